"The same on a real S3 server: moto's, in a process of its own on localhost."

import gzip
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest
from ports import free_port

from llm_from_scratch import storage
from llm_from_scratch.artifacts import write_atomic, write_manifest
from llm_from_scratch.env import UserError
from llm_from_scratch.storage import BLOCK_BYTES, fetch, list_files, open_binary, publish_folder

pytest.importorskip("moto.server", reason="moto[server] is not installed")
s3fs = pytest.importorskip("s3fs")


def start_server(port):
    command = [sys.executable, "-c", "from moto.server import main; main()", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 300
    while True:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/moto-api/", timeout=1)
            return server
        except (urllib.error.URLError, OSError):
            assert server.poll() is None and time.monotonic() < deadline, "moto's server does not start"
            time.sleep(0.1)


@pytest.fixture(scope="module")
def endpoint():
    port = free_port()
    server = start_server(port)
    yield f"http://127.0.0.1:{port}"
    server.kill()
    server.wait()


@pytest.fixture
def bucket(endpoint, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    s3fs.S3FileSystem.clear_instance_cache()
    store = s3fs.S3FileSystem()
    if not store.exists("crawl"):
        store.mkdir("crawl")
    yield store
    store.rm("crawl", recursive=True)
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture
def folder(tmp_path):
    for name in ("00000.parquet", "report/index.html"):
        write_atomic(tmp_path / "set" / name, name * 1000)
    write_manifest(tmp_path / "set", kind="corpus", inputs={})
    return tmp_path / "set"


def test_read_list_and_fetch(bucket, tmp_path):
    record = gzip.compress(b"WARC/1.0\r\n" * 5000)
    bucket.pipe_file("crawl/segment/00000.warc.gz", record)
    bucket.pipe_file("crawl/segment/00001.warc.gz", record)
    bucket.pipe_file("crawl/segment/.part", b"x")
    bucket.pipe_file("crawl/segment/folder/", b"")
    bucket.pipe_file("crawl/notes.txt", b"x")
    names = [f"s3://crawl/segment/0000{number}.warc.gz" for number in (0, 1)]
    for pattern in ("s3://crawl/segment", "s3://crawl/*/*.warc.gz", "s3://crawl/segment/", "s3://crawl/**/*.gz"):
        assert list_files(pattern) == names, pattern
    with open_binary(names[0]) as file:
        assert gzip.decompress(file.read()) == b"WARC/1.0\r\n" * 5000
        assert file.seek(1) == 1 and file.read(1) == b"\x8b"
    copy = fetch(names[1], tmp_path / "copies")
    assert copy.name == "00001.warc.gz" and copy.read_bytes() == record
    assert fetch(names[1], tmp_path / "copies") == copy


def test_a_file_larger_than_a_block_is_streamed(bucket):
    content = bytes(range(256)) * (BLOCK_BYTES // 100)
    bucket.pipe_file("crawl/large.bin", content)
    with open_binary("s3://crawl/large.bin") as file:
        digest = hashlib.sha256()
        while block := file.read(300_000):
            digest.update(block)
            assert len(file.cache.cache) <= 2 * BLOCK_BYTES + 300_000
        assert file.seek(-1, 2) == len(content) - 1 and file.read() == b"\xff"
    assert digest.digest() == hashlib.sha256(content).digest()


def test_what_is_written_after_a_listing_is_seen(bucket):
    bucket.pipe_file("crawl/a.txt", b"x")
    assert list_files("s3://crawl") == ["s3://crawl/a.txt"]
    s3fs.S3FileSystem(skip_instance_cache=True).pipe_file("crawl/b.txt", b"y")
    assert list_files("s3://crawl") == ["s3://crawl/a.txt", "s3://crawl/b.txt"]
    assert open_binary("s3://crawl/b.txt").read() == b"y"


def test_what_is_wrong_is_one_line_with_the_address(bucket):
    bucket.pipe_file("crawl/folder/a.txt", b"x")
    for url in ("s3://crawl/none.txt", "s3://no-such-bucket/a.txt", "s3://crawl/folder"):
        with pytest.raises(UserError, match=url) as caught:
            open_binary(url)
        assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="s3://no-such-bucket/\\*.gz"):
        list_files("s3://no-such-bucket/*.gz")


def test_a_store_without_credentials_is_a_user_error(bucket, monkeypatch, tmp_path):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    s3fs.S3FileSystem.clear_instance_cache()
    for ask in (open_binary, list_files):
        with pytest.raises(UserError, match="s3://crawl/a.*(AWS_ACCESS_KEY_ID|credentials)"):
            ask("s3://crawl/a")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    s3fs.S3FileSystem.clear_instance_cache()


def test_cln_7_publish_resume_refuse(bucket, folder, tmp_path):
    manifest = json.loads((folder / "manifest.json").read_text())
    bucket.pipe_file("crawl/out/unfinished.json", json.dumps({"kind": "corpus", "hash": manifest["hash"]}).encode())
    bucket.put_file(str(folder / "00000.parquet"), "crawl/out/00000.parquet")
    assert publish_folder(folder, "s3://crawl/out") == ["report/index.html", "manifest.json"]
    assert publish_folder(folder, "s3://crawl/out") == []
    assert list_files("s3://crawl/out") == [f"s3://crawl/out/{name}" for name in ("00000.parquet", "manifest.json", "report/index.html")]
    assert bucket.cat_file("crawl/out/report/index.html") == (folder / "report/index.html").read_bytes()
    write_atomic(tmp_path / "other" / "a", "x")
    write_manifest(tmp_path / "other", kind="corpus", inputs={})
    with pytest.raises(UserError, match="take another destination"):
        publish_folder(tmp_path / "other", "s3://crawl/out")
    with pytest.raises(UserError, match="no-such-bucket"):
        publish_folder(folder, "s3://no-such-bucket/out")


def fork_publisher(folder, url):
    publisher = os.fork()
    if publisher == 0:
        s3fs.S3FileSystem.clear_instance_cache()
        send, sent = storage._send, []

        def send_four(*arguments):
            if len(sent) == 4:
                time.sleep(600)  # until it is killed
            sent.append(send(*arguments))

        storage._send = send_four
        publish_folder(folder, url)
        os._exit(0)
    return publisher


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks and kills a process")
def test_a_publisher_killed_midway_leaves_no_manifest(bucket, tmp_path):
    for number in range(15):
        write_atomic(tmp_path / "set" / f"{number:05}.bin", bytes([number]) * 50_000)
    write_manifest(tmp_path / "set", kind="corpus", inputs={})
    publisher, deadline = fork_publisher(tmp_path / "set", "s3://crawl/out"), time.monotonic() + 120
    while len(bucket.find("crawl/out", refresh=True)) < 5 and time.monotonic() < deadline:
        bucket.invalidate_cache()
        time.sleep(0.02)
    os.kill(publisher, signal.SIGKILL)
    status = os.waitpid(publisher, 0)[1]
    bucket.invalidate_cache()
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL, "the kill came too late: the test proves nothing"
    assert not bucket.exists("crawl/out/manifest.json")
    sent = publish_folder(tmp_path / "set", "s3://crawl/out")
    assert sent[-1] == "manifest.json" and len(sent) < 15
    assert len(list_files("s3://crawl/out")) == 16
