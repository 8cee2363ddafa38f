"The fuse inside training, on a clock that is set by hand: warned, cut, stopped, resumed, killed."

import json
import socket
import subprocess
import sys
import time

import pytest

from llm_from_scratch.checkpointing import latest_checkpoint, verify_checkpoint
from llm_from_scratch.config import FuseConfig, build_config, load_preset
from llm_from_scratch.env import Ranks, UserError, set_deterministic
from llm_from_scratch.fuse import Decision, Fuse, Webhook, after_step, begin, read_ledger
from llm_from_scratch.launch import DONE, STOPPED, StopRequest, check_resume
from llm_from_scratch.training_loop import build_training, fit, prepare_data, resume

SMALL = {"model": {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "max_seq_len": 32}, "tokenizer": {"vocab_size": 300},
         "eval": {"every_steps": 5}, "checkpoint": {"every_steps": 4, "background": False},
         "train": {"steps": 14, "seq_len": 16, "global_batch": 4, "micro_batch": 4, "dtype": "fp32"}, "fuse": {"grace_steps": 3}}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(20): (folder / f"{number}.txt").write_text(f"{number} is a number, and {number + 1} is another. " * 20)
    return folder


@pytest.fixture(autouse=True)
def restored():
    yield
    set_deterministic(False)


class Clock:
    now = 0.0
    def __call__(self): return self.now


def run(corpus, run_dir, resume_from=None, stop_after=None, seconds_a_row=1.0, crash_after=None, close=True, **options):
    "Each row takes so many seconds of a made clock; gives exit code, rows by step, losses by step, and the training."
    config = build_config(load_preset("tiny"), SMALL, {"data": {"path": [str(corpus)], "cache_dir": str(corpus.parent / "cache"), "val_fraction": 0.2}}, {"fuse": options})
    training, stop, rows, losses, clock = build_training(config, prepare_data(config), Ranks()), StopRequest(), {}, {}, Clock()
    training.fuse = Fuse(config.fuse, num_steps=config.train.steps, clock=clock)
    training.fuse.tell = lambda text: None
    if resume_from: resume(training, resume_from)
    true_step = training.engine.train_step
    def train_step(batches, **more):
        rows[training.step + 1] = [row for batch in batches for row in batch.row_ids.tolist()]
        clock.now += seconds_a_row * len(rows[training.step + 1])
        return true_step(batches, **more)
    training.engine.train_step = train_step
    def observe(step, throughput, **values):
        losses[step] = values["loss"]
        if step == stop_after: stop.reason = "test"
        if step == crash_after: raise KeyboardInterrupt
    code = fit(training, run_dir, observe, stop)
    if close: training.fuse.close(training.step, training.tokens)
    return code, rows, losses, training


def test_over_the_plan_it_warns_cuts_and_stops_with_a_verified_checkpoint(corpus, tmp_path):
    code, rows, _, training = run(corpus, tmp_path, budget_hours=14 * 4 / 3600, seconds_a_row=1.7)
    fuse = training.fuse
    assert code == STOPPED == 3 and [event["actions"] for event in fuse.events] == [["warn", "cut", "free"], ["stop"]]
    assert [len(rows[step]) for step in (3, 4)] == [4, 3]
    spent = 1.7 * sum(len(found) for found in rows.values())
    assert spent >= 14 * 4 > spent - 1.7 * len(rows[training.step])
    newest = latest_checkpoint(tmp_path / "checkpoints")
    assert newest.name == f"step_{training.step:08d}" and verify_checkpoint(newest) == []
    page = (tmp_path / "report" / "cost.html").read_text()
    assert "the budget of" in page and "75% of the configured rows" in page


@pytest.mark.slow
def test_a_cut_loses_no_row_and_sees_none_twice(corpus, tmp_path):
    _, whole, _, _ = run(corpus, tmp_path / "whole")
    code, cut, _, _ = run(corpus, tmp_path / "cut", budget_tokens=14 * 64 / 1.7, when_spent="warn")
    seen = [row for step in sorted(cut) for row in cut[step]]
    assert code == DONE and len(cut[14]) == 3 and seen == [row for step in sorted(whole) for row in whole[step]][:len(seen)]


def test_a_cut_run_stopped_and_resumed_is_the_same_run(corpus, tmp_path):
    options = dict(budget_tokens=14 * 64 / 1.4, over_plan={0.3: "warn+cut"}, when_spent="warn")
    _, rows, losses, _ = run(corpus, tmp_path / "whole", **options)
    _, before, first, _ = run(corpus, tmp_path / "parts", stop_after=6, **options)
    _, after, second, training = run(corpus, tmp_path / "parts", resume_from=latest_checkpoint(tmp_path / "parts" / "checkpoints"), **options)
    assert {**before, **after} == rows and {**first, **second} == losses
    assert training.fuse.kept == 0.75 and [event["step"] for event in training.fuse.events][0] == 3


