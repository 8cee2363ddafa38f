"The whole command on pages with every fault of the cases, from raw records to Parquet, report and trace."

import gzip
import io
import json
import os
import tarfile
from pathlib import Path

import pyarrow
import pytest
from crawl_pages import Built, balance, build, cleaning_records, duplicate_records, html_records, page, prose, record, write_crawl
from pyarrow import parquet

from llm_from_scratch import shard_cleaning
from llm_from_scratch.artifacts import Lock, verify_manifest
from llm_from_scratch.documents import list_inputs
from llm_from_scratch.env import UserError

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="pages are parsed in a process with limits")


@pytest.fixture(scope="module")
def crawl(tmp_path_factory): return write_crawl(tmp_path_factory.mktemp("faults") / "crawl")


@pytest.fixture(scope="module")
def built(crawl):
    assert build("--inputs", crawl, "--out", crawl.parent / "corpus", "--workers", 2, groups=2, pictures=True) == 0
    return Built(crawl.parent / "corpus")


def test_everything_read_is_accounted_for(built):
    num_records = len([*html_records(), *cleaning_records(), *duplicate_records()])
    assert balance(built.report) == num_records + 2 + 4 + 3 + 1 + 1
    assert built.report["kept"] == len(built.kept) and built.report["read"] - built.report["kept"] == len(built.rejected)
    assert built.report["missing"] == {} and verify_manifest(built.folder) == []
    assert not Path(f"{built.folder}.work").exists() and [path.name for path in built.folder.parent.iterdir() if path.name[0] == "."] == []
    for row in built.kept:
        assert row["text"].strip() and not set(row["text"]) & set(map(chr, [*range(9), *range(11, 32), *range(127, 160)]))
        assert row["length_chars"] == len(row["text"]) and row["lang"] in ("en", "zh")


def test_html_3_a_declared_charset_means_what_browsers_make_of_it(built):
    assert "naïve café “ok” € 5" in built.text("html-3-meta") and "naïve café." in built.text("html-3-header")
    assert "\ufffd" not in built.text("html-3-meta") + built.text("html-3-header")


def test_html_4_a_name_outside_gb2312_is_kept(built): assert built.text("html-4").startswith("朱镕基来信")


def test_html_5_control_characters_end_at_the_door(built):
    assert "".join(built.text("html-5").partition("\n")[0].split()).replace("\ufffd", "") == "abcde"
    assert prose("html-5-xml") in built.words("html-5-xml")


def test_html_6_scripts_stay_out_and_entities_are_read(built):
    assert "Body text." in built.text("html-6") and "leak" not in built.text("html-6")
    assert built.text("html-6-part").startswith("It’s 2 < 3.")


def test_html_7_blocks_come_once_and_apart(built):
    words = built.text("html-7").split()
    assert [words.count(word) for word in ("One", "Two", "Three", "Four", "Five", "undone.")] == [1] * 6


def test_html_8_a_nested_table_comes_once(built):
    assert [built.text("html-8").count(cell) for cell in ("cell-a", "inner-cell", "cell-c", "cell-d")] == [1] * 4


def test_html_9_lines_do_not_change_the_language(built): assert built.text("html-9") == prose("html-9").replace(". ", ".\n")


def test_html_10_too_little_is_unknown_and_a_menu_decides_nothing(built):
    assert [built.reason("html-10-short"), built.reason("html-10-code")] == ["language_unknown"] * 2
    assert [row["lang"] for row in built.kept if row["source"] == "html-10-menu.example"] == ["en"]


def test_html_11_damage_costs_its_record_and_is_named(built, crawl):
    assert [name for name in built.texts if name.startswith("html-11")] == ["html-11-0.example", "html-11-2.example"]
    found = {(Path(row["warc_file"]).name, row["reason"]) for row in built.rejected if row["stage"] == "read" and row["warc_file"]}
    assert {("error.warc.gz", "not_an_archive"), ("empty.warc.gz", "not_an_archive"), ("flipped.warc.gz", "damaged_record"), ("flipped.warc.gz", "truncated_record")} <= found
    assert all(row["warc_offset"] >= 0 for row in built.rejected if row["reason"] == "damaged_record")


