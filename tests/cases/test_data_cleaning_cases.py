import gzip
import json
import os
import random
import time
from collections import Counter
from pathlib import Path

import fsspec
import pyarrow
import pytest
from pyarrow import parquet

from llm_from_scratch import data_cleaning as c
from llm_from_scratch.env import UserError

SHARED = Path(os.environ.get("LLM_SHARED_DATA", Path(__file__).parents[2] / "../shared/data"))
ENGLISH = ("The harbour town lives from its fishing boats and from the visitors who come in summer to see the old lighthouse on the cliff. "
           "Every morning the market opens before sunrise, and people from the villages bring bread, cheese and apples. ")
MENU = ("Deutsch English Español Français Italiano Nederlands Polski Português Русский 日本語 中文 한국어 العربية فارسی עברית हिन्दी বাংলা தமிழ் తెలుగు ไทย "
        "Türkçe Українська Svenska Suomi Norsk Dansk Čeština Magyar Română Ελληνικά Български Српски Hrvatski Slovenčina Indonesia ქართული Հայերեն "
        "Lietuvių Latviešu አማርኛ").split()


def page(body=f"<html><body><p>{ENGLISH}</p></body></html>"):
    return body if isinstance(body, bytes) else body.encode()


def record(body=page(), url="http://a.example/", http_lines=("Content-Type: text/html",), status="200 OK", length=None, kind="response"):
    http = "\r\n".join([f"HTTP/1.1 {status}", *http_lines, "", ""]).encode() + page(body)
    head = f"WARC/1.0\r\nWARC-Type: {kind}\r\nWARC-Target-URI: {url}\r\nContent-Type: application/http; msgtype=response\r\n"
    return f"{head}Content-Length: {len(http) if length is None else length}\r\n\r\n".encode() + http + b"\r\n\r\n"


def read(path, **options):
    tally, cfg = Counter(), c.CleanConfig(**options)
    found = list(c.read_source(path, cfg, tally))
    assert tally["read"] == tally["kept"] + tally["dropped"] + tally["damaged"] == len(found)
    assert tally["kept"] == sum(isinstance(item, c.Document) for item in found)
    rejected = Counter(item.reason for item in found if isinstance(item, c.Rejected))
    assert {reason: tally[reason] for reason in rejected} == rejected
    assert sum(rejected[reason] for reason in c.DAMAGE) == tally["damaged"]
    assert all(item.stage in c.STAGES for item in found if isinstance(item, c.Rejected))
    for item in found:
        if isinstance(item, c.Document):
            item.text.encode()
            assert item.text == c.normalize_text(item.text) != ""
    return found, tally


def read_archive(tmp_path, *records, name="crawl.warc.gz", **options):
    path = tmp_path / name
    path.write_bytes(b"".join(map(gzip.compress, records)) if name.endswith(".gz") else b"".join(records))
    return read(path, **options)


def reasons(found):
    return [item.reason if isinstance(item, c.Rejected) else "" for item in found]


# HTML-9, HTML-10, CLN-9: language


def test_html_9_newlines_do_not_change_the_language():
    lines = "Good morning everyone.\nThe train leaves at nine.\r\n"
    assert c.identify_language(lines) == c.identify_language("Good morning everyone. The train leaves at nine.")
    assert c.identify_language(lines)[0] == "en"
    for separator in ["\x0b", "\x0c", "\x85", "\u2028", "\u2029", "\r", "\x00", "\x1c"]:
        assert c.identify_language(ENGLISH.replace(". ", f".{separator}"))[0] == "en"


@pytest.mark.parametrize("text", ["", "\n", " \r\n\t", "\u200b", "\ud83d", "123 456", "…" * 500])
def test_html_9_text_without_letters_is_unknown(text):
    assert c.identify_language(text) == ("unknown", 0.0)


