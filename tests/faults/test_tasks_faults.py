"Workers and launchers killed at any moment, on this machine and on a Dask cluster of two processes."

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from llm_from_scratch.artifacts import Lock, verify_manifest
from llm_from_scratch.env import UserError
from llm_from_scratch.tasks import Task, run_tasks

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="kills processes")


def slow_shard(payload, folder):
    "Write ten files, slowly; leave the process's number while at it; the last file waits for what the payload names."
    mark = Path(payload["busy"], str(os.getpid()))
    mark.touch()
    for number in range(10):
        while number == 9 and payload["after"] and not Path(payload["after"]).exists():
            time.sleep(0.01)
        (folder / f"{number}.txt").write_text(payload["text"] * 1000)
        time.sleep(payload["seconds"] / 10)
    mark.unlink(missing_ok=True)


def deadly_shard(payload, folder):
    "Kill the process as many times as the payload says, then write."
    with open(payload["log"], "a") as log:
        print(payload["text"], file=log)
    if Path(payload["log"]).read_text().split().count(payload["text"]) <= payload["kills"]:
        os.kill(os.getpid(), signal.SIGKILL)
    (folder / "text.txt").write_text(payload["text"])


def slow_tasks(busy, num_tasks, seconds, after=None, num_free=0):
    "All but the first few wait for a file."
    busy.mkdir(exist_ok=True)
    return [Task(f"{number:05}", {"text": f"{number} ", "busy": str(busy), "seconds": seconds, "after": after and number >= num_free and str(after)}) for number in range(num_tasks)]


def content(out):
    "The bytes of what is finished; an orphan's draft stays while nobody reaps the orphan, as in a container without init."
    files = [path for path in sorted(out.rglob("*")) if path.is_file() and path.relative_to(out).parts[0][0] != "."]
    return {path.relative_to(out).as_posix(): path.read_bytes() for path in files}


def is_free(lock):
    try:
        with Lock(lock):
            return True
    except UserError:
        return False


def busy_processes(busy):
    found = []
    for mark in busy.iterdir():
        with suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(int(mark.name)))
    return found


def wait_until(condition, seconds=300):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)


def is_gone(process):
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # it went in between
        return True


@pytest.fixture
def killer(tmp_path):
    "Kill -9 a busy worker, six times at most; the list says whom, and a file that it was twice."
    busy, done, killed = tmp_path / "busy", threading.Event(), []
    busy.mkdir()

    def kill():
        while len(killed) < 6 and not done.wait(random.uniform(0.02, 0.2)):
            for mark in list(busy.iterdir())[:1]:
                try:
                    mark.unlink()
                    os.kill(int(mark.name), signal.SIGKILL)
                    killed.append(mark.name)
                except OSError:
                    pass
            if len(killed) == 2:
                (tmp_path / "killed twice").touch()

    thread = threading.Thread(target=kill)
    thread.start()
    yield killed
    done.set()
    thread.join()


def test_cln_5_workers_killed_at_random_lose_nothing(tmp_path, killer):
    tasks, out = slow_tasks(tmp_path / "busy", 12, 0.08, after=tmp_path / "killed twice"), tmp_path / "out"
    report = run_tasks(tasks, slow_shard, out, workers=2, retries=1000, start_method="forkserver")
    assert len(killer) >= 2
    assert report.done == [task.name for task in tasks] and report.failed == {}
    assert all(verify_manifest(out / name) == [] for name in report.done)
    assert [name for name in os.listdir(out) if not name.startswith("0")] == [".tasks.lock"]


def held_tasks(folder):
    "Two tasks that end, and four that wait for a word."
    return slow_tasks(folder / "busy", 6, 0.05, after=folder / "go on", num_free=2)


def launch(folder, start_method):
    tasks = held_tasks(Path(folder))
    report = run_tasks(tasks, slow_shard, Path(folder, "out"), workers=2, start_method=start_method)
    assert len(report.done) + len(report.resumed) == 6


def start_launcher(folder, start_method):
    "A launcher in a new process; its number. Forked where its workers are, which saves the imports."
    if start_method != "fork":
        environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{Path(__file__).parent}"}
        command = [sys.executable, "-c", "import test_tasks_faults, sys; test_tasks_faults.launch(*sys.argv[1:])", str(folder), start_method]
        return subprocess.Popen(command, env=environment, stderr=open(folder / "said.txt", "w")).pid
    launcher = os.fork()
    if launcher == 0:
        os.dup2(os.open(folder / "said.txt", os.O_CREAT | os.O_WRONLY), 2)
        sys.stderr = open(2, "w")
        try:
            launch(folder, start_method)
        except BaseException as error:
            sys.stderr.flush()
            os._exit(error.code if isinstance(error, SystemExit) else 130)
        os._exit(0)
    return launcher


