"Failures like those of the doctor's pages, with other numbers: one run's artefacts are changed, and the right rule comes first."

import json
import shutil
from dataclasses import replace
from functools import partial

import pytest
import torch

from llm_from_scratch.checkpointing import list_checkpoints
from llm_from_scratch.config import to_yaml
from llm_from_scratch.data_failures import rewritten
from llm_from_scratch.launch import schedule_lr
from llm_from_scratch.storage_failures import checkpoint_swapped
from llm_from_scratch.token_shards import EncodedDocument
from llm_from_scratch.tokenizer import Tokenizer
from llm_from_scratch.troubleshooting import Evidence, diagnose, practice_run

STEPS = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("variants")


@pytest.fixture(scope="module")
def healthy(folder):
    run = practice_run(folder / "healthy", {"train": dict(steps=STEPS, global_batch=8, micro_batch=4), "optim": dict(warmup_steps=4)})
    assert causes(run) == []
    return run


@pytest.fixture
def run(healthy, tmp_path):
    return shutil.copytree(healthy, tmp_path / "run")


def causes(run):
    return [one.rule.name for one in diagnose(run)]


def change(path, edit):
    "Lines of JSON, each handed to `edit`, which gives the record to keep, or None."
    kept = [edit(json.loads(line)) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(record) + "\n" for record in kept if record is not None))


def in_rows(run, edit):
    change(run / "metrics.jsonl", lambda row: row | edit(row["step"], row) if "loss" in row else row)


@pytest.mark.parametrize("begin, rate", [(5, 0.0), (9, None), (1, 0.0), (17, 1e-5)])
def test_a_rate_that_stands_still_from_some_step_on(run, begin, rate):
    kept = next(row["lr"] for row in Evidence(run).metrics if row["step"] == begin) if rate is None else rate
    in_rows(run, lambda step, row: {"lr": kept} if step >= begin else {})
    assert causes(run)[:1] == ["lr-stands-still"]


@pytest.mark.parametrize("since, speed", [(0, 2), (0, 4), (8, 2), (8, 8)])
def test_a_schedule_that_runs_ahead_from_the_start_or_after_a_resume(run, since, speed):
    plan = partial(schedule_lr, Evidence(run).config)
    in_rows(run, lambda step, row: {"lr": plan(since + speed * (step - 1 - since))} if step > since else {})
    if since:
        start = Evidence(run).records("start")[0]
        with open(run / "log.jsonl", "a") as file:
            print(json.dumps(start | {"step": since, "time": Evidence(run).log[-1]["time"]}), file=file)
            print(json.dumps(Evidence(run).log[-1]), file=file)
    assert causes(run)[:1] == ["scheduler-stepped-twice"]


@pytest.mark.parametrize("bad, begin, end", [(40.0, 2, 24), (8.5, 12, 15), (float("nan"), 20, 24)])
def test_a_rate_that_is_too_high_at_once_for_a_while_or_to_the_end(run, bad, begin, end):
    in_rows(run, lambda step, row: {"loss": bad} if begin <= step <= end else {})
    assert causes(run)[:1] == ["rate-too-high"]


@pytest.mark.parametrize("bad", [7.5, float("nan")])
def test_one_bad_batch_is_no_rate_that_is_too_high(run, bad):
    in_rows(run, lambda step, row: {"loss": bad} if step == 12 else {})
    assert "rate-too-high" not in causes(run)


@pytest.mark.parametrize("begin", [3, 20])
def test_losses_that_are_nan_under_fp16_from_any_step_on(run, begin):
    config = Evidence(run).config
    (run / "config.yaml").write_text(to_yaml(config.model_copy(update={"train": config.train.model_copy(update={"dtype": "fp16"})})))
    (run / "config.sha256").unlink()
    for path in list_checkpoints(run / "checkpoints"):
        shutil.rmtree(path)
    in_rows(run, lambda step, row: {"loss": float("nan"), "grad_norm": float("inf")} if step >= begin else {})
    [found] = diagnose(run)
    assert (found.rule.name, found.finding.step) == ("nan-from-fp16", begin)


