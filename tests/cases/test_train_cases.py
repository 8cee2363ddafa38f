"Training as a command: what it refuses, what it leaves, and how it goes on after a stop or a kill."

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import torch

from llm_from_scratch import artifacts, export, train, training_loop
from llm_from_scratch.checkpointing import latest_checkpoint, load_run, save_checkpoint
from llm_from_scratch.config import build_config, to_yaml
from llm_from_scratch.env import UserError, run_command, set_deterministic
from llm_from_scratch.launch import STOPPED, check_resume, load_initial_weights, resolve
from llm_from_scratch.moe import build_model
from llm_from_scratch.optim import lr_at

ROOT = Path(__file__).parents[2]
SHAPE = ["--model.hidden-size", "32", "--model.num-layers", "1", "--model.num-heads", "2", "--tokenizer.vocab-size", "300"]
SHORT = ["--train.seq-len", "32", "--train.global-batch", "4", "--train.micro-batch", "4", "--train.num-threads", "1", "--optim.kind", "adamw",
         "--train.dtype", "fp32", "--log.tensorboard", "False", "--eval.num-completions", "0", "--eval.num-samples", "1", "--eval.sample-tokens", "8"]


@pytest.fixture(autouse=True)
def restored():
    "Training changes switches of the whole process; other tests must not see it."
    yield
    set_deterministic(False)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(30):
        (folder / f"page-{number}.txt").write_text("".join(f"{number} times {factor} is {number * factor}\n" for factor in range(40)))
    return folder


@pytest.fixture
def options(corpus):
    return [*SHAPE, *SHORT, "--data.path", str(corpus), "--data.val-fraction", "0.2", "--data.cache-dir", str(corpus.parent / "cache")]


STANDING = """
import sys, time
from llm_from_scratch import train, training_loop
from llm_from_scratch.env import run_command
train_on, stops, last = training_loop.train_on, [], int(sys.argv.pop(1))
class Kept(train.StopRequest):
    def __enter__(self):
        stops.append(self)
        return super().__enter__()
def stand(training, batch, stop):
    while training.step == last and not stops[0].reason: time.sleep(0.01)
    return train_on(training, batch, stop)
train.StopRequest, training_loop.train_on = Kept, stand
run_command(train.main)
"""


