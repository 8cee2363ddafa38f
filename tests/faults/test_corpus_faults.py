"The command killed, interrupted, short of room, on a store and on a cluster: nothing is lost and nothing counted twice."

import errno
import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow
import pytest
from crawl_pages import CHINESE, Built, balance, build, page, prose, record, write_crawl
from ports import free_port
from pyarrow import parquet

from llm_from_scratch import assembly, shard_cleaning
from llm_from_scratch.artifacts import Lock
from llm_from_scratch.env import UserError, run_command

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="kills processes")
OF_THE_RUN = ("manifest.json", "run.json", "report/index.html") # times, memory, how many tasks were found done


def small_crawl(folder, num_files=6):
    "Archives of two pages each."
    folder.mkdir()
    for number in range(num_files):
        (folder / f"{number}.warc.gz").write_bytes(b"".join(gzip.compress(record(f"{number}{side}", page(f"{number}{side}"))) for side in "ab"))
    return folder


def content(folder):
    return {name: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file() and (name := path.relative_to(folder).as_posix()) not in OF_THE_RUN}


def wait_until(condition, seconds=300):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)


def are_free(*locks):
    "A killed launcher's worker has its locks until it is gone."
    try:
        for lock in locks:
            with Lock(lock): pass
    except UserError: return False
    return True


def fork_build(*arguments, patch=lambda: None):
    "The command in a forked process; its number."
    launcher = os.fork()
    if launcher: return launcher
    patch()
    try: code = build(*arguments, groups=1)
    except SystemExit as error: code = error.code
    except BaseException: code = 99
    os._exit(code or 0)


def hold_shards(tasks, num_free):
    "Once so many tasks are finished the others go no further."
    sign = shard_cleaning.sign_documents
    def wait_and_sign(*values):
        while len(list(tasks.glob("0*"))) >= num_free: time.sleep(0.01)
        return sign(*values)
    return lambda: setattr(shard_cleaning, "sign_documents", wait_and_sign)


def slow_page(): assembly.write_page = lambda *values: time.sleep(600)


@pytest.fixture(scope="module")
def crawl(tmp_path_factory): return small_crawl(tmp_path_factory.mktemp("killed") / "crawl")


@pytest.fixture(scope="module")
def whole(crawl):
    "What a run in one go makes."
    assert build("--inputs", crawl, "--out", crawl.parent / "whole", groups=1) == 0
    return crawl.parent / "whole"


def kill_twice(crawl, out):
    "A launcher killed while at its tasks, and the next one while it writes the corpus."
    tasks = Path(f"{out}.work/tasks")
    launcher = fork_build("--inputs", crawl, "--out", out, patch=hold_shards(tasks, 2))
    wait_until(lambda: len(list(tasks.glob("0*"))) >= 2)
    os.kill(launcher, signal.SIGKILL)
    os.waitpid(launcher, 0)
    assert len(list(tasks.glob("0*"))) < 6
    wait_until(lambda: are_free(Path(f"{out}.work/.lock"), tasks / ".tasks.lock"))
    launcher = fork_build("--inputs", crawl, "--out", out, patch=slow_page)
    wait_until(lambda: list(out.parent.glob(f".{out.name}.tmp-*/report.json")))
    os.kill(launcher, signal.SIGKILL)
    os.waitpid(launcher, 0)
    assert not out.exists()


def test_cln_6_a_run_killed_twice_ends_as_one_in_one_go(crawl, whole, tmp_path):
    kill_twice(crawl, tmp_path / "out")
    assert build("--inputs", crawl, "--out", tmp_path / "out", groups=1) == 0
    run = json.loads((tmp_path / "out/run.json").read_text())
    assert (run["tasks_run"], run["tasks_found_done"]) == (0, 6)
    left = {name for name, data in content(whole).items() if content(tmp_path / "out").get(name) != data}
    assert left <= {"config.yaml"} and not (tmp_path / "out.work").exists()


def test_cln_6_a_killed_run_leaves_nothing_beside_the_corpus(crawl, tmp_path):
    kill_twice(crawl, tmp_path / "out")
    assert build("--inputs", crawl, "--out", tmp_path / "out", groups=1) == 0
    assert os.listdir(tmp_path) == ["out"]


def deadly(name):
    "Kill the worker that reads a file of this name."
    read = shard_cleaning.read_source
    def read_or_die(path, *values, **options):
        if Path(path).name == name: os.kill(os.getpid(), signal.SIGKILL)
        return read(path, *values, **options)
    return read_or_die