@pytest.mark.parametrize("text", ["OK 42", "import numpy as np", "Hello", "x = y", "Nein!", "404", "Menu | Login", "你好", " ".join(MENU), "\n".join(MENU), " | ".join(MENU)])
def test_html_10_too_little_text_is_unknown(text):
    assert c.identify_language(text) == ("unknown", 0.0)
    assert c.language_verdict(*c.identify_language(text), c.CleanConfig()) == c.Verdict(False, "language_unknown")


@pytest.mark.parametrize("separator", [" ", "\n", " | ", ", "])
def test_html_10_a_language_menu_does_not_outvote_the_article(separator):
    article = " ".join((ENGLISH * 4).split()[:120])
    code, probability = c.identify_language(separator.join(MENU) + "\n" + article)
    assert code == "en" and probability > 0.5


def test_html_10_short_code_is_no_confident_foreign_language():
    lines = ["import numpy as np", "for i in range(10):", "self.assertEqual(a, b)", "return None", "x += 1", "np.zeros((3, 4), dtype=int)"]
    for line in lines:
        assert c.language_verdict(*c.identify_language(line), c.CleanConfig()).keep is False


def test_html_10_other_scripts_are_told():
    samples = {"zh": "今天天气很好，我们一起去公园散步吧。", "ja": "今日は天気がいいので、公園を散歩しましょう。", "ko": "오늘은 날씨가 좋아서 공원에 산책하러 갑시다.",
               "ru": "Сегодня хорошая погода, пойдём гулять в парк.", "el": "Σήμερα ο καιρός είναι καλός, πάμε στο πάρκο.", "th": "วันนี้อากาศดี ไปเดินเล่นที่สวนสาธารณะกันเถอะ",
               "ar": "الطقس جميل اليوم، لنذهب في نزهة إلى الحديقة.", "he": "מזג האוויר יפה היום, בואו נלך לטייל בפארק."}
    assert {code: c.identify_language(text)[0] for code, text in samples.items()} == {code: code for code in samples}


def test_html_10_every_label_of_the_model_has_a_name():
    labels, _ = c._language_model().predict("any text", 400, -1.0)
    codes = {c._ISO_CODES.get(label.removeprefix("__label__"), label.removeprefix("__label__")) for label in labels}
    assert codes == set(c.LANGUAGES) and len(codes) == 176


def test_cln_9_lone_surrogates_are_replaced_and_counted():
    tally = Counter()
    assert c.normalize_counted("a \ud83d b \udc00, 😀, \ud83d\ude00", tally) == "a \ufffd b \ufffd, 😀, 😀"
    assert tally["surrogates_replaced"] == 2
    assert c.identify_language(ENGLISH + "\ud800") == c.identify_language(ENGLISH + "?")


def test_cln_9_surrogates_from_a_file_end_at_the_door(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"text": ENGLISH + "\ud83d", "id": "\udc00"}) + "\n")
    found, tally = read(path)
    assert found[0].text.endswith("\ufffd") and tally["surrogates_replaced"] == 1
    json.dumps(found[0].id, ensure_ascii=False).encode()


def test_the_real_paragraphs_are_told_as_well_as_by_the_model_alone():
    path = SHARED / "langid/udhr2_paragraphs.tsv.gz"
    if not path.is_file():
        pytest.skip("needs the shared data")
    rows = [line.rstrip("\n").split("\t") for line in gzip.open(path, "rt", encoding="utf-8")][1:]
    guesses = [(label, *c.identify_language(text)) for label, _, text in rows]
    sure = [(label, guess) for label, guess, probability in guesses if probability >= 0.65]
    assert len(sure) / len(rows) > 0.84
    assert sum(label == guess for label, guess in sure) / len(sure) > 0.985


# Normalisation