def start(args, stand_after=None):
    "The command in a process of its own; after a step it may stand still until it is told to stop."
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    program = ["-m", "llm_from_scratch.train"] if stand_after is None else ["-c", STANDING, str(stand_after)]
    return subprocess.Popen([sys.executable, *program, *map(str, args)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process, seconds=300):
    out, err = process.communicate(timeout=seconds)
    return process.returncode, out, err


def rows(run_dir):
    return [json.loads(line) for line in (Path(run_dir) / "metrics.jsonl").read_text().splitlines()]


def wait_for_step(run_dir, step, seconds=300):
    "Until that step is in the metrics."
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        try:
            if rows(run_dir)[-1]["step"] >= step:
                return
        except (OSError, IndexError, json.JSONDecodeError):
            pass
        time.sleep(0.02)
    raise AssertionError(f"step {step} did not come")


def wait_for_checkpoint(run_dir, step, seconds=300):
    limit = time.monotonic() + seconds
    while not (Path(run_dir) / "checkpoints" / f"step_{step:08d}").exists():
        assert time.monotonic() < limit, f"checkpoint {step} did not come"
        time.sleep(0.01)


def losses(run_dir):
    return {row["step"]: row["loss"] for row in rows(run_dir)}


@pytest.fixture(scope="module")
def undisturbed(corpus, tmp_path_factory):
    "A run of 60 steps in one sitting; its folder."
    run_dir = tmp_path_factory.mktemp("runs") / "whole"
    args = [*SHAPE, *SHORT, "--data.path", str(corpus), "--data.val-fraction", "0.2", "--data.cache-dir", str(corpus.parent / "cache")]
    with redirect_stdout(StringIO()) as out:
        assert train.main([*args, "--train.steps", "60", "--checkpoint.every-steps", "20", "--eval.every-steps", "30", "--run-dir", str(run_dir)]) == 0
    assert all(word in out.getvalue() for word in ("extend", "generate", "evaluate"))
    return run_dir


def go_on(run_dir, monkeypatch):
    "Resume in this process; the report, which others look at, takes longer than the steps."
    monkeypatch.setattr(train, "tell", lambda *arguments: None)
    return train.main(["--run-dir", str(run_dir), "--resume", "auto"])


def test_a_finished_run_leaves_everything(undisturbed):
    names = {path.name for path in undisturbed.iterdir()}
    assert {"config.yaml", "config.sha256", "tokenizer", "env.json", "data.json", "metrics.jsonl", "log.jsonl", "checkpoints", "report", "summary.json"} <= names
    assert {path.suffix for path in (undisturbed / "report").iterdir()} >= {".png", ".html"}
    assert "stopped.json" not in names
    assert load_run(undisturbed).step == 60


def test_trn_8_throughput_and_tokens_add_up(undisturbed):
    seen = rows(undisturbed)
    assert [row["step"] for row in seen] == list(range(1, 61))
    assert {"step", "loss", "lr", "grad_norm", "tokens", "tokens_per_second", "step_seconds"} <= set(seen[0])
    total = sum(row["tokens_per_second"] * row["step_seconds"] for row in seen)
    assert total == pytest.approx(seen[-1]["tokens"])
    assert [row["step"] for row in seen if "val_loss" in row] == [30, 60]


def test_sch_1_logged_rate_is_the_formula(undisturbed):
    config = load_run(undisturbed).config
    for row in rows(undisturbed):
        assert row["lr"] == lr_at(row["step"] - 1, peak=config.optim.adamw_lr, floor=config.optim.adamw_lr * config.optim.min_lr_ratio, warmup=6, total=60)


def test_sigterm_saves_exits_3_and_resumes_to_the_bit(options, undisturbed, tmp_path, monkeypatch):
    run_dir = tmp_path / "cut"
    process = start([*options, "--train.steps", "60", "--checkpoint.every-steps", "20", "--eval.every-steps", "30", "--run-dir", run_dir], stand_after=3)
    wait_for_step(run_dir, 3)
    process.send_signal(signal.SIGTERM)
    code, out, err = finish(process)
    assert code == 3, err
    assert f"--run-dir {run_dir} --resume auto" in out
    assert json.loads((run_dir / "stopped.json").read_text())["exit_code"] == STOPPED
    stopped_at = rows(run_dir)[-1]["step"]
    assert latest_checkpoint(run_dir / "checkpoints").name == f"step_{stopped_at:08d}"
    assert stopped_at < 60
    assert go_on(run_dir, monkeypatch) == 0
    assert losses(run_dir) == losses(undisturbed)
    assert not (run_dir / "stopped.json").exists()


def test_kill_9_resumes_from_the_last_whole_checkpoint(options, undisturbed, tmp_path, monkeypatch, capsys):
    run_dir = tmp_path / "killed"
    process = start([*options, "--train.steps", "60", "--checkpoint.every-steps", "20", "--eval.every-steps", "30", "--run-dir", run_dir], stand_after=25)
    wait_for_step(run_dir, 20)
    wait_for_checkpoint(run_dir, 20)  # written beside the training
    process.kill()
    finish(process)
    assert go_on(run_dir, monkeypatch) == 0
    assert "resumed from" in capsys.readouterr().out
    assert losses(run_dir) == losses(undisturbed)


def test_a_mistake_is_one_line_and_exit_code_2(command, options, tmp_path):
    code, out, err = command("train", *options, "--train.step", "5", "--run-dir", tmp_path / "typo")
    assert code == 2
    assert err.strip().count("\n") == 0 and "did you mean '--train.steps'?" in err
    assert not (tmp_path / "typo").exists()


@pytest.mark.parametrize("change, words", [
    (["--tokenizer.vocab-size", "70000", "--data.dtype", "uint16"], "65535"),
    (["--train.seq-len", "100000", "--model.max-seq-len", "100000"], "sequence longer than the data"),
    (["--data.path", "/nowhere/*.txt"], "/nowhere/*.txt"),
    (["--train.global-batch", "6"], "train.global_batch 6"),
    (["--train.init-from", "/nowhere"], "no such run or checkpoint"),
    (["--optim.warmup-steps", "500"], "optim.warmup_steps 500"),
    (["--tokenizer.vocab-size", "30000"], "vocab"),
    (["--preset", "smal"], "did you mean 'small'"),
])
def test_wrong_input_names_what_and_where(options, tmp_path, monkeypatch, change, words):
    with pytest.raises(UserError, match=words.replace("*", r"\*")) as caught:
        train.main([*options, *change, "--run-dir", str(tmp_path / "run")])
    assert "\n" not in str(caught.value)


def test_a_folder_with_another_run_is_refused(options, undisturbed):
    before = (undisturbed / "config.yaml").read_text()
    with pytest.raises(UserError, match="already holds a run.*--resume auto"):
        train.main([*options, "--train.steps", "61", "--run-dir", str(undisturbed)])
    with pytest.raises(UserError, match="model.num_layers = 1, asked for is 2"):
        train.main([*options, "--model.num-layers", "2", "--train.steps", "60", "--run-dir", str(undisturbed), "--resume", "auto"])
    assert (undisturbed / "config.yaml").read_text() == before


def test_a_checkpoint_of_another_shape_is_refused(options, undisturbed, tmp_path):
    with pytest.raises(UserError, match="32.*48|48.*32"):
        train.main([*options, "--model.hidden-size", "48", "--train.init-from", str(undisturbed), "--run-dir", str(tmp_path / "run")])


def test_changed_text_is_refused_on_a_resume(options, corpus, undisturbed, tmp_path):
    grown = tmp_path / "grown"
    grown.mkdir()
    (grown / "more.txt").write_text("nine times nine is eighty-one\n" * 200)
    with pytest.raises(UserError):
        train.main(["--run-dir", str(undisturbed), "--resume", "auto", "--data.path", str(grown)])


@pytest.mark.slow
def test_two_runs_do_not_share_a_folder(options, tmp_path):
    run_dir = tmp_path / "run"
    process = start([*options, "--train.steps", "100000", "--run-dir", run_dir])
    wait_for_step(run_dir, 1)
    with pytest.raises(UserError, match=str(process.pid)):
        train.main([*options, "--run-dir", str(run_dir), "--resume", "auto"])
    process.send_signal(signal.SIGINT)
    assert finish(process)[0] == 3


def test_trn_10_without_a_compiler_one_line_says_so_and_it_trains(options, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(training_loop, "why_not_compile", lambda: "there is no C++ compiler")
    monkeypatch.setattr(train, "tell", lambda *arguments: None)
    code = train.main([*options, "--train.compile", "always", "--train.steps", "2", "--run-dir", str(tmp_path / "run")])
    captured = capsys.readouterr()
    assert code == 0
    assert captured.err.splitlines() == ["torch.compile is off: there is no C++ compiler"]
    assert len(losses(tmp_path / "run")) == 2


def test_fewer_steps_than_done_are_refused(undisturbed):
    with pytest.raises(UserError, match="train.steps 5 is below the 60 steps already done"):
        train.main(["--run-dir", str(undisturbed), "--resume", "auto", "--train.steps", "5"])


def test_checkpoints_that_are_all_damaged_are_not_trained_over(options, tmp_path, monkeypatch):
    run_dir = tmp_path / "run"
    monkeypatch.setattr(train, "tell", lambda *arguments: None)
    assert train.main([*options, "--train.steps", "4", "--checkpoint.every-steps", "2", "--run-dir", str(run_dir)]) == 0
    for weights in run_dir.glob("checkpoints/*/model.safetensors"):
        weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    with pytest.raises(UserError, match="none of the 2 checkpoints"):
        train.main(["--run-dir", str(run_dir), "--resume", "auto"])


def test_a_run_dir_that_is_a_file_is_one_line(command, options, tmp_path):
    (tmp_path / "file").write_text("")
    code, out, err = command("train", *options, "--run-dir", tmp_path / "file")
    assert code == 2
    assert err.startswith("error: ") and err.count("\n") == 1


@pytest.mark.slow
def test_brackets_in_the_folder_name_are_printed(options, tmp_path):
    code, out, err = finish(start([*options, "--train.steps", "2", "--run-dir", tmp_path / "a [bold]run"]))
    assert code == 0, err
    assert "a [bold]run' --resume auto" in out


def test_rows_of_one_token_train(options, tmp_path):
    rows = ["--train.seq-len", "1", "--model.max-seq-len", "1", "--train.global-batch", "64", "--train.micro-batch", "64"]  # an evaluation has thousands
    assert train.main([*options, *rows, "--train.steps", "2", "--run-dir", str(tmp_path / "run")]) == 0


def copied(undisturbed, tmp_path):
    run_dir = tmp_path / "copy"
    shutil.copytree(undisturbed, run_dir)
    return run_dir


def test_rows_that_a_crash_or_a_hand_damaged_are_told(undisturbed, tmp_path):
    run_dir = copied(undisturbed, tmp_path)
    (run_dir / "metrics.jsonl").write_bytes(b'{"step": 1, "loss": 2.0}\n{"st\xff\n')
    with pytest.raises(UserError, match=r"metrics.jsonl, line 2: not a row of metrics"):
        train.main(["--run-dir", str(run_dir), "--resume", "auto"])


@pytest.mark.parametrize("name, text, words", [
    ("data.json", "{}", "data.json does not hold the hashes"),
    ("data.json", "[]", "data.json does not hold the hashes"),
    ("data.json", "", "data.json: damaged JSON"),
    ("data.json", None, "data.json: no such file"),
    ("config.yaml", "", "config.yaml is empty"),
    ("config.yaml", "greeting: hello\n", "config.yaml: unknown key 'greeting'"),
    ("config.yaml", "model: {hidden_size: 32}\n", "config.yaml has the hash .* but .*config.sha256 says"),
    ("config.yaml", None, "it has no config.yaml"),
    ("config.sha256", "", "config.sha256 says nothing"),
    ("tokenizer/tokenizer.model", "no model", "the tokenizer is damaged.*a resume writes it anew"),
    ("tokenizer/manifest.json", "{}", "not a manifest of ours.*a resume writes it anew"),
])
def test_a_damaged_run_folder_is_refused_before_anything_is_prepared(undisturbed, tmp_path, monkeypatch, name, text, words):
    run_dir = copied(undisturbed, tmp_path)
    (run_dir / name).write_text(text) if text is not None else (run_dir / name).unlink()
    monkeypatch.setattr(train, "prepare_data", lambda config: pytest.fail("data were prepared"))
    with pytest.raises(UserError, match=words) as caught:
        train.main(["--run-dir", str(run_dir), "--resume", "auto"])
    assert "\n" not in str(caught.value)
    if name.startswith("config"):
        with pytest.raises(UserError, match=words):
            load_run(run_dir)


def test_a_removed_tokenizer_is_written_anew_and_the_report_too(undisturbed, tmp_path):
    run_dir = copied(undisturbed, tmp_path)
    for name in ("tokenizer", "report"):
        shutil.rmtree(run_dir / name)
    (run_dir / "summary.json").unlink()
    assert train.main(["--run-dir", str(run_dir), "--resume", "auto"]) == 0
    assert load_run(run_dir).step == 60 and (run_dir / "report" / "index.html").exists()
    assert json.loads((run_dir / "summary.json").read_text())["val_loss"] == rows(run_dir)[-1]["val_loss"]


def test_a_checkpoint_without_a_configuration_is_not_trained_over(options, undisturbed, tmp_path):
    run_dir = copied(undisturbed, tmp_path)
    (run_dir / "config.yaml").unlink()
    with pytest.raises(UserError, match="already holds a run"):
        train.main([*options, "--run-dir", str(run_dir)])


SLEEPY = """
import sys, time
from llm_from_scratch import train
from llm_from_scratch.env import run_command
def sleepy(*args, **options):
    print("asleep", flush=True)
    time.sleep(600)
    raise AssertionError("nobody woke it")
setattr(train, sys.argv.pop(1), sleepy)
run_command(train.main)
"""


def interrupt_in(function, args, number):
    "Signal training while it is inside of one of its functions; exit code, standard output, standard error."
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, "-c", SLEEPY, function, *map(str, args)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    read = ""
    while "asleep" not in read:
        line = process.stdout.readline()
        assert line, process.stderr.read()
        read += line
    process.send_signal(number)
    out, err = process.communicate(timeout=300)
    return process.returncode, read + out, err


@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGINT])
def test_a_signal_during_the_report_says_how_to_go_on(undisturbed, tmp_path, number):
    run_dir = copied(undisturbed, tmp_path)
    for name in ("report", "tensorboard"):
        shutil.rmtree(run_dir / name, ignore_errors=True)
    code, out, err = interrupt_in("write_report", ["--run-dir", run_dir, "--resume", "auto"], number)
    assert (code, err) == (STOPPED, "")
    assert f"stopped after step 60, before its report, saved; go on with: torchrun -m llm_from_scratch.train --run-dir {run_dir} --resume auto" in out
    assert json.loads((run_dir / "stopped.json").read_text())["exit_code"] == STOPPED
    assert train.main(["--run-dir", str(run_dir), "--resume", "auto"]) == 0
    assert (run_dir / "report" / "index.html").exists() and not (run_dir / "stopped.json").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_before_the_first_step_is_one_line(options, tmp_path, number):
    code, out, err = interrupt_in("prepare_data", [*options, "--run-dir", tmp_path / "run"], number)
    assert (code, err) == (130, f"interrupted by {number.name} outside of the steps; go on with: the same command\n")
    assert not (tmp_path / "run" / "config.yaml").exists()