def test_cln_5_a_shard_that_kills_its_worker_is_set_aside_and_done_by_the_next_run(crawl, whole, tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        patch.setattr(shard_cleaning, "read_source", deadly("2.warc.gz"))
        assert build("--inputs", crawl, "--out", tmp_path / "out", groups=1) == 1
    assert "missing  task 00002: worker_killed: the worker was killed by SIGKILL; the same command tries it again" in capsys.readouterr().err
    first = Built(tmp_path / "out")
    assert list(first.report["missing"]) == ["00002"] and balance(first.report) == first.report["kept"] == 10
    assert build("--inputs", crawl, "--out", tmp_path / "out", groups=1) == 0
    run = json.loads((tmp_path / "out/run.json").read_text())
    assert (run["tasks_run"], run["tasks_found_done"]) == (1, 5)
    assert {name for name, data in content(whole).items() if content(tmp_path / "out").get(name) != data} <= {"config.yaml"}


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 3), pytest.param(signal.SIGTERM, 3, marks=pytest.mark.slow)])
def test_a_run_that_is_told_to_stop_goes_on_later(crawl, whole, tmp_path, number, code):
    tasks = tmp_path / "out.work/tasks"
    launcher = fork_build("--inputs", crawl, "--out", tmp_path / "out", patch=hold_shards(tasks, 1))
    wait_until(lambda: list(tasks.glob("0*")))
    os.kill(launcher, number)
    assert os.waitstatus_to_exitcode(os.waitpid(launcher, 0)[1]) == code
    assert [path.name for path in tasks.iterdir() if path.name.startswith(".0")] == []
    assert build("--inputs", crawl, "--out", tmp_path / "out", groups=1) == 0
    assert content(tmp_path / "out")["report.json"] == content(whole)["report.json"]


def test_a_full_disk_at_the_end_is_one_line(crawl, tmp_path, monkeypatch, capsys):
    def full(*values): raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(assembly, "write_page", full)
    with pytest.raises(SystemExit, match="2"):
        run_command(lambda _: build("--inputs", crawl, "--out", tmp_path / "out"))
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: ")


# New processes: seconds of imports each


def command(*arguments, environment={}, **options):
    "The command as a user starts it."
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environment
    return subprocess.run([sys.executable, "-m", "llm_from_scratch.corpus", *map(str, arguments)], env=environment, capture_output=True, text=True, timeout=300, **options)


@pytest.mark.slow
def test_ded_4_neither_the_hash_seed_nor_workers_change_a_byte(tmp_path):
    crawl = write_crawl(tmp_path / "crawl")
    for seed, workers in [(1, 1), (2, 4)]:
        ended = command("--inputs", crawl, "--out", tmp_path / f"out{seed}", "--workers", workers, environment={"PYTHONHASHSEED": str(seed)})
        assert ended.returncode == 0, ended.stderr
    one, other = content(tmp_path / "out1"), content(tmp_path / "out2")
    assert {name for name in one if one[name] != other.get(name)} <= {"config.yaml"}


@pytest.mark.slow
def test_no_terminal_and_no_input_is_no_matter(crawl, tmp_path):
    ended = command("--inputs", crawl, "--out", tmp_path / "out", "--workers", 64, stdin=subprocess.DEVNULL)
    assert ended.returncode == 0 and ended.stdout.startswith("read 12 = kept 12 + dropped 0 + damaged 0\n"), ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.slow
