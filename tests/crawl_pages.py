"Invented web pages with every fault of the cases, and the command that cleans them, in this process."

import gzip
import json
import random
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from llm_from_scratch import assembly, corpus
from llm_from_scratch.documents import list_inputs

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


def build(*arguments, groups=500, pictures=False):
    "The command in this process; its exit code. Pictures take seconds."
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "START_METHOD", "fork") # a new process imports for seconds
        patch.setattr(corpus, "GROUP_FILES", groups)
        if not pictures: patch.setattr(assembly, "figure_html", lambda *values: "")
        for name in () if pictures else ("draw_funnel", "draw_counts", "draw_lengths", "draw_shares", "draw_scores"): patch.setattr(assembly, name, lambda *values: None)
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