def test_divergence_without_a_checkpoint_says_so(options, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(training_loop, "is_over", lambda training, in_a_row: in_a_row > 0)
    build = train.build_training
    def poisoned(*args, **options):
        training = build(*args, **options)
        whole = training.engine.loss
        training.engine.loss = lambda model, batch: whole(model, batch) * float("nan")
        return training
    monkeypatch.setattr(train, "build_training", poisoned)
    assert train.main([*options, "--train.steps", "4", "--run-dir", str(tmp_path / "run")]) == 4
    assert "no checkpoint was written yet; start another run with a lower --optim.lr" in capsys.readouterr().out


@pytest.mark.parametrize("change, words", [
    (["--model.hidden-size", "1000000"], r"take at least [\d,.]+ GB and [\d,.]+ GB of memory can be had"),
    (["--model.num-layers", "100000000"], "does not fit"),
    (["--run-dir", ""], "--run-dir is empty"),
    (["--data.path", ""], "--data.path is empty"),
    (["--resume", ""], "--resume is empty"),
    (["--config", ""], "--config is empty"),
    (["--train.init-from", ""], "--train.init-from is empty"),
    (["--tokenizer.character-coverage", "0.9"], "tokenizer.character_coverage.*0.98"),
    (["--train.num-threads", "100000"], "train.num_threads.*less than or equal to 1024"),
    (["--tokenizer.vocab-size", "2147483647"], "tokenizer.vocab_size.*less than or equal to 16777216"),
    (["--data.num-workers", "100000"], r"data.num_workers 100000 asks for 100,000 reading processes on \d+ cores; take at most"),
    (["--data.mix-changes", "100:web=1"], r"data.mix_changes 100:web=1: write it as '\{1000: \{web: 0.5, code: 0.5\}\}'"),
    (["--data.mix-changes", "{-5: {web: 1}}"], "there is no step -5"),
    (["--model.num-experts", "1000000000"], "lower model.num_experts, model.hidden_size"),
    (["--model.num-experts", "9" * 400], "does not fit"),
    (["--model.num-experts", "4", "--model.experts-per-token", "5"], "experts_per_token 5 is above num_experts 4"),
    (["--model.num-experts", "4", "--model.capacity-factor", "1e300"], "model.capacity_factor.*less than or equal to 1000000"),
    (["--model.num-experts", "4", "--model.router-temperature", "1e300"], "model.router_temperature.*less than or equal to 1000000"),
    (["--model.num-experts", "4", "--model.balance-weight", "1e39"], "model.balance_weight.*less than or equal to 1000000"),
    (["--model.num-experts", "4", "--model.router-z-weight", "1e39"], "model.router_z_weight.*less than or equal to 1000000"),
    (["--train.global-batch", "7", "--train.micro-batch", "2"], "train.global_batch 7 is not train.micro_batch 2 x 1 ranks x a whole number: use 6 or 8"),
    (["--data.mix", "web"], "data.mix web: write it as web=0.7 code=0.3"),
])
def test_an_impossible_option_is_refused_at_once(options, tmp_path, monkeypatch, change, words):
    monkeypatch.setattr(train, "prepare_data", lambda config: pytest.fail("data were prepared"))
    with pytest.raises(UserError, match=words) as caught:
        train.main([*options, "--run-dir", str(tmp_path / "run"), *change])
    assert "\n" not in str(caught.value)


def test_a_restart_count_that_is_no_number_is_told(options, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "x")
    with pytest.raises(UserError, match="TORCHELASTIC_RESTART_COUNT='x'"):
        train.main([*options, "--run-dir", str(tmp_path / "run")])


@pytest.mark.parametrize(("place", "restarts", "is_told"), [("resolve", "0", True), ("resolve", "1", False), ("repeated_stop", "1", False), ("watch_launcher", "1", True)])
def test_a_restart_ends_without_a_word_until_it_knows_that_it_repeats_no_stop(monkeypatch, capsys, place, restarts, is_told):
    def interrupted(*args): raise KeyboardInterrupt("SIGTERM")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restarts)
    monkeypatch.setattr(train, place, interrupted)
    monkeypatch.setattr(sys, "argv", ["train"])
    with pytest.raises(SystemExit) as ended: run_command(train.main)
    assert (ended.value.code, capsys.readouterr().err) == (130, "interrupted by SIGTERM\n" * is_told)


