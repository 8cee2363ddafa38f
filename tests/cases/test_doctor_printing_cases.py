"What the doctor prints can be copied at any width, and noise is told from failures."

import json
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
from rich.console import Console

from llm_from_scratch import slowdown
from llm_from_scratch.data_failures import rewritten
from llm_from_scratch.job_checks import JobCheck, cures, job_table
from llm_from_scratch.numeric_failures import clip_too_early
from llm_from_scratch.slowdown import Signal, looks, slowdown_table
from llm_from_scratch.troubleshooting import diagnose, practice_run, show_diagnoses

CUT = JobCheck("ids (train)", "fail", "id 999 in shard 00000, tokens from 131,072 on, and the vocabulary holds 300", "python -m llm_from_scratch.token_shards encode --tokenizer FOLDER")
CLOCKS = Signal("hardware", 2.0, "the GPU's clock is 900 MHz", "1,800 MHz, best stretch", "nvidia-smi -q -d PERFORMANCE")


def printed(show, width: int) -> str:
    console = Console(width=width, force_jupyter=False, color_system=None)
    with console.capture() as shown:
        show(console)
    return shown.get()


@pytest.mark.parametrize("width", [20, 80, 200])
def test_a_diagnosis_is_printed_in_whole_lines(tmp_path, width):
    (tmp_path / "stopped.json").write_text(json.dumps({"reason": "parameter 'x' is not in the optimizer"}))
    [found] = diagnose(tmp_path)
    shown = printed(lambda console: show_diagnoses([found], tmp_path, console), width)
    assert f"  check next  {found.describe(tmp_path)['next']}\n" in shown and f"  cure        {found.rule.cure}\n" in shown


def test_tables_hold_no_commands_and_lose_no_word_in_80_columns():
    assert cures([CUT, JobCheck("disk", "pass", "69 GB free")]) == f"fail  ids (train): {CUT.cure}"
    assert looks([CLOCKS, Signal("data", 1.0, "a disk request waits 1.0 ms", "limit 10 ms", "iostat -x 1")]) == f"look at  hardware: {CLOCKS.look}"
    shown = printed(lambda console: console.print(job_table([CUT]), slowdown_table([CLOCKS])), 80)
    assert "…" not in shown and max(map(len, shown.splitlines())) <= 80
    told = shown.split()
    assert all(word in told for text in (CUT.evidence, CLOCKS.now, CLOCKS.then) for word in text.split())


@pytest.mark.parametrize("num_rows", [0, 6, 7])
def test_a_run_too_short_to_be_compared_is_told_so(tmp_path, capfd, num_rows):
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps({"step": step, "tokens_per_second": 100.0}) + "\n" for step in range(1, num_rows + 1)))
    with mock.patch.object(slowdown, "attribute", lambda run, seconds: ([CLOCKS], {"steps": {"tokens_per_second": 90.0}})):
        assert slowdown.main([str(tmp_path)]) == 1
    shown = capfd.readouterr().out
    assert ("the run is too short to be compared with itself" in shown) == (num_rows < 7) and CLOCKS.look in shown


def test_losses_that_jump_at_usual_gradients_are_the_noise_of_small_batches(tmp_path):
    "Made losses and norms, as a default run of eight short rows a step has them; then rises that large gradients made."
    once, dice = dict(every_steps=60), np.random.default_rng(0)
    run = practice_run(tmp_path / "run", {"train": dict(steps=60, global_batch=1, micro_batch=1), "eval": once, "checkpoint": once})
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses, norms, thrown = 5.7 - 0.5 * np.log1p(np.arange(60)) + dice.normal(0, 0.4, 60), np.exp(dice.normal(0.5, 0.25, 60)), [20, 30, 40, 50]
    norms[[10, 16]] = 8.85, 5.51
    noise = lambda step: {"loss": float(losses[step - 1]), "grad_norm": float(norms[step - 1])}
    swing = lambda step: {"loss": 4.0 + (step in thrown), "grad_norm": 1.0 + 3 * (step in thrown)}
    for made, rules in ((noise, []), (swing, ["clip-lets-loss-swing"])):
        (run / "metrics.jsonl").write_text("".join(json.dumps(row | made(row["step"])) + "\n" for row in rows))
        assert [one.rule.name for one in diagnose(run)] == rules


def test_ends_that_only_the_validation_lacks_are_missed(tmp_path):
    cut = lambda split, own, other: [replace(each, ids=each.ids[:-1]) if split == "val" else each for each in own]
    assert [one.rule.name for one in diagnose(practice_run(tmp_path / "run", patches=(rewritten(tmp_path / "shards", cut),)))] == ["eos-missing"]


def test_clipping_of_scaled_gradients_beside_muon_is_told_by_the_norms(tmp_path):
    options = {"train": dict(dtype="fp16", steps=8), "optim": dict(kind="muon")}
    run = clip_too_early(tmp_path / "run", kind="muon", steps=8)
    assert [one.rule.name for one in diagnose(run)] == ["clipped-before-unscaling"]
    assert diagnose(practice_run(tmp_path / "good", options)) == []
