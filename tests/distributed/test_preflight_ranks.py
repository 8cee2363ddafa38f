"Ranks that are compared and tried before the first step: real processes, under time limits."

import json
import os
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import ranks as processes
import torch
from ranks import run_ranks

from llm_from_scratch import rank_checks
from llm_from_scratch.env import UserError
from llm_from_scratch.preflight import Console, examine, preflight_ranks

CPU = torch.device("cpu")


@contextmanager
def nothing(ranks):
    yield {}


@contextmanager
def other_option(ranks):
    yield {"extra": {"configuration": "other" if ranks.rank else "same"}}


@contextmanager
def other_option_allowed(ranks):
    yield {"extra": {"configuration": "other" if ranks.rank else "same"}, "allow_different": True}


@contextmanager
def wrong_sums(ranks):
    with patch.object(rank_checks, "known_values", lambda num_values, rank, device: right(num_values, rank, device) + (rank == 1) * (torch.arange(num_values) == 5)):
        yield {}


@contextmanager
def slow_clock(ranks):
    with patch.dict(rank_checks.measure_clock.__kwdefaults__, clock=lambda: time.time() - 3600 * ranks.rank):
        yield {}


right, CHANGES = rank_checks.known_values, (nothing, other_option, other_option_allowed, wrong_sums, slow_clock)


def look(ranks):
    "What a rank finds, or is refused for, and what it tells, under each change; then rank 1 does not come."
    answers, console = {}, Console(force_jupyter=False, width=200)
    for change in CHANGES:
        found, error = None, ""
        with change(ranks) as options, console.capture() as told:
            try:
                found = preflight_ranks(ranks, CPU, console, **options)
            except UserError as refusal:
                error = str(refusal)
        answers[change.__name__] = found, error, told.get()
    try:
        if ranks.rank == 0:
            examine(ranks, CPU, timeout_seconds=0.5)
    except UserError as refusal:
        answers["late"] = str(refusal)
    return answers


@pytest.fixture(scope="module")
def answers():
    with processes.server_with_torch():
        yield run_ranks(look, 2, timeout_seconds=120)


def test_equal_ranks_pass_with_clocks_sums_and_speeds(answers):
    (found, error, told), (other, other_error, _) = (answer["nothing"] for answer in answers)
    assert error == other_error == "" and found == other
    assert all(not speed.wrong_on and speed.gbit_per_second > 0 for speed in found.speeds)
    assert found.clocks[0] == (0, 0) and abs(found.clocks[1][0]) <= found.clocks[1][1] + 1e-3
    assert len({binding["process"] for binding in found.bindings}) == 2
    assert told.startswith("preflight    2 ranks, equal in") and "within one machine" in told


def test_one_rank_with_another_configuration_is_refused_alike_and_named(answers):
    (_, error, told), (_, other_error, _) = (answer["other_option"] for answer in answers)
    assert error == other_error and "configuration is same on rank 0, other on rank 1" in error
    assert "the ranks differ" in told and "all-reduce" not in told


def test_a_difference_that_is_allowed_is_told_and_passes(answers):
    found, error, told = answers[0]["other_option_allowed"]
    assert found.speeds and not error
    assert "look at environments: the ranks differ: configuration" in told


def test_wrong_sums_are_refused_on_all_ranks(answers):
    assert [answer["wrong_sums"][1].partition(":")[0] for answer in answers] == ["all-reduce"] * 2
    assert "wrong sums of 4,096 bytes on ranks 0-1" in answers[0]["wrong_sums"][1]


def test_a_clock_that_is_an_hour_behind_is_told_of_and_passes(answers):
    found, error, told = answers[0]["slow_clock"]
    assert found and not error and "rank 1's clock is 3.6e+03 s behind rank 0's" in told


def test_a_rank_that_does_not_come_is_named(answers):
    assert "rank 0 waited 0.5 s for rank 1" in answers[0]["late"] and "late" not in answers[1]


def free_environment():
    names = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    return {name: value for name, value in os.environ.items() if name not in names} | {"OMP_NUM_THREADS": "1"}


@pytest.mark.slow
def test_the_command_under_torchrun_prints_one_list(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "llm_from_scratch.preflight", "--json", "--folder", str(tmp_path)]
    done = subprocess.run(command, env=free_environment(), capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found["bindings"]) == len(found["clocks"]) == 2 and len(found["speeds"]) == 4
    assert done.stderr.count("met by RANK=0, LOCAL_RANK=0, WORLD_SIZE=2") == 1 and "set by torchrun" in done.stderr


@pytest.mark.slow
def test_the_command_by_hand_ends_with_2_where_ranks_differ():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    shared = free_environment() | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [{"RANK": "0", "LOCAL_RANK": "0"}, {"RANK": "1", "LOCAL_RANK": "1", "NCCL_ALGO": "Ring"}]
    command = [sys.executable, "-m", "llm_from_scratch.preflight"]
    started = [subprocess.Popen(command, env=shared | own, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for own in ranks]
    try:
        said = [process.communicate(timeout=200) for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [2, 2], said
    assert "NCCL_ALGO" in said[0][0] and "FAILED" in said[0][0] and said[1][0] == ""
