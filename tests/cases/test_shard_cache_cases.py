"Cases of shards from afar, on a store in memory: the seam to training, windows, processes that fork."

import json
import os
import threading
from pathlib import Path

import fsspec
import numpy as np
import pytest

from llm_from_scratch import encoding, shard_cache
from llm_from_scratch.artifacts import read_manifest
from llm_from_scratch.config import build_config
from llm_from_scratch.encoding import EncodeConfig, describe_tokens, encode_corpus
from llm_from_scratch.env import UserError, hash_json
from llm_from_scratch.shard_cache import open_remote_shards
from llm_from_scratch.storage import publish_folder
from llm_from_scratch.token_shards import open_shards, write_shards
from llm_from_scratch.training_loop import prepare_data


@pytest.fixture(autouse=True)
def store(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(shard_cache, "RETRY_SECONDS", (0.0, 0.0))
    store = fsspec.filesystem("memory")
    yield store
    if store.exists("/bucket"):
        store.rm("/bucket", recursive=True)


@pytest.fixture
def local(store, tmp_path):
    write_shards([np.full(1_000, number) for number in range(6)], tmp_path / "set", vocab_size=100, tokenizer_fingerprint="f1", shard_tokens=1_000)
    publish_folder(tmp_path / "set", "memory://bucket/set")
    return open_shards(tmp_path / "set")


def run_here(tasks, folder, workers):
    for task in tasks:
        Path(folder, task.name).mkdir(parents=True)
        encoding.encode_group(task.payload, Path(folder, task.name))


def test_what_is_encoded_to_a_store_is_trained_on_from_there(monkeypatch, tmp_path):
    for number in range(40):
        Path(f"page-{number}.txt").write_text(f"page {number} of a book\n" * 5)
    monkeypatch.setattr(encoding, "run_encoding", run_here)
    url = "memory://bucket/tokens"
    cfg = build_config({"data": {"path": ["page-*.txt"], "val_fraction": 0.2}, "tokenizer": {"vocab_size": 290}, "out": url}, kind=EncodeConfig)
    made = encode_corpus(cfg)
    assert encode_corpus(cfg)["hash"] == made["hash"] == describe_tokens(url)["hash"]
    data = prepare_data(build_config({"data": {"path": [url], "cache_dir": str(tmp_path / "mine")}}))
    assert data.tokenizer.fingerprint == made["inputs"]["tokenizer"] and data.train.num_tokens == made["extra"]["train"]["num_tokens"]
    assert data.manifests["val"] == describe_tokens(f"{url}/val")["hash"]
    assert data.val.shards[0][0] == data.tokenizer.bos_id and (tmp_path / "mine" / "remote_shards").is_dir()
    with pytest.raises(UserError, match="holds tokens, but token_shards was expected"):
        open_shards(url)


def test_an_error_ahead_reaches_whoever_reads_the_shard(local, store):
    remote, good = open_shards("memory://bucket/set"), store.cat_file("/bucket/set/00001.bin")
    store.pipe_file("/bucket/set/00001.bin", b"torn")
    remote.shards.prefetch([0, 1, 2])
    while thread := remote.shards.thread:
        thread.join()
    assert remote.shards[0][0] == 0
    with pytest.raises(UserError, match="memory://bucket/set/00001.bin: 3 tries failed.*4 bytes came, 2000 were expected"):
        remote.shards[1]
    store.pipe_file("/bucket/set/00001.bin", good)
    assert remote.shards[1][0] == 1 and remote.shards[-1][0] == 5


def test_reading_and_reading_ahead_at_once_end(local):
    small = sum(file["bytes"] for name, file in local.manifest["files"].items() if not name.endswith(".bin")) + (local.path / "manifest.json").stat().st_size
    remote = open_shards("memory://bucket/set", cache_bytes=small + 4 * 2_000)

    def read():
        for number in [0, 1, 2, 3, 4, 5] * 20:
            if number % 2 == 0:
                remote.shards.prefetch([number, number + 1])
            assert remote.shards[number][7] == number

    readers = [threading.Thread(target=read, daemon=True) for _ in range(3)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(300)
    assert not any(reader.is_alive() for reader in readers)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_forked_reader_begins_afresh(local):
    remote = open_shards("memory://bucket/set")
    remote.shards.prefetch([0, 1])
    assert remote.shards[0][0] == 0
    with remote.shards.guard:  # as a thread of the parent may hold it at that moment
        child = os.fork()
        if child == 0:
            os._exit(0 if [int(remote.shards[number][0]) for number in (0, 1)] == [0, 1] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_arrays_stay_readable_after_their_file_is_deleted(local):
    remote = open_shards("memory://bucket/set")
    array = remote.shards[2]
    shard_cache.drop_shard(remote.shards, 2)
    assert shard_cache.remove_unused(remote.shards.path(2)) == 2_000
    assert np.array_equal(array, local.shards[2]) and np.array_equal(remote.shards[2], array)


def test_a_manifest_that_leads_out_of_the_folder_is_refused(local, store, tmp_path):
    manifest = read_manifest(tmp_path / "set")
    del manifest["hash"]
    manifest["files"]["../../stolen"] = manifest["files"]["00000.bin"]
    store.pipe_file("/bucket/set/manifest.json", json.dumps({**manifest, "hash": hash_json(manifest)}).encode())
    with pytest.raises(UserError, match="outside of the folder"):
        open_remote_shards("memory://bucket/set")
