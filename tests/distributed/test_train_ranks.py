"Training under torchrun: the same curve on two ranks, a stop that all ranks obey, and a resume on another number."

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from ranks import ForkedTorchrun

ROOT = Path(__file__).parents[2]


ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def command(num_ranks, *args):
    "Training as a user starts it; every process imports torch for itself."
    launcher = ["-m", "torch.distributed.run", "--standalone", "--max-restarts", "1", "--nproc-per-node", str(num_ranks)]
    arguments = [sys.executable, *launcher, "-m", "llm_from_scratch.train", *map(str, args)]
    return subprocess.Popen(arguments, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)


TRAIN = """
from llm_from_scratch import train
from llm_from_scratch.env import run_command
run_command(train.main)
"""


def forked(folder, num_ranks, *args, program=TRAIN, max_restarts=1):
    "The same, in processes that have torch already; the program and what it says are files of the folder."
    log = Path(tempfile.mkstemp(".txt", dir=folder)[1])
    script = log.with_suffix(".py")
    script.write_text(program)
    return ForkedTorchrun(["--standalone", "--max-restarts", max_restarts, "--nproc-per-node", num_ranks, script, *args], ENVIRONMENT, log)


def finish(process, seconds=300):
    try:
        out, _ = process.communicate(timeout=seconds)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, out


def losses(run_dir):
    lines = [line for line in (Path(run_dir) / "metrics.jsonl").read_text().splitlines() if line.endswith("}")]  # the last one may be under way
    return {row["step"]: row["loss"] for row in map(json.loads, lines)}


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(30):
        (folder / f"page-{number}.txt").write_text("".join(f"{number} times {factor} is {number * factor}\n" for factor in range(40)))
    return ["--model.hidden-size", 32, "--model.num-layers", 1, "--model.num-heads", 2, "--tokenizer.vocab-size", 300, "--train.seq-len", 32,
            "--train.global-batch", 8, "--train.micro-batch", 4, "--train.num-threads", 1, "--train.dtype", "fp32", "--optim.kind", "adamw",
            "--log.tensorboard", "False", "--eval.num-completions", 0, "--eval.num-samples", 1, "--eval.sample-tokens", 4, "--eval.every-steps", 10,
            "--data.path", folder, "--data.val-fraction", 0.2, "--data.cache-dir", folder.parent / "cache"]


def test_two_ranks_give_the_curve_of_one(options, tmp_path):
    steps = [*options, "--train.steps", 20, "--run-dir"]
    for process in (forked(tmp_path, 1, *steps, tmp_path / "1"), command(2, *steps, tmp_path / "2")):
        code, out = finish(process)
        assert code == 0, out
    one, two = losses(tmp_path / "1"), losses(tmp_path / "2")
    assert list(one) == list(two) == list(range(1, 21))
    assert two == pytest.approx(one, rel=1e-5)
    assert "8 rows asked for = 4 a micro-batch x 1 accumulated x 2 ranks" in out
    summaries = [json.loads((tmp_path / name / "summary.json").read_text()) for name in ("1", "2")]
    assert summaries[1]["val_loss"] == pytest.approx(summaries[0]["val_loss"], rel=1e-5)
    rows = [json.loads(line) for line in (tmp_path / "2" / "metrics.jsonl").read_text().splitlines()]
    assert all(0 < row["comm_share"] < 1 and row["comm_bytes"] > 0 for row in rows) and "Between ranks" in out
    for row in rows:
        by_collective = {name.split("/")[1]: row[name] for name in row if name.startswith("comm/") and name.endswith("/bytes")}
        assert by_collective["gradients_all_reduce"] > 0 and sum(by_collective.values()) == pytest.approx(row["comm_bytes"], abs=len(by_collective))


