"Predictions of memory, time and price, and what a user can get wrong on the way to them."

import json

import pytest
import torch

from llm_from_scratch.config import build_config, load_preset, to_yaml
from llm_from_scratch.cost import GPUS, ROOM, calibrate, device_memory, estimate, find_room, main, measure_memory, parse_amount
from llm_from_scratch.env import UserError

SMALL = {"model": dict(vocab_size=512, hidden_size=64, num_layers=2), "tokenizer": dict(vocab_size=512), "train": dict(seq_len=64, global_batch=4, micro_batch=4)}


@pytest.mark.parametrize("changes", [{}, {"train": dict(micro_batch=4)}, {"train": dict(checkpoint_activations="all")}])
def test_memory_is_predicted_within_a_tenth(changes):
    config = build_config(SMALL, {"train": dict(seq_len=128, global_batch=8, micro_batch=8)}, changes)
    assert abs(device_memory(config, torch.float32)["total"] / measure_memory(config, torch.float32) - 1) < 0.1


def test_measuring_memory_leaves_the_random_numbers_alone():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    measure_memory(build_config(SMALL), torch.float32)
    assert torch.equal(before, torch.get_rng_state())


def test_a_run_that_does_not_fit_is_told_what_would():
    config = build_config(load_preset("7b"), {"model": {"vocab_size": 32000}, "train": {"checkpoint_activations": "none"}})
    assert not estimate(config, GPUS["a100-40"], 32, 1e12).fits
    words = find_room(config, GPUS["a100-40"], 32).split()
    better = build_config(config.model_dump(), {"train": {"checkpoint_activations": words[1]}})
    assert words[0] == "--train.checkpoint-activations" and device_memory(better, torch.bfloat16, 32)["total"] <= ROOM * 40e9


def test_more_gpus_are_faster_and_cost_no_less():
    config = build_config(load_preset("7b"), {"model": {"vocab_size": 32000}})
    few, many = (estimate(config, GPUS["h100"], count, 1e12, price_per_hour=2.0) for count in (32, 128))
    assert many.hours < few.hours and many.price >= few.price * (1 - 1e-9)


def test_without_a_price_there_is_none(capsys):
    assert main(["--preset", "7b", "--gpus", "32", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {row["price"] for row in told["kinds"]} == {None} and len(told["kinds"]) == len(GPUS)


@pytest.mark.parametrize("words, told", [(["--tokens", "1X"], "--tokens '1X'"), (["--gpus", "1e99999"], "--gpus"), (["--gpus", "1.5"], "whole number"), (["--gpu", "h10"], "did you mean 'h100'?"),
                                         (["--price-per-hour", "-1"], "-1"), (["--utilisation", "1.5"], "at most 1"), (["--preset", "7b", "--gpus", "7"], "train.global_batch 1024"),
                                         (["--calibrate", "nowhere"], "nowhere is not a run"), (["--token", "1T"], "--tokens")])
def test_mistakes_are_one_line(words, told):
    with pytest.raises(UserError) as error: main(words)
    assert told in str(error.value) and "\n" not in str(error.value)


def test_amounts_know_their_units():
    assert [parse_amount(text, "x") for text in ("1k", "2M", "3G", "3B", "4T", ".5e1".replace(".", "0."))] == [1e3, 2e6, 3e9, 3e9, 4e12, 5.0]


def test_calibration_leaves_out_the_first_row_and_follows_sparse_logs():
    rows = [{"step": 5 * place, "step_seconds": 7.0 if place == 1 else 2.0} for place in range(1, 9)]
    found = calibrate(rows)
    assert (found.step_seconds, found.num_steps, found.predicted_seconds, found.error) == (2.0, 25, 50.0, 0.0)


def test_a_run_of_too_few_steps_cannot_be_calibrated(tmp_path):
    (tmp_path / "config.yaml").write_text(to_yaml(build_config(SMALL)))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "step_seconds": 1.0}\n')
    with pytest.raises(UserError, match="too few"): main(["--calibrate", str(tmp_path)])


def test_the_command_ends_with_two(command):
    code, _, err = command("cost", "--tokens", "nan")
    assert code == 2 and err.startswith("error: --tokens 'nan'") and err.count("\n") == 1
