"Cases of the encoding command: stops, workers, changed inputs, and what training accepts of its result."

import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from llm_from_scratch.artifacts import read_json, read_manifest, verify_manifest, write_json, write_manifest
from llm_from_scratch.config import build_config
from llm_from_scratch.documents import corpus_files, read_corpus
from llm_from_scratch.encoding import EncodeConfig, encode_corpus, make_plan, plan_tasks
from llm_from_scratch.env import UserError, hash_json
from llm_from_scratch.token_shards import document_at, main, open_shards, write_splits
from llm_from_scratch.tokenizer import Tokenizer
from llm_from_scratch.train import is_code
from llm_from_scratch.training_loop import prepare_data

OPTIONS = ["--tokenizer.vocab-size", "300", "--data.val-fraction", "0.2", "--data.shard-tokens", "5000"]


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LLM_CACHE", str(tmp_path / "cache"))


def write_texts(count=1_100, words="word"):
    Path("texts").mkdir(exist_ok=True)
    for number in range(count):
        Path("texts", f"page-{number:04d}.txt").write_text(f"{words} {number} of a book\n" * (1 + number % 5))
    Path("texts", "broken.txt").write_bytes(b"caf\xe9")


def settings(**more):
    values = {"data": {"path": ["texts"], "val_fraction": 0.2, "shard_tokens": 5000}, "tokenizer": {"vocab_size": 300}}
    return build_config(values, more, kind=EncodeConfig)


def start():
    command = [sys.executable, "-m", "llm_from_scratch.token_shards", "encode", "--inputs", "texts", "--out", "tokens", *OPTIONS]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])})


def contents(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="kills a process")
def test_killed_and_started_again_it_does_the_rest_on_other_workers(capsys):
    write_texts()
    first, deadline = start(), time.monotonic() + 300
    while not Path("tokens.work/tasks/00000/manifest.json").exists():
        assert time.monotonic() < deadline and first.poll() is None, first.communicate()
        time.sleep(0.01)
    first.kill()
    first.communicate()
    assert not Path("tokens").exists(), "the kill came too late: the test proves nothing"
    assert main(["encode", "--inputs", "texts", "--out", "tokens", *OPTIONS, "--workers", "2"]) == 0
    out, err = capsys.readouterr()
    assert "task 00000 of 3" in err and "found finished" in err and err.count("found finished") < 3
    assert "--data.path tokens" in out and not Path("tokens.work").exists()
    tokenizer, files, reading = Tokenizer.load("tokens/tokenizer"), corpus_files(["texts"]), Counter()
    write_splits(read_corpus(files, 0.2, reading), tokenizer, "one-pass", cfg=settings().data, reading=reading, inputs={"corpus": read_manifest("tokens")["inputs"]["corpus"]})
    for split in ("train", "val"):
        assert contents(f"tokens/{split}") == contents(f"one-pass/{split}")
    assert read_manifest("tokens")["extra"]["reading"]["not_utf8"] == 1
    assert verify_manifest("tokens") == []


def encode_in_process(cfg, monkeypatch):
    "The same without worker processes: each task is called here."
    from llm_from_scratch import encoding

    def run(tasks, folder, workers):
        for task in tasks:
            place = Path(folder, task.name)
            place.mkdir(parents=True)
            encoding.encode_group(task.payload, place)

    monkeypatch.setattr(encoding, "run_encoding", run)
    return encode_corpus(cfg)


def test_training_takes_the_folder_as_it_is(monkeypatch):
    write_texts(60)
    made = encode_in_process(settings(), monkeypatch)
    config = build_config({"data": {"path": ["tokens"]}})
    data = prepare_data(config)
    assert data.tokenizer.fingerprint == made["inputs"]["tokenizer"] and data.train.num_tokens == made["extra"]["train"]["num_tokens"]
    assert data.val.manifest["extra"]["val_fraction"] == 0.2 and not is_code(config)
    assert not Path("cache").exists(), "nothing is encoded or trained again"


