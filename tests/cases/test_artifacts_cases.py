import json
import os
import signal
import subprocess
import sys
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

WRITER = """
import sys
from llm_from_scratch.artifacts import atomic_folder, write_atomic, write_manifest
print("ready", flush=True)
step = 0
while True:
    step += 1
    write_atomic(f"{sys.argv[1]}/state.json", "[" + ",".join([str(step)] * 50_000) + "]")
    with atomic_folder(f"{sys.argv[1]}/set", overwrite=True) as folder:
        for name in "abc":
            (folder / name).write_bytes(bytes([step % 256]) * 500_000)
        write_manifest(folder, kind="set", inputs={}, extra={"step": step})
"""


def test_killed_writer_leaves_whole_files_and_folders(tmp_path):
    for delay_seconds in (0.03, 0.11, 0.2):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE)
        writer.stdout.readline()
        deadline = time.monotonic() + 60
        while not (tmp_path / "set").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(delay_seconds)
        writer.kill()
        writer.wait()
        assert len(set(read_json(tmp_path / "state.json"))) == 1
        assert verify_manifest(tmp_path / "set") == []
        remove_stale(tmp_path)
        assert {path.name for path in tmp_path.iterdir()} == {"state.json", "set"}


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


def test_folder_set_aside_by_a_dead_process_comes_back_or_goes(tmp_path):
    with atomic_folder(tmp_path / "set") as folder:
        living = folder.name
    mark = living.split("-")[-1]
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    aside = tmp_path / f".other.old-{dead.pid}-{mark}"
    aside.mkdir()
    remove_stale(tmp_path)
    assert aside.exists() or (tmp_path / "other").exists()
    (tmp_path / "other").mkdir(exist_ok=True)
    remove_stale(tmp_path)
    assert not aside.exists()


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
    code = ("import sys, time; from llm_from_scratch.artifacts import Lock\n"
            "with Lock(sys.argv[1]): print('held', flush=True); time.sleep(60)")
    holder = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE)
    try:
        holder.stdout.readline()
        with pytest.raises(UserError, match=f"process {holder.pid} on "):
            Lock(tmp_path).__enter__()
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait()
        with Lock(tmp_path):
            pass
    finally:
        holder.kill()


def test_cache_folder_follows_the_environment(tmp_path):
    assert default_cache_dir({"LLM_CACHE": str(tmp_path)}) == tmp_path
    assert default_cache_dir({"HOME": "ignored"}).name == "llm_from_scratch"