def test_ded_2_what_is_half_alike_stays(built):
    assert [built.reason(f"ded-2-{number}-{side}") for number in range(6) for side in "ab"] == ["kept"] * 12


def test_ded_3_a_chain_keeps_its_ends_and_the_largest_cluster_is_named(built):
    assert [built.reason(f"ded-3-{side}") for side in "abc"] == ["kept", "near_duplicate", "kept"]
    assert built.report["largest_cluster"] == built.report["clusters"][0]["size"] == 4


@pytest.mark.parametrize("threshold", ["0.0", "-0.1", "1.1", "nan", "much"])
def test_ded_5_impossible_thresholds_are_refused_before_anything_is_read(tmp_path, threshold):
    with pytest.raises((UserError, ValueError), match="threshold"): build("--inputs", tmp_path, "--out", tmp_path / "out", f"--dedup.threshold={threshold}")
    assert list(tmp_path.iterdir()) == []


def test_cln_1_an_impossible_length_costs_its_record(built):
    lengths = [row for row in built.rejected if row["reason"] == "damaged_record" and Path(row["warc_file"]).name == "a.warc.gz"]
    assert len(lengths) == 3 and built.text("cln-2-plain-gzip")


def test_cln_2_encodings_are_undone_or_ignored(built):
    for name in ("plain-gzip", "plain-br", "gzip", "chunked"): assert built.words(f"cln-2-{name}") == prose(name)


def test_cln_3_hostile_pages_end_in_text_or_reason(built):
    reasons = {name: built.reason(f"cln-3-{name}") for name in ("svg", "colspan", "nested", "attributes", "rows")}
    assert set(reasons.values()) <= {"kept", *shard_cleaning.REASONS}, reasons
    assert prose("svg") in built.words("cln-3-svg")


def test_cln_4_the_same_page_four_times_is_one_document_and_three_copies(built):
    assert [built.reason(f"cln-4-{number}") for number in range(4)] == ["kept"] + ["exact_duplicate"] * 3
    excerpts = {row["excerpt"] for row in built.rejected if row["source"] and row["source"].startswith("cln-4")}
    assert len(excerpts) == 1 and built.text("cln-4-0").startswith(excerpts.pop())


def test_cln_9_lone_surrogates_are_replaced(built):
    assert "a \ufffd b \ufffd c" in built.text("cln-9")
    row = next(row for row in built.kept if row["text"].endswith(prose("row")))
    assert row["text"].startswith("A \ufffd half.") and built.report["repairs"]["surrogates_replaced"] >= 1


# DED-4, CLN-7 and what is done with a corpus


