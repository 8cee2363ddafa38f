"Odd files and options at the commands of evaluation, monitoring, doctor and cost: one clear line, and nothing lost."

import json
import math
import os
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch

from llm_from_scratch import blind_rating, cost, spelling
from llm_from_scratch.artifacts import read_json, read_manifest, write_atomic, write_manifest
from llm_from_scratch.blind_rating import is_key, parse_ratings, sheet_command
from llm_from_scratch.checkpointing import load_checkpoint, save_checkpoint
from llm_from_scratch.code_eval import read_tasks
from llm_from_scratch.compare import check_place, compare_page
from llm_from_scratch.config import read_yaml
from llm_from_scratch.cost import calibrate
from llm_from_scratch.device_monitor import DeviceMonitor
from llm_from_scratch.efficiency import efficiency_figures
from llm_from_scratch.env import UserError, check_disk, hash_json, run_command
from llm_from_scratch.eval import read_text
from llm_from_scratch.evaluation_cards import TEXT_KINDS, read_card
from llm_from_scratch.job_checks import CURES, check_options
from llm_from_scratch.live_page import RunView
from llm_from_scratch.monitoring import cut_back, parse_row, read_metrics, read_report, readable, series, summarize, undrawn
from llm_from_scratch.slowdown import best_and_last, measure_steps, ranking, read_record, sides
from llm_from_scratch.troubleshooting import KEPT, Diagnosis, Evidence, Finding, Rule, growth, left_out, read_log, readable_rows
from llm_from_scratch.wikitext import main as wikitext_main

HUGE = 10**400
ODD = ["x", None, [1], {"a": 1}, math.nan, math.inf, HUGE, -1, 0, True]


def ended(capsys, main):
    with pytest.raises(SystemExit) as end:
        run_command(main)
    return end.value.code, capsys.readouterr().err


def test_a_full_output_is_one_line(monkeypatch, capsys):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        code, err = ended(capsys, lambda arguments: print("a line"))
    assert (code, err) == (2, "error: a file: No space left on device; check the path, its rights and the space left\n")


def test_the_file_that_was_asked_for_is_named_not_its_draft(capsys, tmp_path):
    code, err = ended(capsys, lambda arguments: write_atomic(tmp_path, "text"))
    assert code == 2 and err.startswith(f"error: {tmp_path}: Is a directory")


def test_a_pipe_is_never_replaced_by_a_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FileExistsError, match="a device or a pipe"):
        write_atomic(tmp_path / "pipe", "text")
    assert (tmp_path / "pipe").is_fifo() and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("data", [b"9" * 5000, b'{"a": ' + b"9" * 5000 + b"}", b"[" * 100_000, b"\xff\x00", b""])
def test_json_that_python_refuses_names_its_file(tmp_path, data):
    (tmp_path / "a.json").write_bytes(data)
    with pytest.raises(UserError, match="a.json"):
        read_json(tmp_path / "a.json")


@pytest.mark.parametrize("change", [dict(format_version=math.nan), dict(format_version="x"), dict(files=[]), dict(inputs=5)], ids=str)
def test_a_manifest_of_odd_values_is_refused(tmp_path, change):
    manifest = write_manifest(tmp_path, kind="k", inputs={}) | change
    if change.get("format_version") is not math.nan:
        manifest["hash"] = hash_json({key: value for key, value in manifest.items() if key != "hash"})
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="edited or damaged"):
        read_manifest(tmp_path)


def test_weights_in_a_folder_whose_name_is_no_text(tmp_path):
    folder = tmp_path / os.fsdecode(b"latin-\xe9")
    folder.mkdir()
    path = save_checkpoint(tmp_path / "plain", {"model": torch.nn.Linear(2, 2)}, step=1)
    shutil.copytree(path, folder / path.name)
    with pytest.raises(UserError, match="can't read the tensors"):
        load_checkpoint(folder / path.name, {"model": torch.nn.Linear(2, 2)})


