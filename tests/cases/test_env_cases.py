import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from ports import free_port

import llm_from_scratch
from llm_from_scratch import env
from llm_from_scratch.env import Ranks, UserError

EIGHT_RANKS = {
    "RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500",
}


def clean_environment(**more):
    kept = {name: value for name, value in os.environ.items()
            if name not in {*env.RANK_VARIABLES, *env.ADDRESS_VARIABLES, "LOCAL_WORLD_SIZE"}}
    return kept | {"OMP_NUM_THREADS": "1"} | more


def start(code, **environ):
    return subprocess.Popen([sys.executable, "-c", code], env=clean_environment(**environ), text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_dist_3_device_is_the_local_rank_and_only_rank_0_writes(tmp_path):
    with patch("torch.cuda.is_available", return_value=True), patch("torch.cuda.device_count", return_value=4):
        ranks = env.read_ranks(EIGHT_RANKS)
        assert (ranks.rank, ranks.local_rank, ranks.world_size) == (5, 1, 8)
        assert env.choose_device(ranks) == torch.device("cuda", 1)
    with patch("torch.distributed.rendezvous", return_value=iter([("store", 5, 8)])) as meet, \
         patch("torch.distributed.init_process_group") as join:
        env.open_process_group(ranks, torch.device("cpu"))
    assert meet.call_args.args[:3] == ("env://", 5, 8)
    assert (join.call_args.kwargs["rank"], join.call_args.kwargs["world_size"]) == (5, 8)
    for rank in range(8):
        log = env.open_log(tmp_path / f"log_{rank}.jsonl", Ranks(rank, rank % 4, 8))
        log.info("hello")
    assert [path.name for path in tmp_path.iterdir()] == ["log_0.jsonl"]
    env.open_log(tmp_path / "closed.jsonl", Ranks(1, 1, 2))


def test_dist_3_without_the_launchers_count_of_local_processes():
    environ = {name: value for name, value in EIGHT_RANKS.items() if name != "LOCAL_WORLD_SIZE"}
    with patch("torch.cuda.is_available", return_value=True), patch("torch.cuda.device_count", return_value=4):
        assert env.choose_device(env.read_ranks(environ)) == torch.device("cuda", 1)


def test_dist_3_a_local_rank_above_the_gpus_is_told_of(capsys):
    too_many = {**EIGHT_RANKS, "LOCAL_RANK": "4", "LOCAL_WORLD_SIZE": "6"}
    with patch("torch.cuda.is_available", return_value=True), patch("torch.cuda.device_count", return_value=4), \
         patch("torch.distributed.get_backend", return_value="gloo"), patch("torch.distributed.init_process_group"):
        with pytest.raises(UserError, match="LOCAL_RANK='4': expected a whole number from 0 to 3"):
            env.read_ranks({**too_many, "RANK": "3"})
        ranks = env.read_ranks(too_many)
        assert env.choose_device(ranks) == torch.device("cpu")
        with pytest.raises(UserError, match="device cuda: 6 GPUs needed"):
            env.choose_device(ranks, "cuda")
        with patch("torch.distributed.rendezvous", side_effect=RuntimeError("nobody")), pytest.raises(UserError, match="6 processes are here, and GPUs for 4"):
            env.open_process_group(ranks, torch.device("cpu"))
        for first, told in [(Ranks(0, 0, 8, 6), True), (Ranks(0, 0, 8, 4), False)]:
            with patch("torch.distributed.rendezvous", return_value=iter([("store", 0, 8)])):
                env.open_process_group(first, torch.device("cpu"))
            assert ("gloo on cpu; not on GPUs: 6 processes are here, and GPUs for 4" in capsys.readouterr().err) == told


@pytest.mark.parametrize("rank", [0, 1])
def test_dist_7_occupied_port_names_the_address_within_the_limit(rank):
    before = dict(os.environ)
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port = str(stranger.getsockname()[1])
        with patch.dict(os.environ, MASTER_ADDR="127.0.0.1", MASTER_PORT=port):
            begin = time.monotonic()
            with pytest.raises(UserError, match=f"127.0.0.1:{port}"):
                env.open_process_group(Ranks(rank, rank, 2), torch.device("cpu"), timeout_seconds=1)
            assert time.monotonic() - begin < 60
    assert dict(os.environ) == before
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("rank", [0, 1])
def test_dist_7_peers_that_never_come_end_the_wait(rank):
    port = str(free_port())
    with patch.dict(os.environ, MASTER_ADDR="127.0.0.1", MASTER_PORT=port):
        with pytest.raises(UserError) as failure:
            env.open_process_group(Ranks(rank, rank, 2), torch.device("cpu"), timeout_seconds=1)
    for part in [f"127.0.0.1:{port}", "within 1 s", "unset RANK LOCAL_RANK WORLD_SIZE", "MASTER_PORT"]:
        assert part in str(failure.value)


def test_dist_7_stale_variables_fail_fast_and_are_named():
    before = dict(os.environ)
    with pytest.raises(UserError, match="RANK=0, WORLD_SIZE=2 set but LOCAL_RANK missing"):
        env.read_ranks({"RANK": "0", "WORLD_SIZE": "2"})
    with pytest.raises(UserError, match="MASTER_ADDR, MASTER_PORT missing"):
        env.read_ranks({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"})
    code = "from llm_from_scratch.env import read_ranks, run_command; run_command(lambda a: print(read_ranks()))"
    process = start(code, RANK="0", WORLD_SIZE="2")
    _, said = process.communicate(timeout=300)
    assert process.returncode == 2
    assert len(said.strip().splitlines()) == 1 and said.startswith("error: half-set ranks")
    assert dict(os.environ) == before


@pytest.mark.parametrize("change", [
    {"RANK": "8"}, {"RANK": "-1"}, {"RANK": "one"}, {"LOCAL_RANK": "6"}, {"WORLD_SIZE": "0"}, {"MASTER_PORT": "70000"},
    {"LOCAL_WORLD_SIZE": "1"},
])
def test_dist_7_variables_that_contradict_each_other_are_refused(change):
    with pytest.raises(UserError, match=f"{next(iter(change))}="):
        env.read_ranks(EIGHT_RANKS | change)


def test_command_prints_json_and_names_the_nearest_option(command, monkeypatch):
    for name in os.environ.keys() - clean_environment().keys():
        monkeypatch.delenv(name)
    code, out, _ = command("env", "--json")
    report = json.loads(out)
    assert report["fingerprint"] == env.environment_fingerprint(report["environment"])
    assert code == (2 if any(c["hard"] and not c["ok"] for c in report["checks"]) else 0)
    assert command("env", "--foldr", ".") == (2, "", "error: unrecognized arguments: --foldr .; did you mean --folder?\n")


def test_fingerprint_ignores_the_host_and_sees_the_code():
    report = env.environment_report()
    assert env.environment_fingerprint(report | {"host": "x"}) == env.environment_fingerprint(report)
    for key in ["python", "packages", "cuda"]:
        assert env.environment_fingerprint(report | {key: "other"}) != env.environment_fingerprint(report)


def test_half_precision_only_where_it_is_fast_and_fp16_only_by_name():
    cpu = torch.device("cpu")
    with patch.object(env, "cpu_flags", return_value={"avx2"}):
        assert env.choose_dtype("auto", cpu) == torch.float32
    with patch.object(env, "cpu_flags", return_value={"avx2", "amx_bf16"}):
        assert env.choose_dtype("auto", cpu) == torch.bfloat16
    for device in (cpu, torch.device("cuda", 0)):
        assert env.choose_dtype("fp16", device) == torch.float16


NEVER_DONE = """
import sys, time
class Wait:
    def find_spec(self, name, *others):
        if name.startswith("llm_from_scratch.") and "torch" in sys.modules: time.sleep(600)
sys.meta_path.insert(0, Wait())
"""  # imports that are not over before the signal comes


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("command", ["generate", "train"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_the_imports_is_one_line(command, number, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(NEVER_DONE)
    environment = clean_environment(PYTHONPATH=f"{tmp_path}:{Path(__file__).parents[2]}")
    process = subprocess.Popen([sys.executable, "-m", f"llm_from_scratch.{command}"], env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    caught, limit = 0, time.monotonic() + 300
    while not caught & 1 << signal.SIGTERM - 1:
        assert time.monotonic() < limit and process.poll() is None
        time.sleep(0.005)
        caught = int(Path(f"/proc/{process.pid}/status").read_text().partition("SigCgt:")[2].split()[0], 16)
    process.send_signal(number)
    assert process.communicate(timeout=300) == ("", f"interrupted by {number.name}\n") and process.returncode == 130


@pytest.mark.parametrize(("module", "restarts", "is_told"), [("train", None, True), ("train", "0", True), ("train", "1", False), ("train", "10", False), ("generate", "1", True)])
def test_only_training_that_was_started_again_ends_without_a_word_while_it_imports(monkeypatch, capfd, module, restarts, is_told):
    "It may only repeat a final stop, as a faster rank has done by then: the launcher's signal means that, not the user."
    heard, codes = {}, []
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    if restarts:
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restarts)
    monkeypatch.setattr(sys, "argv", ["-m"])
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", f"llm_from_scratch.{module}"])
    monkeypatch.setattr(signal, "signal", heard.__setitem__)
    monkeypatch.setattr(os, "_exit", codes.append)
    exec(Path(llm_from_scratch.__file__).read_text(), {"__file__": llm_from_scratch.__file__, "__path__": []})
    heard[signal.SIGTERM](signal.SIGTERM, None)
    assert codes == [130] and capfd.readouterr().err == "interrupted by SIGTERM\n" * is_told


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_after_the_last_words_changes_neither_them_nor_the_code(number, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(f"import atexit, os\natexit.register(lambda: os.kill(os.getpid(), {int(number)}))\n")
    process = subprocess.run([sys.executable, "-m", "llm_from_scratch.env", "--jsno"], env=clean_environment(PYTHONPATH=f"{tmp_path}:{Path(__file__).parents[2]}"), text=True, capture_output=True, timeout=300)
    assert process.returncode == 2 and process.stderr.startswith("error: ") and process.stderr.count("\n") == 1, process.stderr


def test_importing_the_package_leaves_signals_alone():
    code = "import signal, sys; sys.argv = ['-m']; import llm_from_scratch.env; print(signal.getsignal(signal.SIGINT) == signal.default_int_handler, signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)"
    process = start(code, PYTHONPATH=str(Path(__file__).parents[2]))
    assert process.communicate(timeout=300)[0] == "True True\n"


def test_a_letter_that_the_terminal_lacks_ends_no_command():
    code = r"from llm_from_scratch.env import run_command; run_command(lambda arguments: print('na\xefve \u2603 \ud800'))"
    process = start(code, PYTHONIOENCODING="ascii", PYTHONUTF8="0", LC_ALL="C")
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out, err) == (0, "na\\xefve \\u2603 \\ud800\n", "")


def test_help_that_nobody_reads_ends_quietly():
    code = "import argparse; from llm_from_scratch.env import run_command; run_command(argparse.ArgumentParser().parse_args)"
    reader, writer = os.pipe()
    os.close(reader)
    try:
        process = subprocess.run([sys.executable, "-c", code, "--help"], env=clean_environment(PYTHONUNBUFFERED=""), stdout=writer, stderr=subprocess.PIPE, timeout=120)
    finally:
        os.close(writer)
    assert (process.returncode, process.stderr) == (141, b"")
