"Alarms on the rows of a run: once an episode, silent where nothing is wrong, exact over a resume."

import json
import math

import pytest
from rich.console import Console

from llm_from_scratch.alarms import Alarms
from llm_from_scratch.config import AlarmConfig, build_config, load_preset
from llm_from_scratch.env import Ranks, UserError
from llm_from_scratch.train import watch_and_fit
from llm_from_scratch.training_loop import build_training, prepare_data

QUICK = AlarmConfig(window=4, warmup_rows=3, effective_throughput=None)


def row(step, seconds=1.0, **more): return {"step": step, "step_seconds": seconds, "tokens_per_second": 100 / seconds, "data_use": 0.99, "grad_norm": 1.0, **more}


def told(alarms, rows): return [(event["step"], event["alarm"].split()[0], event["state"]) for one in rows for event in alarms.judge(one)]


def test_an_episode_rings_once_and_may_ring_again_after_it_is_over():
    waves = [1.0] * 10 + ([1.5] * 12 + [1.0] * 12) * 3
    found = told(Alarms(QUICK), [row(step, seconds) for step, seconds in enumerate(waves, 1)])
    assert [state for _, _, state in found] == ["on", "off"] * 3


def test_a_figure_that_wavers_round_its_limit_rings_once():
    waves = [1.0] * 10 + [1.32, 1.32, 1.32, 1.28, 1.28, 1.28] * 20
    assert [state for _, _, state in told(Alarms(QUICK), [row(step, seconds) for step, seconds in enumerate(waves, 1)])] == ["on"]


def test_warmup_evaluation_and_resume_are_silent():
    rows = [row(step, 9.0 if step <= 3 or 41 <= step <= 43 else 1.0) for step in range(1, 80)]
    rows[40]["resumed_from"] = 40
    for step in (20, 40, 60): rows[step - 1] |= {"val_loss": 3.0, "step_seconds": 50.0}
    assert told(Alarms(AlarmConfig(window=4, warmup_rows=3)), rows) == []


def test_each_alarm_has_its_figure():
    cfg = AlarmConfig(window=4, warmup_rows=0, steps_per_hour=3000.0)
    good = [row(step) for step in range(1, 9)]
    assert told(Alarms(cfg), [*good, *[row(step, 1.25) for step in range(9, 20)]])[0][1] == "effective"
    assert {name for _, name, _ in told(Alarms(cfg), [*good, *[row(step, data_use=0.5) for step in range(9, 20)]])} == {"data"}
    assert {name for _, name, _ in told(Alarms(cfg.model_copy(update={"effective_throughput": None})), [*good, *[row(step, 1.4) for step in range(9, 20)]])} == {"cost", "effective"}
    assert "effective" in {name for _, name, _ in told(Alarms(cfg), [*good, *[row(step, grad_norm=math.nan) for step in range(9, 20)]])}


def test_rows_without_figures_are_no_mistake():
    assert told(Alarms(QUICK), [{"step": step} for step in range(1, 30)]) == []
    assert told(Alarms(QUICK), [{"step": step, "step_seconds": math.nan, "tokens_per_second": None, "data_use": "NaN"} for step in range(1, 30)]) == []


def test_a_resume_opens_the_same_episodes_and_tells_nothing_twice(tmp_path):
    rows, heard = [row(step, 1.0 if step < 12 else 2.0) for step in range(1, 31)], []
    first = Alarms(QUICK, tmp_path, tell=heard.append)
    for one in rows: first.look(one["step"], {name: value for name, value in one.items() if name != "step"})
    assert len(heard) == 1
    second = Alarms(QUICK, tmp_path, rows=rows[:25], tell=heard.append)
    for step in range(26, 60): second.look(step, {name: value for name, value in row(step, 2.0).items() if name != "step"})
    assert (second.on, second.baseline, len(heard)) == (first.on, 1.0, 1)
    assert len((tmp_path / "alarms.jsonl").read_text().splitlines()) == 1
    Alarms(QUICK, tmp_path, rows=rows[:5])
    assert (tmp_path / "alarms.jsonl").read_text() == ""


def test_training_writes_and_shows_an_alarm(tmp_path):
    (tmp_path / "corpus").mkdir()
    for number in range(20): (tmp_path / "corpus" / f"{number}.txt").write_text(f"{number} is a number, and {number + 1} is another. " * 20)
    config = build_config(load_preset("tiny"), {
        "model": {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1}, "tokenizer": {"vocab_size": 300}, "log": {"tensorboard": False},
        "data": {"path": [str(tmp_path / "corpus")], "cache_dir": str(tmp_path / "cache"), "val_fraction": 0.2}, "train": {"steps": 12, "seq_len": 16, "global_batch": 4, "dtype": "fp32", "deterministic": False},
        "alarms": {"window": 2, "warmup_rows": 2, "steps_per_hour": 1e12, "effective_throughput": None, "data_use": None, "cost_rise": None}})
    training = build_training(config, prepare_data(config), Ranks())
    (tmp_path / "run").mkdir()
    with (tmp_path / "out").open("w") as out:
        assert watch_and_fit(training, tmp_path / "run", Console(file=out, width=200)) == 0
    events = [json.loads(line) for line in (tmp_path / "run" / "alarms.jsonl").read_text().splitlines()]
    assert [(event["alarm"], event["state"], event["step"]) for event in events] == [("effective steps an hour", "on", 4)]
    assert (tmp_path / "out").read_text().count("alarm: effective steps an hour") == 1 and "alarm: effective" in (tmp_path / "run" / "log.jsonl").read_text()


def test_impossible_limits_are_refused():
    with pytest.raises(UserError, match="alarms.data_use"): build_config({"alarms": {"data_use": 92}})