def end_launcher(folder, start_method, number):
    "Signal a launcher that has finished some tasks and is at others; its code and what is finished."
    (folder / "busy").mkdir()
    launcher, ending = start_launcher(folder, start_method), signal.SIGKILL
    try:
        wait_until(lambda: len(list(folder.glob("out/0*"))) == len(busy_processes(folder / "busy")) == 2)
        workers, ending = busy_processes(folder / "busy"), number
    finally:
        os.kill(launcher, ending)
        code = os.waitstatus_to_exitcode(os.waitpid(launcher, 0)[1])
    wait_until(lambda: all(map(is_gone, workers)))
    finished = sorted(path.name for path in (folder / "out").glob("0*"))
    assert finished == ["00000", "00001"]
    (folder / "go on").touch()
    return code, finished


@pytest.mark.parametrize("start_method", ["fork", pytest.param("spawn", marks=pytest.mark.slow), pytest.param("forkserver", marks=pytest.mark.slow)])
def test_cln_6_a_job_whose_launcher_is_killed_is_taken_up(tmp_path, start_method):
    code, finished = end_launcher(tmp_path, start_method, signal.SIGKILL)
    assert code == -signal.SIGKILL
    assert any(name.startswith(".0") for name in os.listdir(tmp_path / "out")), "nothing was being written"
    tasks = held_tasks(tmp_path)
    wait_until(lambda: is_free(tmp_path / "out" / ".tasks.lock"))  # a forked worker holds its launcher's lock until it is gone
    report = run_tasks(tasks, slow_shard, tmp_path / "out", workers=2, start_method="forkserver")
    assert report.resumed == finished and len(report.done) == 6 - len(finished)
    run_tasks(tasks, slow_shard, tmp_path / "one_go", workers=3, start_method="forkserver")
    assert content(tmp_path / "out") == content(tmp_path / "one_go")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_launcher_that_is_told_to_stop_says_what_stays(tmp_path, number):
    code, finished = end_launcher(tmp_path, "fork", number)
    assert code == 128 + number
    assert f"stopped: {len(finished)} of 6 tasks are finished and stay" in (tmp_path / "said.txt").read_text()
    assert [name for name in os.listdir(tmp_path / "out") if name.startswith(".")] == [".tasks.lock"]


@pytest.fixture(scope="module")
def cluster():
    distributed = pytest.importorskip("distributed")
    import dask

    with dask.config.set({"distributed.scheduler.allowed-failures": 0, "distributed.nanny.environ.OMP_NUM_THREADS": "1"}):
        with distributed.LocalCluster(2, threads_per_worker=1, dashboard_address=None, silence_logs=50) as started:
            yield started


def deadly_tasks(tmp_path, kills):
    return [Task(f"{number:05}", {"text": f"t{number}", "kills": times, "log": str(tmp_path / "log")}) for number, times in enumerate(kills)]


def test_cln_5_a_dask_worker_that_is_killed_costs_one_try_of_one_task(tmp_path, cluster):
    tasks, out = deadly_tasks(tmp_path, [0, 1, 0, 0]), tmp_path / "out"
    report = run_tasks(tasks, deadly_shard, out, cluster=cluster.scheduler_address, retries=2)
    assert report.failed == {} and len(report.done) == 4
    assert sorted((tmp_path / "log").read_text().split()) == ["t0", "t1", "t1", "t2", "t3"]
    run_tasks(tasks, deadly_shard, tmp_path / "local", start_method="forkserver")
    assert content(out) == content(tmp_path / "local")


@pytest.mark.slow
def test_cln_5_a_task_that_kills_dask_workers_is_set_aside(tmp_path, cluster):
    tasks, out, address = deadly_tasks(tmp_path, [0, 1, 0, 99, 0, 0]), tmp_path / "out", cluster.scheduler_address
    report = run_tasks(tasks, deadly_shard, out, cluster=address, retries=2)
    assert report.failed == {"00003": "worker_killed"} and len(report.done) == 5
    log = (tmp_path / "log").read_text().split()
    assert {name: log.count(name) for name in set(log)} == {"t0": 1, "t1": 2, "t2": 1, "t3": 2, "t4": 1, "t5": 1}
    assert json.loads((out / "failed" / "00003.json").read_text())["tries"] == 2
    (tmp_path / "log").write_text("t3 " * 99)
    again = run_tasks(tasks, deadly_shard, out, cluster=address)
    assert (again.done, len(again.resumed), again.failed) == (["00003"], 5, {})


def test_a_cluster_that_does_not_answer_is_named(tmp_path, monkeypatch):
    pytest.importorskip("distributed")
    monkeypatch.setattr("llm_from_scratch.tasks.DaskWorkers.__init__.__defaults__", (0.3,))
    with pytest.raises(UserError, match="cluster tcp://127.0.0.1:9: no answer"):
        run_tasks([Task("a", {})], slow_shard, tmp_path / "out", cluster="tcp://127.0.0.1:9")
