"A real run under torchrun whose ranks, or whose launcher, are stopped, resumed and killed: it goes on, nobody is left, and the losses are those of a calm run."

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from elastic_runs import OPTIONS, ROOT, losses, make_corpus, starts

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, and Linux tells a worker of its launcher's death")]

PROGRAM = """
import os, time
from llm_from_scratch import train, training_loop
from llm_from_scratch.env import run_command
from llm_from_scratch.watchdog import Watchdog
train.tell = lambda *arguments: None
train.watch_run = lambda ranks, seconds, run_dir: Watchdog(ranks, 20, folder=run_dir, grace_seconds=5)
train_on = training_loop.train_on
training_loop.train_on = lambda *arguments: (time.sleep(float(os.environ["PACE"])), train_on(*arguments))[1]
run_command(train.main)
"""


class Run:
    "A torchrun of two ranks; all of its processes are found by a mark in their environment, orphans too."

    def __init__(self, home, run_dir, steps, *launch, pace=0.03):
        self.run_dir, self.mark, self.log = run_dir, uuid.uuid4().hex, home / f"said-{time.time_ns()}"
        (home / "program.py").write_text(PROGRAM)
        program = [str(home / "program.py"), *OPTIONS, *make_corpus(home), "--train.steps", str(steps), "--run-dir", str(run_dir), "--resume", "auto"]
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RUN_MARK": self.mark, "PACE": str(pace)}
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *launch, *program]
        with self.log.open("w") as log:
            self.launcher = subprocess.Popen(command, env=environ, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for process in [*self.ranks().values(), self.launcher]:
            process.kill()
        self.launcher.wait()

    def ranks(self):
        "The ranks' processes by number."
        found = {}
        for process in psutil.process_iter():
            try:
                environ = process.environ()
                if environ.get("RUN_MARK") == self.mark and "RANK" in environ and process.status() != psutil.STATUS_ZOMBIE:
                    found[int(environ["RANK"])] = process
            except psutil.Error:
                pass
        return found

    def said(self):
        return self.log.read_text()

    def wait(self, what, seconds=240):
        "What the function returns once it is true."
        limit = time.monotonic() + seconds
        while not (found := what()):
            assert time.monotonic() < limit, f"it did not come:\n{self.said()[-5000:]}"
            time.sleep(0.03)
        return found

    def steps_from(self, step):
        "Wait until twelve more are done: a checkpoint lies in between."
        return self.wait(lambda: (newest := max(losses(self.run_dir), default=0)) >= step + 12 and newest)


def errors(said):
    return re.findall(r"(?m)^error: .*", said)


def calm(home, steps):
    with Run(home, home / "calm", steps, pace=0) as run:
        assert run.launcher.wait(timeout=300) == 0, run.said()
    return losses(home / "calm")


def test_ranks_that_are_stopped_and_killed_come_back(tmp_path):
    run_dir, steps = tmp_path / "run", 200
    with Run(tmp_path, run_dir, steps, "--max-restarts", "3") as run:
        run.steps_from(0)
        one = run.ranks()[1]
        one.suspend()
        time.sleep(3)
        stood = max(losses(run_dir))
        one.resume()
        step = run.steps_from(stood)
        assert len(starts(run_dir)) == 1 and not list(run_dir.glob("stalled_*")), "a short pause ended the run"

        for number, stopped in enumerate((1, 0), 1):
            run.ranks()[stopped].suspend()
            again = run.wait(lambda: starts(run_dir)[number:])[0]
            found = errors(run.said())
            assert len(found) == number, found
            assert f"rank {1 - stopped} in " in found[-1] and f"no answer from rank {stopped}: the process is gone, stopped, or stuck" in found[-1]
            assert (run_dir / f"stalled_rank_{1 - stopped}.txt").exists() and f"exitcode: 5) local_rank: {1 - stopped}" in run.said()
            step = run.steps_from(again["step"])

        for rank in run.ranks().values():
            rank.kill()
        again = run.wait(lambda: starts(run_dir)[3:])[0]
        assert step - 20 < again["step"] < steps
        assert run.launcher.wait(timeout=240) == 0, run.said()
    assert losses(run_dir) == calm(tmp_path, steps)


def test_no_rank_outlives_its_launcher_and_a_resume_goes_on(tmp_path):
    run_dir, steps = tmp_path / "run", 200
    for ending in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        with Run(tmp_path, run_dir, steps) as run:
            number = len(starts(run_dir))
            begun = run.wait(lambda: starts(run_dir)[number:])[0]["step"]
            step = run.steps_from(begun)
            assert step < steps - 20, "too late: this proves nothing"
            run.launcher.send_signal(ending)
            assert run.launcher.wait(timeout=120) != 0
            run.wait(lambda: not run.ranks(), 120)
        assert run.said().count("stopped after step") == 1 and not errors(run.said()), run.said()
        assert (run_dir / "checkpoints" / f"step_{max(losses(run_dir)):08d}").exists()
    with Run(tmp_path, run_dir, steps, pace=0) as run:
        assert run.launcher.wait(timeout=300) == 0, run.said()
    assert losses(run_dir) == calm(tmp_path, steps)


def test_a_launcher_that_is_killed_while_its_ranks_start_leaves_none(tmp_path):
    for delay in (0, 2):
        with Run(tmp_path, tmp_path / f"run-{delay}", 100_000) as run:
            run.wait(lambda: len(run.ranks()) == 2)
            time.sleep(delay)
            run.launcher.kill()
            run.launcher.wait()
            run.wait(lambda: not run.ranks())
        assert "Traceback" not in run.said() and "could not meet" not in run.said()