def test_a_reader_that_starves_the_device_late_only(run):
    in_rows(run, lambda step, row: {"data_wait_share": 0.6 if step > 14 else 0.01})
    assert causes(run)[:1] == ["loader-starves-device"]


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_workers_that_send_the_same_rows(run, workers):
    names = [row["batch"] for row in Evidence(run).metrics if "batch" in row]
    in_rows(run, lambda step, row: {"batch": names[(step - 1) // workers]})
    assert causes(run)[:1] == ["workers-send-same-data"]


@pytest.mark.parametrize("field, rule", [("live_graphs", "memory-leak"), ("live_batches", "loader-leaks-memory"), ("live_tensor_bytes", "memory-leak")])
def test_a_leak_that_begins_late(run, field, rule):
    record = Evidence(run).records("validation")[0] | {"time": Evidence(run).log[-1]["time"]}
    late = 3 if field == "live_tensor_bytes" else 8
    values = [max(0, step - late) for step in range(4, 20)] if late == 8 else [step for step in range(4, 20)]
    change(run / "log.jsonl", lambda each: None if each.get("message") == "validation" else each)
    with open(run / "log.jsonl", "a") as file:
        for step, value in enumerate(values, 4):
            print(json.dumps(record | {"step": step, field: record[field] + (value * 10**6 if late == 3 else value)}), file=file)
        print(json.dumps(Evidence(run).records("end")[-1]), file=file)
    assert causes(run)[:1] == [rule]


@pytest.mark.parametrize("name", ["model.safetensors", "engine.safetensors", "train_state.json"])
@pytest.mark.parametrize("lost", [1, 40])
def test_a_checkpoint_without_its_last_bytes(run, name, lost):
    path = list_checkpoints(run / "checkpoints")[0] / name
    path.write_bytes(path.read_bytes()[:-lost])
    assert causes(run)[:1] == ["checkpoint-damaged"]


def test_a_checkpoint_with_one_bit_changed(run):
    path = list_checkpoints(run / "checkpoints")[-1] / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert causes(run)[:1] == ["checkpoint-damaged"]


@pytest.mark.parametrize("sections", [dict(optim=dict(warmup_steps=4, lr=1e-3)), dict(optim=dict(warmup_steps=4), model=dict(num_layers=1))])
def test_a_checkpoint_of_a_run_that_differs_in_what_a_resume_may_change_or_not(run, folder, sections):
    other = practice_run(folder / f"other-{len(sections)}", {"train": dict(steps=STEPS, global_batch=8, micro_batch=4), **sections})
    ours, theirs = (list_checkpoints(path / "checkpoints")[-1] for path in (run, other))
    shutil.rmtree(ours)
    shutil.copytree(theirs, ours)
    assert causes(run)[:1] == ["checkpoint-swapped"]


def test_a_checkpoint_whose_step_was_made_again_is_no_stranger(run):
    again = [row | {"val_loss": row["val_loss"] * (1 + 1e-5)} for row in Evidence(run).metrics if "val_loss" in row]
    in_rows(run, lambda step, row: {})
    change(run / "metrics.jsonl", lambda row: next((other for other in again if other["step"] == row["step"] and "val_loss" in row), row))
    assert checkpoint_swapped(Evidence(run)) is None


@pytest.mark.parametrize("seconds, is_told", [
    ([1.3**number for number in range(8)], True),
    ([1 + 0.3 * number for number in range(6)], True),
    ([1.3**number for number in range(5)], True),
    ([2 * 1.1**number for number in range(14)], True),
    ([1.0, 1.4, 1.2, 2.2, 3.0], False),
    ([3.0, 1.0, 3.1, 0.9, 3.2, 1.1, 3.0, 1.0], False),
    ([0.02 * 1.3**number for number in range(6)], False),
])
def test_a_disk_that_slows_down_round_by_round(run, seconds, is_told):
    kept, clock = [record for record in Evidence(run).log if record["message"] != "saved"], Evidence(run).log[0]["time"]
    saves = [{"message": "saved", "time": clock, "step": step, "seconds": each, "bytes": 3 * 10**9} for step, each in enumerate(seconds, 1)]
    (run / "log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in [kept[0], *saves, *kept[1:]]))
    assert ("disk-slows-down" in causes(run)) == is_told


@pytest.mark.parametrize("first, is_told", [(9.0, True), (14.0, True), (6.2, False)])
def test_a_first_loss_above_that_of_a_model_that_knows_nothing(run, first, is_told):
    in_rows(run, lambda step, row: {"loss": first} if step == 1 else {})
    assert ("explodes-from-init" in causes(run)) == is_told


def test_a_tokenizer_of_the_same_size_with_other_pieces(run):
    shutil.rmtree(run / "tokenizer")
    Tokenizer.train([f"lorem ipsum {number} dolor sit amet {number * 7}" for number in range(600)], vocab_size=300, out=run / "tokenizer")
    assert causes(run)[:1] == ["tokenizer-mismatch"]


def without_eos(split, own, other):
    "One of four sources was encoded without."
    return [replace(document, ids=document.ids[:-1]) if number % 4 == 0 else document for number, document in enumerate(own)]


def copied(split, own, other):
    "The validation is a shard of the training split."
    return own if split == "train" else other[:8]


def one_word(split, own, other):
    "A page of one token."
    return [*own[:9], EncodedDocument([2, *[77] * 98, 3], "one word", num_bytes=400), *own[9:]] if split == "train" else own


@pytest.mark.parametrize("documents, rule", [(without_eos, "eos-missing"), (copied, "validation-in-training"), (one_word, "polluted-batch")])
def test_shards_that_are_wrong_in_part(folder, documents, rule):
    steps = {"train": dict(steps=16, seed=2), "optim": dict(lr=0.01, schedule="constant"), "eval": dict(every_steps=16), "checkpoint": dict(every_steps=16)}
    run = practice_run(folder / rule, steps, patches=(rewritten(folder / f"{rule}-shards", documents),))
    assert causes(run)[:1] == [rule]


@pytest.mark.parametrize("order", ["turned", "dropped"])
def test_a_validation_that_is_always_wrong_in_the_same_way(folder, order):
    from unittest import mock

    from llm_from_scratch import training_loop

    real = training_loop.evaluate_loader
    pick = {"turned": lambda batches: batches[::-1], "dropped": lambda batches: batches[:-1]}[order]
    patch = mock.patch.object(training_loop, "evaluate_loader", lambda model, loader, *where, **options: real(model, pick(list(loader)), *where, **options))
    assert causes(practice_run(folder / order, {"eval": dict(every_steps=4)}, patches=(patch,)))[:1] == ["validation-not-as-stored"]
