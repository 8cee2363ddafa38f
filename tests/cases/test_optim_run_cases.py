"Schedules, clipping, sixteen bits and the guard inside training: what is logged, what is skipped, and the exact resume."
import json
import logging

import pytest
import torch

from llm_from_scratch.checkpointing import latest_checkpoint
from llm_from_scratch.config import build_config, load_preset
from llm_from_scratch.env import Ranks, set_deterministic
from llm_from_scratch.launch import DIVERGED, DONE, STOPPED, StopRequest
from llm_from_scratch.optim import lr_at
from llm_from_scratch.training_loop import build_training, fit, prepare_data, resume

SMALL = {"model": {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "max_seq_len": 32}, "tokenizer": {"vocab_size": 300},
         "eval": {"every_steps": 3}, "checkpoint": {"every_steps": 4, "background": False},
         "train": {"steps": 14, "seq_len": 16, "global_batch": 4, "micro_batch": 4, "dtype": "fp32"}}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(20): (folder / f"{number}.txt").write_text(f"{number} is a number, and {number + 1} is another. " * 20)
    return folder


@pytest.fixture(autouse=True)
def restored():
    yield
    set_deterministic(False)


def configure(corpus, **sections):
    return build_config(load_preset("tiny"), SMALL, {"data": {"path": [str(corpus)], "cache_dir": str(corpus.parent / "cache"), "val_fraction": 0.2}}, sections)


def run(config, run_dir, resume_from=None, stop_after=None, damage=None):
    training, stop, rows = build_training(config, prepare_data(config), Ranks()), StopRequest(), {}
    if damage: damage(training)
    if resume_from: resume(training, resume_from)
    def observe(step, throughput, **values):
        rows[step] = {key: repr(value) for key, value in values.items() if not key.startswith("val_")} # a stop brings an evaluation of its own
        if step == stop_after: stop.reason = "test"
    return fit(training, run_dir, observe, stop), rows, training