@pytest.mark.parametrize("text", ["a: 2020-99-99", "? [a]\n: 1", "a: " + "9" * 5000, "a: " + "[" * 3000, "a: !!bool x", "a: !!timestamp x", "a: !!int ''", "a: \0"])
def test_yaml_that_its_reader_breaks_on_names_its_file(tmp_path, text):
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(UserError, match="config.yaml is not valid YAML"):
        read_yaml(tmp_path / "config.yaml")


@pytest.mark.parametrize("path", ["a\0b", "\ud800"])
def test_a_text_whose_name_no_file_has(path):
    with pytest.raises(UserError, match="can't read"):
        read_text(path)


MEASURED = dict(step_seconds=0.1, samples_per_second=80.0, data_use=0.9, loaded_tokens=512, cost_per_thousand_steps=0.2)
ROWS = [dict(step=step, loss=3.0, tokens=64 * step, tokens_per_second=640.0, **MEASURED) for step in range(1, 31)]


@pytest.mark.parametrize("value", ODD, ids=str)
@pytest.mark.parametrize("name", MEASURED)
def test_efficiency_leaves_odd_rows_out(name, value):
    assert efficiency_figures([row | {name: value} for row in ROWS]) is not None
    figures = efficiency_figures([*ROWS[:10], ROWS[10] | {name: value}, *ROWS[11:]])
    if value not in (-1, 0, True):
        assert figures == pytest.approx(efficiency_figures(ROWS))


def test_what_is_no_number_is_counted_and_named():
    rows = [*ROWS, ROWS[0] | {"data_use": "x"}, ROWS[1] | {"data_use": [1], "step_seconds": "y"}]
    assert undrawn(rows) == "2 data_use that are no numbers, 1 step_seconds that are no numbers"
    assert undrawn([ROWS[0] | {"loss": HUGE}]) == "1 values that are NaN, infinite or above 1e+100"
    assert summarize(rows)["steps"] == 2


@pytest.mark.parametrize("value", ["x", HUGE, [1]], ids=str)
def test_a_curve_s_odd_value_is_told_with_its_step(value):
    with pytest.raises(UserError, match="at step 7 loss is no number"):
        series([{"step": 3, "loss": 1.0}, {"step": 7, "loss": value}], "loss")


@pytest.mark.parametrize("origin", [-3, 2**53, HUGE, 2.5, True, "x", [1]], ids=str)
def test_a_resume_from_nowhere_is_named(origin):
    row = parse_row(json.dumps({"step": 3, "resumed_from": origin}), "metrics")
    assert "resumed_from" not in row and "which is no step" in row["unread"][0]


def test_a_byte_order_mark_is_no_damage(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.0}\n')
    assert [row["step"] for row in read_metrics(path)] == [1, 2]
    assert RunView(tmp_path).state()["summary"]["steps"] == "2"
    assert cut_back(path, 1) == 1


def test_readable_numbers_of_any_size():
    assert [readable(value) for value in (12345, HUGE, -HUGE, 1e300, True)] == ["12,345", "above 1e+100", "above 1e+100", f"{1e300:,.0f}", "True"]


@pytest.mark.parametrize("summary", [{"a": [math.nan]}, {"a": {"b": 1}}])
def test_a_report_with_nested_values_is_refused(tmp_path, summary):
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "report.json").write_text(json.dumps(dict(title="t", summary=summary, samples=[])))
    with pytest.raises(UserError, match="is not a report's"):
        read_report(tmp_path)