@pytest.mark.parametrize("before, after", [
    ("a\r\nb\rc\x0bd\x0ce\x85f\u2028g\u2029h", "a\nb\nc\nd\ne\nf\ng\nh"),
    ("a\x00b\x1fc\x7fd\x80e\ufffef", "abcdef"),
    ("\ufeffa\u200bb\u200ec\u202ed\u2066e\u00adf\u061cg", "abcdefg"),
    ("a\u00a0b\u3000c\u2009d\u202fe", "a b c d e"),
    ("e\u0301 \u212b \uac00 \u1100\u1161", "é Å 가 가"),
    ("a  b   c \n", "a b c"),
    ("a\n\n\n\n\nb", "a\n\nb"),
    (" \n\t\n a", "a"),
    ("name\t\tvalue\t3", "name\tvalue\t3"),
    ("def f():\n    if x:\n\treturn  1", "def f():\n    if x:\n\treturn  1"),
    ("    indented = 1\n    code   = 2", "    indented = 1\n    code   = 2"),
    ("می\u200cخواهم", "می\u200cخواهم"),
    ("👩\u200d🚀 ❤\ufe0f\u200d🔥", "👩\u200d🚀 ❤\ufe0f\u200d🔥"),
    ("क्\u200dष x\u200dy \u200c", "क्\u200dष xy"),
    ("\u0e40\u200b\u0e01", "\u0e40\u0e01"),
    ("", ""), (" ", ""), ("\u200b", ""),
])
def test_normalize_text(before, after):
    assert c.normalize_text(before) == after


def test_normalising_is_idempotent_and_never_raises():
    chance = random.Random(1)
    alphabet = [chr(code) for code in [*range(0x250), *range(0x300, 0x370), *range(0x900, 0x980), *range(0x1100, 0x1200), *range(0x2000, 0x2070), 0xd83d, 0xde00,
                0x1f3f4, 0x1f469, 0x1f680, *range(0xe0060, 0xe0070), 0xe007f, 0xfe0f, 0xfeff]] + ["\n"] * 40 + [" "] * 80 + ["\t"] * 20 + ["```"] * 5
    for _ in range(2000):
        once = c.normalize_text("".join(chance.choices(alphabet, k=30)))
        assert c.normalize_text(once) == once
        once.encode()


@pytest.mark.parametrize("bomb", ["a" + "\u0301\u0316" * 300_000, " " * 1_000_000 + "x", "a\n" + " \n" * 300_000, "\t " * 300_000, "\u200d" * 500_000, "`" * 500_000,
                                  "\u094d\u200d" * 200_000, "\U0001f3f4" + "\U000e0061" * 300_000, "─" * 500_000, "\u1100" + "\u1161" * 200_000],
                         ids=["marks", "spaces", "blank lines", "tabs", "joiners", "backticks", "viramas", "tags", "line", "jamo"])
def test_normalising_takes_linear_time(bomb):
    began = time.process_time()
    c.identify_language(c.normalize_text(bomb))
    assert time.process_time() - began < 5  # quadratic would be minutes


def test_every_repair_has_a_name():
    tally = Counter()
    c.normalize_counted("\ufeffa \x00\r\n\n\n\n\ud83d e\u0301 e\u0301" + "\u0301\u0316" * 40, tally)
    assert set(tally) == set(c.CLEAN_REPAIRS) and min(tally.values()) > 0


# Protocol


def test_the_protocol_filter_names_each_reason(tmp_path):
    cases = {"http_status": record(status="404 Not Found"), "content_type": record(http_lines=["Content-Type: image/png"]), "page_too_small": record("<p>hi"),
             "page_too_large": record("<p>" + "x " * 5000), "binary": record(b"%PDF-1.4" + b"x" * 100), "": record(http_lines=["Content-Type: TEXT/HTML;charset=utf-8"])}
    found, tally = read_archive(tmp_path, *cases.values(), max_bytes=5000)
    assert reasons(found) == list(cases)
    assert found[0].detail == "404" and found[1].detail == "image/png"
    assert found[-1].warc_file == str(tmp_path / "crawl.warc.gz") and found[-1].id == f"{found[-1].warc_file}:{found[-1].warc_offset}"


def test_a_missing_content_type_is_settled_by_the_first_bytes(tmp_path):
    found, _ = read_archive(tmp_path, record(http_lines=[]), record("{}" * 99, http_lines=[]), record(b"\xef\xbb\xbf <!DOCTYPE html>" + page(), http_lines=[]))
    assert reasons(found) == ["", "content_type", ""]