def test_ctrl_c_in_a_terminal_is_one_line(crawl, tmp_path):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    arguments = [sys.executable, "-m", "llm_from_scratch.corpus", "--inputs", str(crawl), "--out", str(tmp_path / "out")]
    started = subprocess.Popen(arguments, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    wait_until(lambda: (tmp_path / "out.work/tasks").exists())
    time.sleep(0.1) # its worker is importing
    os.killpg(started.pid, signal.SIGINT)
    said = started.communicate(timeout=300)[1]
    assert started.returncode == 3 and "Traceback" not in said and "the same command goes on" in said, said


@pytest.mark.slow
def test_a_corpus_goes_from_a_store_to_a_store(crawl, whole, tmp_path, monkeypatch):
    storage = pytest.importorskip("test_storage_s3", reason="needs moto's server and s3fs")
    port = free_port()
    server = storage.start_server(port)
    try:
        for name, value in {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1", "LLM_CACHE": str(tmp_path / "cache")}.items(): monkeypatch.setenv(name, value)
        store = storage.s3fs.S3FileSystem(skip_instance_cache=True)
        store.mkdir("crawl")
        for path in crawl.iterdir(): store.put_file(str(path), f"crawl/in/{path.name}")
        for _ in range(2):
            ended = command("--inputs", "s3://crawl/in/*.warc.gz", "--out", "s3://crawl/out")
            assert ended.returncode == 0 and ended.stdout.startswith("read 12 = kept 12 "), ended.stderr
        store.invalidate_cache()
        assert {name.removeprefix("crawl/out/") for name in store.find("crawl/out")} == {path.relative_to(whole).as_posix() for path in whole.rglob("*") if path.is_file()}
        refused = command("--inputs", "s3://crawl/in/1.warc.gz", "--out", "s3://crawl/out")
        assert refused.returncode == 2 and refused.stderr.startswith("error: ") and len(refused.stderr.splitlines()) == 1
        missing = command("--inputs", "s3://crawl/none/*.gz", "--out", tmp_path / "out")
        assert missing.returncode == 2 and "s3://crawl/none" in missing.stderr and len(missing.stderr.splitlines()) == 1
    finally:
        server.kill()
        server.wait()


@pytest.mark.slow
def test_a_cluster_loses_a_worker_and_nothing_else(crawl, whole, tmp_path):
    distributed = pytest.importorskip("distributed")
    with distributed.LocalCluster(2, threads_per_worker=1, dashboard_address=None, silence_logs=50) as cluster:
        launcher = fork_build("--inputs", crawl, "--out", tmp_path / "out", "--cluster", cluster.scheduler_address)
        wait_until(lambda: list((tmp_path / "out.work/tasks").glob(".0*")), 90)
        os.kill(cluster.workers[0].process.pid, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(launcher, 0)[1]) == 0
    assert content(tmp_path / "out")["report.json"] == content(whole)["report.json"]


@pytest.mark.slow
def test_a_tiny_model_trains_on_the_corpus(crawl, whole, tmp_path):
    arguments = ["--preset", "tiny", "--data.path", str(whole), "--train.steps", "2", "--tokenizer.vocab_size", "800", "--run-dir", str(tmp_path / "run")]
    ended = subprocess.run([sys.executable, "-m", "llm_from_scratch.train", *arguments], env=os.environ | {"PYTHONPATH": str(ROOT), "LLM_CACHE": str(tmp_path / "cache")}, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr


def large_inputs(folder):
    "Files that ask for memory, one after the other, written in pieces: a forked worker counts this process's memory as its own."
    line = prose("line", 20) + "\n"
    def write(name, before, times, after=b""):
        with open(folder / name, "wb") as file:
            file.write(before)
            for _ in range(times): file.write(line.encode())
            file.write(after)
        return folder / name
    head, length = record("large", "<p>", length="LENGTH"), 40_000 * len(line)
    head, _, http = head.removesuffix(b"\r\n\r\n").partition(b"\r\n\r\n")
    yield write("text.txt", b"", 300_000_000 // len(line))
    yield write("archive.warc", record("a", page("a")) + head.replace(b"LENGTH", str(len(http) + length).encode()) + b"\r\n\r\n" + http, 40_000, b"\r\n\r\n" + record("b", page("b")))
    (folder / "chinese.txt").write_text((CHINESE * 16_000)[:2_700_000])
    yield folder / "chinese.txt"
    line = json.dumps(line)[1:-1]
    yield write("line.jsonl", b'{"text": "', 300_000_000 // len(line), b'"}\n')
    with parquet.ParquetWriter(folder / "rows.parquet", pyarrow.schema([("text", pyarrow.string())])) as rows:
        rows.write_table(pyarrow.table({"text": [f"{number} {line * 300}" for number in range(300)]}))
    yield folder / "rows.parquet"


@pytest.mark.slow
def test_no_input_takes_a_gibibyte(tmp_path):
    peaks = {}
    for path in large_inputs(tmp_path):
        assert command("--inputs", path, "--out", f"{path}.out").returncode == 0
        peaks[path.name] = json.loads(Path(f"{path}.out", "run.json").read_text())["largest_worker_bytes"] / 2**30
    print(peaks)
    assert max(peaks.values()) < 1, peaks
