"Cases of stored tokens: types, offsets, borders, damage."
import json
import multiprocessing
import pickle
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from llm_from_scratch.artifacts import read_manifest
from llm_from_scratch.config import DataConfig
from llm_from_scratch.documents import Document
from llm_from_scratch.env import UserError, hash_json
from llm_from_scratch.token_shards import (
    EncodedDocument, cached_shards, document_at, encode_documents, map_tokens, open_shards, token_dtype, token_offset_bytes, write_shards, write_splits)


class ByteTokenizer:
    "A byte plus four; the smallest thing that encodes."
    vocab_size, pad_id, unk_id, bos_id, eos_id, fingerprint = 260, 0, 1, 2, 3, "bytes"

    def encode_batch(self, texts, *, bos=False, eos=False, num_threads=None):
        return [[2] * bos + [4 + byte for byte in text.encode()] + [3] * eos for text in texts]


def write_and_open(tmp_path, docs, vocab_size, **options):
    write_shards(docs, tmp_path / "tokens", vocab_size=vocab_size, tokenizer_fingerprint="f1", **options)
    return open_shards(tmp_path / "tokens", tokenizer_fingerprint="f1", deep=True)


def test_data_1_narrow_type_holds_its_largest_id(tmp_path):
    shards = write_and_open(tmp_path, [[0, 65_535]], 65_536)
    assert shards.dtype == np.dtype("<u2") and shards.shards[0].tolist() == [0, 65_535]


def test_data_1_wide_vocabulary_gets_a_wide_type(tmp_path):
    shards = write_and_open(tmp_path, [[0, 70_000]], 70_001)
    assert shards.dtype == np.dtype("<u4") and shards.shards[0].tolist() == [0, 70_000]
    assert read_manifest(tmp_path / "tokens")["extra"]["dtype"] == "uint32"


def test_data_1_type_follows_the_vocabulary_not_the_data(tmp_path):
    assert write_and_open(tmp_path, [[1, 2]], 65_537).dtype.itemsize == 4


@pytest.mark.parametrize("vocab_size, dtype", [(65_537, "uint16"), (2**32 + 1, "auto"), (0, "auto"), (100, "int8")])
def test_data_1_impossible_type_is_refused(vocab_size, dtype):
    with pytest.raises(UserError): token_dtype(vocab_size, dtype)


@pytest.mark.parametrize("bad", [70_001, 65_536 + 2**32, -1])
def test_data_1_foreign_id_names_the_document(tmp_path, bad):
    with pytest.raises(UserError, match=f"page-7.*{bad}"):
        write_and_open(tmp_path, [EncodedDocument([1], "fine"), EncodedDocument([1, bad], "page-7")], 70_001)
    assert list(tmp_path.iterdir()) == []


def claim(folder, **facts):
    "Change what a manifest says, as a faulty writer would: with a hash that fits."
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["extra"].update(facts)
    del manifest["hash"]
    (folder / "manifest.json").write_text(json.dumps({**manifest, "hash": hash_json(manifest)}))


@pytest.mark.parametrize("facts, message", [
    (dict(dtype="uint16", vocab_size=100), "12 bytes, but 3 tokens of uint16 take 6"), (dict(dtype="uint16"), "70001 does not fit uint16"),
    (dict(vocab_size=3), "holds id 3, outside the vocabulary of 3"), (dict(dtype="int16"), "int16")])
def test_data_1_false_claims_are_refused_when_opened(tmp_path, facts, message):
    write_and_open(tmp_path, [[1, 2, 3]], 70_001)
    claim(tmp_path / "tokens", **facts)
    with pytest.raises(UserError, match=message): open_shards(tmp_path / "tokens")


def test_data_5_offsets_do_not_wrap():
    assert token_offset_bytes(np.uint32(600_000), np.uint32(4_096), np.uint32(2)) == 4_915_200_000
    assert token_offset_bytes(np.int32(600_000), np.int32(4_096), np.int32(4)) == 9_830_400_000


def test_data_5_tokens_beyond_four_gigabytes_are_read(tmp_path):
    num_tokens = 2**31 + 100
    with open(tmp_path / "00000.bin", "wb") as file:
        file.truncate(token_offset_bytes(num_tokens, 1, 2))
        file.seek(token_offset_bytes(num_tokens - 3, 1, 2))
        file.write(np.array([7, 8, 9], "<u2").tobytes())
    tokens = map_tokens(tmp_path / "00000.bin", np.dtype("<u2"), num_tokens)
    assert tokens[np.uint32(num_tokens - 3):].tolist() == [7, 8, 9] and tokens[0] == 0


def test_documents_stay_whole_and_can_be_found_again(tmp_path):
    docs = [EncodedDocument(range(length), f"doc-{number}", num_bytes=length) for number, length in enumerate([4, 5, 3, 25, 10, 2])]
    shards = write_and_open(tmp_path, docs, 100, shard_tokens=10)
    assert [len(shard) for shard in shards.shards] == [9, 3, 25, 10, 2]
    assert (shards.num_tokens, shards.num_documents, shards.num_bytes) == (49, 6, 49)
    found = [document_at(shards, shard, token)["id"] for shard, tokens in enumerate(shards.shards) for token in range(len(tokens))]
    assert found == [document.id for document in docs for _ in document.ids]