def test_what_a_killed_sitting_spent_stays_spent(corpus, tmp_path):
    budget = dict(budget_hours=100.0)
    with pytest.raises(KeyboardInterrupt): run(corpus, tmp_path, crash_after=7, **budget)
    ledger = read_ledger(tmp_path)
    assert ledger["step"] == 6 and sum(ledger["seconds"].values()) == 24.0 # the newest one is at most ten seconds old
    code, _, _, training = run(corpus, tmp_path, resume_from=latest_checkpoint(tmp_path / "checkpoints"), **budget)
    assert code == DONE and training.fuse.seconds["lost"] == 8.0 and sum(training.fuse.seconds.values()) == 14 * 4 + 8


@pytest.mark.slow
def test_a_spent_budget_stops_a_resume_before_its_first_step_until_it_is_raised(corpus, tmp_path):
    _, _, _, training = run(corpus, tmp_path, budget_tokens=300.0)
    newest = latest_checkpoint(tmp_path / "checkpoints")
    code, rows, _, _ = run(corpus, tmp_path, resume_from=newest, budget_tokens=300.0)
    assert (code, rows) == (STOPPED, {})
    assert run(corpus, tmp_path, resume_from=newest, budget_tokens=1e9)[0] == DONE


@pytest.mark.slow
def test_a_checkpoint_from_before_the_fuse_can_be_resumed(corpus, tmp_path, monkeypatch):
    run(corpus, tmp_path, stop_after=4)
    from llm_from_scratch import training_loop
    load = training_loop.load_checkpoint
    monkeypatch.setattr(training_loop, "load_checkpoint", lambda *args, **options: {name: value for name, value in load(*args, **options).items() if name != "fuse"})
    code, rows, _, training = run(corpus, tmp_path, resume_from=latest_checkpoint(tmp_path / "checkpoints"))
    assert code == DONE and min(rows) == 6 and training.fuse.counted == 9


def test_budgets_may_change_on_a_resume():
    old = build_config(load_preset("tiny"))
    assert check_resume(old, build_config(load_preset("tiny"), {"fuse": {"budget_hours": 2.0}, "alarms": {"data_use": 0.5}}), 10) == []


def test_all_ranks_follow_rank_0_whatever_their_clocks_say(corpus):
    class Loader:
        def __init__(self): self.dealing, self.num_changes, self.feed = {"batch_size": 8}, 0, type("Feed", (), {"plan": None})()
    word, loaders, fuses = [], [Loader(), Loader()], []
    for rank, pace in enumerate((2.0, 0.1)):
        agree = (lambda found: word.append(found) or found) if rank == 0 else (lambda found: word[-1])
        fuses.append((Fuse(FuseConfig(budget_hours=100 / 3600, grace_steps=5), num_steps=100, clock=Clock(), agree=agree), pace))
    ends = []
    for step in range(1, 60):
        for (fuse, pace), loader in zip(fuses, loaders):
            if step == 1: begin(fuse, loader, None, 0, 0)
            fuse.clock.now += pace
            ends.append((step, after_step(fuse, loader, step, 0), loader.dealing["batch_size"]))
    assert all(one == other for one, other in zip(ends[::2], ends[1::2]))
    assert (5, False, 6) in ends and (50, True, 6) in ends


def test_a_server_that_never_answers_costs_a_message_and_no_time():
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        hook = Webhook(f"http://127.0.0.1:{silent.getsockname()[1]}/", timeout_seconds=0.2, most_waiting=2)
        begun = time.monotonic()
        for number in range(50): hook.send({"number": number})
        assert time.monotonic() - begun < 60
        hook.close()
    hook.thread.join(300)
    assert hook.num_sent == 0 and hook.num_failed >= 47


@pytest.mark.parametrize("options, told", [(dict(over_plan={0.3: "shout"}), "shout"), (dict(over_plan={-1: "warn"}), "not a share above 0"), (dict(budget_hours=0), "greater than 0"),
                                           (dict(webhook="file:///etc/passwd"), "webhook"), (dict(budget_tokens=float("nan")), "finite")])
def test_impossible_options_are_refused_in_one_line(options, told):
    with pytest.raises(UserError) as error: build_config({"fuse": options})
    assert told in str(error.value) and "\n" not in str(error.value)


def test_money_needs_a_price():
    with pytest.raises(UserError, match="log.price_per_hour"): Fuse(FuseConfig(budget_money=5.0), num_steps=1)
    assert Decision().actions == ()


@pytest.mark.slow
def test_the_command_ends_with_three_and_says_why(corpus, tmp_path):
    command = [sys.executable, "-m", "llm_from_scratch.train", "--run-dir", str(tmp_path / "run"), "--data.path", str(corpus), "--data.val-fraction", "0.2", "--tokenizer.vocab-size", "300", "--model.hidden-size", "16",
               "--model.num-layers", "1", "--train.seq-len", "16", "--train.global-batch", "4", "--train.steps", "50", "--fuse.budget-tokens", "1000", "--log.tensorboard", "False"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert result.returncode == 3 and "fuse: the budget of 1000 tokens is spent" in result.stdout.replace("1,000", "1000"), result.stdout + result.stderr
    assert json.loads((tmp_path / "run" / "stopped.json").read_text())["reason"] == "budget"
    assert (tmp_path / "run" / "report" / "cost.html").exists()
    assert verify_checkpoint(latest_checkpoint(tmp_path / "run" / "checkpoints")) == []
