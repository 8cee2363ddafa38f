"""Processes killed while they save, bytes that rot, disks that fill: a good checkpoint is always left.

Run as a script, this file is the process that saves and is killed.
"""

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import llm_from_scratch.checkpointing as checkpointing
from llm_from_scratch.checkpointing import (
    checkpoint_step,
    latest_checkpoint,
    list_checkpoints,
    load_checkpoint,
    prune_checkpoints,
    save_checkpoint,
    verify_checkpoint,
)
from llm_from_scratch.env import UserError
from llm_from_scratch.state_trees import capture_rng

ROOT = Path(__file__).resolve().parents[2]
NUM_KILLS = 8


def net_of(step):
    net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    for parameter in net.parameters():
        parameter.data.fill_(step)
    return net


def save_for_ever(folder, report, same_step):
    "Save step after step, or one step again and again, telling each finished one."
    newest = latest_checkpoint(folder)
    step = checkpoint_step(newest) if newest else 0
    while True:
        step = 7 if same_step else step + 1
        save_checkpoint(folder, {"model": net_of(step), "progress": {"step": step}}, step=step)
        os.write(report, f"{step}\n".encode())
        prune_checkpoints(folder, keep=2)


def stop_in_a_save(child, folder):
    "Halt the saver again and again, until it stands where its draft is there."
    while True:
        os.kill(child, signal.SIGSTOP)
        os.waitpid(child, os.WUNTRACED)
        if any(entry.name.startswith(".step_") for entry in Path(folder).iterdir()):
            return
        os.kill(child, signal.SIGCONT)
        time.sleep(random.uniform(0, 0.005))


def kill_while_saving(folder, same_step):
    "Fork a saver, kill -9 it at a random moment, the first time in the middle of a save; look at what it left; one JSON line a round."
    for number in range(NUM_KILLS):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            save_for_ever(folder, writer, same_step)
        os.close(writer)
        told = os.read(reader, 64)
        if number == 0:
            stop_in_a_save(child, folder)
        else:
            time.sleep(random.uniform(0, 0.05))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        with os.fdopen(reader, "rb") as pipe:
            told = (told + pipe.read()).split()
        problems = {path.name: verify_checkpoint(path) for path in list_checkpoints(folder)}
        newest = latest_checkpoint(folder)
        net = net_of(-1)
        if newest:
            load_checkpoint(newest, {"model": net})
        print(json.dumps({
            "told": int(told[-1]),
            "newest": checkpoint_step(newest) if newest else None,
            "weight": net[0].weight[0, 0].item(),
            "problems": {name: found for name, found in problems.items() if found},
            "drafts": sum(entry.name.startswith(".") for entry in Path(folder).iterdir()),
        }), flush=True)


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    "What was found after each kill: of a saver that goes on, and of one that saves a step again and again."
    going_on, same = tmp_path_factory.mktemp("going_on"), tmp_path_factory.mktemp("same")
    save_checkpoint(same, {"model": net_of(6), "progress": {"step": 6}}, step=6)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, __file__, going_on, same], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    rounds = [json.loads(line) for line in done.stdout.splitlines()]
    return going_on, rounds[:NUM_KILLS], rounds[NUM_KILLS:]


@pytest.fixture
def two(tmp_path):
    "Two good checkpoints, the newer one about to be damaged."
    for step in (10, 20):
        save_checkpoint(tmp_path, {"model": net_of(step), "progress": {"step": step}, "rng": capture_rng()}, step=step)
    return tmp_path


needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="forks a process")


@needs_fork
def test_kill_9_leaves_whole_checkpoints_only(killed):
    _, rounds, _ = killed
    assert [entry["problems"] for entry in rounds] == [{}] * NUM_KILLS
    for entry in rounds:
        assert entry["newest"] in (entry["told"], entry["told"] + 1)
        assert entry["weight"] == entry["newest"]
    assert any(entry["drafts"] for entry in rounds), "no kill hit a save: the test proves nothing"


@needs_fork
def test_kill_9_while_a_step_is_saved_again(killed):
    _, _, rounds = killed
    assert [entry["problems"] for entry in rounds] == [{}] * NUM_KILLS
    assert {entry["newest"] for entry in rounds} <= {6, 7}
    assert all(entry["weight"] == entry["newest"] for entry in rounds)


@needs_fork
def test_the_next_save_clears_what_killed_ones_left(killed):
    folder, _, _ = killed
    save_checkpoint(folder, {"model": net_of(1)}, step=10**6)
    assert [entry.name for entry in folder.iterdir() if entry.name.startswith(".")] == []


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path):
    path.write_bytes(path.read_bytes()[:-2])


def empty(path):
    path.write_bytes(b"")


