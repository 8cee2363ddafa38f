"Addresses, listings, fetched copies and published folders, on local files and a store in memory."

import importlib
import json
import os
import sys
from unittest.mock import patch

import fsspec
import pytest

from llm_from_scratch.artifacts import write_atomic, write_manifest
from llm_from_scratch.documents import list_inputs
from llm_from_scratch.env import UserError
from llm_from_scratch.storage import fetch, is_remote, list_files, open_binary, publish_folder


@pytest.fixture
def store():
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    memory.pseudo_dirs[:] = [""]
    return memory


@pytest.fixture
def folder(tmp_path):
    for name in ("a.bin", "deep/b.bin"):
        write_atomic(tmp_path / "set" / name, name)
    write_manifest(tmp_path / "set", kind="corpus", inputs={})
    return tmp_path / "set"


@pytest.mark.parametrize("path", ["C:\\crawl\\a.gz", "c:/a", "C://a", "a:b", "", "file:///a", "http:/a", "a/b://c"])
def test_paths_are_no_urls(path):
    assert not is_remote(path)


@pytest.mark.parametrize("path", ["s3://b/k", "S3A://b", "memory://a", "https://x/y.warc.gz", "gs://b/k", "abfs+x://b"])
def test_urls_are_remote(path):
    assert is_remote(path)


def test_local_listing_keeps_the_rules_of_list_inputs(tmp_path, monkeypatch):
    for name in ("b.txt", "a.txt", ".hidden/x", "deep/.x", "deep/__pycache__/y", "deep/z.gz", "[odd]/q*.txt"):
        write_atomic(tmp_path / name, "x")
    (tmp_path / "link.txt").symlink_to(tmp_path / "a.txt")
    (tmp_path / ".hidden" / "inner").mkdir()
    monkeypatch.chdir(tmp_path)
    for patterns in (["."], [str(tmp_path)], ["*.txt", "deep"], ["**/*.gz"], ["[odd]"], ["b.txt", "./b.txt"], [".hidden"], ["*"]):
        assert list_files(patterns) == [path.as_posix() for path in list_inputs(patterns)], patterns


@pytest.mark.parametrize("pattern", ["none.txt", "*.none", "empty", "memory://none", "memory://none/*.gz", "memory://crawl/*.none"])
def test_a_pattern_without_a_file_is_named(tmp_path, monkeypatch, store, pattern):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    store.pipe_file("crawl/a.gz", b"x")
    with pytest.raises(UserError, match=r"no file here"):
        list_files(["memory://crawl/a.gz", pattern])


def test_every_listed_url_can_be_opened(store):
    for name in ("crawl/a.gz", "crawl/x/b.gz", "crawl/y/.c/d.gz"):
        store.pipe_file(name, name.encode())
    urls = list_files(["memory://crawl", "memory://crawl/**/*.gz"])
    assert [open_binary(url).read().decode() for url in urls[:2]] == ["crawl/a.gz", "crawl/x/b.gz"]
    assert list_files(reversed(["memory://crawl", "memory://crawl/**/*.gz"])) == urls


def test_a_library_that_is_missing_is_named():
    known = importlib.import_module("fsspec.registry")._registry
    with patch.dict(sys.modules, {"s3fs": None}), patch.dict(known):
        known.pop("s3", None)
        with pytest.raises(UserError, match=r"install llm_from_scratch\[s3\]"):
            open_binary("s3://bucket/never-asked-for")


def test_two_objects_of_one_name_are_two_copies(store, tmp_path):
    store.pipe_file("one/a.txt", b"1")
    store.pipe_file("two/a.txt", b"2")
    copies = [fetch(f"memory://{name}/a.txt", tmp_path) for name in ("one", "two", "one")]
    assert [copy.read_bytes() for copy in copies] == [b"1", b"2", b"1"]
    assert copies[0] == copies[2] and {copy.name for copy in copies} == {"a.txt"}


def test_two_fetch_at_once(store, tmp_path):
    store.pipe_file("one/a.txt", b"1")
    get_file = type(store).get_file

    def slow(self, name, local):
        with patch.object(type(store), "get_file", get_file):
            fetch("memory://one/a.txt", tmp_path)
        get_file(self, name, local)

    with patch.object(type(store), "get_file", slow):
        copy = fetch("memory://one/a.txt", tmp_path)
    assert copy.read_bytes() == b"1"
    assert os.listdir(tmp_path) == [copy.parent.name]


@pytest.mark.parametrize("num_sent", range(4))
def test_cln_7_a_publication_broken_anywhere_is_taken_up(store, folder, num_sent):
    put, sent = type(store).put_file, []

    def breaking(self, local, name, **options):
        if len(sent) == num_sent:
            raise OSError("broken pipe")
        sent.append(name)
        put(self, local, name)

    with patch.object(type(store), "put_file", breaking):
        if num_sent < 3:
            with pytest.raises(ConnectionError, match="broken pipe"):
                publish_folder(folder, "memory://out/corpus")
            assert not store.exists("out/corpus/manifest.json")
        else:
            publish_folder(folder, "memory://out/corpus")
    expected = ["a.bin", "deep/b.bin", "manifest.json"][num_sent:]
    assert publish_folder(folder, "memory://out/corpus/") == expected
    assert sorted(store.find("out/corpus")) == [f"/out/corpus/{name}" for name in ("a.bin", "deep/b.bin", "manifest.json")]


def test_cln_7_a_half_written_object_is_sent_again(store, folder):
    publish_folder(folder, "memory://out")
    store.rm_file("out/manifest.json")
    manifest = json.loads((folder / "manifest.json").read_text())
    store.pipe_file("out/unfinished.json", json.dumps({"kind": "corpus", "hash": manifest["hash"]}).encode())
    store.pipe_file("out/a.bin", b"a.biX")
    store.pipe_file("out/deep/b.bin", b"")
    assert publish_folder(folder, "memory://out") == ["a.bin", "deep/b.bin", "manifest.json"]
    assert store.cat_file("out/a.bin") == b"a.bin"


@pytest.mark.parametrize("name", ["manifest.json", "unfinished.json", "stranger.txt"])
def test_cln_7_a_destination_of_others_stays_as_it_is(store, folder, name):
    content = json.dumps({"kind": "token_shards", "hash": "0" * 64}).encode()
    store.pipe_file(f"out/{name}", content)
    with pytest.raises(UserError, match="memory://out: holds"):
        publish_folder(folder, "memory://out")
    assert store.find("out") == [f"/out/{name}"] and store.cat_file(f"out/{name}") == content


def test_a_damaged_manifest_at_the_destination_is_a_user_error(store, folder):
    store.pipe_file("out/manifest.json", b"{")
    with pytest.raises(UserError, match="damaged"):
        publish_folder(folder, "memory://out")


def test_an_unfinished_or_damaged_folder_is_not_published(store, folder, tmp_path):
    with pytest.raises(UserError, match="no manifest.json"):
        publish_folder(tmp_path, "memory://out")
    (folder / "a.bin").write_text("cut")
    with pytest.raises(UserError, match="a.bin"):
        publish_folder(folder, "memory://out")
    with pytest.raises(UserError, match="not the URL"):
        publish_folder(folder, str(tmp_path / "out"))
    assert store.find("") == []