def test_empty_documents_are_counted(tmp_path):
    shards = write_and_open(tmp_path, [[], [1], []], 10)
    assert shards.num_documents == 1 and shards.manifest["extra"]["num_empty_documents"] == 2
    with pytest.raises(UserError, match="no token"): write_shards([[]], tmp_path / "none", vocab_size=10, tokenizer_fingerprint="f1")
    assert not (tmp_path / "none").exists()


def test_another_tokenizer_is_refused_naming_both(tmp_path):
    write_and_open(tmp_path, [[1]], 10)
    with pytest.raises(UserError) as error: open_shards(tmp_path / "tokens", tokenizer_fingerprint="f2")
    assert "f1" in str(error.value) and "f2" in str(error.value)


def test_damage_is_refused(tmp_path):
    write_and_open(tmp_path, [[1, 2, 3], [4]], 10)
    tokens = tmp_path / "tokens" / "00000.bin"
    tokens.write_bytes(tokens.read_bytes()[::-1])
    with pytest.raises(UserError, match="00000.bin"): open_shards(tmp_path / "tokens", deep=True)
    tokens.write_bytes(tokens.read_bytes()[:-1])
    with pytest.raises(UserError, match="00000.bin"): open_shards(tmp_path / "tokens")
    tokens.unlink()
    with pytest.raises(UserError, match="00000.bin"): open_shards(tmp_path / "tokens")


def test_pickled_shards_carry_no_tokens(tmp_path):
    shards = write_and_open(tmp_path, [np.zeros(100_000, np.int64)], 10)
    message = pickle.dumps(shards)
    assert len(message) < 1_000 and pickle.loads(message).num_tokens == 100_000


def test_one_bos_and_one_eos_a_document():
    class Doubling(ByteTokenizer):
        def encode_batch(self, texts, **options): return [[2, *ids] for ids in super().encode_batch(texts, **options)]

    documents = [Document("a", "<s>é"), Document("b", "")]
    encoded = list(encode_documents(documents, ByteTokenizer(), Counter()))
    assert [(list(document.ids).count(2), list(document.ids).count(3)) for document in encoded] == [(1, 1), (1, 1)]
    with pytest.raises(UserError, match="document a: 2 BOS"): list(encode_documents(documents, Doubling(), Counter()))


def test_splits_do_not_move_when_documents_come(tmp_path):
    def names(count, out):
        write_splits([Document(f"doc-{number}", "text") for number in range(count)], ByteTokenizer(), out, cfg=DataConfig(val_fraction=0.3), reading=Counter())
        shards = open_shards(out / "val")
        return {document_at(shards, 0, int(start))["id"] for start in shards.starts[0]}
    few, many = names(50, tmp_path / "few"), names(100, tmp_path / "many")
    assert few and few < many and all(int(name[4:]) >= 50 for name in many - few)


def test_one_document_gives_both_splits(tmp_path):
    page = tmp_path / "page.txt"
    page.write_text("words")
    sizes = [cached_shards(DataConfig(val_fraction=1e-9), ByteTokenizer(), [page], split, tmp_path / "cache").num_bytes for split in ("train", "val")]
    assert sizes == [4, 1]


def test_empty_split_says_what_to_do(tmp_path):
    page = tmp_path / "page.txt"
    page.write_text("x")
    with pytest.raises(UserError, match="split of 1 file.*give more text"):
        for split in ("train", "val"):
            cached_shards(DataConfig(), ByteTokenizer(), [page], split, tmp_path / "cache")


def fill_cache(files, cache, answers):
    answers.put(cached_shards(DataConfig(val_fraction=0.2), ByteTokenizer(), files, "train", cache).manifest["hash"])


def test_processes_that_fill_one_cache_agree(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # names decide the split: they must not hold the folder's
    files = [Path(f"page-{number}.txt") for number in range(30)]
    for file in files: file.write_text(f"page {file.stem}")
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    workers = [context.Process(target=fill_cache, args=(files, tmp_path / "cache", answers), daemon=True) for _ in range(3)]
    for worker in workers: worker.start()
    hashes = {answers.get(timeout=300) for _ in workers}
    for worker in workers: worker.join(300)
    assert len(hashes) == 1
    assert len([path for path in (tmp_path / "cache" / "shards").iterdir() if path.is_dir()]) == 1


def test_documents_left_out_are_counted_in_the_manifest(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # names decide the split: they must not hold the folder's
    for number in range(10): Path(f"page-{number}.txt").write_text(f"page {number}")
    Path("latin.txt").write_bytes(b"caf\xe9")
    shards = cached_shards(DataConfig(val_fraction=0.3), ByteTokenizer(), sorted(Path().glob("*.txt")), "train", tmp_path / "cache")
    reading = shards.manifest["extra"]["reading"]
    assert reading["read"] == 11 and reading["kept"] == reading["encoded"] == 10


def test_a_damaged_cache_is_written_again(tmp_path):
    page = tmp_path / "page.txt"
    page.write_text("some words\n" * 200)
    first = cached_shards(DataConfig(), ByteTokenizer(), [page], "train", tmp_path / "cache")
    file, tokens = next(first.path.glob("*.bin")), first.shards[0].tolist()
    data = bytearray(file.read_bytes())
    data[10] ^= 1
    file.write_bytes(data)
    assert cached_shards(DataConfig(), ByteTokenizer(), [page], "train", tmp_path / "cache").shards[0].tolist() == tokens
