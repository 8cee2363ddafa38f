"A run whose folder is on a real S3 server: trained, lost, and gone on with elsewhere."

import json
import shutil

import pytest

pytest.importorskip("moto.server", reason="moto[server] is not installed")
pytest.importorskip("s3fs")

from test_storage_s3 import bucket, endpoint  # noqa: E402, F401

from llm_from_scratch import train  # noqa: E402
from llm_from_scratch.checkpointing import latest_checkpoint  # noqa: E402
from llm_from_scratch.remote_runs import fetch_run, remote_checkpoints, work_locally  # noqa: E402

URL = "s3://crawl/runs/first"


@pytest.fixture
def options(tmp_path):
    (tmp_path / "text").mkdir()
    for number in range(30):
        (tmp_path / "text" / f"page-{number}.txt").write_text("".join(f"{number} times {factor} is {number * factor}\n" for factor in range(40)))
    return ["--model.hidden-size", "32", "--model.num-layers", "1", "--model.num-heads", "2", "--tokenizer.vocab-size", "300", "--train.seq-len", "32",
            "--train.global-batch", "4", "--train.micro-batch", "4", "--train.num-threads", "1", "--train.dtype", "fp32", "--optim.kind", "adamw",
            "--log.tensorboard", "False", "--eval.num-completions", "0", "--eval.num-samples", "0", "--data.path", str(tmp_path / "text"),
            "--data.val-fraction", "0.2", "--data.cache-dir", str(tmp_path / "cache"), "--checkpoint.every-steps", "2", "--checkpoint.keep", "2"]


def losses(run_dir):
    return {row["step"]: row["loss"] for row in map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())}


@pytest.mark.slow
def test_a_run_on_a_store_goes_on_on_another_machine(bucket, options, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setattr(train, "tell", lambda *arguments: None)
    monkeypatch.setenv("LLM_CACHE", str(tmp_path / "machine_1"))
    assert train.main([*options, "--train.steps", "8", "--run-dir", str(tmp_path / "whole")]) == 0
    assert train.main([*options, "--train.steps", "8", "--run-dir", URL]) == 0
    assert remote_checkpoints(URL) == ["step_00000006", "step_00000008"]
    assert bucket.exists("crawl/runs/first/config.yaml") and bucket.exists("crawl/runs/first/tokenizer/tokenizer.model")
    bucket.rm("crawl/runs/first/checkpoints/step_00000008/manifest.json")
    shutil.rmtree(tmp_path / "machine_1")
    monkeypatch.setenv("LLM_CACHE", str(tmp_path / "machine_2"))
    assert train.main(["--run-dir", URL, "--resume", "auto"]) == 0
    local = work_locally(["--run-dir", URL])[0][1]
    assert losses(tmp_path / "whole") == losses(type(tmp_path)(local))
    assert remote_checkpoints(URL) == ["step_00000006", "step_00000008"]
    fetched = fetch_run(URL, tmp_path / "third")
    assert fetched == latest_checkpoint(tmp_path / "third" / "checkpoints") and fetched.name == "step_00000008"