def same_files(one, other):
    "Compare two corpora byte by byte, but for what tells of the run itself."
    def content(folder): return {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
    one, other = content(one), content(other)
    assert one.keys() == other.keys()
    assert [name for name in one if one[name] != other[name]] in ([], ["manifest.json", "report/index.html", "run.json"], ["config.yaml", "manifest.json", "report/index.html", "run.json"])


def test_ded_4_workers_do_not_change_a_byte(built, crawl, tmp_path):
    assert build("--inputs", crawl, "--out", tmp_path / "corpus", "--workers", 4, groups=2) == 0
    same_files(built.folder, tmp_path / "corpus")


@pytest.mark.parametrize("options, said", [(["--clean.lang_threshold", "0.5"], "lang_threshold was 0.65, now 0.5"), (["--quality.off", "c4"], "quality.off"), (["--dedup.threshold", "0.9"], "dedup.threshold was")])
def test_cln_7_other_options_are_refused_with_the_difference(built, crawl, options, said):
    before = verify_manifest(built.folder), (built.folder / "report.json").stat().st_mtime_ns
    with pytest.raises(UserError, match=f"corpus: holds a corpus made otherwise.*{said}"): build("--inputs", crawl, "--out", built.folder, *options)
    assert before == (verify_manifest(built.folder), (built.folder / "report.json").stat().st_mtime_ns)


def test_cln_7_other_inputs_and_foreign_folders_are_refused(built, crawl, tmp_path):
    with pytest.raises(UserError, match="input .*page.html is gone"): build("--inputs", crawl / "*.gz", "--out", built.folder)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="no manifest.json"): build("--inputs", crawl, "--out", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_cln_7_a_second_run_on_the_same_folder_is_refused(crawl, tmp_path):
    (tmp_path / "corpus.work").mkdir()
    with Lock(tmp_path / "corpus.work/.lock"), pytest.raises(UserError, match=f"in use by process {os.getpid()}"): build("--inputs", crawl, "--out", tmp_path / "corpus")


def test_a_finished_corpus_is_not_made_again(built, crawl, capsys):
    before = (built.folder / "manifest.json").stat().st_mtime_ns
    assert build("--inputs", crawl, "--out", built.folder) == 0
    assert f"read {built.report['read']:,} = kept {built.report['kept']:,}" in capsys.readouterr().out
    assert (built.folder / "manifest.json").stat().st_mtime_ns == before


def test_training_reads_the_shards_alone(built):
    assert list_inputs([str(built.folder)]) == [built.folder / "00000.parquet"]


def test_trace_prints_the_raw_record_of_any_document(built, crawl, capsysbinary):
    for name, wanted in {"html-4.example": "朱镕基".encode("gbk"), "cln-4-1.example": b"WARC-Target-URI: http://cln-4-1.example/"}.items():
        id = next(row["id"] for row in built.kept + built.rejected if row["source"] == name)
        assert build("trace", built.folder, "--id", id) == 0
        assert wanted in capsysbinary.readouterr().out
    assert build("trace", built.folder, "--id", crawl / "page.html") == 0
    assert capsysbinary.readouterr().out == (crawl / "page.html").read_bytes()
    assert build("trace", built.folder, "--id", f"{crawl / 'rows.jsonl'}:2") == 0
    assert capsysbinary.readouterr().out == b'{"body": 1}\n'
    with pytest.raises(UserError, match="no document 'none'"): build("trace", built.folder, "--id", "none")


def test_lineage_names_every_input_with_its_state(built, crawl, capsys):
    assert build("lineage", built.folder / "00000.parquet") == 0
    lines = {line.split()[-1].rpartition("/")[2]: line.split()[:2] for line in capsys.readouterr().out.splitlines()}
    assert lines["flipped.warc.gz"] == ["2", "there"] and lines["page.html"] == ["1", "there"]
    assert build("lineage", built.folder) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(list(crawl.iterdir()))


def test_review_takes_over_what_a_person_decides(tmp_path, capsys):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"id": f"row {number}", "text": prose(number)}) + "\n" for number in range(3)))
    command = ["--inputs", tmp_path / "rows.jsonl", "--out", tmp_path / "corpus", "--gates.domain_keywords", "quantum chromodynamics", "--gates.semantic_threshold", "0.9"]
    assert build(*command) == 0
    assert Built(tmp_path / "corpus").report["dropped"] == {"semantic_review": 3}
    assert build("review", tmp_path / "corpus") == 0
    assert all(f"row {number}" in capsys.readouterr().out for number in [0])
    assert build("review", tmp_path / "corpus", "accept", "row 0") == 0 and build("review", tmp_path / "corpus", "reject", "row 1") == 0
    assert build(*command) == 0
    after = Built(tmp_path / "corpus")
    assert balance(after.report) == 3 and [row["id"] for row in after.kept] == ["row 0"]
    assert after.report["dropped"] == {"semantic_rejected": 1, "semantic_review": 1}


# Odd names and files: each costs itself only