def test_a_stop_that_is_repeated_is_not_cut_off_by_the_launchers_signal(monkeypatch, capsys, tmp_path):
    def repeats(run_dir): return 2
    def say_them(): whole(), os.kill(os.getpid(), signal.SIGTERM)
    whole = train.say_last_words
    monkeypatch.setattr(train, "repeated_stop", repeats)
    monkeypatch.setattr(train, "say_last_words", say_them)
    monkeypatch.setattr(sys, "argv", ["train", "--run-dir", str(tmp_path)])
    with pytest.raises(SystemExit) as ended: run_command(train.main)
    assert (ended.value.code, capsys.readouterr().err) == (2, "")


def test_a_full_disk_is_one_line(options, tmp_path, monkeypatch, capsys):
    def full(*args, **more):
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(artifacts.os, "fsync", full)
    monkeypatch.setattr(sys, "argv", ["train", *options, "--train.steps", "2", "--run-dir", str(tmp_path / "run")])
    with pytest.raises(SystemExit) as ended:
        run_command(train.main)
    err = capsys.readouterr().err
    assert (ended.value.code, err.count("\n")) == (2, 1) and str(tmp_path / "run") in err and "No space left" in err


@pytest.mark.slow # three trainings
def test_training_goes_on_from_other_peoples_weights(options, tmp_path, monkeypatch):
    first = [*options, "--model.rope-base", "5e5", "--model.vocab-multiple", "64"]
    assert train.main([*first, "--train.steps", "30", "--run-dir", str(tmp_path / "first"), "--eval.every-steps", "30"]) == 0
    monkeypatch.setattr(export, "find_spec", lambda name: None)
    export.export_hf(tmp_path / "first", tmp_path / "theirs")
    again = [*options[len(SHAPE):], "--train.init-from", str(tmp_path / "theirs"), "--train.steps", "2", "--run-dir", str(tmp_path / "second")]
    with pytest.raises(UserError, match="model.num_layers is 3, but the weights of train.init_from"):
        train.main([*again, "--model.num-layers", "3"])
    assert train.main([*again, "--eval.every-steps", "2"]) == 0
    one, two = load_run(tmp_path / "first"), load_run(tmp_path / "second")
    assert two.config.model.rope_base == 5e5 and two.tokenizer.fingerprint == one.tokenizer.fingerprint
    before, after = rows(tmp_path / "first"), rows(tmp_path / "second")
    assert after[0]["loss"] < before[0]["loss"] - 1 and abs(after[0]["loss"] - before[-1]["loss"]) < 0.5
    shutil.rmtree(tmp_path / "theirs")
    assert train.main(["--run-dir", str(tmp_path / "second"), "--resume", "auto", "--train.steps", "3"]) == 0


