"The whole command on pages with every fault of the cases, from raw records to Parquet, report and trace."

import functools
import gzip
import json
import os
import random
import sys
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from llm_from_scratch import corpus
from llm_from_scratch.artifacts import verify_manifest
from llm_from_scratch.documents import list_inputs
from llm_from_scratch.env import UserError
from llm_from_scratch.html import decode_html
from llm_from_scratch.tasks import run_tasks

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="pages are parsed in a process with limits")

PEOPLE = "ferryman carpenter sister baker surveyor neighbour sailor student nurse tailor gardener keeper violinist postwoman fisherman guide teacher miller shepherd cook".split()
THINGS = "boat door bottle clock map letter kettle chair apple rope coat basket gate notebook lamp hammer ladder blanket mirror violin barrel curtain saddle engine".split()
PLACES = "station mill market canal forest tower bridge school shore church theatre workshop valley pier bakery hill garden library harbour orchard".split()
ADJECTIVES = "old quiet tired young wooden broken heavy small famous narrow empty green distant modern curious careful crowded sunny frozen patient gentle hidden noisy royal".split()
VERBS = "painted carried repaired described forgot bought measured cleaned found borrowed photographed lifted sold hid remembered opened washed drew guarded weighed".split()
WHEN = "before after during despite without since until through around beyond".split()
CHINESE = ("今年春天，小镇的居民决定一起修理河边的旧木桥。老木匠带来了他的工具，孩子们从学校拿来了颜料。下午开始下雨，但是没有人愿意回家。面包店的主人给大家送来了热茶和刚出炉的面包。"
           "到了晚上，桥上挂起了红色的灯笼，远处的船也看得见灯光。人们坐在岸边，谈论明年要种什么树，还要不要在广场上建一座小图书馆。最后一位离开的是邮递员，他说这座桥比以前更漂亮了。")


def prose(seed, num_sentences=14):
    "Invented English that repeats nothing and passes every rule."
    chance = random.Random(f"prose {seed}")
    def some(words): return f"the {chance.choice(ADJECTIVES)} {chance.choice(words)}"
    parts = (f"{some(PEOPLE)} {chance.choice(VERBS)} {some(THINGS)} of {some(PEOPLE)} and {chance.choice(VERBS)} to {some(PLACES)} {chance.choice(WHEN)} {some(PLACES)}" for _ in range(num_sentences))
    return " ".join(part[0].upper() + part[1:] + "." for part in parts)


def page(name, *, before="", head="", after=""):
    return f"<html><head>{head}</head><body>{before}<p>{prose(name).replace('. ', '.</p><p>')}</p>{after}</body></html>"


def record(name, body, *lines, status="200 OK", length=None, kind="text/html"):
    body = body if isinstance(body, bytes) else body.encode()
    http = "\r\n".join([f"HTTP/1.1 {status}", *(lines or [f"Content-Type: {kind}"]), "", ""]).encode() + body
    head = f"WARC/1.0\r\nWARC-Type: response\r\nWARC-Target-URI: http://{name}.example/\r\nContent-Type: application/http; msgtype=response\r\n"
    return f"{head}Content-Length: {len(http) if length is None else length}\r\n\r\n".encode() + http + b"\r\n\r\n"