def break_batch(step, factor):
    "The loss of the batch that is taken as number `step` of the data is multiplied."
    def damage(training):
        true_loss, loader = training.engine.loss, training.loader
        def loss(model, batch):
            is_broken = model.training and (loader.epoch, loader.position // 4) == (0, step) # rows handed out, this batch included
            return true_loss(model, batch) * (factor if is_broken else 1.0)
        training.engine.loss = loss
    return damage


OPTIONS = {
    "wsd": dict(optim=dict(schedule="wsd", warmup_steps=2, decay_share=0.5)),
    "linear, AdamW, by group": dict(optim=dict(kind="adamw", schedule="linear", clip="groups", clip_steps=5)),
    "breathing, dynamic": dict(optim=dict(schedule="breathing", warmup_steps=2, breathing_hold_steps=2, breathing_quiet_steps=2, breathing_threshold=1.0, breathing_freeze_steps=4,
                                          breathing_decay=0.8, clip="dynamic", clip_steps=3)),
    "plateau": dict(optim=dict(plateau_evals=1, lr=3.0, muon_lr=3.0), eval=dict(every_steps=1)),
    "bf16 weights": dict(train=dict(weights="bf16")),
    "fp16": dict(optim=dict(kind="adamw"), train=dict(dtype="fp16", loss_scale=2.0**14, loss_scale_interval=3)),
}


@pytest.mark.parametrize("name", [name if name in ("fp16", "bf16 weights") else pytest.param(name, marks=pytest.mark.slow) for name in OPTIONS])
def test_a_resumed_run_is_the_same_run(corpus, tmp_path, name):
    config = configure(corpus, **OPTIONS[name])
    code, whole, training = run(config, tmp_path / "one")
    stopped, begun, _ = run(config, tmp_path / "two", stop_after=6)
    _, rest, again = run(config, tmp_path / "two", resume_from=latest_checkpoint(tmp_path / "two" / "checkpoints"))
    assert (code, stopped, len(whole), len(begun)) == (DONE, STOPPED, 14, 7) and begun | rest == whole
    assert all(torch.equal(p, q) for p, q in zip(training.model.parameters(), again.model.parameters()))
    assert (training.schedule.state_dict(), training.engine.clipper.state_dict()) == (again.schedule.state_dict(), again.engine.clipper.state_dict())
    assert float(whole[14]["loss"]) < float(whole[1]["loss"]) or name == "plateau"
    assert {p.dtype for p in training.model.parameters()} == {torch.bfloat16 if name == "bf16 weights" else torch.float32}
    if name == "plateau": assert training.schedule.factor < 1
    if "group" in name: assert training.engine.clipper.limits


@pytest.mark.parametrize("factor", [float("inf"), float("nan")])
def test_amp_1_a_skipped_step_moves_neither_weights_nor_schedule(corpus, tmp_path, factor):
    config = configure(corpus, optim=dict(kind="adamw", warmup_steps=2), train=dict(steps=3, dtype="fp16", loss_scale=1024.0))
    code, rows, training = run(config, tmp_path, damage=break_batch(2, factor))
    rates = [float(rows[step]["lr"]) for step in (1, 2, 3)]
    assert rates == [lr_at(position, peak=3e-3, floor=3e-4, warmup=2, total=3) for position in (0, 1, 1)]
    assert (code, training.skipped, training.position, training.engine.scaler.scale) == (DONE, 1, 2, 512.0)
    assert {int(moments["step"]) for moments in training.engine.state_dict()["optimizer"]["moments"].values()} == {2}
    (reason, count), = training.engine.skipped.items()
    assert count == 1 and "embedding.weight" in reason and "on rank 0" in reason


@pytest.mark.slow
def test_fp16_looks_for_its_scale_longer_than_a_broken_run_may_last(corpus, tmp_path):
    fp16 = dict(dtype="fp16", loss_scale=2.0**30, steps=24)
    code, rows, training = run(configure(corpus, optim=dict(kind="adamw"), train=fp16), tmp_path / "found")
    assert code == DONE and training.skipped > 10 and training.engine.scaler.scale < 2.0**20 and training.last_val["val_loss"] < 5.8
    def damage(training): training.engine.loss = lambda model, batch: sum(p.sum() for p in model.parameters()) * float("nan")
    code, rows, training = run(configure(corpus, optim=dict(kind="adamw"), train={**fp16, "loss_scale": 2.0**14}), tmp_path / "never", damage=damage)
    assert code == DIVERGED and len(rows) == 14


@pytest.mark.parametrize("guard", [True, False])
def test_a_short_run_whose_steps_are_skipped_to_its_end_has_diverged(corpus, tmp_path, guard):
    options = dict(optim=dict(lr=1e30, warmup_steps=0), train=dict(steps=6), guard=dict(enabled=guard, window=4))
    code, rows, training = run(configure(corpus, **options), tmp_path)
    assert (code, training.skipped, len(rows)) == (DIVERGED, 5, 6)


GUARDED = dict(guard=dict(enabled=True, window=4, norm_multiple=20.0, loss_rise=50.0), optim=dict(kind="adamw", schedule="constant", warmup_steps=0))


def test_the_guard_goes_back_and_leaves_the_rows_out(corpus, tmp_path, caplog):
    config = configure(corpus, **GUARDED)
    logging.getLogger("llm_from_scratch").propagate = True
    with caplog.at_level("WARNING", "llm_from_scratch"): code, rows, training = run(config, tmp_path / "one", damage=break_batch(7, 1e4))
    spikes = list({id(record): record for record in caplog.records if record.message == "spike"}.values()) # a logger opened before hands a record on twice
    assert len(spikes) == 1, [(record.step, record.reason, record.back_to, record.getMessage()) for record in caplog.records]
    spike, = spikes
    assert code == DONE and list(rows) == list(range(1, 15)) and (training.guard.num_times, training.guard.num_lost) == (1, 3)
    assert (spike.step, spike.back_to) == (7, "step_00000004") and "times the median" in spike.reason
    assert [len(batch) for batch in spike.rows[0]] == [4, 4, 4]
    assert [float(rows[step]["lr"]) for step in (7, 8, 14)] == pytest.approx([3e-3, 2.4e-3, 2.4e-3])
    assert {int(moments["step"]) for moments in training.engine.state_dict()["optimizer"]["moments"].values()} == {11}


@pytest.mark.parametrize("stop_after", [5, pytest.param(2, marks=pytest.mark.slow), pytest.param(7, marks=pytest.mark.slow)])
def test_a_guarded_run_resumes_exactly(corpus, tmp_path, stop_after):
    config = configure(corpus, **GUARDED, checkpoint=dict(keep=1)) # a stop's checkpoint must not push out the one to go back to
    _, whole, training = run(config, tmp_path / "one", damage=break_batch(7, 1e4))
    _, begun, _ = run(config, tmp_path / "two", damage=break_batch(7, 1e4), stop_after=stop_after)
    _, rest, again = run(config, tmp_path / "two", damage=break_batch(7, 1e4), resume_from=latest_checkpoint(tmp_path / "two" / "checkpoints"))
    assert begun | rest == whole and again.guard.state_dict() == training.guard.state_dict()


@pytest.mark.slow
def test_after_so_many_times_a_spike_is_only_seen(corpus, tmp_path):
    config = configure(corpus, **{**GUARDED, "guard": {**GUARDED["guard"], "max_times": 0}})
    code, rows, training = run(config, tmp_path, damage=break_batch(7, 1e4))
    assert code == DONE and training.guard.num_lost == 0 and training.schedule.factor == 1
