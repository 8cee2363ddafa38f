import gzip
import io
import json
import random
import tarfile
from collections import Counter
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from llm_from_scratch import documents as d
from llm_from_scratch import packed_files
from llm_from_scratch.env import UserError


def read(*files):
    tally = Counter()
    found = list(d.read_documents([Path(file) for file in files], tally))
    assert tally["read"] == tally["kept"] + sum(tally[reason] for reason in d.REASONS)
    assert tally["kept"] == len(found)
    return found, tally


@pytest.fixture
def good(tmp_path):
    path = tmp_path / "good.txt"
    path.write_text("good")
    return path


def test_a_byte_order_mark_is_not_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\n")
    (tmp_path / "b.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "three"}\n')
    found, tally = read(tmp_path / "a.txt", tmp_path / "b.jsonl")
    assert [document.text for document in found] == ["one\r\ntwo\n", "three"]
    assert tally["bom_removed"] == 1


def test_a_file_of_only_a_byte_order_mark_is_empty(tmp_path, good):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf")
    assert read(good, tmp_path / "a.txt")[1]["empty"] == 1


@pytest.mark.parametrize("data", [b"caf\xe9", "text".encode("utf-16"), b"\xed\xa0\x80", b"\xff\xfe\x00"])
def test_what_is_not_utf8_is_counted_and_alone_refused(tmp_path, good, data):
    bad = tmp_path / "bad.txt"
    bad.write_bytes(data)
    assert read(good, bad)[1]["not_utf8"] == 1
    with pytest.raises(UserError, match="bad.txt: not_utf8") as error:
        read(bad)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("data", [b"", b" \n\t\r\n"])
def test_an_empty_file_is_counted_and_alone_refused(tmp_path, good, data):
    bad = tmp_path / "bad.txt"
    bad.write_bytes(data)
    assert read(good, bad)[1]["empty"] == 1
    with pytest.raises(UserError, match="empty"):
        read(bad)


def test_a_bad_json_line_costs_that_line_only(tmp_path):
    lines = [b'{"text": "one"}', b'{"text": ', b"[1]", b'{"text": 3}', b'{"text": "caf\xe9"}', b"", b'{"text": ""}', b'{"text": "two"}']
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join(lines))
    found, tally = read(path)
    assert [document.text for document in found] == ["one", "two"]
    assert [document.id.rsplit(":", 1)[1] for document in found] == ["1", "8"]
    assert tally == {"read": 8, "kept": 2, "bad_json": 1, "no_text": 2, "not_utf8": 1, "empty": 2}


def test_json_with_other_line_separators_inside_is_one_line(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "a\u2028b\x85c\r\nd"}, ensure_ascii=False) + "\n", encoding="utf-8")
    assert [document.text for document in read(path)[0]] == ["a\u2028b\x85c\r\nd"]


def test_deeply_nested_json_is_bad_json(tmp_path, good):
    path = tmp_path / "a.jsonl"
    path.write_text("[" * 200_000 + "\n")
    assert read(good, path)[1]["bad_json"] == 1


def test_lone_surrogates_are_replaced_and_pairs_survive(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "half \\ud83d"}\n{"text": "whole \\ud83d\\ude00"}\n')
    found, tally = read(path)
    assert [document.text for document in found] == ["half \ufffd", "whole 😀"]
    assert tally["surrogates_replaced"] == 1
    assert all(document.text.encode() for document in found)


