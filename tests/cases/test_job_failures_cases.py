"Failures between processes and of storage, told from what a run left."

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from llm_from_scratch import distributed_failures, storage_failures
from llm_from_scratch.troubleshooting import FAILURES, Evidence, diagnose, practice_run

OURS = [name for name, failure in FAILURES.items() if failure.make.__module__ in (distributed_failures.__name__, storage_failures.__name__)]


def test_every_rule_of_ours_has_its_failure():
    assert len(OURS) == 13


def log(run: Path, *records: dict) -> Evidence:
    run.mkdir(exist_ok=True)
    (run / "log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return Evidence(run)


def test_a_run_that_ended_well_is_not_missed(tmp_path):
    start = {"message": "start", "time": "2026-01-01T00:00:00.000+00:00", "step": 0}
    assert distributed_failures.worker_vanished(log(tmp_path / "ended", start, {"message": "end", "time": start["time"]})) is None
    assert distributed_failures.worker_vanished(log(tmp_path / "killed", start)).step == 0
    assert distributed_failures.worker_vanished(log(tmp_path / "resumed", start, start, {"message": "end", "time": start["time"]})) is None


def test_a_rank_that_lost_its_peer_says_so(tmp_path):
    crash = {"message": "crash", "step": 7, "error_type": "RuntimeError", "reason": "[gloo] Read error [127.0.0.1]:3: Connection reset by peer"}
    found = distributed_failures.worker_vanished(log(tmp_path / "run", {"message": "start", "step": 0}, crash))
    assert (found.step, found.sure) == (7, "likely") and "another rank is gone" in found.evidence


def test_a_rank_that_the_watchdog_ended_has_not_vanished(tmp_path):
    run = log(tmp_path / "run", {"message": "start", "step": 0}).run
    assert [one.rule.name for one in diagnose(run)] == ["worker-vanished"]
    (run / "stalled_rank_1.txt").write_text("error: deadlock in collective 80 of group 0 (14 s): rank 1 in barrier (step 13); rank 0 has not come: step 13\n")
    assert [one.rule.name for one in diagnose(run)] == ["barrier-missed"]


def test_one_slow_save_is_no_trend(tmp_path):
    saves = [{"message": "saved", "step": step, "seconds": 9.0 if step == 4 else 1.0, "bytes": 100} for step in range(12)]
    assert storage_failures.disk_slows_down(log(tmp_path / "once", *saves)) is None
    growing = [{**save, "seconds": 1.0 + save["step"]} for save in saves]
    assert storage_failures.disk_slows_down(log(tmp_path / "growing", *growing)).step == 0


def metrics(run: Path, seconds) -> Evidence:
    run.mkdir(exist_ok=True)
    rows = [{"step": step, "comm_seconds": cost, "comm_share": cost / (cost + rest), "comm_bytes": 1000} for step, (cost, rest) in enumerate(seconds, 1)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Evidence(run)


def test_a_busy_machine_is_no_slow_link(tmp_path):
    assert distributed_failures.all_reduce_slowed(metrics(tmp_path / "busy", [(0.1, 0.1)] * 10 + [(0.5, 0.4)] * 10)) is None
    assert distributed_failures.all_reduce_slowed(metrics(tmp_path / "crowded", [(0.1, 0.1)] * 10 + [(0.5, 0.1), (0.1, 0.1), (0.5, 0.1)] * 4)) is None
    assert distributed_failures.all_reduce_slowed(metrics(tmp_path / "link", [(0.1, 0.1)] * 10 + [(0.5, 0.1)] * 10)).step == 11


def test_a_clock_that_goes_on_is_silent(tmp_path):
    times = [f"2026-01-01T00:00:{second:02d}.000+00:00" for second in (0, 5, 5, 9)]
    assert distributed_failures.clock_skew(log(tmp_path / "on", *[{"message": "validation", "time": time} for time in times])) is None
    assert "by 9 s" in distributed_failures.clock_skew(log(tmp_path / "back", *[{"message": "validation", "time": time} for time in (times[3], times[0])])).evidence


@pytest.mark.slow
def test_the_command_leaves_word_of_ranks_that_never_met(tmp_path):
    root = Path(__file__).resolve().parents[2]
    variables = dict(RANK="1", LOCAL_RANK="1", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(distributed_failures.free_port()), PYTHONPATH=str(root))
    command = [sys.executable, "-m", "llm_from_scratch.train", "--run-dir", str(tmp_path / "run"), "--engine.timeout-seconds", "2"]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and "could not meet" in done.stderr
    assert [one.rule.name for one in diagnose(tmp_path / "run")] == ["stale-rank-variables"]


def test_a_run_that_goes_on_is_not_called_dead(tmp_path):
    run = practice_run(tmp_path / "run", {"train": dict(steps=4)})
    lines = (run / "log.jsonl").read_text().splitlines(keepends=True)
    (run / "log.jsonl").write_text("".join(line for line in lines if '"end"' not in line))
    holder = subprocess.Popen([sys.executable, "-S", "-c", "import fcntl, sys, time\nfile = open(sys.argv[1], 'rb')\nfcntl.flock(file, fcntl.LOCK_EX)\nprint('held', flush=True)\ntime.sleep(600)", str(run / ".lock")], stdout=subprocess.PIPE)
    try:
        assert holder.stdout.readline() == b"held\n"
        assert distributed_failures.worker_vanished(Evidence(run)) is None
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        holder.stdout.close()
    assert "killed" in distributed_failures.worker_vanished(Evidence(run)).evidence
