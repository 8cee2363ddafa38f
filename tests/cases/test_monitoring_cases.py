"What a run writes down: whole rows, each step once, tokens that add up, and no number that is not its own."

import html
import io
import json
import math
import re

import pytest
import torch
from rich.console import Console

from llm_from_scratch.env import Ranks, UserError
from llm_from_scratch.monitoring import (
    MetricsWriter,
    Peak,
    Throughput,
    Window,
    cut_back,
    describe_mfu,
    device_name,
    main,
    measure_peak_flops,
    mfu,
    progress_bar,
    read_metrics,
    write_report,
)


def write_steps(run_dir, first, last, resume_step=0):
    with MetricsWriter(run_dir, resume_step=resume_step, tensorboard=False) as writer:
        for step in range(first, last + 1):
            writer.log(step, loss=8.0 / step, lr=1e-3, grad_norm=1.0, tokens=step * 64, tokens_per_second=100.0)
    return writer


def test_trn_8_tokens_per_second_of_the_whole_window():
    assert round(Window(999_424, 48.30).tokens_per_second) == 20_692


def test_trn_8_windows_sum_to_the_tokens_and_seconds():
    now = [0.0]
    throughput = Throughput(clock=lambda: now[0])
    windows = []
    for step in range(1, 123):
        throughput.add(8192)
        now[0] += 48.30 / 122
        if step % 10 == 0 or step == 122:
            windows.append(throughput.window())
        if step % 50 == 0:
            with throughput.paused():
                now[0] += 7.0
    assert sum(window.tokens for window in windows) == throughput.total.tokens == 999_424
    assert math.isclose(sum(window.seconds for window in windows), 48.30)
    assert round(throughput.total.tokens_per_second) == 20_692
    assert math.isclose(throughput.total.seconds + throughput.total_paused_seconds, now[0])


def test_trn_9_mfu_is_unknown_without_a_peak_of_this_device():
    name = device_name("cpu")
    for peak in [None, Peak("another device", "float32", 1e9), Peak(name, "bfloat16", 1e9)]:
        share = mfu(20_692, 6e6, name, "float32", peak)
        assert share is None
        assert "unknown" in describe_mfu(share, peak) and not re.search(r"\d", describe_mfu(share, peak))


def test_trn_9_mfu_says_what_it_was_measured_against():
    peak = measure_peak_flops("cpu", torch.float32, size=64, seconds=0.0)
    share = mfu(1.0, peak.flops_per_second / 2, peak.device_name, peak.dtype, peak)
    assert math.isclose(share, 0.5)
    assert f"measured on {device_name('cpu')}" in describe_mfu(share, peak)


def test_resumed_metrics_hold_each_step_once(tmp_path):
    write_steps(tmp_path, 1, 30)
    writer = write_steps(tmp_path, 21, 40, resume_step=20)
    assert writer.num_dropped == 10
    rows = read_metrics(tmp_path)
    assert [row["step"] for row in rows] == list(range(1, 41))
    assert [row["step"] for row in rows if "resumed_from" in row] == [21]


def test_a_new_run_in_an_old_folder_starts_at_nothing(tmp_path):
    write_steps(tmp_path, 1, 5)
    assert write_steps(tmp_path, 1, 2).num_dropped == 5
    assert len(read_metrics(tmp_path)) == 2


def test_a_line_torn_anywhere_costs_that_line_only(tmp_path):
    path, whole = tmp_path / "metrics.jsonl", b'{"step": 1, "loss": 2.5}\n{"step": 2}\n'
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        assert len(read_metrics(path)) == whole[:size].count(b"\n")
        cut_back(path, 10)
        assert path.read_bytes() == whole[: whole[:size].rfind(b"\n") + 1]


def test_damage_in_the_middle_names_file_and_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "lo\n{"step": 3}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl, line 2: .*step"):
        read_metrics(path)
    before = path.read_bytes()
    with pytest.raises(UserError):
        cut_back(path, 1)
    assert path.read_bytes() == before


def test_numbers_that_are_not_finite_survive_as_strict_json(tmp_path):
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.log(1, loss=math.nan, grad_norm=torch.tensor(math.inf), low=-math.inf)

    def refuse(name):
        raise AssertionError(f"not JSON: {name}")

    json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    [row] = read_metrics(tmp_path)
    assert math.isnan(row["loss"]) and row["grad_norm"] == math.inf and row["low"] == -math.inf


def test_only_rank_0_writes(tmp_path):
    with MetricsWriter(tmp_path / "run", ranks=Ranks(1, 1, 2)) as writer:
        writer.log(1, loss=1.0)
    assert list(tmp_path.iterdir()) == []