def test_newlines_are_untouched(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\n a\r\nb\rc\x0c\n\n")
    assert read(path)[0][0].text == "\n a\r\nb\rc\x0c\n\n"


def test_a_truncated_archive_gives_what_it_holds(tmp_path):
    import random
    noise = random.Random(0)
    rows = [json.dumps({"text": f"{number} {noise.random()}"}) for number in range(20_000)]
    whole = gzip.compress("\n".join(rows).encode())
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(whole[: len(whole) // 2])
    found, tally = read(path)
    assert 0 < len(found) < len(rows) and tally["damaged"] == 1


def test_parquet_rows_keep_their_provenance(tmp_path):
    path = tmp_path / "a.parquet"
    columns = {"id": ["x", None], "text": ["one", "two"], "lang_prob": [0.5, None], "warc_offset": [10, 2**40], "other": [1, 2]}
    parquet.write_table(pyarrow.table(columns), path)
    found, _ = read(path)
    assert found[0] == d.Document("x", "one", lang_prob=0.5, warc_offset=10)
    assert found[1].id.endswith("a.parquet:2") and found[1].warc_offset == 2**40


def test_parquet_without_text_and_damaged_parquet(tmp_path, good):
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"body": ["one"]}), path)
    with pytest.raises(UserError, match="no column 'text', only body"):
        read(path)
    path.write_bytes(path.read_bytes()[:-5])
    assert read(good, path)[1]["damaged"] == 1


def test_a_pattern_that_matches_nothing_is_refused(tmp_path, good):
    for pattern in ["*.md", "nowhere", "nowhere/*.txt", "**/x"]:
        with pytest.raises(UserError, match="no file here") as error:
            d.list_inputs([str(good), str(tmp_path / pattern)])
        assert pattern in str(error.value)
    (tmp_path / "hollow").mkdir()
    with pytest.raises(UserError, match="hollow: no file here"):
        d.list_inputs([str(tmp_path / "hollow")])


def test_a_file_whose_name_holds_glob_characters_is_a_file(tmp_path):
    path = tmp_path / "part[1]*.txt"
    path.write_text("text")
    assert d.list_inputs([str(path)]) == [path]


def test_each_file_once_and_sorted(tmp_path):
    for name in ["b.txt", "a.txt", "sub/c.txt", ".git/d.txt", "sub/.e.txt"]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    files = d.list_inputs([str(tmp_path / "b.txt"), str(tmp_path), f"{tmp_path}/**/*.txt"])
    assert [path.relative_to(tmp_path).as_posix() for path in files] == ["a.txt", "b.txt", "sub/c.txt"]


def test_a_file_that_vanished_is_one_line(tmp_path):
    with pytest.raises(UserError, match="gone.txt: cannot be read"):
        read(tmp_path / "gone.txt")


def test_the_split_never_moves():
    names = [f"{number}.py" for number in range(2000)]
    held_out = {name for name in names if d.is_validation(name, 0.05)}
    assert 60 < len(held_out) < 140
    assert held_out == {name for name in names[::-1] + ["new"] if d.is_validation(name, 0.05)} - {"new"}
    assert d.is_validation("json/decoder.py", 0.01) is d.is_validation("json/decoder.py", 0.01)


def test_the_inputs_hash_ignores_where_the_library_lies(tmp_path, monkeypatch):
    for place in ("here", "there"):
        (tmp_path / place / "json").mkdir(parents=True)
        (tmp_path / place / "json" / "decoder.py").write_text("pass")
    hashes = []
    for place in ("here", "there"):
        monkeypatch.setattr(d, "stdlib_folder", lambda: tmp_path / place)
        hashes.append(d.inputs_hash(d.stdlib_files()))
    assert hashes[0] == hashes[1]