def html_records():
    "A record for each case HTML-3 to HTML-10, by a name that becomes its host."
    yield record("html-3-meta", b'<meta charset="iso-8859-1"><p>na\xefve caf\xe9 \x93ok\x94 \x80 5. ' + prose("html-3-meta").encode() + b"</p>")
    yield record("html-3-header", page("html-3-header", head='<meta charset="latin-1">', before="<p>naïve café.</p>"), "Content-Type: text/html; charset=utf-8")
    yield record("html-4", b'<html><head><meta charset="gb2312">' + b'<meta name="x" content="y">' * 800 + "</head><body><p>朱镕基来信。{}</p>".format(CHINESE).encode("gbk"))
    yield record("html-5", page("html-5", before='<p val="h\x00">a\x00b\x0bc\x1fd&#0;e</p>'))
    yield record("html-5-xml", '<?xml version="1.0" encoding="utf-8"?>' + page("html-5-xml"))
    hidden = '<script>var s="<p>leak1</p>";</script><style>.leak2{}</style><noscript>leak3</noscript><template>leak4</template><!-- leak5 -->'
    yield record("html-6", page("html-6", after=f"<div>Body text.</div>{hidden}"))
    yield record("html-6-part", f"<p>It&rsquo;s 2 &lt; 3. {prose('html-6-part')}</p>")
    yield record("html-7", page("html-7", before="<main><p>One</p>Two<div><h4>Three</h4><p>Four</p>Five</div><p>It is <b>un</b>done.</p>", after="</main>"))
    inner = "<table><tr><td>inner-cell</td></tr></table>"
    yield record("html-8", page("html-8", before=f"<table><tr><td>cell-a</td><td>{inner}</td></tr><tr><td>cell-c</td><td>cell-d</td></tr></table>"))
    yield record("html-9", prose("html-9").replace(". ", ".\r\n"), kind="text/plain")
    yield record("html-10-short", "<html><body><p>OK 42</p><!-- a short page in a long answer, to pass by size --></body></html>")
    yield record("html-10-code", "<html><body><pre>import numpy as np</pre><!-- a short page in a long answer, to pass by size --></body></html>")
    menu = "Deutsch Español Français Italiano Nederlands Polski Português Русский 日本語 中文 한국어 العربية فارسی עברית हिन्दी বাংলা ไทย Türkçe Українська Svenska Suomi Norsk Dansk Čeština Magyar Română Ελληνικά Български"
    yield record("html-10-menu", page("html-10-menu", before="<ul>" + "".join(f"<li>{word}</li>" for word in menu.split()) + "</ul>"))


def cleaning_records():
    "A record for each case CLN-1 to CLN-4 and CLN-9."
    for number, length in enumerate([-1, 10**15, 10**7]): yield record(f"cln-1-{number}", page("lost"), length=length)
    for name, lines in {"plain-gzip": "Content-Encoding: gzip", "plain-br": "Content-Encoding: br"}.items(): yield record(f"cln-2-{name}", page(name), "Content-Type: text/html", lines)
    yield record("cln-2-gzip", gzip.compress(page("gzip").encode()), "Content-Type: text/html", "Content-Encoding: gzip")
    body = page("chunked").encode()
    yield record("cln-2-chunked", b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body), "Content-Type: text/html", "Transfer-Encoding: chunked")
    yield record("cln-3-svg", page("svg", before="<svg><template><p>x</p></template></svg>"))
    yield record("cln-3-colspan", page("colspan", before='<table><tr><td colspan="9007199254740991">cell</td></tr></table>'))
    yield record("cln-3-nested", "<div>" * 200_000 + prose("nested"))
    yield record("cln-3-attributes", "<p " + " ".join(f"a{number}=1" for number in range(50_000)) + f">{prose('attributes')}</p>")
    yield record("cln-3-rows", "<table>" + "<tr><td>row</td></tr>" * 120_000 + f"</table>{prose('rows')}")
    for number in range(4): yield record(f"cln-4-{number}", page("cln-4"))
    yield record("cln-9", page("cln-9", before="<p>a &#xD83D; b &#xDC00; c</p>"))


def duplicate_records():
    "Records for DED-2 (half alike) and DED-3 (a chain whose ends differ)."
    for number in range(6):
        shared = prose(f"shared {number}", 28)
        for side in "ab": yield record(f"ded-2-{number}-{side}", f"<p>{shared} {prose(f'{number} {side}', 6)}</p>")
    one, two, three = prose("one", 4), prose("two", 40), prose("three", 4)
    for side, text in {"a": f"{one} {two}", "b": f"{two}", "c": f"{two} {three}"}.items(): yield record(f"ded-3-{side}", f"<p>{text}</p>")


