"Hostile and mislabelled pages: each ends in its text or in a counted reason."

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from llm_from_scratch import html as h
from llm_from_scratch.env import UserError

DATA = Path(os.environ.get("LLM_SHARED_DATA", Path(__file__).resolve().parents[3] / "shared" / "data")) / "extraction" / "trafilatura"
CONTROLS = set(map(chr, range(32))) - {"\n", "\t"}
PAGE = b"<html><head><title>A title</title></head><body><p>A paragraph of a healthy page.</p></body></html>"
BOTH = pytest.mark.parametrize("extractor", h.EXTRACTORS)


def run_page(text: str, extractor: str) -> str:
    return h.extract_text(f"<html><body><article>{text}</article></body></html>", extractor=extractor)


def test_html_3_web_labels_mean_what_browsers_make_of_them():
    body = b'<meta charset="iso-8859-1"><p>na\xefve caf\xe9 \x93ok\x94 \x80 5</p>'
    assert "naïve café “ok” € 5" in h.decode_html(body)
    assert h.extract_text(body) == "naïve café “ok” € 5"
    right = '<meta charset="latin-1"><p>naïve café “ok” € 5</p>'
    assert h.decode_html(right.encode(), "text/html; charset=utf-8") == right
    assert h.decode_html(right.encode(), "text/html; charset=iso-8859-1") == right  # valid UTF-8 is UTF-8
    assert h.decode_html(right.encode("utf-8-sig"), "text/html; charset=koi8-r") == right  # a mark beats the header


def test_html_3_the_header_beats_the_meta_tag():
    body = '<meta charset="windows-1251"><p>Привет, мир</p>'.encode("koi8-r")
    assert "Привет, мир" in h.decode_html(body, "text/html; charset=koi8-r")
    assert "Привет, мир" in h.decode_html(body.replace(b"windows-1251", b"koi8-r"))


@pytest.mark.parametrize(
    "label, codec, text",
    [
        ("shift_jis", "cp932", "日本語のテキスト①です"),
        ("euc-kr", "cp949", "한국어 문장입니다 똠방각하"),
        ("big5", "big5hkscs", "繁體中文的網頁內容"),
        ("euc-jp", "euc_jp", "日本語のテキスト"),
        ("iso-2022-jp", "iso2022_jp", "日本語のテキスト"),
        ("windows-1256", "cp1256", "مرحبا بالعالم"),
        ("iso-8859-9", "cp1254", "İstanbul'da güneşli"),
        ("tis-620", "cp874", "สวัสดีชาวโลก “ดี”"),
    ],
)
def test_html_3_other_labels(label, codec, text):
    body = f'<meta http-equiv="Content-Type" content="text/html; charset={label}"><p>{text}</p>'.encode(codec)
    assert text in h.decode_html(body)
    assert h.decode_page(body)[1] == codec


def test_html_3_a_false_claim_of_utf_8_and_a_broken_character():
    russian = "<p>Привет, мир, как дела сегодня?</p>"
    assert russian in h.decode_html(russian.encode("cp1251"), "text/html; charset=utf-8")
    damaged = russian.encode()[:-9] + b"\xd0</p>"
    assert h.decode_html(damaged, "text/html; charset=utf-8").count("\ufffd") == 1
    assert h.decode_html(damaged).count("\ufffd") == 1
    wrong_meta = b"<meta charset=iso-8859-1>" + damaged
    assert "Привет" in h.decode_html(wrong_meta, "text/html; charset=utf-8")


@pytest.mark.parametrize("codec", ["utf-16", "utf-16-le", "utf-16-be"])
def test_html_3_utf_16_with_a_mark_and_without(codec):
    assert h.extract_text("<html><body><p>Tea and 茶 for two</p>".encode(codec)) == "Tea and 茶 for two"


def test_html_3_decoding_never_raises():
    bodies = [b"", b"\xff", b"\xfe\xff\xd8", b"\0" * 9, bytes(range(256)) * 9, b"<meta charset=", b"<!--" * 2000, b"\xd0" * 99]
    types = [None, "", "text/html; charset=", "text/html; charset=\ud800", "text/html;charset=utf-16", "text/html; charset=undefined", "x; charset=rot13", "x; charset=hex", "x; charset=idna"]
    for body in bodies:
        for content_type in types:
            assert isinstance(h.decode_html(body, content_type), str)


