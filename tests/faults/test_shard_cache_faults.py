"Shards on a real S3 server, with a proxy before it that cuts connections: what is damaged, gone, shared or too large."

import contextlib
import multiprocessing
import os
import socket
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from llm_from_scratch import shard_cache
from llm_from_scratch.dataloader import TokenLoader
from llm_from_scratch.env import UserError
from llm_from_scratch.shard_cache import cache_root, cached_bytes, open_remote_shards
from llm_from_scratch.storage import publish_folder
from llm_from_scratch.token_shards import document_at, open_shards, write_shards

pytest.importorskip("moto.server", reason="moto[server] is not installed")
s3fs = pytest.importorskip("s3fs")

from ports import free_port  # noqa: E402
from test_storage_s3 import start_server  # noqa: E402

SHARD_BYTES = 40_000
URL = "s3://data/tokens"


class Proxy:
    "Passes bytes on to a server. `num_cuts` times it drops an answer after `cut_after` bytes, and refuses connections until it is `back`."

    def __init__(self, port):
        self.target, self.port, self.num_cuts, self.cut_after, self.cuts_done, self.bytes_sent = port, free_port(), 0, 0, 0, 0
        self.away, self.back, self.listener = threading.Event(), threading.Event(), self.listen()
        self.back.set()
        threading.Thread(target=self.serve, daemon=True).start()

    def listen(self):
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self.port))
        listener.listen(64)
        listener.settimeout(0.02)
        return listener

    def serve(self):
        while True:
            if self.away.is_set():
                self.listener.close()
                time.sleep(0.1)
                self.listener = self.listen()
                self.away.clear()
                self.back.set()
            try:
                client, _ = self.listener.accept()
            except TimeoutError:
                continue
            client.settimeout(None)
            server = socket.create_connection(("127.0.0.1", self.target))
            for pair in ((client, server, False), (server, client, True)):
                threading.Thread(target=self.pump, args=pair, daemon=True).start()

    def pump(self, source, target, is_answer):
        passed = 0
        with contextlib.suppress(OSError):
            while data := source.recv(4096):
                passed += len(data)
                self.bytes_sent += len(data) if is_answer else 0
                if is_answer and passed > self.cut_after and self.cuts_done < self.num_cuts:
                    self.cuts_done += 1
                    self.back.clear()
                    self.away.set()
                    break
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@pytest.fixture(scope="module")
def proxy():
    port = free_port()
    server = start_server(port)
    proxy, patch = Proxy(port), pytest.MonkeyPatch()
    for name, value in {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy.port}", "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test",
                        "AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true", "AWS_MAX_ATTEMPTS": "1"}.items():
        patch.setenv(name, value)
    patch.setattr(s3fs.S3FileSystem, "retries", 1)  # the library's own tries would hide ours
    patch.setattr(shard_cache, "RETRY_SECONDS", (0.2, 0.4))
    patch.setattr(shard_cache, "time", SimpleNamespace(sleep=lambda seconds: proxy.back.wait(60)))  # the next try comes when it can be answered
    s3fs.S3FileSystem.clear_instance_cache()
    s3fs.S3FileSystem().mkdir("data")
    yield proxy
    patch.undo()
    s3fs.S3FileSystem.clear_instance_cache()
    server.kill()
    server.wait()


@pytest.fixture(scope="module")
def local(proxy, tmp_path_factory):
    "Four shards of 40,000 bytes, published under URL."
    folder = tmp_path_factory.mktemp("published") / "tokens"
    write_shards([np.full(10_000, number) for number in range(8)], folder, vocab_size=100, tokenizer_fingerprint="f1", shard_tokens=20_000)
    publish_folder(folder, URL)
    return open_shards(folder)


def publish(folder, documents, url, fingerprint="f1"):
    write_shards(documents, folder, vocab_size=100, tokenizer_fingerprint=fingerprint, shard_tokens=20_000)
    publish_folder(folder, url)
    return open_shards(folder)


def small_bytes(local):
    return sum(file["bytes"] for name, file in local.manifest["files"].items() if not name.endswith(".bin")) + (local.path / "manifest.json").stat().st_size


def is_equal(remote, local, numbers=range(4)):
    return all(np.array_equal(remote.shards[number], local.shards[number]) for number in numbers)


def test_a_connection_cut_in_the_middle_is_tried_again(proxy, local, tmp_path):
    remote = open_shards(URL, tokenizer_fingerprint="f1", cache_dir=tmp_path)
    proxy.num_cuts, proxy.cut_after, proxy.cuts_done = 2, 20_000, 0
    assert is_equal(remote, local, [3]) and proxy.cuts_done == 2
    proxy.num_cuts = 0
    before = proxy.bytes_sent
    assert is_equal(open_shards(URL, cache_dir=tmp_path), local, [3])
    assert proxy.bytes_sent - before < SHARD_BYTES, "it was fetched again"
    assert document_at(remote, 3, 19_999)["id"] == "7"