def write_crawl(folder):
    "Every fault in one crawl: archives, an error page in place of one, a flipped byte, a cut record, rows, text and a page."
    folder.mkdir(parents=True)
    records = [*html_records(), *cleaning_records(), *duplicate_records()]
    (folder / "a.warc.gz").write_bytes(b"".join(map(gzip.compress, records)))
    (folder / "error.warc.gz").write_bytes(b'<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>')
    (folder / "empty.warc.gz").write_bytes(b"")
    members = [gzip.compress(record(f"html-11-{number}", page(f"html-11-{number}"))) for number in range(4)]
    members[1] = members[1][:200] + bytes([members[1][200] ^ 255]) + members[1][201:]
    (folder / "flipped.warc.gz").write_bytes(b"".join(members[:3]) + members[3][:-60])
    (folder / "rows.jsonl").write_text(json.dumps({"text": "A \ud83d half. " + prose("row"), "id": "row \udc00"}) + "\n" + json.dumps({"body": 1}) + "\nnot json\n")
    (folder / "text.txt").write_bytes(prose("text").encode() + b"\xff")
    (folder / "page.html").write_text(page("page"))
    return folder


@functools.cache
def start_method_of_tests(): return functools.partial(run_tasks, start_method="fork") # the imports of a new process take seconds


def build(*arguments, groups=500):
    "The command in this process; its exit code."
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "run_tasks", start_method_of_tests())
        patch.setattr(corpus, "GROUP_FILES", groups)
        return corpus.main([str(argument) for argument in arguments])


class Built:
    "A corpus on disk, by the host of each document."
    def __init__(self, folder):
        self.folder, self.report = folder, json.loads((folder / "report.json").read_text())
        self.kept = pyarrow.concat_tables(map(parquet.read_table, list_inputs([str(folder)]))).to_pylist()
        self.rejected = pyarrow.concat_tables(map(parquet.read_table, sorted((folder / "rejected").glob("*.parquet")))).to_pylist()
        self.texts = {row["source"]: row["text"] for row in self.kept}
        self.reasons = {row["source"] or row["id"]: row["reason"] for row in self.rejected}

    def text(self, name): return self.texts[f"{name}.example"]
    def words(self, name): return " ".join(self.text(name).split())
    def reason(self, name): return self.reasons.get(f"{name}.example", "kept")


def balance(report):
    assert report["read"] == report["kept"] + sum(report["dropped"].values()) + report["damaged"]
    return report["read"]


@pytest.fixture(scope="module")
def crawl(tmp_path_factory): return write_crawl(tmp_path_factory.mktemp("faults") / "crawl")


@pytest.fixture(scope="module")
def built(crawl):
    assert build("--inputs", crawl, "--out", crawl.parent / "corpus", "--workers", 2, groups=2) == 0
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
    assert set(reasons.values()) <= {"kept", *corpus.REASONS}, reasons
    assert prose("svg") in built.words("cln-3-svg")


def test_cln_4_the_same_page_four_times_is_one_document_and_three_copies(built):
    assert [built.reason(f"cln-4-{number}") for number in range(4)] == ["kept"] + ["exact_duplicate"] * 3
    excerpts = {row["excerpt"] for row in built.rejected if row["source"] and row["source"].startswith("cln-4")}
    assert len(excerpts) == 1 and built.text("cln-4-0").startswith(excerpts.pop())


def test_cln_9_lone_surrogates_are_replaced(built):
    assert "a \ufffd b \ufffd c" in built.text("cln-9")
    row = next(row for row in built.kept if row["text"].endswith(prose("row")))
    assert row["text"].startswith("A \ufffd half.") and built.report["repairs"]["surrogates_replaced"] >= 1
