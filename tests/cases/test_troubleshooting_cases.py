"The doctor: every failure reproduced and diagnosed from its folder, healthy runs left alone, and the command."

import json
import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from llm_from_scratch.env import UserError
from llm_from_scratch.troubleshooting import (
    FAILURES,
    HEALTHY,
    RULES,
    Evidence,
    ask_rule,
    diagnose,
    healthy_runs,
    load_rules,
    main,
    quick_table,
    rule_list,
    try_failure,
)

load_rules()
ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "doctor.jsonl"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("doctor")


@pytest.fixture(scope="module")
def healthy(folder):
    return healthy_runs(folder / "healthy")


def test_healthy_runs_are_left_alone(healthy):
    assert list(healthy) == list(HEALTHY)
    for name, run in healthy.items():
        assert [one.describe(run) for one in diagnose(run)] == [], name


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) if failure.is_slow else name for name, failure in FAILURES.items()])
def test_a_failure_is_reproduced_and_diagnosed(name, folder, healthy):
    row = try_failure(FAILURES[name], folder / name, healthy)
    assert row["reproduced"], f"{name}: its symptom did not show"
    assert row["diagnosed"] and row["rank"] == 1, row
    assert row["false_alarms"] == 0 and row["healthy"] == len(HEALTHY) >= 5


def test_every_rule_has_its_failure_and_its_texts():
    assert set(RULES) == set(FAILURES)
    for rule in RULES.values():
        assert rule.kind in ("data", "numeric", "distributed", "storage")
        assert all((rule.symptom, rule.cause, rule.command, rule.cure)), rule.name
        assert "{" not in rule.command.format(run="RUN").replace("${", ""), rule.name
    assert len(quick_table().splitlines()) == 2 + len(RULES)


def test_the_commands_of_the_table_can_be_copied(healthy, tmp_path):
    run = shutil.copytree(healthy["adamw"], tmp_path / "run")
    (run / "stalled_rank_0.txt").write_text("rank 0\n")
    listed = rule_list()
    for rule in RULES.values():
        text = rule.command.format(run=run)
        assert f"  look     {rule.command.format(run='RUN')}\n" in listed
        assert all(find_spec(name) for name in re.findall(r"-m (llm_from_scratch\.\w+)", text)), text
        if re.match("ls|grep|head", text):
            assert not subprocess.run(["bash", "-c", text], capture_output=True).stderr, text


def test_the_committed_table_is_whole():
    rows = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    assert {row["failure"] for row in rows} == set(RULES)
    assert all(row["reproduced"] and row["diagnosed"] and row["false_alarms"] == 0 for row in rows)


def test_the_command_tells_by_its_exit_code(healthy, folder, capsys):
    assert main(["diagnose", str(healthy["adamw"])]) == 0
    assert "nothing found" in capsys.readouterr().out
    slow = folder / "attention-on-slow-path"
    if not slow.exists():
        FAILURES[slow.name].make(slow)
    assert main(["diagnose", str(slow), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [one["rule"] for one in found] == ["attention-on-slow-path"]
    assert {"evidence", "sure", "cause", "cure", "next", "symptom", "step"} <= set(found[0])


def test_a_cut_batch_and_waits_that_are_no_numbers_are_no_failures(healthy, tmp_path):
    run = shutil.copytree(healthy["adamw"], tmp_path / "run")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    cut = [row | {"tokens": row["tokens"] // 3, "data_wait_share": float("nan")} for row in rows]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in cut))
    assert [one.rule.name for one in diagnose(run)] == ["global-batch-too-small"]
    (run / "fuse.json").write_text(json.dumps({"kept": 1 / 3}))
    assert diagnose(run) == []
    (run / "fuse.json").write_text(json.dumps({"kept": 0.75, "events": [{"step": 4, "actions": ["cut"]}]}))
    found = diagnose(run)
    assert [(one.rule.name, one.finding.step) for one in found] == [("global-batch-too-small", 5)]
    assert "planned are 3 rows x 32 = 96" in found[0].finding.evidence


def records(run, *found):
    (run / "log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in found))
    return [(one.rule.name, one.finding.sure, one.finding.evidence) for one in diagnose(run)]


def test_what_only_a_gpu_says_is_understood(tmp_path):
    crash = {"message": "crash", "step": 4, "error_type": "OutOfMemoryError", "reason": "CUDA out of memory. Tried to allocate 2.00 GiB"}
    [(name, sure, told)] = records(tmp_path, {**crash, "device_memory_allocated": 40 * 2**30, "device_memory_reserved": 80 * 2**30})
    assert (name, sure) == ("memory-peak", "certain") and "2.00 GiB" in told and "50% of what is held is free but in pieces" in told
    [(name, sure, told)] = records(tmp_path, {**crash, "error_type": "AcceleratorError", "reason": "CUDA error: device-side assert triggered"})
    assert (name, sure) == ("index-out-of-range", "likely") and "step 5 ended in" in told


def test_readers_that_grow_are_a_leak(tmp_path):
    validations = [{"message": "validation", "step": step, "reader_bytes": step * 2**27, "live_batches": 4} for step in (2, 4, 8)]
    [(name, sure, told)] = records(tmp_path, *validations)
    assert (name, sure) == ("loader-leaks-memory", "likely") and "the reading processes grew by 805,306,368 bytes" in told
    assert records(tmp_path, *validations[:2]) == []


def test_a_damaged_configuration_is_told_where_nothing_is_found(tmp_path):
    (tmp_path / "config.yaml").write_text("hello")
    with pytest.raises(UserError, match="config.yaml"):
        main(["diagnose", str(tmp_path)])


def test_a_folder_that_is_no_run_is_a_mistake(command, folder):
    code, _, err = command("troubleshooting", "diagnose", folder)
    assert code == 2
    assert err.count("\n") == 1 and "is not a run's folder" in err


@pytest.mark.parametrize("damage", ["metrics.jsonl", "log.jsonl", "config.yaml", "env.json", "data.json", "tokenizer/tokenizer.model", "checkpoints/step_00000012/train_state.json", "checkpoints/step_00000012/model.safetensors"])
def test_rules_bear_damaged_artefacts(damage, healthy, tmp_path):
    run = shutil.copytree(healthy["adamw"], tmp_path / "run")
    (run / damage).write_bytes(b"\x00garbage\xff{")
    broken = [one.finding.evidence for one in diagnose(run) if "could not look" in one.finding.evidence]
    assert broken == []
    shutil.rmtree(run / "checkpoints")
    assert all(ask_rule(rule, Evidence(run)) is None or "could not look" not in ask_rule(rule, Evidence(run)).evidence for rule in RULES.values())


def test_brackets_in_a_runs_name_are_no_markup(tmp_path, capsys):
    run = tmp_path / "a[" / "]b"
    run.mkdir(parents=True)
    (run / "log.jsonl").write_text("[1]\n")
    (run / "stopped.json").write_text(json.dumps({"reason": "parameter '[/x][bold]' is not in the optimizer"}))
    assert main(["diagnose", str(run)]) == 1
    assert capsys.readouterr().out