@pytest.mark.parametrize("label", ["gb2312", "GBK", "gb18030"])
@pytest.mark.parametrize("before", [0, 20_000, 60_000])
def test_html_4_gb2312_is_read_as_its_superset(label, before):
    body = f'<meta charset="{label}">'.encode() + b"<br>" * (before // 4) + "<p>朱镕基</p>".encode("gbk")
    assert "朱镕基" in h.decode_html(body)
    assert h.extract_text(body).strip() == "朱镕基"
    assert "朱镕基" in h.decode_html(b"<br>" * (before // 4) + f'<meta charset="{label}">'.encode() + "<p>朱镕基</p>".encode("gbk"))


def test_html_4_the_detector_sees_letters_behind_a_long_ascii_head():
    chinese = "中国的总理在北京会见了外国客人，双方进行了友好的谈话。"
    body = b"<br>" * 30_000 + f"<p>{chinese}</p>".encode("gbk") + b"<br>" * 30_000
    assert chinese in h.decode_html(body)


@BOTH
def test_html_5_control_characters_do_not_reach_the_text(extractor):
    text = run_page('<p val="h\x00">a\x00b\x0bc\x1fd&#0;e and some more words of a paragraph</p>', extractor)
    assert [letter for letter in text if letter in "abcde"][:5] == list("abcde")
    assert not CONTROLS & set(text)
    declared = '<?xml version="1.0" encoding="utf-8"?>\n<html><body><p>An XML declared page with a long enough text.</p></body></html>'
    assert "An XML declared page" in h.extract_text(declared, extractor=extractor)
    assert "An XML declared page" in h.extract_text(declared.encode(), extractor=extractor)


@BOTH
def test_html_6_scripts_and_their_kind_stay_out(extractor):
    page = '<body><div>Body text.</div><script>var s="<p>leak1</p>";</script><style>.leak2{}</style><noscript>leak3</noscript><template>leak4</template><!-- leak5 --></body>'
    text = h.extract_text(page, extractor=extractor)
    assert text.strip() == "Body text."
    assert h.extract_text("<p>It&rsquo;s 2 &lt; 3</p>", extractor=extractor).strip() == "It’s 2 < 3"


@BOTH
def test_html_7_blocks_are_separate_and_come_once(extractor):
    words = h.extract_text("<main><p>One</p>Two<div><h4>Three</h4><p>Four</p>Five</div></main>", extractor=extractor).split()
    assert words == ["One", "Two", "Three", "Four", "Five"]
    assert "undone" in run_page("<p>What is <b>un</b>done stays in one word here.</p>", extractor)


@BOTH
def test_html_8_nested_tables(extractor):
    page = "<table><tr><td>outer-a</td><td><table><tr><td>inner-cell</td></tr></table></td></tr><tr><td>outer-b</td><td>outer-c</td></tr></table>"
    text = run_page("<p>A table follows this paragraph.</p>" + page, extractor)
    assert [text.count(word) for word in ("inner-cell", "outer-a", "outer-b", "outer-c")] == [1, 1, 1, 1]


def test_lists_dates_and_lone_characters_survive():
    page = "<body><p>He said “<i>yes</i>” on <time>3 May</time>.</p><ul><li>one item</li><li>茶</li></ul><p>見<b>分</b>け<b>方</b></p></body>"
    text = h.extract_text(page)
    for part in ("“yes” on 3 May.", "one item", "茶", "見分け方"):
        assert part in text
    assert h.COMPANION not in text


def test_code_and_tables_keep_their_lines():
    text = h.extract_text("<body><pre>def f(x):\n    if x:\r\n        return 1\n</pre><table><tr><td>a<td>b<tr><td>c<td>d</table></body>")
    assert "def f(x):\n    if x:\n        return 1" in text
    assert [line.split() for line in text.splitlines()[-2:]] == [["a", "b"], ["c", "d"]]


HOSTILE = {
    "svg_template": "<svg><template>in<p>x</svg>" + PAGE.decode(),
    "colspan": '<table><tr><td colspan="9007199254740991" rowspan="9007199254740991">cell</td></tr></table>',
    "divs": "<div>" * 200_000 + "deep",
    "closed_divs": "<div>" * 20_000 + "deep" + "</div>" * 20_000,
    "attributes": "<p " + " ".join(f'a{i}="{i}"' for i in range(50_000)) + ">text</p>",
    "rows": "<table>" + "".join(f"<tr><td>{i}</td></tr>" for i in range(300_000)) + "</table>",
    "quotes": "<a '" * 100_000,
    "comments": "<!--" * 200_000,
    "scripts": "<script>" * 100_000,
    "bold": "".join(f"<b id={i}>" for i in range(20_000)) + "<p>x" * 2000,
    "select": "<select>" * 50_000 + "<table>" * 1000,
    "stray": "<div></x>" * 30_000,
}


@BOTH
def test_cln_3_hostile_pages_end_in_text_or_reason(extractor):
    limits = h.PageLimits(seconds=0.4)
    began = time.process_time()
    with h.PageParser(limits, extractor) as parser:
        for name, page in HOSTILE.items() if extractor == "fast" else list(HOSTILE.items())[:6]:
            hostile, healthy = parser.parse_many([(page.encode(), "text/html"), (PAGE, None)])
            assert hostile.reason in h.PAGE_REASONS or not hostile.reason, name
            assert healthy == h.ParsedPage("A paragraph of a healthy page.", "A title", "utf-8")
    assert time.process_time() - began < 10


def test_cln_3_the_known_shapes_are_refused_before_parsing():
    reasons = {name: h.page_problem(page) for name, page in HOSTILE.items()}
    expected = dict(divs="html_too_deep", closed_divs="html_too_deep", attributes="html_too_many_attributes", rows="html_too_many_tags", colspan="", svg_template="")
    assert {name: reasons[name] for name in expected} == expected
    for name in ("divs", "attributes"):
        assert h.extract_text(HOSTILE[name]) in ("deep", "text")


def test_cln_3_the_watchdog_ends_a_parser_in_c_code():
    limits = h.PageLimits(seconds=0.2, max_depth=10**6)
    page = b"<div>" * 100_000 + b"deep"
    with h.PageParser(limits) as parser:
        parsed = list(parser.parse_many([(PAGE, None), (page, None), (page, None), (PAGE, None)]))
    assert [one.reason for one in parsed] == ["", "parse_timeout", "parse_timeout", ""]
    assert parser.num_restarts == 2


def test_cln_3_memory_is_bounded():
    limits = h.PageLimits(memory_bytes=100 << 20, max_tags=10**8, max_html_bytes=10**8)
    page = b"<p>x" * 600_000
    with h.PageParser(limits) as parser:
        assert [one.reason for one in parser.parse_many([(page, None), (PAGE, None)])] == ["parse_memory", ""]


def test_cln_3_a_child_that_is_killed_costs_its_page_only():
    with h.PageParser() as parser:
        assert parser.parse(PAGE).text
        os.kill(parser._child.process.pid, signal.SIGKILL)
        assert [one.reason for one in parser.parse_many([(PAGE, None)] * 3)] == ["parse_crashed", "", ""]


@BOTH
def test_cln_3_what_the_first_page_loads_is_not_on_its_clock(extractor):
    with h.PageParser(h.PageLimits(seconds=0.15), extractor) as parser:
        assert parser.parse(PAGE).reason == ""


def test_cln_3_a_child_that_stops_answering_is_ended(monkeypatch):
    receive = h._Child.receive
    with h.PageParser(h.PageLimits(wall_seconds=0.3)) as parser:
        monkeypatch.setattr(h._Child, "receive", lambda child, seconds: receive(child, 300 * seconds))  # a slow machine's answers come too
        assert parser.parse(PAGE).text
        stopped = parser._child
        monkeypatch.setattr(h._Child, "receive", lambda child, seconds: receive(child, seconds if child is stopped else 300 * seconds))
        os.kill(parser._child.process.pid, signal.SIGSTOP)
        assert [one.reason for one in parser.parse_many([(PAGE, None)] * 2)] == ["parse_timeout", ""]


def test_cln_3_large_pages_and_texts_pass_both_ways_at_once():
    pages = [(b"<body>" + f"<p>{i} ".encode() + b"word " * 300_000, None) for i in range(4)]
    with h.PageParser() as parser:
        texts = [one.text for one in parser.parse_many(pages)]
    assert [text[:6] for text in texts] == [f"{i} word" for i in range(4)]
    assert all(len(text) > 1_490_000 for text in texts)


def test_cln_3_leaving_early_does_not_mix_pages_up():
    with h.PageParser() as parser:
        for one in parser.parse_many([(b"<p>first page of all", None), (b"<p>second page of all", None), (b"<p>third", None)]):
            break
        assert one.text == "first page of all"
        assert parser.parse(PAGE).title == "A title"


def test_cln_3_the_child_ends_with_its_parent_and_loads_no_torch():
    code = (
        "import sys, os, signal, time; from llm_from_scratch.html import PageParser, PageLimits; p = PageParser(PageLimits(seconds=1, max_depth=10**7));"
        "p.parse(b'<p>a'); print(p._child.process.pid, flush=True); assert 'torch' not in sys.modules;"
        "p._send(b'<div>' * 100000, None); os.kill(os.getpid(), signal.SIGKILL)"
    )
    pid = int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout)
    for _ in range(2400):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")")[-1].split()[0]
        except OSError:
            return
        if state == "Z":
            return
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    pytest.fail("the child outlived its parent")


def test_cln_3_a_folder_that_holds_this_module_hides_nothing(tmp_path, monkeypatch):
    package = Path(h.__file__).parent
    monkeypatch.chdir(package)
    monkeypatch.setattr(sys, "path", ["", str(package), *sys.path])
    with h.PageParser() as parser:
        assert parser.parse(PAGE).title == "A title"


@BOTH
def test_cln_4_the_same_page_gives_the_same_text(extractor):
    page = PAGE.replace(b"</p>", b"</p><p>Another paragraph that is repeated.</p><p>Another paragraph that is repeated.</p>" * 3)
    texts = {h.extract_text(page, extractor=extractor) for _ in range(6)}
    assert len(texts) == 1 and "healthy page" in texts.pop()


@BOTH
def test_cln_9_lone_surrogates_are_replaced(extractor):
    text = run_page("<p>The letters a\ud800b and c&#xD800;d and \ud83d\ude42 are in this paragraph.</p>", extractor)
    assert text.encode() and "a\ufffdb" in text and "🙂" in text and "c" in text
    assert h.extract_text("<title>\udfff</title><p>x\udc00", extractor=extractor).encode()


def test_plain_text_and_binary_bodies_are_told_apart():
    assert h.parse_page(b"a <b> c\n    d\r\n", "text/plain; charset=utf-8").text == "a <b> c\n    d\n"
    assert h.parse_page(b"\x89PNG\r\n", "text/html").reason == "html_is_binary"
    assert h.parse_page(b"", "text/html") == h.ParsedPage("", "", "utf-8")
    assert h.parse_page(b"x" * 100, None, h.PageLimits(max_html_bytes=99)).reason == "html_too_large"


def test_xhtml_elements_that_close_themselves_swallow_nothing():
    page = '<?xml version="1.0"?><html xmlns="http://www.w3.org/1999/xhtml"><head><script src="x"/><title/></head><body><div class="y"/><p>All of the text.</p></body></html>'
    assert h.extract_text(page) == "All of the text."


def test_one_run_of_pages_at_a_time():
    with h.PageParser() as parser:
        running = parser.parse_many([(PAGE, None)] * 3)
        assert next(running).text
        with pytest.raises(AssertionError, match="on their way"):
            parser.parse(PAGE)
        running.close()
        assert parser.parse(PAGE).text


def test_unknown_extractors_are_refused_in_one_line():
    for use in (lambda: h.extract_text("<p>a", extractor="best"), lambda: h.PageParser(extractor="best")):
        with pytest.raises(UserError, match="fast, accurate"):
            use()


@pytest.mark.skipif(not DATA.exists(), reason="needs the shared data")
def test_our_steps_do_not_lose_to_the_library_alone():
    gold = [(entry, gzip.open(DATA / "html" / entry["file"]).read()) for entry in json.loads((DATA / "evaldata.json").read_bytes()).values()]
    scores = {}
    for name, extract in (("library", lambda s: h.extract_plain_text(s, main_content=True, alt_texts=False, comments=False)), ("ours", h.extract_text)):
        texts = [(entry, extract(h.decode_html(body))) for entry, body in gold]
        right, wrong = (sum(segment in text for entry, text in texts for segment in entry[kind]) for kind in ("with", "without"))
        scores[name] = 2 * right / (right + wrong + sum(len(entry["with"]) for entry, _ in texts))
    assert scores["ours"] > max(scores["library"], 0.82)