def test_one_odd_file_costs_itself_only(tmp_path, capsysbinary):
    crawl = tmp_path / "crawl"
    crawl.mkdir()
    archive = gzip.compress(record("named", page("named")))
    for name in (b"a b.warc.gz", b"new\nline.warc.gz", b"not\xffutf8.warc.gz"): Path(os.fsdecode(os.path.join(os.fsencode(crawl), name))).write_bytes(archive)
    parquet.write_table(pyarrow.table({"body": ["a", "b"]}), crawl / "no-text.parquet")
    (crawl / "numbers.jsonl").write_text('{"text": "' + prose("number") + '", "warc_file": "q", "warc_offset": 99999999999999999999}\n')
    (crawl / "cut.jsonl.gz").write_bytes(gzip.compress(json.dumps({"text": prose("cut")}).encode())[:-9])
    (crawl / "true.txt").write_text(prose("true"))
    for name, target in {"loop": "loop", "self": ".", "gone": "/nonexistent"}.items(): os.symlink(target, crawl / name)
    assert build("--inputs", crawl, crawl / "true.txt", f"{crawl}/*.txt", "--out", tmp_path / "corpus") == 0
    found = Built(tmp_path / "corpus")
    assert found.report["missing"] == {} and balance(found.report) == 7
    assert found.report["dropped"] == {"exact_duplicate": 2, "no_text": 1} and found.report["damage"] == {"damaged_file": 1}
    assert {row["text"] for row in found.kept} >= {prose("number"), prose("true")}


# Places and names


@pytest.mark.parametrize("name", ["rows.jsonl.gz", "rows.parquet"])
def test_trace_prints_the_row_of_a_compressed_file(tmp_path, name, capsysbinary):
    rows = [{"text": prose(number)} for number in range(3)]
    if name.endswith(".gz"): (tmp_path / name).write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    else: parquet.write_table(pyarrow.table({"text": [row["text"] for row in rows]}), tmp_path / name)
    assert build("--inputs", tmp_path / name, "--out", tmp_path / "corpus") == 0
    assert build("trace", tmp_path / "corpus", "--id", f"{tmp_path / name}:2") == 0
    assert prose(1).encode() in capsysbinary.readouterr().out


def test_trace_finds_a_file_with_a_number_sign(tmp_path, capsysbinary):
    (tmp_path / "c#-notes.txt").write_text(prose("sign"))
    assert build("--inputs", tmp_path / "c#-notes.txt", "--out", tmp_path / "corpus") == 0
    assert build("trace", tmp_path / "corpus", "--id", tmp_path / "c#-notes.txt") == 0


@pytest.mark.parametrize("pattern, out", [("", "corpus"), ("", "corpus/"), ("", "."), ("*", "corpus"), ("**/*.parquet", "corpus"), ("a.txt", "..")])
def test_a_corpus_among_its_inputs_is_refused_at_once(tmp_path, monkeypatch, pattern, out):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for name in ("a.txt", "b.parquet"): Path(name).write_text(prose("a"))
    with pytest.raises(UserError, match="lies among the inputs|you are in it"): build("--inputs", tmp_path / "here" / pattern, "--out", out)
    assert sorted(os.listdir(tmp_path)) == ["here"] and sorted(os.listdir()) == ["a.txt", "b.parquet"]


def test_the_current_folder_is_a_place_for_a_corpus_or_refused_at_once(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    (tmp_path / "a.txt").write_text(prose("a"))
    monkeypatch.chdir(tmp_path / "here")
    try: assert build("--inputs", "../a.txt", "--out", ".") == 0
    except UserError: assert list(Path().iterdir()) == []


def test_lineage_names_what_is_missing(tmp_path):
    with pytest.raises(UserError, match="none: no such"): build("lineage", tmp_path / "none")


def test_every_row_leads_back_to_its_line_whatever_its_name(tmp_path, capsysbinary):
    crawl, own = tmp_path / "crawl", {"id": "my-own", "text": prose("own")}
    crawl.mkdir()
    (crawl / "rows.jsonl").write_text(json.dumps({"text": prose("first")}) + "\n" + json.dumps(own) + "\n")
    (crawl / os.fsdecode(b"caf\xe9.txt")).write_text(prose("strange"))
    build("--inputs", crawl, "--out", tmp_path / "corpus")
    capsysbinary.readouterr()
    build("trace", tmp_path / "corpus", "--id", "my-own")
    assert json.loads(capsysbinary.readouterr().out) == own
    [name] = [row["id"] for row in Built(tmp_path / "corpus").kept if "caf" in row["id"]]
    build("trace", tmp_path / "corpus", "--id", name)
    assert capsysbinary.readouterr().out.decode() == prose("strange")
    build("lineage", tmp_path / "corpus")
    assert [line.split()[0] for line in capsysbinary.readouterr().out.splitlines()] == [b"1", b"2"]


def test_an_input_replaced_by_another_of_the_same_size_is_refused(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"text": prose("one") + " A"}) + "\n")
    build("--inputs", rows, "--out", tmp_path / "corpus")
    rows.touch()
    build("--inputs", rows, "--out", tmp_path / "corpus")
    rows.write_text(json.dumps({"text": prose("one") + " B"}) + "\n")
    with pytest.raises(UserError, match="rows.jsonl: is another file than the one"): build("--inputs", rows, "--out", tmp_path / "corpus")


