"What a job of many tasks owes: every task ends, a rerun does what is missing, nothing depends on the order."

import json
import os
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from llm_from_scratch.artifacts import Lock, read_json, read_manifest, verify_manifest
from llm_from_scratch.env import UserError
from llm_from_scratch.tasks import TASK_REASONS, Task, payload_hash, run_tasks

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="kills processes")
FAST = {"start_method": "forkserver"}


def shard(payload, folder):
    "Write what the text says; `log` counts the tries."
    with open(payload["log"], "a") as log:
        print(payload["text"], file=log)
    (folder / "count.json").write_text("{half")
    (folder / "deep").mkdir()
    act(payload["text"], folder)
    (folder / "count.json").write_text(json.dumps(len(payload["text"])))


def act(text, folder):
    if text == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if text == "crashes":
        os.abort()
    if text == "exits":
        os._exit(7)
    if text == "leaves":
        raise SystemExit(3)
    if text == "raises":
        raise ValueError(f"bad record in {folder}\nat byte 7")
    if text == "refuses":
        raise UserError("s3://crawl/none: no such file")
    if text == "fills memory":
        bytearray(1 << 60)


def other_shard(payload, folder):
    shard(payload, folder)


def tasks_of(tmp_path, texts):
    return [Task(f"{number:05}", {"text": text, "log": str(tmp_path / "log.txt")}) for number, text in enumerate(texts)]


def tries(tmp_path):
    return (tmp_path / "log.txt").read_text().splitlines()


def content(out):
    "Every file of a job's folder but the lock."
    return {path.relative_to(out).as_posix(): path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file() and path.name != ".tasks.lock"}


BAD = {"dies": "worker_killed", "exits": "worker_killed", "leaves": "raised", "raises": "raised", "refuses": "user_error", "fills memory": "out_of_memory"}


def test_cln_5_each_fault_is_retried_and_set_aside_and_the_rest_is_done(tmp_path):
    texts = ["a", *BAD, "b", "c"]
    tasks, out = tasks_of(tmp_path, texts), tmp_path / "out"
    told = []
    report = run_tasks(tasks, shard, out, workers=2, retries=2, on_done=lambda *values: told.append(values), **FAST)
    assert report.done == ["00000", "00007", "00008"] and report.resumed == []
    assert list(report.failed.items()) == [(f"{number:05}", BAD[texts[number]]) for number in range(1, 7)]
    assert sorted((task.name, folder, resumed) for task, folder, resumed in told) == [(name, out / name, False) for name in report.done]
    assert {text: tries(tmp_path).count(text) for text in texts} == dict.fromkeys(texts, 2) | dict.fromkeys(["a", "b", "c", "refuses"], 1)
    assert 2**20 < report.peak_memory_bytes < 2**32
    aside = {text: read_json(out / "failed" / f"{texts.index(text):05}.json") for text in BAD}
    assert {text: entry["reason"] for text, entry in aside.items()} == BAD
    assert all(entry["meaning"] == TASK_REASONS[entry["reason"]] for entry in aside.values())
    assert [aside[text]["tries"] for text in ("dies", "raises", "refuses")] == [2, 2, 1]
    assert aside["dies"]["error"] == "the worker was killed by SIGKILL" and aside["exits"]["error"].endswith("exit code 7")
    assert aside["raises"]["error"] == "at byte 7" and f"{out}/00004" in "".join(aside["raises"]["trace"]) and ".tmp-" not in str(aside)
    assert sorted(path.name for path in out.iterdir()) == [".tasks.lock", "00000", "00007", "00008", "failed"]
    assert all(verify_manifest(out / name) == [] for name in report.done)


def test_cln_5_a_rerun_does_the_missing_ones_only(tmp_path):
    out, texts = tmp_path / "out", ["a", "raises", "b"]
    run_tasks(tasks_of(tmp_path, texts), shard, out, retries=1, **FAST)
    (tmp_path / "log.txt").unlink()
    again = run_tasks(tasks_of(tmp_path, texts), shard, out, retries=1, **FAST)
    assert (again.done, again.resumed, again.failed) == ([], ["00000", "00002"], {"00001": "raised"})
    assert tries(tmp_path) == ["raises"]
    last = run_tasks(tasks_of(tmp_path, ["a", "well now", "b"]), shard, out, **FAST)
    assert (last.done, last.resumed, last.failed) == (["00001"], ["00000", "00002"], {})
    assert not (out / "failed").exists()


def test_cln_6_ded_4_one_go_many_workers_and_resumed_twice_are_the_same_bytes(tmp_path):
    texts = [str(number) * number for number in range(9)]
    one, many, thrice = tmp_path / "one", tmp_path / "many", tmp_path / "thrice"
    first = run_tasks(tasks_of(tmp_path, texts), shard, one, **FAST)
    second = run_tasks(tasks_of(tmp_path, texts)[::-1], shard, many, workers=3, **FAST)
    for part in (3, 6, 9):
        last = run_tasks(tasks_of(tmp_path, texts)[:part], shard, thrice, **FAST)
    assert content(one) == content(many) == content(thrice)
    assert first.done == second.done[::-1] == last.resumed + last.done
    assert last.resumed == first.done[:6]