def test_the_live_page_bears_what_is_no_file(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    (tmp_path / "report" / "gradients" / "step.png").mkdir(parents=True)
    view = RunView(tmp_path)
    assert "Is a directory" in view.state()["note"] and view.picture("gradients-step.png") is None


@pytest.mark.parametrize("step", ["true", "2.5", "-1", "NaN"])
def test_a_step_is_a_whole_number(step):
    with pytest.raises(UserError, match="not a row of metrics"):
        parse_row(f'{{"step": {step}}}', "metrics")


def test_the_live_page_tells_of_a_curve_that_it_can_not_draw(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0, "lr": "x"}\n')
    state = RunView(tmp_path).state()
    assert "at step 1 lr is no number" in state["note"] and "loss.png" in state["pictures"] and "learning_rate.png" not in state["pictures"]


def test_bytes_that_are_no_text_are_told_with_their_row(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n{"st\xe9\n')
    assert "row 2: not a row of metrics" in RunView(tmp_path).state()["note"]


@pytest.mark.parametrize("hz", [1e-300, 1e-320])
def test_a_monitor_that_hardly_ever_looks_has_a_thread(hz):
    with DeviceMonitor([lambda: {"a": 1.0}], hz=hz) as monitor:
        assert max(every for _, every in monitor.due.values()) == 3600


def test_the_live_page_says_which_row_is_damaged(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": \n{"step": 3}\n')
    assert "row 2: not a row of metrics" in RunView(tmp_path).state()["note"]


@pytest.mark.parametrize("words", [["--gpus", "1e12"], ["--model.num-layers", "999999"]], ids=str)
def test_an_estimate_has_bounds(words):
    with pytest.raises(UserError, match="are beyond this estimate"):
        cost.main(words)


@pytest.mark.parametrize("more", [[11, 11], [5, 6, 7], [3] * 20])
def test_steps_that_stand_or_go_back_are_no_calibration(more):
    rows = [{"step": step, "step_seconds": 1.0} for step in [*range(1, 12), *more]]
    try:
        assert calibrate(rows).measured_seconds > 0
    except UserError as error:
        assert "too few" in str(error)


@pytest.mark.parametrize(
    "row",
    ['"test_list"', '["test_list"]', '[["test_list"]]', '["canonical_solution"]', "null", '{"test_list": []}', '{"test_list": [5], "text": "a", "code": "b", "task_id": 1}'],
)
def test_tasks_of_another_form_are_refused(tmp_path, row):
    (tmp_path / "tasks").write_text(row)
    with pytest.raises(UserError, match="holds no task"):
        read_tasks(tmp_path / "tasks")


def test_a_kind_called_all_is_counted_once(monkeypatch):
    monkeypatch.setattr(spelling, "complete", lambda model, tokenizer, prompt, **options: [prompt + "ip"])
    run = SimpleNamespace(model=None, tokenizer=SimpleNamespace(encode=list))
    assert spelling.probe_spelling(run, [spelling.Probe("all", "the sh", "ip")])["num_probes"] == {"all": 1}


RATED = "sheet,rater,number,score\nabc,Ann,1,5\nabc,Ann,2,0\n"


@pytest.mark.parametrize("text", [RATED, RATED.replace(",", ";"), RATED.replace(",", "\t"), RATED.replace("\n", "\r\n"), RATED + "\n\n"])
def test_ratings_from_spreadsheets_are_read(text):
    assert parse_ratings(text, "a.csv").scores == {1: 5, 2: 0}


@pytest.mark.parametrize(
    "text",
    [
        RATED + "abc,Ann,1,0\n",
        RATED + "abc,Ann,01,0\n",
        '{"sheet": "abc", "rater": "Ann", "ratings": {"1": 5, "01": 0}}',
        '{"sheet": "abc", "rater": "Ann", "ratings": {"1": 5, "1": 0}}',
    ],
)
def test_a_text_that_is_rated_twice_is_not_guessed(text):
    with pytest.raises(UserError, match="more than once|stands twice"):
        parse_ratings(text, "a.csv")


def test_a_key_with_numbers_beyond_all_texts_is_none():
    assert not is_key(dict(sheet="s", sources=[dict(run="r", step=1)], items={"9" * 5000: 0}))


@pytest.mark.parametrize("options", [["--max-new-tokens", "0"], ["--limit", "-1"], ["--temperature", "nan"]], ids=str)
def test_a_sheet_s_wrong_option_is_told_before_a_run_is_looked_for(tmp_path, options):
    with pytest.raises(UserError, match="give"):
        sheet_command(["nowhere", "--out", str(tmp_path / "sheet.html"), *options])


def test_a_sheet_without_room_for_a_letter_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setattr(blind_rating, "open_checkpoints", lambda options: [("a", None)])
    monkeypatch.setattr(blind_rating, "has_room", lambda run, prompt, max_new_tokens: False)
    with pytest.raises(UserError, match="no prompt and its answer fit"):
        sheet_command(["a", "--out", str(tmp_path / "sheet.html")])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("rater", ["null", "5", "[]"])
def test_a_rater_has_a_name(rater):
    with pytest.raises(UserError, match="names no rater"):
        parse_ratings(f'{{"sheet": "a", "rater": {rater}, "ratings": {{}}}}', "a.json")


@pytest.mark.parametrize("kept", ["sheet.html", "sheet.key.json"])
def test_a_sheet_that_may_be_out_with_raters_keeps_its_key(tmp_path, kept):
    (tmp_path / kept).write_text("kept")
    with pytest.raises(UserError, match=f"{kept} exists already"):
        sheet_command(["nowhere", "--out", str(tmp_path / "sheet.html")])
    assert (tmp_path / kept).read_text() == "kept"


def test_a_comparison_replaces_its_own_page_only(tmp_path):
    page, other = tmp_path / "page.html", tmp_path / "config.yaml"
    page.write_text(compare_page([], "0 runs side by side"))
    other.write_text("model: {}\n")
    check_place(page), check_place(tmp_path / "new.html")
    with pytest.raises(UserError, match="config.yaml exists already"):
        check_place(other)


def test_articles_never_lie_over_a_file(tmp_path):
    (tmp_path / "wiki").write_text(" = A = \n text <unk> \n")
    with pytest.raises(UserError, match="exists already"):
        wikitext_main([str(tmp_path / "wiki"), str(tmp_path / "wiki")])
    assert wikitext_main([str(tmp_path / "wiki"), str(tmp_path / "new.jsonl")]) == 0


CARD = dict.fromkeys([name for name, kind in TEXT_KINDS.items() if kind is str], "x") | dict(card_version=1, window=32, stride=16, bos=True, deterministic=True, nll_sum=5.0)


@pytest.mark.parametrize("change", [dict(window=0), dict(stride=-1), dict(nll_sum=HUGE), dict(nll_sum=True), dict(num_tokens=[1])], ids=str)
def test_cards_with_values_that_no_evaluation_gives(tmp_path, change):
    (tmp_path / "card.json").write_text(json.dumps(CARD | change))
    with pytest.raises(UserError, match="is not the card of a text"):
        read_card(tmp_path / "card.json")
    (tmp_path / "card.json").write_text(json.dumps(CARD))
    assert read_card(tmp_path / "card.json") == CARD


@pytest.mark.parametrize("name", ["env.json", "speed.json"])
@pytest.mark.parametrize(
    "text",
    ["[]", "5", "null", '{"packages": []}', '{"machine": 5}', '{"machine": {"core_share": "x"}}', '{"steps": {"data_wait_share": null}}', '{"steps": {"flops_per_token": 1e999}}', "{", "9" * 5000],
)
def test_a_record_of_another_kind_is_named(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=name):
        read_record(tmp_path / name)


@pytest.mark.parametrize("value", ODD, ids=str)
def test_slowdown_reads_what_numbers_there_are(tmp_path, value):
    rows = [row | dict(tokens=value, tokens_per_second=value) if at % 2 else row for at, row in enumerate(ROWS)]
    assert best_and_last(rows)["best"]["tokens_per_second"] == 640.0
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert ranking(*sides(tmp_path, {"machine": {}, "steps": {}}))
    names = ("step_seconds", "data_wait_share", "process_cpu_percent", "disk_await_ms", "device_reserved_bytes", "device_allocated_bytes", "gpu_used_bytes", "gpu_throttle")
    rows = [dict(step=step, tokens_per_second=640.0) | dict.fromkeys(names, value) for step in range(1, 12)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert ranking(*sides(tmp_path, {"machine": {}, "steps": {}}))


def test_steps_are_measured_longer_than_a_small_corpus_lasts(monkeypatch):
    monkeypatch.setattr("llm_from_scratch.training_loop.train_on", lambda training, batch, sync: (SimpleNamespace(num_tokens=1),))
    training = SimpleNamespace(loader=[1, 2, 3], device=torch.device("cpu"), attention="none")
    assert measure_steps(training, 0.005)["tokens_per_second"] > 0


@pytest.mark.parametrize("change", [dict(ranks=0), dict(ranks=-1), dict(memory_gb=0.0), dict(memory_gb=-1.0), dict(memory_gb=math.nan), dict(memory_gb=math.inf), dict(leave_out=["kill und resume"])], ids=str)
def test_a_preflight_of_nothing_is_refused(change):
    options = dict(ranks=1, memory_gb=None, leave_out=["kill and resume", *CURES])
    check_options(SimpleNamespace(**options))
    with pytest.raises(UserError, match=f"--{next(iter(change)).replace('_', '-')}"):
        check_options(SimpleNamespace(**options | change))


def test_the_doctor_reads_past_damaged_rows_and_counts_them(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "loss": 3.0}\n{"step": 2, "lo\n\0\0\n{"step": 4, "loss": "x", "batch": [1]}\n{"step": 5, "note": "\xe9"}\n{"step": 6, "loss": null}\n{"step": 7')
    rows, left_out = readable_rows(path)
    assert rows == [{"step": 1, "loss": 3.0}, {"step": 4}, {"step": 6}]
    assert left_out == "3 damaged rows of metrics.jsonl, the first in line 2, 1 values of loss that are no numbers"
    assert readable_rows(tmp_path / "gone") == ([], "")


@pytest.mark.parametrize("record", [{"live": 5}, {"step": "x", "live": 5}, {"step": 4, "live": "x"}, {"step": 4, "live": [1]}, {"step": 4, "live": math.nan}], ids=str)
def test_a_count_grows_over_the_records_that_have_one(record):
    records = [{"message": "validation", "step": step, "live": live} for step, live in ((3, 10), (6, 13), (9, 16))]
    assert growth([records[0], {"message": "validation"} | record, *records[1:]], "live") == (1.0, 16)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *[(name, text) for name in KEPT for text in ("[1]", "5", "{")],
        ("stopped.json", '{"reason": 5}'), ("summary.json", '{"samples": 5}'), ("summary.json", '{"samples": [5]}'), ("data.json", '{"manifests": {"tokenizer": 5}}'),
        ("fuse.json", '{"events": [5]}'), ("fuse.json", '{"events": [{}]}'), ("fuse.json", '{"kept": NaN}'), ("failed_start.json", '{"reason": "could not meet"}'), ("summary.json", '{"samples": {"a": 1}}'),
    ],
)
def test_a_file_of_a_run_that_is_damaged_is_named_and_not_read(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    evidence = Evidence(tmp_path)
    assert evidence.json(name) is None and evidence.last_words == "" and evidence.manifests == {}
    assert left_out(tmp_path) == f"{name}, which is damaged"


@pytest.mark.parametrize("change", [dict(step="x"), dict(step=HUGE), dict(time="yesterday"), dict(time=5), dict(ranks=None), dict(bytes=[1]), dict(seconds="x"), dict(attention=None), dict(train=[1])], ids=str)
def test_a_damaged_record_of_the_log_is_counted_and_left_out(tmp_path, change):
    record = dict(message="start", time="2026-01-01T00:00:00+00:00", step=3, ranks=1)
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(each) + "\n" for each in (record, record | change, record)) + '{"torn')
    assert read_log(tmp_path / "log.jsonl") == [record, record]
    assert left_out(tmp_path) == "1 damaged records of log.jsonl, the first in line 2"


def test_preflight_sees_a_file_where_the_run_would_be(tmp_path):
    (tmp_path / "file").write_text("")
    assert [check_disk(tmp_path / name).ok for name in ("", "new", "file", "file/run")][2:] == [False, False]


def test_commands_to_run_next_are_quoted():
    rule = Rule("r", "data", "s", "c", "head {run}/log.jsonl", "c", lambda evidence: None)
    assert Diagnosis(rule, Finding("e")).describe("a run; rm x")["next"] == "head 'a run; rm x'/log.jsonl"
    assert Diagnosis(rule, Finding("e")).describe("runs/a")["next"] == "head runs/a/log.jsonl"