def test_lines_that_a_rule_removes_are_counted_at_quality(tmp_path):
    notice = "Please enable Javascript in your browser to see this page.\n" * 20 + "It is the harbour that they could see from there, and it was quiet in the morning.\n"
    texts = {"kept": notice + prose("lines"), "short": notice + "A line that is left over.\n"}
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"id": id, "text": text}) + "\n" for id, text in texts.items()))
    with shard_cleaning.ShardRun(tmp_path, shard_cleaning.CorpusConfig(), shard_cleaning.Tools()) as run:
        kept = list(shard_cleaning.kept_texts(run, str(tmp_path / "in.jsonl"), tmp_path / "progress"))
    after = run.summary["characters_after"]
    assert run.summary["dropped_at"] == {"quality": 1}
    assert after["language"] == run.tally["characters_normalise"] > after["quality"] == len(kept[0])


@pytest.mark.parametrize("option, value, words", [
    ("--write.chunk-overlap", 5000, "chunk_overlap 5000 must be below"), ("--clean.min-bytes", 5_000_000, "min_bytes 5000000 is above"),
    ("--clean.page-memory-bytes", 1000, "a parser takes"), ("--gates.domain-keywords", "sea", "no/such"), ("--out", "corp\udcff", "can't be printed")])
def test_what_can_never_work_is_refused_before_the_work_begins(tmp_path, monkeypatch, option, value, words):
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text(json.dumps({"text": prose("one")}) + "\n")
    more = ("--gates.embedder", "no/such") if option == "--gates.domain-keywords" else ()
    with pytest.raises(UserError, match=words): build("--inputs", "rows.jsonl", "--out", "corpus", option, value, *more)
    assert os.listdir() == ["rows.jsonl"]


def test_a_page_without_an_ending_and_a_tar_of_texts_are_known_by_what_they_are(tmp_path, capsysbinary):
    crawl = tmp_path / "crawl"
    crawl.mkdir()
    (crawl / "view.php?id=3").write_text(f"<!DOCTYPE html>\n<html><body><p>{prose('page')}</p></body></html>")
    (crawl / "notes.md").write_text(f"<h1>Notes</h1>\n\n{prose('notes')}")
    with tarfile.open(crawl / "shard.tar", "w") as tar:
        for number in range(2):
            data, member = prose(f"tar {number}").encode(), tarfile.TarInfo(f"{number}.txt")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    build("--inputs", crawl, "--out", tmp_path / "corpus", "--quality.off", "fineweb")
    kept = {row["id"].rpartition("/")[2]: row["text"] for row in Built(tmp_path / "corpus").kept}
    assert kept["view.php?id=3"] == prose("page") and "shard.tar:0" in kept and "shard.tar:1" in kept
    capsysbinary.readouterr()
    build("trace", tmp_path / "corpus", "--id", f"{crawl}/shard.tar:1")
    assert json.loads(capsysbinary.readouterr().out)["text"] == prose("tar 1")


def test_a_damaged_corpus_is_one_line_for_every_verb(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"text": prose("one")}) + "\n")
    build("--inputs", rows, "--out", tmp_path / "corpus")
    (tmp_path / "corpus" / "00000.parquet").write_bytes(b"garbage")
    for arguments in (("trace", tmp_path / "corpus", "--id", f"{rows}:1"), ("lineage", tmp_path / "corpus"), ("--inputs", rows, "--out", tmp_path / "corpus")):
        with pytest.raises(UserError, match="00000.parquet"): build(*arguments)
