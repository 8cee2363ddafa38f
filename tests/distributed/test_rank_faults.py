"Ranks that differ are refused before the first step; ranks that stand still are told by name and ended with code 5. Real processes, under time limits."

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from ranks import free_port, run_ranks
from test_train_ranks import finish, forked

from llm_from_scratch import rank_checks
from llm_from_scratch.env import Ranks, UserError, close_process_group, open_process_group, read_ranks
from llm_from_scratch.preflight import Console, RankMissing, examine, exchange, preflight_ranks
from llm_from_scratch.watchdog import STALLED, Watchdog, broken_off, note_step

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
    return run_ranks(look, 2)


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
    assert found and not error and "rank 1's clock is 3,600 s behind rank 0's" in told


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
    shared = free_environment() | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
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


forks = multiprocessing.get_context("forkserver")
DONE = 0


def skip_a_barrier(ranks):
    for step in range(1, 5):
        note_step(step)
        if ranks.rank == 1 and step == 3:
            time.sleep(600)
        dist.barrier()


def do_different_things(ranks):
    values = torch.ones(4)
    dist.all_reduce(values) if ranks.rank == 0 else dist.broadcast(values, src=1)
    dist.all_reduce(values)


def freeze(ranks):
    if ranks.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.barrier()


def freeze_the_store(ranks):
    if ranks.is_main:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.barrier()


def lose_one(ranks):
    if ranks.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        dist.barrier()
    except RuntimeError as error:
        print("error:", broken_off(error, ranks), file=sys.stderr, flush=True)
        os._exit(STALLED)


def work_on(ranks):
    for _ in range(8):
        time.sleep(0.1 * ranks.rank)
        dist.barrier()


SCENES = {skip_a_barrier: 3.0, do_different_things: 3.0, freeze: 3.0, freeze_the_store: 3.0, lose_one: 60.0, work_on: 60.0}  # and the limit of each, in seconds


def enter(scene, folder, environ):
    os.environ.update(environ)
    os.dup2(os.open(Path(folder, f"stderr_{environ['RANK']}"), os.O_CREAT | os.O_WRONLY), 2)
    torch.set_num_threads(1)
    ranks = read_ranks()
    open_process_group(ranks, torch.device("cpu"), timeout_seconds=120)
    dist.barrier()
    if scene is freeze_the_store and ranks.rank: time.sleep(1)  # rank 0 stands still by then: its store answers no new client either
    with Watchdog(ranks, SCENES[scene], folder=Path(folder), grace_seconds={freeze: 3, freeze_the_store: 1}.get(scene, 60)):
        scene(ranks)
    close_process_group()


@pytest.fixture(scope="module")
def ends(tmp_path_factory):
    "Exit codes, standard errors and files of every scene."
    started, deadline = {}, time.monotonic() + 600
    try:
        for scene in SCENES:
            folder = tmp_path_factory.mktemp(scene.__name__)
            shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
            pair = [forks.Process(target=enter, args=(scene, str(folder), {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}), daemon=True) for rank in range(2)]
            started[scene.__name__] = pair, folder
            for process in pair:
                process.start()
        for name, (pair, _) in started.items():
            for process in {"freeze": pair[:1], "freeze_the_store": pair[1:]}.get(name, pair):
                process.join(max(0, deadline - time.monotonic()))
        codes = {name: [process.exitcode for process in pair] for name, (pair, _) in started.items()}
    finally:
        for pair, _ in started.values():
            for process in pair:
                process.kill(), process.join()
    said = {name: [Path(folder, f"stderr_{rank}").read_text() for rank in range(2)] for name, (_, folder) in started.items()}
    files = {name: {path.name: path.read_text() for path in folder.glob("stalled_*")} for name, (_, folder) in started.items()}
    return codes, said, files


