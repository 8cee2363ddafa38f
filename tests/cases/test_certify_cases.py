"Comparing checkpoints, and a certificate of a real run."

import json
import signal
import sys

import psutil
import pytest
import torch
from torch import nn

from llm_from_scratch import train
from llm_from_scratch.certify import _started, _train_until_killed, certify, compare_checkpoints, compare_metrics
from llm_from_scratch.checkpointing import main, save_checkpoint
from llm_from_scratch.env import UserError


def save(folder, **values):
    torch.manual_seed(0)
    return save_checkpoint(folder, {"model": nn.Linear(2, 2), **values}, step=1)


@pytest.mark.parametrize("one, other, words", [
    ({"step": 1}, {"step": 2}, "progress step: 1 and 2"),
    ({"step": 1}, {"step": 1.0}, "progress step: 1 and 1.0"),
    ({"zero": 0.0}, {"zero": -0.0}, "progress zero: 0.0 and -0.0"),
    ({"step": 1}, {}, "progress step: only in the first"),
    ({"a": [1, 2]}, {"a": [1, 2, 3]}, "progress a: [1, 2] and [1, 2, 3]"),
    ({"t": torch.zeros(2)}, {"t": torch.zeros(3)}, "progress t: float32 (2,) and float32 (3,)"),
    ({"t": torch.zeros(2)}, {"t": torch.zeros(2).bfloat16()}, "progress t: float32 (2,) and bfloat16 (2,)"),
    ({"t": torch.tensor([1, 2**60])}, {"t": torch.tensor([1, 2**60 + 1])}, "progress t: "),
    ({"t": torch.tensor([0.0])}, {"t": torch.tensor([-0.0])}, "progress t: "),
    ({"t": torch.tensor(1.0)}, {"t": torch.tensor(1.5)}, "progress t: 1 of 1 values differ, by at most 0.5"),
    ({"t": torch.tensor([0.0, float("nan"), 1.0])}, {"t": torch.tensor([-0.0, float("nan"), 1.0])}, "progress t: 1 of 3 values differ"),
    ({"t": torch.eye(2)}, {"t": 2 * torch.eye(2).T}, "progress t: 2 of 4 values differ, by at most 1"),
    ({"t": torch.tensor([True, False])}, {"t": torch.tensor([True, True])}, "progress t: 1 of 2 values differ, by at most 1"),
])
def test_every_difference_has_its_name(tmp_path, one, other, words):
    [found] = compare_checkpoints(save(tmp_path / "one", progress=one), save(tmp_path / "other", progress=other))
    assert found.startswith(words)


def test_nan_equals_itself(tmp_path):
    values = {"t": torch.tensor([float("nan"), 1.0]), "n": float("nan")}
    assert compare_checkpoints(save(tmp_path / "one", progress=values), save(tmp_path / "other", progress=values)) == []


def test_a_damaged_one_is_not_compared(tmp_path):
    one, other = save(tmp_path / "one"), save(tmp_path / "other")
    (other / "train_state.json").write_bytes(b"{}")
    with pytest.raises(UserError, match="other.*damaged: train_state.json"):
        compare_checkpoints(one, other)


def test_metrics_that_one_run_lacks_are_differences(tmp_path):
    for name, rows in [("one", [{"step": 1, "loss": 1.0}, {"step": 2, "loss": float("nan")}]), ("other", [{"step": 1, "loss": 1.0, "step_seconds": 3}])]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert compare_metrics(tmp_path / "one", tmp_path / "one") == []
    assert compare_metrics(tmp_path / "one", tmp_path / "other") == ["step 2 loss: nan and not there", "step 2 step: 2 and not there"]


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_real_run_is_certified(tmp_path, capsys, num_ranks):
    (tmp_path / "corpus").mkdir()
    for number in range(30):
        (tmp_path / "corpus" / f"page-{number}.txt").write_text("".join(f"{number} times {factor} is {number * factor}\n" for factor in range(40)))
    options = ["--model.hidden-size", "32", "--model.num-layers", "1", "--model.num-heads", "2", "--tokenizer.vocab-size", "300", "--train.seq-len", "32",
               "--train.global-batch", "4", "--train.micro-batch", "2", "--train.num-threads", "1", "--optim.kind", "adamw", "--train.dtype", "fp32",
               "--eval.num-completions", "0", "--eval.num-samples", "1", "--eval.sample-tokens", "8", "--data.path", str(tmp_path / "corpus"),
               "--data.val-fraction", "0.2", "--data.cache-dir", str(tmp_path / "cache"), "--train.steps", "3", "--run-dir", str(tmp_path / "run")]
    assert train.main(options) == 0
    assert main(["certify", str(tmp_path / "run"), "--ranks", str(num_ranks)]) == 0
    assert "the same run, to the last bit" in capsys.readouterr().out
    certificate = json.loads((tmp_path / "run" / "certificate.json").read_text())
    assert certificate["same"] and certificate["killed_after_step"] >= 4 and certificate["num_ranks"] == num_ranks


def test_a_copy_that_ended_before_its_kill_is_no_pass(tmp_path, monkeypatch):
    for code in (0, 3):
        monkeypatch.setattr("llm_from_scratch.certify._command", lambda arguments, num_ranks: [sys.executable, "-c", f"raise SystemExit({code})"])
        with pytest.raises(UserError, match=f"ended with exit code {code} before it was killed"):
            _train_until_killed([], 1, tmp_path, step=1, delay=0)


def test_the_kill_reaches_workers_in_sessions_of_their_own(tmp_path, monkeypatch):
    launcher = "import subprocess, sys, time; print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True).pid, flush=True); time.sleep(600)"
    monkeypatch.setattr("llm_from_scratch.certify._command", lambda arguments, num_ranks: [sys.executable, "-c", launcher])
    with _started([], 2) as process:
        worker = psutil.Process(int(process.stdout.readline()))
        assert worker.is_running()
    assert process.returncode == -signal.SIGKILL
    assert psutil.wait_procs([worker], timeout=120)[1] == []


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(UserError, match="not a run"):
        certify(tmp_path)