def test_a_run_from_weights_takes_their_shape_and_goes_on_when_they_are_gone(options, undisturbed, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(train, "tell", lambda *arguments: None)
    weights = Path(shutil.copytree(undisturbed, tmp_path / "weights"))
    again = [*options[len(SHAPE):], "--train.init-from", str(weights), "--train.steps", "1", "--run-dir", str(tmp_path / "run")]
    with pytest.raises(UserError, match="model.num_layers is 3, but the weights of train.init_from"):
        train.main([*again, "--model.num-layers", "3"])
    assert train.main([*again, "--model.capacity-factor", "2"]) == 0
    assert "model.capacity_factor does nothing while model.num_experts is 0" in capsys.readouterr().out
    shutil.rmtree(weights)
    assert train.main(["--run-dir", str(tmp_path / "run"), "--resume", "auto", "--train.steps", "2"]) == 0
    run = load_run(tmp_path / "run")
    assert (run.step, run.config.model.hidden_size, run.tokenizer.fingerprint) == (2, 32, load_run(undisturbed).tokenizer.fingerprint)


def test_a_run_with_experts_hands_its_shape_over(undisturbed, tmp_path):
    shape = dict(hidden_size=32, num_layers=1, num_heads=2, num_experts=3, experts_per_token=1, positions="alibi")
    config = build_config({"model": shape, "tokenizer": {"vocab_size": 300}})
    model = build_model(config.model.model_copy(update={"vocab_size": 300}))
    save_checkpoint(tmp_path / "checkpoints", {"model": model}, step=4)
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    shutil.copytree(undisturbed / "tokenizer", tmp_path / "tokenizer")
    for place in (tmp_path, tmp_path / "checkpoints" / "step_00000004"):
        _, taken, _ = resolve(["--train.init-from", str(place), "--model.capacity-factor", "1.5"])
        assert {name: getattr(taken.model, name) for name in shape} == shape and taken.tokenizer.path == str(tmp_path / "tokenizer")
        other = build_model(taken.model.model_copy(update={"vocab_size": 300}))
        load_initial_weights(str(place), other)
        assert torch.equal(other.blocks[0].mlp.router.weight, model.blocks[0].mlp.router.weight)
    with pytest.raises(UserError, match="model.num_experts is 0, but the weights"):
        resolve(["--train.init-from", str(tmp_path), "--model.num-experts", "0"])


@pytest.mark.parametrize("resume", [[], ["--resume", "auto"]])
def test_imported_weights_are_not_resumed_and_stay_as_they_were(options, tmp_path, resume):
    config = build_config({"model": {"hidden_size": 32, "num_layers": 1, "num_heads": 2}, "tokenizer": {"vocab_size": 300}})
    save_checkpoint(tmp_path / "checkpoints", {"model": build_model(config.model.model_copy(update={"vocab_size": 300}))}, step=0, kind="light")
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError, match=f"holds weights alone.*--train.init-from {tmp_path} --run-dir"):
        train.main([*options, "--run-dir", str(tmp_path), *resume])
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("change, key", [({"train": {"weights": "bf16", "dtype": "fp32"}}, "train.weights"), ({"optim": {"kind": "adamw"}}, "optim.kind"), ({"train": {"seed": 5}}, "train.seed")])
def test_what_a_state_can_not_follow_is_not_offered(change, key):
    old = build_config({"train": {"dtype": "fp32"}})
    with pytest.raises(UserError) as error: check_resume(old, build_config(old.model_dump(), change), 3)
    assert key in str(error.value) and "--allow-change" not in str(error.value)
    with pytest.raises(UserError, match=f"--allow-change can't help with {key}"): check_resume(old, build_config(old.model_dump(), change), 3, allow=(key,))


