"Every option of saving in one real run: light ones, the best, signatures, a local disk first, and a resume."

import json

import pytest

from llm_from_scratch import train
from llm_from_scratch.checkpointing import checkpoint_step, list_checkpoints, load_checkpoint, load_run, main, read_manifest
from llm_from_scratch.env import UserError
from llm_from_scratch.signatures import make_keys


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(30):
        (folder / f"page-{number}.txt").write_text("".join(f"{number} times {factor} is {number * factor}\n" for factor in range(40)))
    return ["--model.hidden-size", "32", "--model.num-layers", "1", "--model.num-heads", "2", "--tokenizer.vocab-size", "300", "--train.seq-len", "32",
            "--train.global-batch", "4", "--train.micro-batch", "4", "--train.num-threads", "1", "--train.dtype", "fp32", "--optim.kind", "adamw",
            "--optim.warmup-steps", "2", "--log.tensorboard", "False", "--eval.num-completions", "0", "--eval.num-samples", "0", "--eval.every-steps", "3",
            "--data.path", str(folder), "--data.val-fraction", "0.2", "--data.cache-dir", str(folder.parent / "cache")]


def steps(run_dir, kind):
    found = list_checkpoints(run_dir / "checkpoints")
    return [checkpoint_step(path) for path in found if read_manifest(path)["extra"]["checkpoint_kind"] == kind]


def test_light_best_signed_and_local_first_then_resumed(options, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "tell", lambda *arguments: None)
    private, public = make_keys(tmp_path / "run.pem")
    saving = ["--checkpoint.every-steps", "4", "--checkpoint.light-every-steps", "1", "--checkpoint.keep", "1", "--checkpoint.keep-light", "2",
              "--checkpoint.keep-best", "True", "--checkpoint.signing-key", str(private), "--checkpoint.require-signature", str(public),
              "--checkpoint.local-dir", str(tmp_path / "disk")]
    run_dir = tmp_path / "run"
    assert train.main([*options, *saving, "--train.steps", "7", "--run-dir", str(run_dir)]) == 0
    best = json.loads((run_dir / "checkpoints" / "best.json").read_text())
    assert best["step"] in (3, 6, 7) and set(steps(run_dir, "full")) == {best["step"], 7}
    assert steps(run_dir, "light")[-1] == 5 and len(steps(run_dir, "light")) == 2
    assert load_run(run_dir).step == 7 and main(["verify", str(run_dir), "--public-key", str(public)]) == 0
    assert [path for path in (tmp_path / "disk").rglob("*") if path.is_file()] == []
    state = load_checkpoint(run_dir / "checkpoints" / "step_00000007", {})
    assert state["config"]["train"]["steps"] == 7 and state["environment"]["packages"] and state["progress"]["step"] == 7
    assert train.main(["--run-dir", str(run_dir), "--resume", "auto", "--train.steps", "8"]) == 0
    (run_dir / "checkpoints" / "step_00000008" / "manifest.sig").unlink()
    assert load_run(run_dir).step < 8
    with pytest.raises(UserError, match="is refused: it is not signed"):
        train.main(["--run-dir", str(run_dir), "--resume", str(run_dir / "checkpoints" / "step_00000008"), "--train.steps", "9"])


def test_what_would_fail_at_the_first_save_is_refused_at_the_start(options, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "prepare_data", lambda config: pytest.fail("data were prepared"))
    (private, public), (inside, _) = make_keys(tmp_path / "run.pem"), make_keys(tmp_path / "run" / "keys" / "own.pem")
    for option, value, words in [
        ("signing-key", tmp_path / "none.pem", "none.pem: the private key can't be read"),
        ("signing-key", public, "is not a private key"),
        ("signing-key", inside, "lies in the run's folder.*keep the key elsewhere"),
        ("require-signature", tmp_path / "none.pem", "none.pem: the public key can't be read"),
        ("local-dir", private, "checkpoint.local_dir .*run.pem is a file"),
    ]:
        with pytest.raises(UserError, match=words):
            train.main([*options, "--train.steps", "3", f"--checkpoint.{option}", str(value), "--run-dir", str(tmp_path / "run")])
    assert not (tmp_path / "run" / "checkpoints").exists() and not (tmp_path / "run" / "config.yaml").exists()


def test_a_pickle_of_weights_is_not_read_and_what_is_said(options, tmp_path):
    (tmp_path / "w.pt").write_bytes(b"PK")
    with pytest.raises(UserError, match="w.pt is a file; a run's folder or a checkpoint is read.*never a pickle"):
        train.main([*options, "--train.init-from", str(tmp_path / "w.pt"), "--run-dir", str(tmp_path / "run")])
