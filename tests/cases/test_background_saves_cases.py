"When a checkpoint is due, and what a save beside the training must never do."

import copy
import errno
import math
import os
import threading

import pytest
import torch
from torch import nn

import llm_from_scratch.background_saves as background_saves
import llm_from_scratch.checkpointing as checkpointing
from llm_from_scratch.background_saves import BackgroundSaver, SaveSchedule, read_best
from llm_from_scratch.checkpointing import checkpoint_step, latest_checkpoint, list_checkpoints, load_checkpoint, verify_checkpoint
from llm_from_scratch.config import CheckpointConfig
from llm_from_scratch.env import UserError


def net_of(value):
    net = nn.Linear(4, 4)
    for parameter in net.parameters():
        parameter.data.fill_(value)
    return net


def steps(folder):
    return [checkpoint_step(path) for path in list_checkpoints(folder)]


@pytest.fixture
def gate(monkeypatch):
    "The disk waits until the test lets it go on."
    opened, write = threading.Event(), background_saves.write_checkpoint

    def slow(*arguments, **options):
        assert opened.wait(300)
        return write(*arguments, **options)

    monkeypatch.setattr(background_saves, "write_checkpoint", slow)
    yield opened
    opened.set()


def failing(monkeypatch, errors):
    "The first writes fail with these."
    real = checkpointing.save_file

    def save_file(tensors, path):
        if errors:
            raise errors.pop(0)
        real(tensors, path)

    monkeypatch.setattr(checkpointing, "save_file", save_file)


def test_amp_6_the_scaler_goes_on_at_its_scale(tmp_path):
    def build():
        torch.manual_seed(0)
        net = nn.Linear(4, 1)
        return net, torch.optim.AdamW(net.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=65536.0, growth_interval=10)

    def train(net, optimizer, scaler, num_steps):
        losses = []
        for number in range(num_steps):
            optimizer.zero_grad()
            loss = (net(torch.full((2, 4), 0.1 + number)) - 1).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append((loss.item(), scaler.get_scale()))
        return losses

    net, optimizer, scaler = build()
    scaler.load_state_dict({**scaler.state_dict(), "scale": 256.0, "_growth_tracker": 7})
    with BackgroundSaver(tmp_path) as saver:
        saver.save({"model": net, "optimizer": optimizer, "scaler": scaler}, step=1)
    undisturbed = train(net, optimizer, scaler, 5)
    net, optimizer, scaler = build()
    load_checkpoint(latest_checkpoint(tmp_path), {"model": net, "optimizer": optimizer, "scaler": scaler})
    assert (scaler.get_scale(), scaler.state_dict()["_growth_tracker"]) == (256.0, 7)
    assert train(net, optimizer, scaler, 5) == undisturbed
    assert undisturbed[-1][1] == 512.0


def test_training_that_goes_on_does_not_change_what_is_written(tmp_path, gate):
    net = net_of(1.0)
    plain = {"list": [1, 2], "nested": {"n": 3}}
    saver = BackgroundSaver(tmp_path)
    saver.save({"model": net, "plain": plain}, step=1)
    net.weight.data.fill_(9.0)
    plain["list"].append(3), plain["nested"].update(n=4)
    assert saver.check() == [] and saver.saved is None and steps(tmp_path) == []
    gate.set()
    saver.wait()
    other = net_of(0.0)
    rest = load_checkpoint(saver.saved, {"model": other})
    assert other.weight.unique().tolist() == [1.0] and rest["plain"] == {"list": [1, 2], "nested": {"n": 3}}


def test_the_next_save_waits_for_the_last(tmp_path, gate):
    saver = BackgroundSaver(tmp_path)
    saver.save({"model": net_of(1.0)}, step=1)
    second = threading.Thread(target=lambda: saver.save({"model": net_of(2.0)}, step=2))
    second.start()
    second.join(0.2)
    assert second.is_alive()
    gate.set()
    second.join(300)
    saver.wait()
    assert steps(tmp_path) == [1, 2] and all(verify_checkpoint(path) == [] for path in list_checkpoints(tmp_path))


