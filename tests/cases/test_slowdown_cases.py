"Slow days of each kind, told from the run's own best stretch or a record."

import json
from itertools import islice

import pytest

from llm_from_scratch.artifacts import write_json
from llm_from_scratch.env import UserError, environment_report
from llm_from_scratch.slowdown import (
    CHANGED,
    DIMENSIONS,
    WORTH,
    attribute,
    best_and_last,
    build_probe,
    factors,
    main,
    measure_machine,
    measure_steps,
    ranking,
    sides,
    slowdown_table,
)
from llm_from_scratch.troubleshooting import practice_run

MACHINE = dict(core_share=0.98, copy_bytes_per_second=1e10, disk_await_ms=0.5, swapped_in=0, throttled=0)
STEPS = dict(data_wait_share=0.02, copy_share=0.06, flops_per_token=1e6, attention="sdpa", threads=4, tokens_per_second=64.0)
RECORD = {name: (value, "record") for name, value in (MACHINE | STEPS).items()}
ROW = dict(step_seconds=2.0, tokens_per_second=64.0, data_wait_share=0.02, comm_share=0.05, process_cpu_percent=390.0, disk_await_ms=0.8)
GPU = ROW | dict(gpu_sm_clock_mhz=1800.0, gpu_throttle="", gpu_used_bytes=11e9, device_reserved_bytes=10e9, device_allocated_bytes=9e9, device_fragmented_share=0.01)