@pytest.mark.parametrize("harm", [flip, cut, empty, Path.unlink])
@pytest.mark.parametrize("name", ["model.safetensors", "train_state.json", "rng/rng.json", "rng/rng.safetensors", "manifest.json"])
def test_a_damaged_file_is_passed_over_and_named(two, warnings_said, name, harm):
    harm(two / "step_00000020" / name)
    assert latest_checkpoint(two) == two / "step_00000010"
    [warning] = warnings_said
    assert warning.startswith("passed over step_00000020: ") and name in warning and "\n" not in warning
    with pytest.raises(UserError, match="damaged"):
        load_checkpoint(two / "step_00000020", {"model": net_of(0)})


def test_every_byte_counts(tmp_path):
    path = save_checkpoint(tmp_path, {"model": nn.Linear(1, 1)}, step=1)
    for file in [file for file in path.rglob("*") if file.is_file()]:
        whole = file.read_bytes()
        for position in range(len(whole)):
            hurt = bytearray(whole)
            hurt[position] ^= 1 << position % 8
            file.write_bytes(hurt)
            assert verify_checkpoint(path), f"{file.name}: a bit of byte {position} is flipped and nobody notices"
        file.write_bytes(whole)
    assert verify_checkpoint(path) == []


def test_a_manifest_of_another_step_is_passed_over(two, warnings_said):
    shutil.copy(two / "step_00000010" / "manifest.json", two / "step_00000020" / "manifest.json")
    assert latest_checkpoint(two) == two / "step_00000010"
    assert "step_00000020" in warnings_said[0]


def test_a_renamed_checkpoint_is_passed_over(two, warnings_said):
    (two / "step_00000020").rename(two / "step_00000030")
    assert latest_checkpoint(two) == two / "step_00000010"
    assert warnings_said == ["passed over step_00000030: the folder is named for step 30 but holds step 20"]


def test_a_file_that_the_manifest_does_not_list_is_named(two, warnings_said):
    (two / "step_00000020" / "optimizer.safetensors").write_bytes(b"planted")
    assert latest_checkpoint(two) == two / "step_00000010"
    assert "optimizer.safetensors" in warnings_said[0]


def test_an_empty_folder_and_a_stray_file_are_no_checkpoints(two, warnings_said):
    (two / "step_00000030").mkdir()
    (two / "step_00000040").write_text("x")
    assert latest_checkpoint(two) == two / "step_00000020"
    assert len(warnings_said) == 1 and "step_00000030" in warnings_said[0]


def test_all_damaged_is_none_and_each_is_named(two, warnings_said):
    for path in list_checkpoints(two):
        cut(path / "model.safetensors")
    assert latest_checkpoint(two) is None
    assert [warning.split(":")[0] for warning in warnings_said] == ["passed over step_00000020", "passed over step_00000010"]


def test_pruning_never_deletes_the_last_good_one(two, warnings_said):
    for step in (30, 40):
        flip(save_checkpoint(two, {"model": net_of(step)}, step=step) / "model.safetensors")
    assert prune_checkpoints(two, keep=2) == []
    assert latest_checkpoint(two) == two / "step_00000020"
    assert warnings_said[0].startswith("nothing deleted")


def test_a_damaged_checkpoint_is_saved_again(two):
    cut(two / "step_00000020" / "model.safetensors")
    save_checkpoint(two, {"model": net_of(20)}, step=20)
    assert latest_checkpoint(two) == two / "step_00000020"


@pytest.mark.parametrize("part", ["save_file", "write_json", "write_manifest"])
def test_a_full_disk_leaves_the_old_checkpoint(two, monkeypatch, part):
    def full(*arguments, **options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpointing, part, full)
    with pytest.raises(UserError, match="can't write checkpoint .*step_00000030: .*No space left on device.*older checkpoints are untouched") as caught:
        save_checkpoint(two, {"model": net_of(30), "progress": {}}, step=30)
    assert "\n" not in str(caught.value)
    assert sorted(entry.name for entry in two.iterdir()) == ["step_00000010", "step_00000020"]
    assert verify_checkpoint(two / "step_00000020") == []


def test_no_room_is_told_with_both_numbers_before_anything_is_written(two, monkeypatch):
    usage = shutil.disk_usage(two)
    monkeypatch.setattr(checkpointing.shutil, "disk_usage", lambda path: usage._replace(free=12_345))
    with pytest.raises(UserError, match=r"takes 1,0\d\d,\d\d\d bytes and .* has 12,345 free; older checkpoints are untouched"):
        save_checkpoint(two, {"model": net_of(30)}, step=30)
    assert sorted(entry.name for entry in two.iterdir()) == ["step_00000010", "step_00000020"]


@pytest.mark.parametrize("key", ["0.weight", "1.bias"])
def test_a_disk_that_gives_back_other_bytes_is_found_at_once(two, monkeypatch, key):
    real = checkpointing.save_file

    def lies(tensors, path):
        real(tensors, path)
        content = bytearray(Path(path).read_bytes())
        size = int.from_bytes(content[:8], "little")
        start = 8 + size + json.loads(content[8 : 8 + size])[key]["data_offsets"][0]
        content[start] ^= 1
        Path(path).write_bytes(content)

    monkeypatch.setattr(checkpointing, "save_file", lies)
    with pytest.raises(UserError, match=f"read back, {key} is not what was written.*older checkpoints are untouched.*disk is failing"):
        save_checkpoint(two, {"model": net_of(30)}, step=30)
    assert sorted(entry.name for entry in two.iterdir()) == ["step_00000010", "step_00000020"]