def test_a_corpus_that_is_moved_keeps_its_names_and_its_split(tmp_path, monkeypatch):
    for place in ("here", "there/deep"):
        for number in range(60):
            file = tmp_path / place / "texts" / f"{number % 3}" / f"{number}.txt"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"page {number}\n" * 20)
        (tmp_path / place / "texts" / "lines.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    monkeypatch.chdir(tmp_path / "here")
    asked = ["texts", "./texts/", str(tmp_path / "here" / "texts"), "../there/deep/texts"]
    found = [d.corpus_files([name]) for name in asked]
    assert {d.inputs_hash(files) for files in found} == {d.inputs_hash(found[0])}
    ids = [[document.id for document in d.read_corpus(files, 0.2, Counter())] for files in found]
    assert ids[0] == ids[1] == ids[2] == ids[3] and "0/3.txt" in ids[0] and "lines.jsonl:2" in ids[0]
    assert 2 < sum(d.is_validation(name, 0.2) for name in ids[0]) < 40
    (tmp_path / "here" / "texts").rename(tmp_path / "here" / "renamed")
    assert d.inputs_hash(d.corpus_files(["renamed"])) == d.inputs_hash(found[3])


def test_one_name_in_two_folders(tmp_path):
    for name in ["a/1.txt", "b/1.txt", "b/2.txt", "c/b/1.txt", "c/b/2.txt"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    names = lambda *given: {path.relative_to(tmp_path).as_posix(): name for path, name in d.corpus_files([str(tmp_path / part) for part in given]).items()}
    assert names("a") == {"a/1.txt": "1.txt"}
    assert names("a", "b") == {"a/1.txt": "1.txt", "b/1.txt": "b/1.txt", "b/2.txt": "b/2.txt"}
    assert names("a", "b", "c/b") == {**names("a", "b"), "c/b/1.txt": "c/b/1.txt", "c/b/2.txt": "c/b/2.txt"}
    assert names("*/1.txt") == names("a/1.txt", "b/1.txt") == {"a/1.txt": "1.txt", "b/1.txt": "b/1.txt"}
    assert names("a", "a/1.txt", "*/1.txt") == names("a", "b/1.txt")
    assert len(set(names(".").values())) == 5


def test_a_folder_round_the_library_has_a_file_of_one_of_its_names(tmp_path, monkeypatch):
    for name in ["lib/python/json/decoder.py", "lib/json/decoder.py"]:
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("pass")
    monkeypatch.setattr(d, "stdlib_folder", lambda: tmp_path / "lib/python")
    assert set(d.corpus_files([str(tmp_path / "lib")]).values()) == {"json/decoder.py", "lib/json/decoder.py"}


def test_the_library_has_its_names_however_it_is_given():
    folder = str(d.stdlib_folder() / "json")
    assert set(d.corpus_files([folder]).values()) > {"json/decoder.py", "json/__init__.py"}
    assert set(d.corpus_files([f"{folder}/*.py"]).values()) < set(d.corpus_files().values())


def test_the_inputs_hash_sees_names_and_bytes(tmp_path):
    paths = [tmp_path / name for name in ("a", "b")]
    for path in paths:
        path.write_text("one")
    first = d.inputs_hash(paths[:1])
    assert first != d.inputs_hash(paths[1:]) != d.inputs_hash(paths)
    paths[0].write_text("two")
    assert d.inputs_hash(paths[:1]) != first


def test_the_standard_library_leaves_tests_out():
    names = [d.document_id(path) for path in d.stdlib_files()]
    assert "json/decoder.py" in names and "__future__.py" in names
    assert not [name for name in names if name.startswith("/") or "/tests/" in name or name.startswith("test/")]
    assert not [name for name in names if "site-packages" in name or "_sysconfigdata" in name]


def test_odd_json_lines_cost_themselves_only(tmp_path):
    file = tmp_path / "odd.jsonl"
    file.write_text('{"text": "a", "n": ' + "9" * 5000 + '}\n{"id": "half \\ud800", "source": "\\ud800", "text": "b"}\n{"text": "c"}\n')
    tally = Counter()
    found = list(d.read_documents([file], tally))
    assert [document.text for document in found] == ["b", "c"]
    assert tally["bad_json"] == 1 and tally["read"] == 3
    for document in found:
        (document.id + (document.source or "")).encode("utf-8")


def test_files_without_a_line_or_a_row_are_counted(tmp_path, good):
    (tmp_path / "a.jsonl").write_bytes(b"")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b""))
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress(b""))
    parquet.write_table(pyarrow.table({"text": pyarrow.array([], pyarrow.string())}), tmp_path / "d.parquet")
    found, tally = read(good, *(tmp_path / name for name in ("a.jsonl", "b.jsonl.gz", "c.txt.gz", "d.parquet")))
    assert tally == {"read": 5, "kept": 1, "empty": 4}
    with pytest.raises(UserError, match="b.jsonl.gz: empty"):
        read(tmp_path / "b.jsonl.gz")