def test_training_refuses_another_tokenizer_a_narrow_type_and_a_changed_shard(monkeypatch):
    write_texts(60)
    made = encode_in_process(settings(), monkeypatch)
    other = Tokenizer.train(["other words of another book " * 9], out="other", vocab_size=280)
    with pytest.raises(UserError) as error:
        prepare_data(build_config({"data": {"path": ["tokens"]}, "tokenizer": {"path": "other"}}))
    assert other.fingerprint in str(error.value) and made["inputs"]["tokenizer"] in str(error.value)
    shard = Path("tokens/val/00000.bin")
    before = made["files"]["val/00000.bin"]["sha256"]
    shard.write_bytes(shard.read_bytes()[::-1])
    with pytest.raises(UserError, match=f"00000.bin: content changed .*expected {before[:12]}"):
        prepare_data(build_config({"data": {"path": ["tokens"]}}))
    with pytest.raises(UserError, match="name the folder above it"):
        prepare_data(build_config({"data": {"path": ["tokens/train"]}}))
    with pytest.raises(UserError, match="can't be mixed"):
        prepare_data(build_config({"data": {"path": ["tokens", "texts"]}}))


def test_another_job_never_takes_over_the_work(monkeypatch):
    write_texts(60)
    encode_in_process(settings(), monkeypatch)
    for change, what in (
        ({"tokenizer": {"vocab_size": 310}}, "tokenizer.vocab_size was 300, now 310"),
        ({"data": {"val_fraction": 0.3}}, "val_fraction was 0.2, now 0.3"),
        ({"data": {"shard_tokens": 7}}, "shard_tokens was 5000, now 7"),
    ):
        with pytest.raises(UserError, match=what):
            encode_corpus(settings(**change))
    Path("texts/page-0001.txt").write_text("Page 1 of a book!\n")
    with pytest.raises(UserError, match="corpus was"):
        encode_corpus(settings())


def test_an_input_that_changes_under_way_is_named():
    write_texts(60)
    tasks = plan_tasks(make_plan(settings(), corpus_files(["texts"])), "f1")
    Path("texts/page-0007.txt").write_text("x")
    from llm_from_scratch.encoding import encode_group
    with pytest.raises(UserError, match="page-0007.txt: 1 bytes"):
        encode_group(tasks[0].payload, Path("work/tasks/00000"))


def test_a_corpus_is_known_by_its_manifest_and_brings_its_weights(monkeypatch):
    Path("corpus").mkdir()
    rows = {"id": [f"doc-{number}" for number in range(50)], "text": ["some words of a page\n"] * 50, "source": ["x.org"] * 25 + ["y.org"] * 25}
    parquet.write_table(pyarrow.table(rows), "corpus/00000.parquet")
    write_json(Path("corpus/weights.json"), {"x.org": 0.25})
    manifest = write_manifest("corpus", kind="corpus", inputs={})
    encode_in_process(settings(data={"path": ["corpus"]}), monkeypatch)
    train = open_shards("tokens/train", deep=True)
    assert train.manifest["inputs"]["corpus"] == manifest["hash"] and "weights.json" in train.manifest["files"]
    assert read_json(Path("tokens/train/weights.json")) == {"x.org": 0.25}
    assert document_at(train, 0, 0)["source"] == "x.org"
    Path("tokens/manifest.json").unlink()
    Path("corpus/00000.parquet").write_bytes(b"cut")
    with pytest.raises(UserError, match="corpus: 00000.parquet: 3 bytes"):
        encode_corpus(settings(data={"path": ["corpus"]}, out="again"))


def test_one_book_is_cut_in_two(monkeypatch):
    Path("book.txt").write_text("".join(f"line {number} of the only book\n" for number in range(100)))
    encode_in_process(settings(data={"path": ["book.txt"]}), monkeypatch)
    assert [open_shards(f"tokens/{split}").num_documents for split in ("train", "val")] == [1, 1]
    assert read_manifest("tokens")["extra"]["reading"]["cut"] == 1


def test_nothing_readable_at_all_is_an_error():
    Path("texts").mkdir()
    Path("texts/broken.txt").write_bytes(b"caf\xe9")
    with pytest.raises(UserError, match="broken.txt: not_utf8"):
        encode_corpus(settings())
    assert not Path("tokens").exists()