def test_cln_7_another_payload_or_function_is_refused(tmp_path):
    out = tmp_path / "out"
    run_tasks(tasks_of(tmp_path, ["a", "b"]), shard, out, **FAST)
    before = content(out)
    with pytest.raises(UserError, match="00001: made with payload"):
        run_tasks(tasks_of(tmp_path, ["a", "other"]), shard, out, **FAST)
    with pytest.raises(UserError, match="00000: made with function .*:shard, but .*:other_shard"):
        run_tasks(tasks_of(tmp_path, ["a", "b"]), other_shard, out, **FAST)
    assert content(out) == before and tries(tmp_path) == ["a", "b"]


def test_cln_7_a_folder_that_is_not_ours_is_refused(tmp_path):
    out = tmp_path / "out"
    (out / "00000").mkdir(parents=True)
    (out / "00000" / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match="00000: no manifest.json"):
        run_tasks(tasks_of(tmp_path, ["a"]), shard, out, **FAST)
    assert (out / "00000" / "thesis.txt").read_text() == "mine"


def test_cln_7_two_launchers_in_a_folder(tmp_path):
    with Lock(tmp_path / "out" / ".tasks.lock"), pytest.raises(UserError, match=f"in use by process {os.getpid()}"):
        run_tasks(tasks_of(tmp_path, ["a"]), shard, tmp_path / "out", **FAST)


@pytest.mark.parametrize("harm", ["cut", "gone", "added"])
def test_a_finished_output_that_lost_bytes_is_made_again(tmp_path, harm):
    out = tmp_path / "out"
    run_tasks(tasks_of(tmp_path, ["a", "b"]), shard, out, **FAST)
    before = content(out)
    if harm == "gone":
        (out / "00001" / "count.json").unlink()
    else:
        (out / "00001" / ("count.json" if harm == "cut" else "new.json")).write_text("")
    report = run_tasks(tasks_of(tmp_path, ["a", "b"]), shard, out, **FAST)
    assert (report.done, report.resumed) == (["00001"], ["00000"])
    assert content(out) == before


@dataclass
class Options:
    path: Path
    sizes: tuple = (1, 2)


def test_payloads_hash_by_their_content():
    assert payload_hash({"b": Options(Path("a")), "a": 1}) == payload_hash({"a": 1, "b": {"path": "a", "sizes": [1, 2]}})
    assert len({payload_hash(value) for value in (1, "1", True, None, [], {}, [1], 1.5)}) == 8
    for value in ({1}, float("inf"), b"x", len, {"a": [object()]}):
        with pytest.raises(UserError, match="plain data"):
            payload_hash(value)


@pytest.mark.parametrize("name", ["", "failed", ".hidden", "a/b", "..", "-x", "é", "a b", "x" * 200, "a\n"])
def test_names_that_are_no_folders_are_refused(tmp_path, name):
    with pytest.raises(UserError, match="not a folder's name"):
        run_tasks([Task(name)], shard, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_can_not_run_is_refused_before_anything_starts(tmp_path):
    def inner(payload, folder):
        pass

    for function in (inner, lambda payload, folder: None, inner.__call__, 7):
        with pytest.raises(UserError, match="can't import"):
            run_tasks([Task("a")], function, tmp_path / "out")
    for options in ({"workers": 0}, {"retries": 0}):
        with pytest.raises(UserError, match="at least one"):
            run_tasks([Task("a")], shard, tmp_path / "out", **options)
    with pytest.raises(UserError, match="twice"):
        run_tasks([Task("a"), Task("a")], shard, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert run_tasks([], shard, tmp_path / "out").done == []


def vanishing(payload, folder):
    pass


def test_workers_that_can_not_import_end_the_job_at_once(tmp_path):
    vanishing.__qualname__ = "gone"
    try:
        with pytest.raises(UserError, match="workers can't import test_tasks_cases:gone: AttributeError"):
            run_tasks([Task("a"), Task("b")], vanishing, tmp_path / "out", **FAST)
    finally:
        vanishing.__qualname__ = "vanishing"


def test_an_error_in_the_callback_stops_the_job_and_its_workers(tmp_path):
    def fail(task, folder, resumed):
        raise RuntimeError("full disk")

    with pytest.raises(RuntimeError, match="full disk"):
        run_tasks(tasks_of(tmp_path, "abcdef"), shard, tmp_path / "out", on_done=fail, **FAST)
    finished = [path.name for path in (tmp_path / "out").glob("0*")]
    report = run_tasks(tasks_of(tmp_path, "abcdef"), shard, tmp_path / "out", **FAST)
    assert report.resumed == sorted(finished) and len(report.done) == 6 - len(finished)


def test_a_job_runs_in_a_thread_of_the_launcher(tmp_path):
    reports = []
    thread = threading.Thread(target=lambda: reports.append(run_tasks(tasks_of(tmp_path, "ab"), shard, tmp_path / "out", **FAST)))
    thread.start()
    thread.join(300)
    assert reports[0].done == ["00000", "00001"]


def report_threads(payload, folder):
    (folder / "threads.json").write_text(json.dumps({name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "SEEN_BY_SPAWN")}))
    (folder / "seconds.json").write_text(json.dumps(time.time() > 0))


def test_a_spawned_worker_has_one_thread_and_the_environment_of_now(tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("SEEN_BY_SPAWN", "yes")
    run_tasks([Task("a")], report_threads, tmp_path / "out")
    assert read_json(tmp_path / "out" / "a" / "threads.json") == {"OMP_NUM_THREADS": "1", "SEEN_BY_SPAWN": "yes"}
    assert "OMP_NUM_THREADS" not in os.environ
    assert read_manifest(tmp_path / "out" / "a", kind="task")["inputs"]["function"] == "test_tasks_cases:report_threads"