@pytest.mark.parametrize("end", [d.KEPT, d.HELD_OUT])
def test_a_foreign_id_cannot_choose_its_split(tmp_path, end):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"id": f"page-{number}{end}", "text": f"text {number}"}) + "\n" for number in range(400)))
    held_out = sum(d.is_validation(document.id, 0.25) for document in read(path)[0])
    assert 50 < held_out < 150
    (tmp_path / f"page{end}").write_text("text")
    assert not read(tmp_path / f"page{end}")[0][0].id.endswith(end)


def test_an_empty_name_does_not_mean_the_present_folder():
    with pytest.raises(UserError, match="an empty name"):
        d.list_inputs([""])


def write_tar(path, members, compress=False):
    "Members are (name, bytes) pairs; bytes None: a folder."
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.type, info.size = (tarfile.DIRTYPE, 0) if data is None else (tarfile.REGTYPE, len(data))
            tar.addfile(info, io.BytesIO(data or b""))
    path.write_bytes(gzip.compress(archive.getvalue()) if compress else archive.getvalue())
    return path


@pytest.mark.parametrize("name, compress", [("s.tar", False), ("s.tar.gz", True), ("s.tgz", True), ("plain-but.tar", True)])
def test_a_tar_shard_gives_a_document_a_sample(tmp_path, name, compress):
    rows = [("b.c/", None), ("b.c/7.json", b'{"lang": "en", "text": "worse"}'), ("b.c/7.TXT", "é\r\n".encode()), ("./8.json", b'{"text": "eight", "id": "z"}'),
            ("8.seg.png", b"\x00" * 3000), ("._8.txt", b"hidden"), ("README", b"no ending"), ("9.cls", b"1")]
    found, tally = read(write_tar(tmp_path / name, rows, compress))
    assert [(each.id.removeprefix(f"{tmp_path}/"), each.text, each.lang) for each in found] == [(f"{name}:b.c/7", "é\r\n", "en"), (f"{name}:8", "eight", None)]
    assert tally["no_text"] == 2 and tally["read"] == 4


@pytest.mark.parametrize("damage, kept, reasons", [
    (lambda data: data[:5 * 1024 + 514], 5, {"damaged": 1}),                          # cut within a member
    (lambda data: data[:4 * 1024], 4, {"damaged": 1}),                                # cut between members, no end marks
    (lambda data: data[:3 * 1024] + b"?" * 512 + data[3 * 1024 + 512:], 7, {"damaged": 1}), # a header in the middle
    (lambda data: b"", 0, {"damaged": 1}), (lambda data: b"<Error>AccessDenied</Error>", 0, {"damaged": 1})])
def test_a_damaged_tar_shard_gives_what_can_be_read_and_counts_the_rest(tmp_path, good, damage, kept, reasons):
    path = write_tar(tmp_path / "s.tar", [(f"{number}.txt", b"text") for number in range(8)])
    path.write_bytes(damage(path.read_bytes()))
    found, tally = read(path, good)
    assert len(found) == kept + 1 and {name: tally[name] for name in d.REASONS if tally[name]} == reasons