@pytest.mark.parametrize("number, cure", [(errno.ENOSPC, "free some space"), (errno.EIO, "disk is failing"), (errno.EROFS, "read-only")])
def test_a_failed_save_is_told_retried_and_not_counted(tmp_path, monkeypatch, warnings_said, number, cure):
    saver = BackgroundSaver(tmp_path)
    saver.save({"model": net_of(1.0)}, step=1)
    saver.wait()
    failing(monkeypatch, [OSError(number, os.strerror(number))])
    saver.save({"model": net_of(2.0)}, step=2)
    saver.under_way.join()
    assert saver.saved.name == "step_00000001" and steps(tmp_path) == [1]
    [told] = saver.check()
    assert "step_00000002" in told and cure in told and "older checkpoints are untouched" in told and "\n" not in told
    assert warnings_said == [told]
    saver.wait()
    assert saver.saved.name == "step_00000002" and steps(tmp_path) == [1, 2]


@pytest.mark.parametrize("background", [True, False])
def test_a_save_that_fails_twice_is_an_error(tmp_path, monkeypatch, background):
    saver = BackgroundSaver(tmp_path, CheckpointConfig(background=background))
    saver.save({"model": net_of(1.0)}, step=1)
    saver.wait()
    failing(monkeypatch, [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) for _ in range(2)])
    with pytest.raises(UserError, match="step_00000002: .*No space left.*older checkpoints are untouched"):
        saver.save({"model": net_of(2.0)}, step=2)
        saver.wait()
    assert saver.saved.name == "step_00000001" and steps(tmp_path) == [1]
    saver.save({"model": net_of(3.0)}, step=3)
    saver.wait()
    assert steps(tmp_path) == [1, 3]


def test_broken_weights_never_become_the_newest(tmp_path):
    with pytest.raises(UserError, match="step 2 is not saved: model weight has 16 of 16 values"):
        with BackgroundSaver(tmp_path) as saver:
            saver.save({"model": net_of(1.0)}, step=1)
            saver.save({"model": net_of(math.nan)}, step=2)
    assert steps(tmp_path) == [1]


def test_what_cannot_be_stored_is_refused_at_once(tmp_path):
    with BackgroundSaver(tmp_path) as saver:
        with pytest.raises(UserError, match="hooks/0"):
            saver.save({"extra": {"hooks": [print]}}, step=1)


def test_an_error_of_training_is_not_hidden_and_the_save_is_finished(tmp_path):
    with pytest.raises(ZeroDivisionError):
        with BackgroundSaver(tmp_path) as saver:
            saver.save({"model": net_of(1.0)}, step=1)
            1 / 0
    assert steps(tmp_path) == [1]


