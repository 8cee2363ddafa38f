"""A training run meets full disks, kills, damage and a clock that goes back: nothing that it reported as saved is lost.

The short tests break one real run three times in a row; the slow ones take every fault of the harness by itself.
"""

import errno
import json
import logging
import os
import random
import shutil
import subprocess
from pathlib import Path
from unittest import mock

import pytest
from training import DAMAGE, FAILS, FAULTS, NUM_STEPS, SAVE_EVERY, Lab, after, copy_of, drafts, kill, killed, last_step, line_with, newest_step, newest_step_by_name, refusal, wait_until

from llm_from_scratch import train
from llm_from_scratch.artifacts import _host_mark
from llm_from_scratch.checkpointing import list_checkpoints
from llm_from_scratch.env import set_deterministic


def train_here(lab, run_dir):
    "A sitting within this process: exit code, and the warnings of checkpoints passed over."
    said = []
    keep = logging.Handler()
    keep.emit = lambda record: said.append(record.getMessage())
    log = logging.getLogger("llm_from_scratch")
    log.addHandler(keep)
    try:
        with mock.patch.multiple(train, write_report=lambda *a, **k: None, utilisation=lambda *a, **k: "not measured"):
            return train.main(lab.arguments(run_dir)), said
    finally:
        log.removeHandler(keep)
        set_deterministic(False)


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    "With a run that nobody disturbed."
    lab = Lab(tmp_path_factory.mktemp("faults"))
    assert train_here(lab, lab.home / "undisturbed")[0] == 0
    return lab


@pytest.fixture(scope="module")
def far_lab(tmp_path_factory):
    "One for real processes only."
    return Lab(tmp_path_factory.mktemp("faults"), random.Random(1))


def promised(lab, run_dir):
    return max(lab.told(run_dir), default=0)


def test_a_full_disk_then_a_kill_during_a_save_then_a_clock_that_goes_back(lab):
    run_dir = lab.home / "broken"
    code, said = lab.train(run_dir, **refusal(errno.ENOSPC, "save_file"))
    assert code == 2 and line_with(said, FAILS.format("No space left on device", "free some space")), said
    assert (promised(lab, run_dir), newest_step(run_dir), drafts(run_dir)) == (6, 6, [])

    process = lab.begin(run_dir, stand_in_save={"from_step": 12})
    assert wait_until(lambda: newest_step_by_name(run_dir) >= 10 and drafts(run_dir, process.pid), process)
    kill(process)
    assert drafts(run_dir, process.pid), "the kill hit no save: the test proves nothing"
    assert after(lab, run_dir, promised(lab, run_dir))[0] == 0

    for path in (run_dir / "checkpoints").rglob("*"):
        os.utime(path, (2**32, 2**32))
    begins = newest_step(run_dir)
    code, said = lab.train(run_dir, turn_clock_back={"seconds": 3600})
    assert code == 0 and line_with(said, f"resumed from RUN/checkpoints/step_{begins:08d}"), said
    assert drafts(run_dir) == []
    assert lab.told(run_dir) == sorted(lab.told(run_dir)) and promised(lab, run_dir) == NUM_STEPS
    assert lab.differences(run_dir) == []


@pytest.mark.parametrize("fault", DAMAGE)
def test_damage_to_the_newest_checkpoint_costs_its_steps_only(lab, fault):
    harm, words = DAMAGE[fault]
    run_dir = copy_of(lab.undisturbed, f"damaged-{fault.replace(' ', '-')}")
    harm(list_checkpoints(run_dir / "checkpoints")[-1])
    assert newest_step(run_dir) == NUM_STEPS - SAVE_EVERY
    code, said = train_here(lab, run_dir)
    assert code == 0 and line_with("\n".join(said), words), said
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["resumed_from"] for row in rows if "resumed_from" in row] == [NUM_STEPS - SAVE_EVERY]
    assert lab.differences(run_dir) == []


def test_a_draft_left_over_is_passed_over_and_cleared(lab):
    run_dir = copy_of(lab.undisturbed, "left-over")
    checkpoints = run_dir / "checkpoints"
    shutil.rmtree(checkpoints / f"step_{NUM_STEPS:08d}")
    gone = subprocess.Popen(["true"])
    gone.wait()
    draft = checkpoints / f".step_{NUM_STEPS:08d}.tmp-{gone.pid}-{_host_mark()}01234567"
    shutil.copytree(checkpoints / f"step_{NUM_STEPS - SAVE_EVERY:08d}", draft)
    assert train_here(lab, run_dir)[0] == 0
    assert not draft.exists()
    assert lab.differences(run_dir) == []


@pytest.mark.slow
@pytest.mark.parametrize("saving", [True, False])
def test_30_kills_lose_nothing(far_lab, saving):
    seen, under_way = 0, 0
    while seen < 15:
        one = killed(far_lab, far_lab.home / f"killed-{saving}-{seen}", min(5, 15 - seen), saving)
        assert (one.steps_lost, one.differences) == (0, [])
        seen, under_way = seen + one.injected, under_way + one.under_way
    assert under_way >= 10 * saving


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_loses_nothing(far_lab, fault):
    seen = FAULTS[fault](far_lab, f"fault-{list(FAULTS).index(fault)}")
    if seen is None:
        pytest.skip("no disk can be mounted here")
    assert (seen.steps_lost, seen.differences) == (0, [])


@pytest.mark.slow
def test_dist_8_a_killed_rank_ends_the_run_and_both_go_on_from_the_last_checkpoint(tmp_path):
    lab = Lab(tmp_path, num_ranks=2)
    run_dir = tmp_path / "run"
    code, said = lab.train(run_dir, die={"rank": 1, "at_step": 5})
    assert code != 0 and (newest_step(run_dir), last_step(run_dir)) == (4, 4), said
    assert said.count("error: rank 0 lost another rank in ") == 1 and "third_party/gloo" not in said, said
    code, said = lab.train(run_dir)
    assert code == 0 and said.count("resumed from RUN/checkpoints/step_00000004") == 1, said
    assert lab.differences(run_dir) == []