def test_a_damaged_compressed_tar_shard_is_counted(tmp_path, good):
    path = write_tar(tmp_path / "s.tar.gz", [(f"{number}.txt", random.Random(number).randbytes(3000).hex().encode()) for number in range(20)], compress=True)
    data = path.read_bytes()
    path.write_bytes(data[:len(data) // 2])
    found, tally = read(path, good)
    assert 5 < len(found) < 15 and tally["damaged"] == 1


def test_a_member_that_is_too_long_is_counted_not_held(tmp_path, good, monkeypatch):
    monkeypatch.setattr(packed_files, "MAX_LINE_BYTES", 100)
    _, tally = read(write_tar(tmp_path / "s.tar", [("1.txt", b"x" * 101), ("2.json", b'{"text": 5}')]), good)
    assert tally["too_long"] == tally["no_text"] == 1


def save_dataset(folder, columns, num_files=2, name="data"):
    folder.mkdir(parents=True)
    table, files = pyarrow.table(columns), []
    for number in range(num_files):
        files.append(f"{name}-{number:05d}-of-{num_files:05d}.arrow")
        with pyarrow.ipc.new_stream(folder / files[-1], table.schema) as stream:
            stream.write_table(table.slice(number * 2, 2), max_chunksize=1)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": file} for file in files], "_fingerprint": "1f"}))
    (folder / "dataset_info.json").write_text("{}")


def test_saved_datasets_are_read_by_their_own_list(tmp_path):
    for split in ("train", "test"):
        save_dataset(tmp_path / "saved" / split, {"text": [f"{split} {number}" for number in range(4)], "source": ["web"] * 4, "label": [1] * 4})
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    (tmp_path / "saved" / "train" / "cache-1f.arrow").write_bytes(b"of an earlier step")
    (tmp_path / "saved" / "notes.txt").write_text("beside it")
    files = d.list_inputs([str(tmp_path / "saved")])
    assert [path.relative_to(tmp_path / "saved").as_posix() for path in files] == [
        "notes.txt", *(f"{split}/data-0000{number}-of-00002.arrow" for split in ("test", "train") for number in (0, 1))]
    found, _ = read(*files)
    assert [each.text for each in found][1:] == [f"{split} {number}" for split in ("test", "train") for number in range(4)]
    assert found[-1].source == "web" and found[-1].id.endswith("train/data-00001-of-00002.arrow:2")


def test_a_state_file_of_others_is_a_text(tmp_path):
    (tmp_path / "state.json").write_text('{"_data_files": [{"filename": "x"}]}')
    (tmp_path / "dataset_dict.json").write_text("{}")
    assert [path.name for path in d.list_inputs([str(tmp_path)])] == ["dataset_dict.json", "state.json"]


@pytest.mark.parametrize("cut", [10, 300])
def test_a_torn_arrow_file_is_counted(tmp_path, good, cut):
    save_dataset(tmp_path / "saved", {"text": ["one", "two"]}, num_files=1)
    path = next((tmp_path / "saved").glob("*.arrow"))
    path.write_bytes(path.read_bytes()[:-cut])
    _, tally = read(path, good)
    assert tally["damaged"] == 1


def test_the_library_itself_writes_what_is_read(tmp_path):
    datasets = pytest.importorskip("datasets", reason="the library is no dependency")
    rows = datasets.Dataset.from_dict({"text": [f"row {number}" for number in range(2500)] + [None]})
    datasets.DatasetDict({"train": rows, "test": rows.select(range(5))}).save_to_disk(tmp_path / "saved", num_shards={"train": 3, "test": 1})
    found, tally = read(*d.list_inputs([str(tmp_path / "saved")]))
    assert len(found) == 2505 and tally["no_text"] == 1 and len({each.id for each in found}) == 2505


def test_zstandard_lines_are_read_and_a_cut_file_is_counted(tmp_path):
    packed = pyarrow.compress("".join(json.dumps({"text": f"line {number} " + "x" * 50}) + "\n" for number in range(2000)).encode(), "zstd", asbytes=True)
    (tmp_path / "a.jsonl.zst").write_bytes(packed + packed)
    (tmp_path / "b.jsonl.zst").write_bytes(packed[:-200])
    (tmp_path / "c.jsonl.zst").write_bytes(b"no archive")
    assert len(list(d.read_jsonl(tmp_path / "a.jsonl.zst"))) == 4000
    tally = Counter()
    kept = list(d.read_documents(d.list_inputs([str(tmp_path)]), tally))
    assert tally["damaged"] == 2 and tally["read"] == len(kept) + 2 >= 4002


@pytest.mark.parametrize("state", [b"", b"{", b"[]", b"{}", b'{"_data_files": [1]}', b"\xff"])
def test_a_saved_dataset_with_a_broken_state_is_one_line(tmp_path, state):
    save_dataset(tmp_path / "saved", {"text": ["one", "two"]}, num_files=1)
    (tmp_path / "saved" / "state.json").write_bytes(state)
    with pytest.raises(UserError, match="state.json: broken.*copy the dataset whole"): d.list_inputs([str(tmp_path / "saved")])