@pytest.mark.parametrize("name", ["model.safetensors", "rng.safetensors", "model.safetensors.index.json", "train_state.json", "rng.json", "manifest.json"])
def test_a_short_write_of_any_file_is_found_at_once(two, monkeypatch, name):
    def cut(path, final):
        if Path(final).name == name:
            os.truncate(path, os.path.getsize(path) // 2)

    save, replace = checkpointing.save_file, os.replace
    monkeypatch.setattr(checkpointing, "save_file", lambda tensors, path: (save(tensors, path), cut(path, path)))
    monkeypatch.setattr(os, "replace", lambda source, target: (cut(source, target), replace(source, target)))
    small = {"max_shard_bytes": 20_000} if "index" in name else {}
    with pytest.raises(UserError, match="can't write checkpoint .*step_00000030: .*read back, .*is not what was written.*untouched; the disk is failing") as caught:
        save_checkpoint(two, {"model": net_of(30), "rng": capture_rng()}, step=30, **small)
    assert "\n" not in str(caught.value)
    assert sorted(entry.name for entry in two.iterdir()) == ["step_00000010", "step_00000020"]


@pytest.mark.parametrize("number, cure", [(errno.EIO, "the disk is failing"), (errno.EROFS, "mount it for writing"), (errno.EDQUOT, "raise the quota")])
def test_each_error_of_a_disk_has_its_cure(two, monkeypatch, number, cure):
    def broken(*arguments, **options):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(checkpointing, "write_manifest", broken)
    with pytest.raises(UserError, match=f"{os.strerror(number)}.*older checkpoints are untouched.*{cure}"):
        save_checkpoint(two, {"model": net_of(30)}, step=30)
    assert latest_checkpoint(two) == two / "step_00000020"


def test_a_copy_that_breaks_on_the_way_leaves_old_ones_and_no_name(two, tmp_path_factory, monkeypatch):
    local = tmp_path_factory.mktemp("local")

    def broken(path, draft, **options):
        Path(draft, "model.safetensors").write_bytes(b"half")
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(checkpointing.shutil, "copytree", broken)
        with pytest.raises(UserError, match="Input/output error.*older checkpoints are untouched"):
            save_checkpoint(two, {"model": net_of(30)}, step=30, local_dir=local)
    assert sorted(entry.name for entry in two.iterdir()) == ["step_00000010", "step_00000020"]
    save_checkpoint(two, {"model": net_of(30)}, step=30, local_dir=local)
    assert latest_checkpoint(two).name == "step_00000030"
    assert [path for path in local.rglob("*") if path.is_file()] == []


@needs_fork
def test_a_real_limit_on_file_size_leaves_the_old_checkpoint(two):
    resource = pytest.importorskip("resource")
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, resource.RLIM_INFINITY))
        try:
            save_checkpoint(two, {"model": net_of(30)}, step=30)
        except UserError as error:
            os._exit(5 if "File too large" in str(error) and "\n" not in str(error) else 6)
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
    assert sorted(entry.name for entry in two.iterdir()) == ["step_00000010", "step_00000020"]


def test_a_path_through_a_file_is_one_clear_line(tmp_path):
    (tmp_path / "checkpoints").write_text("not a folder")
    with pytest.raises(UserError, match="can't write checkpoint"):
        save_checkpoint(tmp_path / "checkpoints", {"model": net_of(1)}, step=1)


def test_an_interrupt_in_the_middle_of_a_save_leaves_no_draft(two, monkeypatch):
    def interrupt(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpointing, "write_manifest", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(two, {"model": net_of(30)}, step=30)
    assert sorted(entry.name for entry in two.iterdir()) == ["step_00000010", "step_00000020"]


def test_readers_survive_a_saver_that_prunes(tmp_path):
    save_checkpoint(tmp_path, {"model": net_of(1)}, step=1)
    failures, newest, done = [], [], threading.Event()

    def read():
        while not done.is_set():
            try:
                newest.append(latest_checkpoint(tmp_path))
            except Exception as error:
                failures.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for step in range(2, 30):
            save_checkpoint(tmp_path, {"model": net_of(step)}, step=step)
            prune_checkpoints(tmp_path, keep=1)
    finally:
        done.set()
        reader.join()
    assert failures == []
    assert None not in newest
    assert [checkpoint_step(path) for path in newest] == sorted(checkpoint_step(path) for path in newest)


if __name__ == "__main__":
    torch.set_num_threads(1)
    kill_while_saving(sys.argv[1], same_step=False)
    kill_while_saving(sys.argv[2], same_step=True)