def test_plain_text_is_taken_as_it_is(tmp_path):
    found, _ = read_archive(tmp_path, record(ENGLISH + "\n<b>not markup</b>", http_lines=["Content-Type: text/plain"]), record(b"a\0b" * 99, http_lines=["Content-Type: text/plain"]))
    assert reasons(found) == ["", "binary"] and found[0].text.endswith("<b>not markup</b>")


# CLN-1, CLN-2, CLN-3, HTML-11: the reading side


@pytest.mark.parametrize("length", [-1, 10**15, 10**9, 10, "ten"])
def test_cln_1_an_impossible_length_costs_its_record_only(tmp_path, length):
    for name in ["crawl.warc", "crawl.warc.gz"]:
        found, tally = read_archive(tmp_path, record(), record(length=length), record(url="http://b.example/"), name=name)
        assert [item.source for item in found if isinstance(item, c.Document)] == ["a.example", "b.example"]
        assert tally["damaged"] == 1


def test_cln_2_false_and_true_encodings_give_the_page(tmp_path):
    body = page()
    lines = [(body, "Content-Encoding: gzip"), (body, "Content-Encoding: br"), (gzip.compress(body), "Content-Encoding: gzip"),
             (b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body), "Transfer-Encoding: chunked"), (body, "Transfer-Encoding: chunked")]
    found, tally = read_archive(tmp_path, *(record(data, http_lines=["Content-Type: text/html", line]) for data, line in lines))
    assert [item.text for item in found] == [c.normalize_text(ENGLISH)] * 5


def test_cln_3_hostile_pages_leave_the_others_unharmed(tmp_path):
    hostile = ["<svg><template>x</template></svg>" + "<p>" * 40, '<table><tr><td colspan="9007199254740991">cell</td></tr></table>' + ENGLISH, "<div>" * 200_000 + "deep",
               "<p " + " ".join(f"a{number}=1" for number in range(50_000)) + ">x", "<table>" + "<tr><td>row</td></tr>" * 60_000 + "</table>"]
    records = [each for body in hostile for each in (record(body), record())]
    began = time.monotonic()
    found, tally = read_archive(tmp_path, *records, page_seconds=1.0)
    assert len(found) == 10 and time.monotonic() - began < 150
    assert [item.text for item in found[1::2]] == [c.normalize_text(ENGLISH)] * 5
    for item in found[::2]:
        assert isinstance(item, c.Document) or item.reason in c.CLEAN_REASONS


def test_html_11_a_file_that_is_no_archive_is_counted(tmp_path):
    path = tmp_path / "error.warc.gz"
    path.write_bytes(b'<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>')
    found, tally = read(path)
    assert reasons(found) == ["not_an_archive"] and tally["damaged"] == 1