def test_tensorboard_hides_the_steps_that_are_run_again(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for first, last, resume_step in [(1, 5, 0), (4, 6, 3)]:
        with MetricsWriter(tmp_path, resume_step=resume_step) as writer:
            for step in range(first, last + 1):
                writer.log(step, loss=float(10 * (resume_step > 0) + step))
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert {event.step: event.value for event in events.Scalars("loss")} == {1: 1, 2: 2, 3: 3, 4: 14, 5: 15, 6: 16}
    assert len(events.Scalars("loss")) == 6


def test_the_bar_is_plain_lines_in_a_file_and_nothing_on_other_ranks():
    for rank, num_lines in [(0, 4), (1, 0)]:
        stream = io.StringIO()
        with progress_bar(100, Ranks(rank, rank, 2), every_steps=25, console=Console(file=stream, force_terminal=False)) as bar:
            for step in range(1, 101):
                bar.update(step, loss=1.0, tokens_per_second=5.0)
        assert len(stream.getvalue().splitlines()) == num_lines
        assert "\x1b" not in stream.getvalue()


def test_a_resumed_bar_counts_only_its_own_pace(monkeypatch):
    now, stream = [100.0], io.StringIO()
    monkeypatch.setattr("llm_from_scratch.monitoring.time.perf_counter", lambda: now[0])
    with progress_bar(1000, start=900, every_steps=1, console=Console(file=stream, force_terminal=False)) as bar:
        now[0] += 10.0
        bar.update(910)
    assert stream.getvalue() == "step 910/1000  1:30 left\n"


@pytest.mark.parametrize("values", [[], [3.0], [3.0, math.nan, math.inf]])
def test_a_report_of_few_or_strange_points(tmp_path, values):
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        for step, value in enumerate(values, 1):
            writer.log(step, loss=value, lr=value, grad_norm=value, tokens_per_second=value)
    page = write_report(tmp_path, title="<run>", summary={"a < b": math.nan, "steps": len(values)}, samples=["</pre><script>x</script>"])
    text = page.read_text()
    assert "<script>" not in text and "&lt;run&gt;" in text and "a &lt; b" in text
    assert text.count("data:image/png;base64,") == 4
    assert not re.findall(r'(?:src|href)="(?!data:)', text)
    assert sorted(path.name for path in page.parent.glob("*.png")) == ["grad_norm.png", "learning_rate.png", "loss.png", "throughput.png"]


def test_the_command_draws_the_page_again_and_keeps_its_samples(tmp_path, capsys):
    write_steps(tmp_path, 1, 4)
    write_report(tmp_path, title="mine", summary={"bits per byte": 1.5}, samples=["def f():"])
    assert main(["report", str(tmp_path)]) == 0
    assert "bits per byte: 1.5" in capsys.readouterr().out
    assert "def f():" in (tmp_path / "report" / "index.html").read_text()
    with pytest.raises(UserError, match="no metrics at"):
        main(["report", str(tmp_path / "gone")])


@pytest.mark.parametrize("value", ['"fast"', "[1]", "1" + "0" * 400])
def test_a_value_that_is_no_number_is_named(tmp_path, value):
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 3, "loss": {value}}}\n')
    with pytest.raises(UserError, match="loss is no number"):
        main(["report", str(tmp_path)])


@pytest.mark.parametrize("text", ['{"title": 5, "summary": {}, "samples": []}', '{"title": "t", "summary": [], "samples": []}', '{"title": "t", "summary": {}, "samples": [5]}'])
def test_another_kind_of_report_is_refused(tmp_path, text):
    write_steps(tmp_path, 1, 2)
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "report.json").write_text(text)
    with pytest.raises(UserError, match="is not a report's"):
        main(["report", str(tmp_path)])


def test_odd_values_are_counted_and_break_nothing(tmp_path, capsys):
    write_steps(tmp_path, 1, 6)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    odd = [{"resumed_from": "x"}, {"loss": 1e308, "grad_norm": -1e308}, {"loss": "NaN", "lr": math.inf}]
    lines[2:5] = [json.dumps({**json.loads(line), **change}) for line, change in zip(lines[2:5], odd)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert main(["report", str(tmp_path)]) == 0
    words = "4 values that are NaN, infinite or above 1e+100, 1 resumed_from 'x', which is no step"
    assert f"not drawn: {words}" in capsys.readouterr().out
    assert f"Not drawn: {words}." in html.unescape((tmp_path / "report" / "index.html").read_text())


@pytest.mark.parametrize("step", ["NaN", "1e308", "-1", '"x"'])
def test_a_step_that_is_none_is_named(tmp_path, step):
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": {step}, "loss": 1.0}}\n')
    with pytest.raises(UserError, match="line 1: not a row of metrics"):
        read_metrics(tmp_path)