def test_a_stop_reaches_all_ranks_and_is_not_restarted(options, tmp_path):
    run_dir = tmp_path / "run"
    process, limit = command(2, *options, "--train.steps", 100_000, "--run-dir", run_dir), time.monotonic() + 300
    while not ((run_dir / "metrics.jsonl").exists() and len(losses(run_dir)) >= 3) and time.monotonic() < limit and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    code, out = finish(process)
    assert code != 0
    assert json.loads((run_dir / "stopped.json").read_text())["exit_code"] == 3
    assert out.count("stopped after step") == 1, out
    last = max(losses(run_dir))
    code, out = finish(forked(tmp_path, 1, "--run-dir", run_dir, "--resume", "auto", "--train.steps", last + 3))
    assert code == 0, out
    assert list(losses(run_dir)) == list(range(1, last + 4))
    assert "the learning rate at step" in out


def errors(out):
    return [line for line in out.splitlines() if line.startswith("error: ")]


def test_a_mistake_of_all_ranks_is_told_once(options, tmp_path):
    nowhere = tmp_path / "nowhere"
    code, out = finish(forked(tmp_path, 2, *options, "--data.path", nowhere, "--train.steps", 2, "--run-dir", tmp_path / "run"))
    assert code != 0
    assert len(errors(out)) == 1 and str(nowhere) in errors(out)[0], out
    stopped = json.loads((tmp_path / "run" / "stopped.json").read_text())
    assert stopped["exit_code"] == 2 and str(nowhere) in stopped["reason"]


SLOW_RANK_0 = """
import time
from llm_from_scratch import train
from llm_from_scratch.env import run_command
remember_stop = train.remember_stop
train.remember_stop = lambda *words: (time.sleep(2), remember_stop(*words))  # the launcher's signal comes in between
run_command(train.main)
"""


def test_a_rank_that_is_slow_to_write_down_a_mistake_is_not_interrupted(options, tmp_path):
    launch = [*options, "--data.path", tmp_path / "nowhere", "--train.steps", 2, "--run-dir", tmp_path / "run"]
    code, out = finish(forked(tmp_path, 2, *launch, program=SLOW_RANK_0, max_restarts=0))  # a restart's ranks may be interrupted before they know
    assert code != 0 and len(errors(out)) == 1 and "interrupted" not in out, out
    assert json.loads((tmp_path / "run" / "stopped.json").read_text())["exit_code"] == 2


ONE_RANK = """
import os, sys, time
from llm_from_scratch import train
from llm_from_scratch.env import UserError, run_command
prepare_data = train.prepare_data
def on_my_machine(config):
    if os.environ["RANK"] == WRONG: raise UserError("my/own/file: cannot be read")
    return prepare_data(config)
train.prepare_data = on_my_machine
run_command(train.main)
"""


@pytest.mark.slow
@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_mistake_of_one_rank_is_told_by_it(options, tmp_path, rank):
    code, out = finish(forked(tmp_path, 2, *options, "--train.steps", 2, "--run-dir", tmp_path / "run", program=ONE_RANK.replace("WRONG", repr(rank)), max_restarts=0))
    assert code != 0
    assert errors(out) == ["error: my/own/file: cannot be read"], out
    assert "interrupted" not in out and "connection" not in out.lower(), out
    assert json.loads((tmp_path / "run" / "stopped.json").read_text())["reason"] == "my/own/file: cannot be read"


SLOW_REPORT = """
import time
from llm_from_scratch import train
from llm_from_scratch.env import run_command
def write_report(*args, **options):
    print("asleep", flush=True)
    time.sleep(60)
train.write_report = write_report
run_command(train.main)
"""


@pytest.mark.slow
def test_a_stop_during_the_report_is_told_once_and_resumed(options, tmp_path):
    run_dir = tmp_path / "run"
    process, limit = forked(tmp_path, 2, *options, "--train.steps", 3, "--run-dir", run_dir, program=SLOW_REPORT), time.monotonic() + 300
    while "asleep" not in process.said() and time.monotonic() < limit and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    code, out = finish(process)
    assert out.count("stopped after step 3, before its report, saved; go on with:") == 1, out
    assert "interrupted" not in out and "error: " not in out
    assert json.loads((run_dir / "stopped.json").read_text())["exit_code"] == 3
    code, out = finish(forked(tmp_path, 1, "--run-dir", run_dir, "--resume", "auto"))
    assert code == 0 and (run_dir / "report" / "index.html").exists(), out