@pytest.mark.parametrize("damage", [lambda data: data[:-40], lambda data: data[:len(data) // 2] + b"\xff" + data[len(data) // 2 + 1:]], ids=["cut", "flipped"])
def test_html_11_damage_costs_one_record(tmp_path, damage):
    path = tmp_path / "crawl.warc.gz"
    records = [gzip.compress(record(f"<p>{ENGLISH} {number}</p>")) for number in range(9)]
    path.write_bytes(damage(b"".join(records)))
    found, tally = read(path)
    assert (tally["kept"], tally["damaged"]) == (8, 1)


def test_html_11_every_shared_archive_ends_well():
    if not (SHARED / "warc").is_dir():
        pytest.skip("needs the shared data")
    kept = {}
    for path in sorted((SHARED / "warc").rglob("*")):
        if path.is_file() and c.source_kind(path) == "archive":
            kept[path.name] = read(path, min_bytes=1, lang_threshold=0)[1]["kept"]
    assert kept["warcfile.warc.gz"] == kept["warcfile.warc.lz4"] >= 14
    assert kept["whirlwind.warc.gz"] == kept["whirlwind.warc.wet.gz"] == 1 and kept["whirlwind.warc.wat.gz"] == 0
    assert kept["example.warc.gz"] == kept["example.warc"] == 1


# Other kinds of files


def test_each_kind_of_file_gives_the_same_text(tmp_path):
    (tmp_path / "a.html").write_bytes(page())
    (tmp_path / "a.html.gz").write_bytes(gzip.compress(page()))
    (tmp_path / "a.txt").write_text(ENGLISH)
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(ENGLISH.encode()))
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": ENGLISH, "url": "https://a.example/x"}) + "\n{\n\n" + json.dumps({"id": 7}))
    parquet.write_table(pyarrow.table({"text": [ENGLISH], "source": ["mine"]}), tmp_path / "a.parquet")
    for path in sorted(tmp_path.iterdir()):
        found, tally = read(path)
        assert found[0].text == c.normalize_text(ENGLISH) and found[0].lang == "en" and found[0].id.startswith(str(path))
        assert found[0].source == {"a.jsonl": "a.example", "a.parquet": "mine"}.get(path.name, tmp_path.name)
        assert reasons(found)[1:] == (["bad_json", "empty", "no_text"] if path.suffix == ".jsonl" else [])


def test_what_cannot_be_read_has_a_reason(tmp_path):
    cases = {"latin.txt": (b"caf\xe9", "not_utf8"), "empty.txt": (b"", "empty"), "cut.txt.gz": (gzip.compress(b"x" * 999)[:-9], "damaged_file"), "big.txt": (b"x" * 3000, "text_too_large"),
             "big.html": (page() * 9, "page_too_large"), "bomb.txt.gz": (gzip.compress(bytes(10_000_000)), "text_too_large"), "empty.html": (b"<p> </p>", "empty"), "bad.parquet": (b"no", "damaged_file"),
             "short.txt": (b"OK 42", "language_unknown"), "big.jsonl": (json.dumps({"text": "x" * 3000}).encode(), "text_too_large")}
    for name, (data, reason) in cases.items():
        (tmp_path / name).write_bytes(data)
        assert reasons(read(tmp_path / name, max_text_bytes=2000, max_bytes=1000)[0]) == [reason], name
    with pytest.raises(UserError, match="missing.txt"):
        read(tmp_path / "missing.txt")


def test_remote_files_are_read_and_named_by_their_address():
    store = fsspec.filesystem("memory")
    for name, data in {"a.warc.gz": gzip.compress(record()), "a.html": page(), "a.txt": ENGLISH.encode(), "a.jsonl": json.dumps({"text": ENGLISH}).encode() + b"\n"}.items():
        store.pipe_file(f"/cleaning/{name}", data)
        found, _ = read(f"memory://cleaning/{name}")
        assert found[0].id.startswith(f"memory://cleaning/{name}") and found[0].lang == "en"


def test_many_records_that_are_no_pages_are_not_held(tmp_path):
    records = [record(ENGLISH, url=f"http://a.example/{number}", http_lines=["Content-Type: text/plain" if number % 100 else "Content-Type: text/html"]) for number in range(300)]
    found, tally = read_archive(tmp_path, *records)
    assert [item.url for item in found] == [f"http://a.example/{number}" for number in range(300)] and tally["kept"] == 300


def test_languages_are_chosen_and_refused_by_name(tmp_path):
    german = "<p>Der Leuchtturm steht seit zweihundert Jahren auf der Klippe und zeigt den Schiffen in der Nacht den sicheren Weg.</p>"
    found, _ = read_archive(tmp_path, record(), record(german), record("<p>OK 42</p>" + " " * 99), languages="de")
    assert reasons(found) == ["language_unwanted", "", "language_unknown"]
    with pytest.raises(ValueError, match="is unknown"):
        c.CleanConfig(languages=["english"])
    assert read_archive(tmp_path, record("<p>OK 42</p>" + " " * 99), lang_threshold=0)[0][0].lang == "unknown"