def test_data_1_an_id_outside_the_vocabulary_names_shard_and_document(monkeypatch):
    write_texts(60)
    encode_in_process(settings(), monkeypatch)
    folder = Path("tokens/train")
    manifest = json.loads((folder / "manifest.json").read_text())
    shard = np.fromfile(folder / "00000.bin", "<u2")
    position = len(shard) // 2
    shard[position] = 999
    shard.tofile(folder / "00000.bin")
    manifest["extra"]["shards"][0]["max_id"] = 999
    del manifest["hash"]
    (folder / "manifest.json").write_text(json.dumps({**manifest, "hash": hash_json(manifest)}))
    with pytest.raises(UserError, match="shard 00000 holds id 999, outside the vocabulary of 300, in document page-") as error:
        open_shards(folder)
    assert "at token" in str(error.value)


def test_a_start_that_made_nothing_does_not_stand_in_the_way(tmp_path):
    (tmp_path / "texts").mkdir()
    for number in range(30): (tmp_path / "texts" / f"{number}.txt").write_text(f"A line of text, number {number}, over the hills.\n" * 20)
    arguments = ["encode", "--inputs", str(tmp_path / "texts"), "--out", str(tmp_path / "tokens")]
    with pytest.raises(UserError, match="vocab_size 8 is too small"): main([*arguments, "--tokenizer.vocab-size", "8"])
    assert main([*arguments, "--tokenizer.vocab-size", "320"]) == 0


def write_damage(folder):
    "Texts, and beside them a tar cut in half, a tar with an overwritten header, a cut Arrow file, and a text that is not UTF-8."
    folder.mkdir()
    for number in range(9):
        (folder / f"page-{number}.txt").write_text(f"page {number} of a book\n" * 20)
    (folder / "latin.txt").write_bytes(b"caf\xe9")
    shard = io.BytesIO()
    with tarfile.open(fileobj=shard, mode="w") as tar:
        for number in range(20):
            member = tarfile.TarInfo(f"{number:03d}.txt")
            member.size = 600
            tar.addfile(member, io.BytesIO(b"page %03d\n" % number * 60 + b"." * 60))
    data = shard.getvalue()
    (folder / "cut.tar").write_bytes(data[:len(data) // 2])
    (folder / "overwritten.tar").write_bytes(data[:1536 * 5] + b"\xff" * 512 + data[1536 * 5 + 512:])
    table = pyarrow.table({"text": [f"row {number} of a table\n" * 9 for number in range(99)]})
    sink = io.BytesIO()
    with pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=9)
    (folder / "cut.arrow").write_bytes(sink.getvalue()[:len(sink.getvalue()) // 2])


def test_what_damage_cost_is_said_at_the_end(tmp_path, capsys):
    write_damage(tmp_path / "damaged")
    assert main(["encode", "--inputs", "damaged", "--out", "tokens", *OPTIONS]) == 0
    places = read_manifest("tokens")["extra"]["reading"]["damaged"]
    assert places >= 3 and f"left out 1 not_utf8, what stood at {places} damaged places\n" in capsys.readouterr().out


def test_info_finds_an_edited_shard_and_an_edited_inner_manifest(capsys):
    write_texts(20)
    assert main(["encode", "--inputs", "texts", "--out", "tokens", *OPTIONS]) == 0
    assert main(["info", "tokens"]) == 0
    for name in ("train/00000.bin", "val/manifest.json"):
        data = Path("tokens", name).read_bytes()
        Path("tokens", name).write_bytes(data[:-3] + bytes([data[-3] ^ 1]) + data[-2:])
        capsys.readouterr()
        assert main(["info", "tokens"]) == 1
        assert json.loads(capsys.readouterr().out)["problems"][0].startswith(f"{name}: content changed")
        Path("tokens", name).write_bytes(data)


def test_a_broken_manifest_of_encoded_tokens_is_named():
    write_texts(20)
    assert main(["encode", "--inputs", "texts", "--out", "tokens", *OPTIONS]) == 0
    for manifest in (Path("tokens/train/manifest.json"), Path("tokens/manifest.json")):
        whole = manifest.read_text()
        for damage in (whole[:-9], "{}", "", None):
            manifest.unlink() if damage is None else manifest.write_text(damage)
            with pytest.raises(UserError, match=f"{manifest.parent}.*manifest.json"):
                prepare_data(build_config({"data": {"path": [str(manifest.parent)]}}))
        manifest.write_text(whole)