@pytest.mark.parametrize("change", [{"kind": "deepspeed"}, {"kind": "deepspeed", "zero_stage": 3}])
def test_another_engine_is_not_offered_once_its_state_was_saved(change):
    old = build_config({})
    new = build_config(old.model_dump(), {"engine": change})
    for before, after in ((old, new), (new, old)):
        with pytest.raises(UserError, match="engine.kind = ") as error: check_resume(before, after, 3)
        assert "--allow-change" not in str(error.value)
        with pytest.raises(UserError, match="or --allow-change engine.kind"): check_resume(before, after, 0)
    with pytest.raises(UserError, match="or --allow-change engine.kind"): check_resume(old, build_config(old.model_dump(), {"engine": {"kind": "deepspeed", "zero_stage": 0}}), 3)
    beside = build_config(new.model_dump(), {"engine": {"offload": "cpu"}})
    with pytest.raises(UserError, match="or --allow-change engine.offload"): check_resume(new, beside, 3)
    with pytest.raises(UserError) as error: check_resume(beside, build_config(new.model_dump(), {"engine": {"offload": "nvme"}}), 3)
    assert "--allow-change" not in str(error.value)


def give_away(path, seed):
    "Make a checkpoint one of a run with another seed, as far as it tells."
    manifest, state = artifacts.read_manifest(path), artifacts.read_json(path / "train_state.json")
    state["entries"]["config"]["value"]["train"]["seed"] = seed
    artifacts.write_json(path / "train_state.json", state)
    (path / "manifest.json").unlink()
    artifacts.write_manifest(path, kind="checkpoint", inputs=manifest["inputs"], extra=manifest["extra"])
    return path