def written(folder, usual=ROW, tail=None, machine=None, steps=None):
    "A run of forty rows, of which the last fifteen differ, ranked with what is measured now."
    rows = [{"step": step, **usual, **(tail or {} if step > 25 else {})} for step in range(1, 41)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ranking(*sides(folder, {"machine": MACHINE | (machine or {}), "steps": STEPS | (steps or {})}))


def told(signals):
    return [signal for signal in signals if (signal.factor or 0) >= WORTH]


@pytest.mark.parametrize(
    "dimension, tail, factor, words",
    [
        ("data", dict(step_seconds=4.0, tokens_per_second=32.0, data_wait_share=0.535), 2.0, "54% of the time waits for the loader"),
        ("hardware", dict(step_seconds=3.8, tokens_per_second=33.7, comm_share=0.515), 2.0, "of a step goes to other ranks"),
        ("hardware", dict(step_seconds=4.0, tokens_per_second=32.0, process_cpu_percent=195.0), 2.0, "keeps 2.1 cores busy"),
        ("algorithm", dict(tokens_per_second=16.0), 4.0, "32 tokens a step"),
        ("data", dict(tokens_per_second=60.0, disk_await_ms=40.0), WORTH, "a disk request waits 40.0 ms"),
    ],
)
def test_the_last_stretch_against_the_best_names_the_dimension(tmp_path, dimension, tail, factor, words):
    first, *others = written(tmp_path, tail=tail)
    assert first.dimension == dimension
    assert first.factor == pytest.approx(factor, rel=0.06)
    assert words in first.now
    assert "best stretch" in first.then
    assert not told(others)


@pytest.mark.parametrize(
    "dimension, tail, factor, words",
    [
        ("hardware", dict(step_seconds=3.0, tokens_per_second=42.7, gpu_sm_clock_mhz=1000.0), 1.5, "the GPU's clock is 1000 MHz"),
        ("hardware", dict(tokens_per_second=60.0, gpu_throttle="power limit"), WORTH, "held back by: power limit"),
        ("driver", dict(tokens_per_second=60.0, gpu_used_bytes=16e9), WORTH, "6.0 GB of the device's memory"),
        ("algorithm", dict(tokens_per_second=60.0, device_allocated_bytes=5e9, device_fragmented_share=0.3), WORTH, "50% of the reserved device memory is in use, 30%"),
    ],
)
def test_a_device_s_rows_name_the_dimension(tmp_path, dimension, tail, factor, words):
    first, *others = written(tmp_path, GPU, tail)
    assert (first.dimension, first.factor) == (dimension, pytest.approx(factor, rel=0.01))
    assert words in first.now
    assert not told(others)


@pytest.mark.parametrize(
    "dimension, machine, steps",
    [
        ("hardware", {"core_share": 0.4}, {}),
        ("hardware", {"throttled": 3}, {}),
        ("hardware", {"swapped_in": 10**8}, {}),
        ("data", {"core_share": 0.9}, {"data_wait_share": 0.6}),
        ("data", {"disk_await_ms": 40.0}, {}),
        ("framework", {}, {"copy_share": 0.5}),
    ],
)
def test_what_is_measured_now_needs_no_record(tmp_path, dimension, machine, steps):
    assert [signal.dimension for signal in told(written(tmp_path, machine=machine, steps=steps))] == [dimension]


@pytest.mark.parametrize(
    "dimension, machine, steps",
    [("hardware", {"copy_bytes_per_second": 5e9}, {"data_wait_share": 0.1}), ("framework", {}, {"copy_share": 0.5}), ("algorithm", {}, {"flops_per_token": 1.4e6, "copy_share": 0.1})],
)
def test_copies_and_operations_are_held_against_a_record(dimension, machine, steps):
    assert next(iter(factors(ranking({**MACHINE, **STEPS, **machine, **steps}, RECORD)))) == dimension


@pytest.mark.parametrize("usual", [ROW, GPU])
def test_a_healthy_run_gets_no_dimension_above_its_noise(tmp_path, usual):
    signals = written(tmp_path, usual, dict(tokens_per_second=61.0, step_seconds=2.1, data_wait_share=0.05, process_cpu_percent=380.0))
    assert {signal.dimension for signal in signals} == set(DIMENSIONS)
    assert told(signals) == []
    assert set(factors(ranking(MACHINE | STEPS, RECORD)).values()) == {1.0}


def test_a_run_that_was_always_so_is_not_slow_for_that(tmp_path):
    always = GPU | dict(disk_await_ms=40.0, device_allocated_bytes=5e9, gpu_used_bytes=16e9, gpu_throttle="power limit", data_wait_share=0.5)
    assert told(written(tmp_path, always)) == []


def test_a_smaller_batch_in_shorter_steps_is_no_loss(tmp_path):
    assert told(written(tmp_path, tail=dict(step_seconds=0.5))) == []


def test_without_a_gpu_the_driver_comes_last_and_says_so(tmp_path):
    last = written(tmp_path)[-1]
    assert (last.dimension, last.factor, last.now) == ("driver", None, "not measured: no GPU")
    table = slowdown_table(written(tmp_path))
    assert list(table.columns[0].cells)[-1] == "driver"
    assert list(table.columns[1].cells)[-1] == "not measured: no GPU"
    assert set(table.columns[0].cells) == set(DIMENSIONS)
    assert [then for then in table.columns[2].cells if "nothing" in then] == ["nothing to compare with"] * 2  # copies and operations


def test_versions_that_changed_stand_below_losses_and_above_noise(tmp_path):
    kept = environment_report()
    kept["packages"]["numpy"], kept["platform"]["release"], kept["driver"] = "1.0", "2.6", "470"
    (tmp_path / "env.json").write_text(json.dumps(kept))
    signals = written(tmp_path, tail=dict(step_seconds=4.0, tokens_per_second=32.0, data_wait_share=0.535))
    assert [signal.dimension for signal in signals[:4]] == ["data", "framework", "driver", "driver"]
    assert [signal.then for signal in signals[1:4]] == ["1.0, env.json", "2.6, env.json", "470, env.json"]
    assert {signal.factor for signal in signals[1:4]} == {CHANGED}
    assert told(written(tmp_path)) == []


def test_a_run_is_compared_with_its_own_best_stretch():
    rows = [{"step": step, "tokens_per_second": 1000.0 if 5 < step < 15 else 600.0} for step in range(1, 41)]
    own = best_and_last(rows)
    assert (own["best"]["tokens_per_second"], own["last"]["tokens_per_second"], own["from_step"]) == (1000.0, 600.0, 5)


def test_rows_without_figures_are_no_obstacle(tmp_path):
    assert told(written(tmp_path, dict(tokens=5))) == []
    assert told(written(tmp_path, dict(tokens_per_second=5.0, data_wait_share=None, disk_await_ms=None, device_reserved_bytes=0))) == []


def test_the_command_keeps_a_record_and_speaks_json(tmp_path, capfd):
    run = practice_run(tmp_path / "run")
    capfd.readouterr()
    assert main([str(run), "--seconds", "0.05", "--keep", "--json"]) == 0
    printed = capfd.readouterr()
    spoken = json.loads(printed.out)
    assert printed.err == ""
    assert json.loads((run / "speed.json").read_text()) == spoken["record"]
    assert {signal["dimension"] for signal in spoken["signals"]} == set(DIMENSIONS)
    assert not [signal for signal in spoken["signals"] if signal["is_weight"] and signal["factor"] == CHANGED]
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
