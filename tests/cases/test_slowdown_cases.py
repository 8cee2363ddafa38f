"Slow days of each kind, told from a record of a better one."

import json
from itertools import islice

import pytest

from llm_from_scratch.artifacts import write_json
from llm_from_scratch.env import UserError
from llm_from_scratch.slowdown import attribute, best_and_last, build_probe, factors, machine_signals, main, measure_machine, measure_steps, record_signals, step_signals
from llm_from_scratch.troubleshooting import practice_run

MACHINE = dict(core_share=0.98, copy_bytes_per_second=1e10, disk_await_ms=0.5, swapped_in=0, throttled=0, kernel="6.1", driver="570", foreign_device_bytes=0)
STEPS = dict(wait_share=0.02, copy_share=0.06, flops_per_token=1e6, attention="sdpa", threads=4, in_use_share=0.9)


@pytest.mark.parametrize(
    "dimension, machine, steps",
    [
        ("hardware", {"core_share": 0.4}, {}),
        ("hardware", {"copy_bytes_per_second": 5e9}, {"wait_share": 0.1}),
        ("framework", {}, {"copy_share": 0.5}),
        ("data", {"core_share": 0.9}, {"wait_share": 0.6}),
        ("algorithm", {}, {"flops_per_token": 1.4e6, "copy_share": 0.1}),
    ],
)
def test_the_dimension_that_costs_most_comes_first(dimension, machine, steps):
    signals = machine_signals({**MACHINE, **machine}, MACHINE) + step_signals({**STEPS, **steps}, STEPS)
    assert next(iter(factors(signals))) == dimension


@pytest.mark.parametrize(
    "dimension, machine, words",
    [
        ("driver", {"driver": "580"}, "driver 570 became 580"),
        ("driver", {"foreign_device_bytes": 5e9}, "5.0 GB more of the device's memory"),
        ("hardware", {"disk_await_ms": 25.0}, "a disk request waits 25 ms"),
        ("hardware", {"throttled": 3}, "throttled in 3 periods"),
    ],
)
def test_what_has_no_figure_is_listed(dimension, machine, words):
    found = [signal for signal in machine_signals({**MACHINE, **machine}, MACHINE) if words in signal.evidence]
    assert [(signal.dimension, signal.factor) for signal in found] == [(dimension, 1.0)]


def test_memory_that_lies_idle_is_named():
    assert "50% of the reserved device memory is in use" in step_signals({**STEPS, "in_use_share": 0.5}, STEPS)[-1].evidence


def test_a_good_day_costs_nothing():
    assert set(factors(machine_signals(MACHINE, MACHINE) + step_signals(STEPS, STEPS)).values()) == {1.0}


def test_without_a_record_only_gross_losses_show():
    signals = machine_signals({**MACHINE, "core_share": 0.5}, {}) + step_signals({**STEPS, "copy_share": 0.1}, {})
    assert [signal.dimension for signal in signals if signal.factor > 1.1] == ["hardware"]


def test_a_run_is_compared_with_its_own_best_stretch():
    rows = [{"step": step, "tokens_per_second": 1000.0 if 5 < step < 15 else 600.0} for step in range(1, 41)]
    assert best_and_last(rows) == {"best": 1000.0, "last": 600.0, "from_step": 5}


def test_the_command_keeps_a_record_and_speaks_json(tmp_path, capfd):
    run = practice_run(tmp_path / "run")
    capfd.readouterr()
    assert main([str(run), "--seconds", "0.05", "--keep", "--json"]) == 0
    printed = capfd.readouterr()
    told = json.loads(printed.out)
    assert printed.err == ""
    assert json.loads((run / "speed.json").read_text()) == told["record"]
    assert {signal["dimension"] for signal in told["signals"]} >= {"hardware", "framework", "data", "algorithm"}
    assert not [signal for signal in record_signals(run) if signal.factor > 1]
    probe = build_probe(run)
    loader = probe.loader

    class Short:
        def __iter__(self):
            return islice(iter(loader), 2)

    probe.loader = Short()
    assert measure_steps(probe, 0.01)["tokens_per_second"] > 0  # more steps than an epoch has
    with pytest.raises(UserError, match="not a run"):
        main([str(tmp_path)])


@pytest.mark.slow
def test_a_loader_that_sleeps_is_the_data_s_fault(tmp_path):
    import time

    run = practice_run(tmp_path / "run", {"train": dict(steps=40)})
    write_json(run / "speed.json", attribute(run, seconds=1.0)[1])
    probe = build_probe(run)
    loader = probe.loader

    class Sleepy:
        def __iter__(self):
            for batch in loader:
                time.sleep(2)
                yield batch

    probe.loader = Sleepy()
    assert next(iter(factors(attribute(run, seconds=1.0, probe=probe)[0]))) == "data"
    assert measure_machine(0.1)["core_share"] > 0