def test_a_checkpoint_of_another_seeds_run_is_refused_in_whatever_folder(undisturbed, tmp_path):
    run_dir = tmp_path / "run"
    shutil.copytree(undisturbed, run_dir)
    theirs = shutil.copytree(give_away(run_dir / "checkpoints" / "step_00000060", 1), tmp_path / "step_00000060")
    for resume in ("auto", str(theirs)):
        with pytest.raises(UserError, match="is another run's: it was saved with train.seed = 1, the run has 0"):
            train.main(["--run-dir", str(run_dir), "--resume", resume, "--train.steps", "61"])


def test_a_checkpoint_tells_its_configuration_where_the_folder_has_none(options, undisturbed, tmp_path):
    theirs = str(undisturbed / "checkpoints" / "step_00000060")
    for change, words in (["--train.seed", "1"], "train.seed = 0, asked for is 1"), (["--optim.lr", "0.5"], "optim.lr = .*, asked for is 0.5"):
        with pytest.raises(UserError, match=words):
            train.main([*options, "--run-dir", str(tmp_path / "new"), "--resume", theirs, "--train.steps", "61", *change])


def test_a_file_url_is_the_path_that_it_names(options, undisturbed, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=f"^{undisturbed} already holds a run"):
        train.main([*options, "--run-dir", f"file://{undisturbed}"])
    with pytest.raises(UserError, match="names a file of the machine 'runs'"):
        train.main([*options, "--run-dir", "file://runs/a"])
    assert list(tmp_path.iterdir()) == []