def test_a_mistake_of_ours_is_no_user_error(tmp_path, monkeypatch):
    monkeypatch.setattr(background_saves, "write_checkpoint", lambda *arguments, **options: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        with BackgroundSaver(tmp_path) as saver:
            saver.save({"model": net_of(1.0)}, step=1)


def test_memory_is_fetched_once_and_used_for_every_save(tmp_path):
    net = net_of(1.0)
    optimizer = torch.optim.AdamW(net.parameters())
    with BackgroundSaver(tmp_path) as saver:
        saver.reserve({"model": net})
        saver.reserve({"model": net})
        saver.reserving.join()
        place = saver.buffers["model", "weight"].data_ptr()
        for step in (1, 2):
            net(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            saver.save({"model": net, "optimizer": optimizer}, step=step)
        saver.save({"model": nn.Linear(5, 5)}, step=3)
        saver.wait()
        assert saver.buffers.keys() == {("model", "weight"), ("model", "bias")}
    assert place and steps(tmp_path) == [1, 2, 3]


def test_shared_tensors_and_views_are_copied_as_they_are(tmp_path):
    base = torch.arange(12.0)
    value = {"whole": base, "part": base[3:6], "turned": base.view(3, 4).T, "again": base, "empty": torch.zeros(0, 2), "one": torch.tensor(2.5).bfloat16()}
    expected = copy.deepcopy(value)
    with BackgroundSaver(tmp_path) as saver:
        saver.save({"values": value}, step=1)
        base.zero_()
    back = load_checkpoint(saver.saved, {})["values"]
    assert all(torch.equal(back[name], expected[name]) and back[name].dtype == expected[name].dtype for name in expected)


def test_a_local_disk_comes_first_and_is_left_empty(tmp_path):
    with BackgroundSaver(tmp_path / "far", CheckpointConfig(local_dir=str(tmp_path / "near"))) as saver:
        saver.save({"model": net_of(1.0)}, step=1)
    assert verify_checkpoint(saver.saved) == [] and saver.saved.parent == tmp_path / "far"
    assert [path for path in (tmp_path / "near").rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("readings, due", [([0, 600, 1200, 1800], [1200]), ([0, 600, -9000, -8400, -7800], [-7800]), ([0, 1e9, 5, 10], [1e9])])
def test_a_clock_that_goes_back_delays_by_one_interval_at_most(readings, due):
    now = [0.0]
    schedule = SaveSchedule(CheckpointConfig(every_steps=10**6, every_minutes=20), clock=lambda: now[0])
    found = []
    for now[0] in readings:
        if schedule.due(1):
            found.append(now[0])
    assert found == due


def test_a_full_checkpoint_is_also_a_light_one():
    now = [0.0]
    options = CheckpointConfig(every_steps=4, light_every_steps=2, light_every_minutes=1)
    schedule = SaveSchedule(options, clock=lambda: now[0])
    assert [schedule.due(step) for step in range(1, 9)] == [None, "light", None, "full", None, "light", None, "full"]
    now[0] = 61.0
    assert [schedule.due(step) for step in (9, 9)] == ["light", None]


def test_the_best_stays_until_a_better_one_stands(tmp_path, monkeypatch):
    options = CheckpointConfig(keep=1, keep_best=True, background=False)
    saver, schedule = BackgroundSaver(tmp_path, options), SaveSchedule(options)
    for step, loss in enumerate([3.0, 2.0, 2.5, 2.75], 1):
        best = schedule.due(step, loss) == "best"
        saver.save({"model": net_of(step)}, step=step, val_loss=loss if best else None)
    assert steps(tmp_path) == [2, 4] and read_best(tmp_path) == {"step": 2, "val_loss": 2.0}
    failing(monkeypatch, [OSError(errno.EIO, "x"), OSError(errno.EIO, "x")])
    with pytest.raises(UserError):
        saver.save({"model": net_of(5)}, step=5, val_loss=1.0)
    assert steps(tmp_path) == [2, 4] and read_best(tmp_path)["step"] == 2
    saver.save({"model": net_of(6)}, step=6, val_loss=1.0)
    assert steps(tmp_path) == [6] and read_best(tmp_path) == {"step": 6, "val_loss": 1.0}


@pytest.mark.parametrize("text", ["", "{", "[]", '{"step": "2"}', '{"step": 99, "val_loss": 1.0}'])
def test_a_damaged_note_of_the_best_is_no_best(tmp_path, text):
    (tmp_path / "best.json").write_text(text)
    assert read_best(tmp_path) is None


def test_a_failed_removal_of_an_old_one_is_told(tmp_path, monkeypatch):
    def refuse(*arguments, **options):
        raise PermissionError(errno.EACCES, "Permission denied", "step_00000001")

    monkeypatch.setattr(background_saves, "prune_checkpoints", refuse)
    saver = BackgroundSaver(tmp_path)
    saver.save({"model": net_of(1.0)}, step=1)
    notes = saver.wait()
    assert saver.saved.name == "step_00000001" and "Permission denied" in notes[0]