def test_corrupt_and_vanished_objects_are_named(proxy, tmp_path):
    store, url = s3fs.S3FileSystem(), "s3://data/bad"
    local = publish(tmp_path / "tokens", [np.full(20_000, number) for number in range(3)], url)
    remote, good = open_shards(url, cache_dir=tmp_path), store.cat_file("data/bad/00001.bin")
    store.pipe_file("data/bad/00001.bin", good[:-1] + b"\xff")
    with pytest.raises(UserError, match=f"{url}/00001.bin: 3 tries failed.*sha256") as error:
        remote.shards[1]
    assert local.manifest["files"]["00001.bin"]["sha256"][:12] in str(error.value) and "\n" not in str(error.value)
    store.rm("data/bad/00002.bin")
    with pytest.raises(UserError, match=f"{url}/00002.bin: 3 tries failed.*no such file"):
        remote.shards[2]
    assert not [path for path in cache_root(tmp_path).rglob("0000[12].bin")]
    store.pipe_file("data/bad/00001.bin", good)
    assert is_equal(remote, local, [0, 1]), "one bad object does no harm to the others, and it may come back"


def test_the_bound_holds_over_all_data_sets(local, tmp_path):
    other = publish(tmp_path / "other", [np.full(20_000, 7)] * 2, "s3://data/other")
    bound = small_bytes(local) + small_bytes(other) + 3 * SHARD_BYTES
    first, second = (open_shards(url, cache_dir=tmp_path, cache_bytes=bound) for url in (URL, "s3://data/other"))
    for number in range(4):
        assert is_equal(first, local, [number, 3 - number]) and int(second.shards[number % 2][0]) == 7
        assert cached_bytes(cache_root(tmp_path)) <= bound
    assert len(list(cache_root(tmp_path).rglob("*.bin"))) == 3
    tight = open_shards(URL, cache_dir=tmp_path, cache_bytes=small_bytes(local))
    with pytest.raises(UserError, match="data.cache_bytes .*no room for 0000.*raise it, or lower data.shuffle_shards"):
        [tight.shards[number] for number in range(4)]


def test_what_a_window_needs_is_never_deleted(local, tmp_path):
    bound = small_bytes(local) + 3 * SHARD_BYTES
    holder = open_shards(URL, cache_dir=tmp_path, cache_bytes=bound)
    holder.shards.prefetch([0, 1])
    arrays = [holder.shards[0], holder.shards[1]]
    other = open_shards(URL, cache_dir=tmp_path, cache_bytes=bound)
    assert is_equal(other, local, [2, 3, 2]), "one place is enough for the other reader"
    assert holder.shards.path(0).exists() and holder.shards.path(1).exists()
    assert all(np.array_equal(array, local.shards[number]) for number, array in enumerate(arrays))


def read_all(folder, order, answers):
    remote = open_remote_shards(URL, cache_dir=folder)
    answers.put([int(remote.shards[number][0]) for number in order])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_two_processes_share_one_cache(proxy, local, tmp_path):
    s3fs.S3FileSystem.clear_instance_cache()
    before, context = proxy.bytes_sent, multiprocessing.get_context("fork")
    answers, orders = context.Queue(), (range(4), range(3, -1, -1))
    readers = [context.Process(target=read_all, args=(tmp_path, order, answers), daemon=True) for order in orders]
    for reader in readers:
        reader.start()
    found = [answers.get(timeout=300) for _ in readers]
    for reader in readers:
        reader.join(60)
    assert sorted(found) == [[0, 2, 4, 6], [6, 4, 2, 0]]
    once = 4 * SHARD_BYTES + small_bytes(local)
    assert proxy.bytes_sent - before < 1.5 * once, "each shard was to be fetched once"
    assert not list(cache_root(tmp_path).rglob("*.part"))


def test_what_a_killed_process_left_is_no_obstacle(local, tmp_path):
    remote = open_shards(URL, cache_dir=tmp_path)
    remote.shards.path(1).with_suffix(".bin.part").write_bytes(bytes(SHARD_BYTES))
    remote.shards.path(2).write_bytes(bytes(10))
    assert is_equal(remote, local, [1, 2])


def test_a_set_made_anew_under_the_same_address_is_another_one(proxy, tmp_path):
    url = "s3://data/renewed"
    publish(tmp_path / "old", [[4, 5]], url)
    remote = open_shards(url, tokenizer_fingerprint="f1", cache_dir=tmp_path)
    s3fs.S3FileSystem().rm("data/renewed", recursive=True)
    publish(tmp_path / "new", [[1, 2, 3]], url, "f2")
    with pytest.raises(UserError, match="made with tokenizer f2, but f1 is in use"):
        open_shards(url, tokenizer_fingerprint="f1", cache_dir=tmp_path)
    call, arguments = remote.__reduce__()
    with pytest.raises(UserError, match="held the set .* now; start again"):
        call(*arguments)
    assert open_shards(url, cache_dir=tmp_path).num_tokens == 3


def test_a_loader_reads_the_same_rows(local, tmp_path):
    remote = open_shards(URL, cache_dir=tmp_path)
    options = dict(batch_size=16, seq_len=100, shuffle=False)
    for mine, theirs in zip(TokenLoader(remote, **options), TokenLoader(local, **options), strict=True):
        assert mine.inputs.equal(theirs.inputs) and mine.doc_ids.equal(theirs.doc_ids)
