import itertools
import json
import multiprocessing
import time

import pytest

from llm_from_scratch.artifacts import (
    Lock,
    atomic_folder,
    default_cache_dir,
    read_json,
    read_manifest,
    remove_stale,
    require_inputs,
    verify_manifest,
    write_atomic,
    write_json,
    write_manifest,
)
from llm_from_scratch.env import UserError

FORK = multiprocessing.get_context("fork")


def write_for_ever(parent, first_step):
    for step in itertools.count(first_step):
        write_atomic(parent / "state.json", json.dumps([step] * 50_000))
        with atomic_folder(parent / "set", overwrite=True) as folder:
            for name in "abc":
                (folder / name).write_bytes(bytes([step % 256]) * 200_000)
            write_manifest(folder, kind="set", inputs={}, extra={"step": step})


def hold_lock(path, held):
    with Lock(path):
        held.set()
        time.sleep(600)


def test_killed_writer_leaves_whole_files_and_folders(tmp_path):
    with atomic_folder(tmp_path / "set") as folder:
        write_manifest(folder, kind="set", inputs={})
    write_json(tmp_path / "state.json", [0])
    for kill in range(12):
        writer = FORK.Process(target=write_for_ever, args=(tmp_path, 1000 * (kill + 1)))
        writer.start()
        deadline = time.monotonic() + 300
        while read_json(tmp_path / "state.json")[0] < 1000 * (kill + 1) and time.monotonic() < deadline:
            time.sleep(0.002)
        time.sleep(0.007 * kill)
        writer.kill()
        writer.join()
        assert len(set(read_json(tmp_path / "state.json"))) == 1
        assert verify_manifest(tmp_path / "set") == []
        remove_stale(tmp_path)
        assert {path.name for path in tmp_path.iterdir()} == {"state.json", "set"}
    assert read_json(tmp_path / "state.json")[0] >= 12_000


def test_write_atomic_keeps_the_old_content_on_an_error(tmp_path):
    path = write_atomic(tmp_path / "a.txt", "old\r\n")
    with pytest.raises(UnicodeEncodeError):
        write_atomic(path, "new \ud800")
    with pytest.raises(ValueError):
        write_json(path, {"loss": float("inf")})
    assert path.read_bytes() == b"old\r\n"
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_written_files_have_the_usual_rights(tmp_path):
    plain, atomic = tmp_path / "plain", tmp_path / "atomic"
    plain.write_text("x")
    write_atomic(atomic, "x")
    assert plain.stat().st_mode == atomic.stat().st_mode


def test_folder_made_meanwhile_is_not_overwritten(tmp_path):
    with pytest.raises(FileExistsError):
        with atomic_folder(tmp_path / "set") as folder:
            (folder / "mine").touch()
            (tmp_path / "set").mkdir()
            (tmp_path / "set" / "theirs").touch()
    assert [path.name for path in (tmp_path / "set").iterdir()] == ["theirs"]
    assert [path.name for path in tmp_path.iterdir()] == ["set"]


def test_folder_set_aside_is_kept_until_the_new_one_stands(tmp_path):
    with atomic_folder(tmp_path / "set") as folder:
        mark = folder.name.split("-")[-1]
    dead = FORK.Process(target=print)
    dead.start()
    dead.join()
    aside = tmp_path / f".other.old-{dead.pid}-{mark}"
    aside.mkdir()
    assert remove_stale(tmp_path) == []
    (tmp_path / "other").mkdir()
    assert remove_stale(tmp_path) == [aside]


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"hash": 1}', "{", "\xff"])
def test_a_damaged_manifest_is_a_problem_and_no_crash(tmp_path, content):
    (tmp_path / "manifest.json").write_text(content, encoding="latin-1")
    assert len(verify_manifest(tmp_path)) == 1
    with pytest.raises(UserError, match="manifest.json"):
        read_manifest(tmp_path)


def test_manifest_survives_json_whatever_its_keys(tmp_path):
    manifest = write_manifest(tmp_path, kind="x", inputs={"a": (1, 2)}, extra={"count": {10: 1, 9: 2}, "share": 0.1})
    assert read_manifest(tmp_path, kind="x") == manifest
    assert json.loads((tmp_path / "manifest.json").read_text()) == manifest


def test_inputs_that_differ_are_both_named(tmp_path):
    manifest = write_manifest(tmp_path, kind="token_shards", inputs={"tokenizer": "aaa"})
    require_inputs(manifest, where=tmp_path, tokenizer="aaa")
    with pytest.raises(UserError, match="aaa.*bbb"):
        require_inputs(manifest, where=tmp_path, tokenizer="bbb")


def test_lock_of_a_killed_holder_is_free_and_a_living_one_is_named(tmp_path):
    held = FORK.Event()
    holder = FORK.Process(target=hold_lock, args=(tmp_path, held))
    holder.start()
    try:
        assert held.wait(300)
        with pytest.raises(UserError, match=f"process {holder.pid} on "):
            Lock(tmp_path).__enter__()
    finally:
        holder.kill()
        holder.join()
    with Lock(tmp_path):
        pass


def test_cache_folder_follows_the_environment(tmp_path):
    assert default_cache_dir({"LLM_CACHE": str(tmp_path)}) == tmp_path
    assert default_cache_dir({"HOME": "ignored"}).name == "llm_from_scratch"