def verdict(said):
    lines = [line for text in said for line in text.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, said
    return lines[0]


def test_dist_7_a_rank_that_skips_a_barrier_is_named_and_all_end(ends):
    codes, said, files = (found["skip_a_barrier"] for found in ends)
    assert codes == [STALLED, STALLED]
    line = verdict(said)
    assert "rank 0 in barrier (step 3, " in line and "rank 1 has not come: step 3, " in line and "skip_a_barrier" in line
    assert "WAITING" in files["stalled_rank_0.txt"] and "time.sleep(600)" in files["stalled_rank_1.txt"]
    assert "Traceback" not in "".join(said)


def test_ranks_that_do_different_things_are_told_apart(ends):
    codes, said, _ = (found["do_different_things"] for found in ends)
    assert codes == [STALLED, STALLED]
    assert "all_reduce of [[4]]" in verdict(said) and "broadcast of [[4]]" in verdict(said)


def test_a_frozen_rank_gives_no_answer_and_the_other_one_ends(ends):
    codes, said, files = (found["freeze"] for found in ends)
    assert codes[0] == STALLED and list(files) == ["stalled_rank_0.txt"]
    assert "no answer from rank 1" in verdict(said)


def test_a_frozen_rank_that_keeps_the_store_is_told_of_too(ends):
    codes, said, files = (found["freeze_the_store"] for found in ends)
    assert codes[1] == STALLED and list(files) == ["stalled_rank_1.txt"]
    line = verdict(said)
    assert "rank 1 in barrier" in line and "no answer from rank 0" in line and "the store does not answer" in line


def test_a_rank_that_is_killed_is_told_of_in_one_line(ends):
    codes, said, files = (found["lose_one"] for found in ends)
    assert codes == [STALLED, -signal.SIGKILL] and not files
    assert "rank 0 lost another rank in" in verdict(said) and "lose_one (step" in verdict(said) and "gloo" not in verdict(said)


def test_slow_ranks_that_move_are_left_alone(ends):
    codes, said, files = (found["work_on"] for found in ends)
    assert codes == [DONE, DONE] and not files and "stands here" not in "".join(said)


ONE_RANK_SLEEPS = """
import os, time
from llm_from_scratch import train, training_loop
from llm_from_scratch.env import run_command
train_on = training_loop.train_on
def sleepy(training, batch, stop):
    if os.environ["RANK"] == "1" and training.step == 3: time.sleep(600)
    return train_on(training, batch, stop)
training_loop.train_on = sleepy
run_command(train.main)
"""


@pytest.mark.slow
def test_a_training_run_that_stands_still_ends_with_names(tmp_path):
    pages, run_dir = tmp_path / "pages", tmp_path / "run"
    pages.mkdir()
    for number in range(30):
        (pages / f"{number}.txt").write_text("".join(f"{number} times {factor} is {number * factor}\n" for factor in range(40)))
    options = ["--model.hidden-size", 32, "--model.num-layers", 1, "--model.num-heads", 2, "--tokenizer.vocab-size", 300, "--train.seq-len", 32, "--train.global-batch", 8,
               "--train.micro-batch", 4, "--train.num-threads", 1, "--train.dtype", "fp32", "--optim.kind", "adamw", "--log.tensorboard", "False", "--data.path", pages,
               "--data.val-fraction", 0.2, "--data.cache-dir", tmp_path / "cache", "--train.steps", 10, "--engine.timeout-seconds", 30, "--run-dir", run_dir]
    code, out = finish(forked(tmp_path, 2, *options, program=ONE_RANK_SLEEPS, max_restarts=0), 280)
    assert code != 0 and f"exitcode  : {STALLED}" in out.replace("exitcode :", "exitcode  :"), out
    line = verdict([out])
    assert "rank 0 in all_reduce" in line and "(step 4, " in line and "agree" in line and "rank 1 has not come: step 3" in line and "sleepy" in line, line
    assert sorted(path.name for path in run_dir.glob("stalled_*")) == ["stalled_rank_0.txt", "stalled_rank_1.txt"]


def test_a_wait_of_less_than_a_millisecond_ends():
    "torch takes zero milliseconds for no limit at all."
    told = []

    def wait():
        try:
            exchange(dist.HashStore(), {}, Ranks(0, 0, 2), timeout_seconds=0.0004, call=0)
        except RankMissing as error:
            told.append(str(error))

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive() and "rank 1" in told[0]
