import base64
import gzip
import hashlib
import io
import os
import random
import time
import zlib
from collections import Counter
from pathlib import Path

import pytest
from fastwarc.stream_io import BrotliWriter, Lz4Writer, ZstdWriter, zstd_train_dictionary_from_samples

from llm_from_scratch.env import UserError
from llm_from_scratch.warc import WarcReader, read_raw_record

DATA = Path(os.environ.get("LLM_SHARED_DATA", Path(__file__).parents[2].parent / "shared" / "data")) / "warc"


class Kept(io.BytesIO):
    def close(self):
        pass


def pack(writer, data, **options):
    kept = Kept()
    packer = writer(kept, **options)
    packer.write(data)
    packer.close()
    return kept.getvalue()


def record(name, block=None, length=None, kind="response", newline="\r\n", extra=()):
    block = answer(f"<p>{name} ".encode() * 50) if block is None else block
    head = ["WARC/1.0", f"WARC-Type: {kind}", f"WARC-Target-URI: http://example.org/{name}"]
    head += ["Content-Type: application/http"] if len(name) % 2 else []
    head += [*extra, f"Content-Length: {len(block) if length is None else length}", "", ""]
    return newline.join(head).encode() + block + 2 * newline.encode()


def answer(body, *lines):
    return "\r\n".join(["HTTP/1.1 200 OK", *(lines or ["Content-Type: text/html"]), "", ""]).encode() + body


def digest(block):
    return f"WARC-Block-Digest: sha1:{base64.b32encode(hashlib.sha1(block).digest()).decode()}"


CONTAINERS = {
    "plain": b"".join,
    "gzip": lambda records: b"".join(gzip.compress(one, 6) for one in records),
    "zstd": lambda records: b"".join(pack(ZstdWriter, one) for one in records),
    "lz4": lambda records: b"".join(pack(Lz4Writer, one) for one in records),
    "one gzip member": lambda records: gzip.compress(b"".join(records), 6),
    "three to a member": lambda records: b"".join(gzip.compress(b"".join(records[at : at + 3]), 6) for at in range(0, len(records), 3)),
}


def read(data, **options):
    reader = WarcReader("memory", stream=io.BytesIO(data), **options)
    return [found.url.rsplit("/", 1)[-1] for found in reader], dict(reader.counts), reader


def names(count):
    return [f"page{number}" for number in range(count)]


@pytest.mark.parametrize("container", CONTAINERS)
def test_each_record_has_its_own_offset_and_is_found_by_it(container, tmp_path):
    records = [record(name) for name in names(40)]
    path = tmp_path / "crawl.warc"
    path.write_bytes(CONTAINERS[container](records))
    reader = WarcReader(path)
    found = list(reader)
    assert dict(reader.counts) == {"ok": 40} and len({one.offset for one in found}) == 40
    assert [one.url for one in found] == [f"http://example.org/{name}" for name in names(40)]
    for number in (0, 1, 2, 17, 39):
        assert read_raw_record(path, found[number].offset) == records[number][:-4]
    for wrong in {found[5].offset + 50, 10**7, -1} - {one.offset for one in found}:
        with pytest.raises(UserError, match="no record begins"):
            read_raw_record(path, wrong)


def test_one_flipped_byte_anywhere_costs_one_record():
    records = [record(name, random.Random(name).randbytes(300)) for name in names(12)]
    data = CONTAINERS["gzip"](records)
    for position in range(0, len(data), 17):
        damaged = bytearray(data)
        damaged[position] ^= 1 << position % 8
        found, counts, _ = read(bytes(damaged))
        assert len(found) >= 11 and set(found) <= set(names(12))
        assert len(found) == 12 or counts["damaged"] == 1, position


@pytest.mark.parametrize("container", ["gzip", "zstd"])
def test_many_flipped_bytes_never_pass_for_a_page(container):
    blocks = {name: answer(random.Random(name).randbytes(40).hex().encode() * 20) for name in names(200)}
    data = CONTAINERS[container]([record(name, block) for name, block in blocks.items()])
    spots = random.Random(1)
    for num_flips in (1, 5, 20, 100):
        damaged = bytearray(data)
        for _ in range(num_flips):
            damaged[spots.randrange(len(data))] ^= 1 << spots.randrange(8)
        reader = WarcReader("memory", stream=io.BytesIO(bytes(damaged)))
        found = list(reader)
        assert len(found) >= 200 - num_flips
        assert all(blocks[one.url.rsplit("/", 1)[-1]].endswith(one.body) and len(one.body) == 1600 for one in found)


def test_damage_in_unchecked_containers_is_noticed_by_the_digest():
    blocks = [answer(f"<p>{name} ".encode() * 30) for name in names(9)]
    plain = b"".join(record(name, block, extra=[digest(block)]) for name, block in zip(names(9), blocks))
    damaged = plain.replace(b"page4 page4" if b"page4 page4" in plain else b"<p>page4 ", b"<p>qage4 ", 1)
    assert read(damaged)[1] == {"ok": 8, "damaged": 1}
    assert read(gzip.compress(damaged))[1] == {"ok": 8, "damaged": 1}
    assert read(damaged, check_digests=False)[1] == {"ok": 9}


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("length", [-1, 10**15, 10**9, 90_000_000, 5000, 10, "ten", "", "0x10"])
def test_cln_1_impossible_lengths_cost_that_record_alone(container, length):
    records = [record(name, length=length if name == "page4" else None) for name in names(9)]
    found, counts, reader = read(CONTAINERS[container](records))
    assert found == [name for name in names(9) if name != "page4"]
    assert counts == {"ok": 8, "damaged": 1} and len(reader.problems) == 1


def test_cln_1_hostile_files_end_soon():
    many = 4000
    hostile = [record("a", length=60_000_000) * many, (record("a") * 8 + record("b", length=10**9)) * (many // 8)]
    hostile += [b"WARC/1.0\r\nA: b\r\n" * many, b"\x1f\x8b\x08" * many, b"\x28\xb5\x2f\xfd" * many, b"\x04\x22\x4d\x18" * many]
    hostile += [record("a") + b"\n" * 1_000_000, gzip.compress(record("a", length=9) * many), bytes(3_000_000)]
    began = time.monotonic()
    for data in hostile:
        counts = read(data)[1]
        assert sum(counts.values()) >= 1
    assert time.monotonic() - began < 120


def test_cln_1_a_bomb_is_counted_and_not_unfolded():
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    bomb = packer.compress(record("bomb", bytes(20_000_000))) + packer.flush()
    inner = answer(gzip.compress(bytes(20_000_000)), "Content-Encoding: gzip")
    data = bomb + gzip.compress(record("inner", inner)) + gzip.compress(record("after"))
    found, counts, _ = read(data, max_body_bytes=1_000_000)
    assert found == ["after"] and counts == {"ok": 1, "too_large": 2}


def test_cln_2_declared_encodings_are_undone_or_ignored():
    page = b"<p>Roses are red. " * 40
    chunked = b"".join(b"%x\r\n%b\r\n" % (len(page[at : at + 100]), page[at : at + 100]) for at in range(0, len(page), 100)) + b"0\r\n\r\n"
    raw = zlib.compressobj(wbits=-15)
    bodies = [
        (page, "Content-Encoding: gzip"),
        (page, "Content-Encoding: br"),
        (page, "Content-Encoding: zstd"),
        (page, "Content-Encoding: deflate"),
        (page, "Transfer-Encoding: chunked"),
        (page, "Content-Encoding: none"),
        (gzip.compress(page), "Content-Encoding: gzip"),
        (gzip.compress(page), "Content-Type: text/html"),
        (zlib.compress(page), "Content-Encoding: deflate"),
        (raw.compress(page) + raw.flush(), "Content-Encoding: deflate"),
        (pack(BrotliWriter, page), "Content-Encoding: br"),
        (pack(ZstdWriter, page), "Content-Encoding: zstd"),
        (chunked, "Transfer-Encoding: chunked"),
        (b"%x\r\n%b\r\n0\r\n\r\n" % (len(gzip.compress(page)), gzip.compress(page)), "Content-Encoding: gzip\r\nTransfer-Encoding: chunked"),
    ]
    data = b"".join(record(str(number), answer(body, line)) for number, (body, line) in enumerate(bodies))
    reader = WarcReader("memory", stream=io.BytesIO(data))
    assert [found.body == page for found in reader] == [True] * len(bodies)
    assert dict(reader.counts) == {"ok": len(bodies), "encoding_false": 6, "encoding_unsaid": 1}


def test_html_11_a_bad_file_ends_nothing(tmp_path):
    records = [record(name) for name in names(6)]
    good = CONTAINERS["gzip"](records)
    second = len(gzip.compress(records[0], 6))
    files = {"good.warc.gz": good, "denied.warc.gz": b"<Error>AccessDenied</Error>", "good2.warc.gz": bytearray(good)}
    files["good2.warc.gz"][second + 60] ^= 1
    readers = []
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
        readers.append(WarcReader(tmp_path / name))
        list(readers[-1])
    assert [dict(reader.counts) for reader in readers] == [{"ok": 6}, {"not_an_archive": 1}, {"ok": 5, "damaged": 1}]
    assert "denied.warc.gz" in readers[1].problem and "AccessDenied" in readers[1].problem and "\n" not in readers[1].problem
    assert readers[2].problems == [(second, "gzip unit is broken")]


@pytest.mark.parametrize("data", [b"", b"\n\n", b"<html>", gzip.compress(b"<html>", mtime=0), b"\x1f\x8b\x08", b"PK\x03\x04" * 99])
def test_html_11_what_is_no_archive_is_named(data):
    reader = WarcReader("busy.warc.gz", stream=io.BytesIO(data))
    assert list(reader) == [] and dict(reader.counts) == {"not_an_archive": 1}
    assert reader.problem.startswith("busy.warc.gz: ")


def test_a_missing_file_is_the_users_error(tmp_path):
    with pytest.raises(UserError, match="missing.warc"):
        list(WarcReader(tmp_path / "missing.warc"))


@pytest.mark.parametrize("container", CONTAINERS)
def test_a_cut_last_record_is_counted_and_not_handed_on(container):
    data = CONTAINERS[container]([record(name) for name in names(9)])
    for num_bytes in (9, 40, 60):
        found, counts, _ = read(data[:-num_bytes])
        assert counts["truncated"] == 1 and len(found) <= 8 and set(found) <= set(names(9))
        if container != "three to a member" and container != "one gzip member":
            assert len(found) == 8


def test_junk_before_between_and_behind():
    records = [record(name) for name in names(3)]
    assert read(b"junk\n" + records[0] + b"more junk\n" + records[1] + records[2])[1] == {"ok": 3, "damaged": 2}
    packed = [gzip.compress(one) for one in records]
    assert read(b"junk" + packed[0] + b"junk" + packed[1] + packed[2] + b"junk")[1] == {"ok": 3, "damaged": 3}
    assert read(b"".join(packed) + bytes(10240))[1] == {"ok": 3}
    assert read(b"".join(records).replace(b"WARC/1.0\r\nWARC-Type: response\r\nWARC-Target-URI: http://example.org/page1", b"WORC/1.0\r\nWARC-Type: x"))[1] == {"ok": 2, "damaged": 1}


def test_line_feeds_and_page_text_that_looks_like_a_record():
    tricky = answer(b"<pre>\nWARC/1.0\r\nWARC-Type: response\r\nContent-Length: 3\r\n\r\nabc\r\n\r\n</pre>")
    bare = record("bare", b"text", newline="\n", kind="conversion")
    found, counts, _ = read(record("one") + bare + record("tricky", tricky) + bare + record("two"))
    assert found == ["one", "bare", "tricky", "bare", "two"] and counts == {"ok": 5}


def test_kinds_are_chosen_and_the_others_counted():
    data = CONTAINERS["gzip"]([record("ask", b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", kind="request"), record("page"), record("text", b"abc", kind="conversion")])
    assert read(data, kinds={"response"})[:2] == (["page"], {"ok": 1, "skipped": 2})
    assert [found.status for found in WarcReader("x", stream=io.BytesIO(data))] == [None, 200, None]


def test_zstd_with_a_dictionary_in_front():
    records = [record(name, answer(random.Random(name).randbytes(200).hex().encode())) for name in names(200)]
    dictionary = zstd_train_dictionary_from_samples(records, 4000)
    frames = [pack(ZstdWriter, one, dictionary=dictionary) for one in records[:30]]
    size = 8 + len(dictionary)
    data = frames[0][:size] + b"".join(frame[size:] for frame in frames)
    assert read(data)[1] == {"ok": 30}
    damaged = bytearray(data)
    damaged[len(data) // 2] ^= 4
    assert read(bytes(damaged))[1] == {"ok": 29, "damaged": 1}


def test_arc_resynchronises_too():
    def old(name, length=None):
        body = answer(b"<p>" + name.encode())
        return b"http://example.org/%b 192.0.2.1 19990101000000 text/html %b\n%b\n" % (name.encode(), str(len(body) if length is None else length).encode(), body)

    head = b"filedesc://old.arc 0.0.0.0 19990101000000 text/plain 12\n1 0 Archive\n\n"
    parts = [head, old("a"), old("b", 10**6), old("c"), old("d", -1), old("e")]
    for data in (b"".join(parts), b"".join(gzip.compress(part) for part in parts)):
        reader = WarcReader("old.arc", stream=io.BytesIO(data))
        assert [(found.kind, found.status) for found in reader] == [("warcinfo", None)] + [("response", 200)] * 3
        assert dict(reader.counts) == {"ok": 4, "damaged": 2}


REAL = {  # file: (records by kind, counts)
    "cc_net/sample.warc.txt": ({}, {"damaged": 4}),
    "commoncrawl-whirlwind/whirlwind.warc.gz": ({"warcinfo": 1, "request": 1, "response": 1, "metadata": 1}, {"ok": 4}),
    "commoncrawl-whirlwind/whirlwind.warc.wat.gz": ({"warcinfo": 1, "metadata": 1}, {"ok": 2}),
    "commoncrawl-whirlwind/whirlwind.warc.wet.gz": ({"warcinfo": 1, "conversion": 1}, {"ok": 2}),
    "resiliparse/block-sized-records.warc.gz": ({"unknown": 3}, {"ok": 3}),
    "resiliparse/warcfile.warc.gz": ({"warcinfo": 1, "request": 17, "response": 16, "metadata": 16}, {"ok": 50}),
    "resiliparse/warcfile.warc.lz4": ({"warcinfo": 1, "request": 17, "response": 16, "metadata": 16}, {"ok": 50}),
    "warcio/bad.arc": ({"response": 1}, {"ok": 1, "damaged": 3}),
    "warcio/example-bad.warc.gz.bad": ({"warcinfo": 1, "response": 2, "request": 2, "revisit": 1}, {"ok": 6}),
    "warcio/example-digest.warc": ({"request": 4}, {"ok": 4}),
    "warcio/example-iana.org-chunked.warc": ({"warcinfo": 1, "response": 1, "request": 1}, {"ok": 3}),
    "warcio/example-resource.warc.gz": ({"warcinfo": 2, "resource": 1}, {"ok": 3}),
    "warcio/example-wget-bad-target-uri.warc.gz": ({"warcinfo": 1, "request": 1, "response": 1, "metadata": 1, "resource": 2}, {"ok": 6}),
    "warcio/example.warc": ({"warcinfo": 2, "response": 1, "request": 2, "revisit": 1}, {"ok": 6}),
    "warcio/example.warc.gz": ({"warcinfo": 2, "response": 1, "request": 2, "revisit": 1}, {"ok": 6}),
    "warcio/post-test.warc.gz": ({"response": 3, "request": 3}, {"ok": 6}),
}


@pytest.mark.skipif(not DATA.is_dir(), reason="shared data is not here")
def test_each_real_archive_comes_to_its_end():
    files = [path.relative_to(DATA).as_posix() for path in sorted(DATA.rglob("*")) if path.is_file() and path.suffix != ".md"]
    assert set(REAL) <= set(files)
    for name in files:
        reader = WarcReader(DATA / name)
        found = list(reader)
        if name in REAL:
            assert (dict(Counter(one.kind for one in found)), dict(reader.counts)) == REAL[name], name
        for one in found[:3]:
            assert b"WARC/1." in read_raw_record(DATA / name, one.offset)[:8] or name.endswith(".arc")
        assert not any("<" in (one.url or "") for one in found)


def test_frames_of_zstd_without_a_checksum_are_held_against_the_digest():
    import pyarrow
    blocks = {name: answer(random.Random(name).randbytes(400).hex().encode()) for name in names(20)}
    records = [record(name, block, extra=[digest(block)]) for name, block in blocks.items()]
    packed = [bytearray(pyarrow.compress(one, "zstd", asbytes=True)) for one in records]
    spots, num_noticed = random.Random(1), 0
    for place in range(len(packed[7]) - 300, len(packed[7]) - 20, 28): # within the page
        damaged = bytearray(packed[7])
        damaged[place] ^= 1 << spots.randrange(8)
        data = b"".join([*packed[:7], damaged, *packed[8:]])
        assert read(data)[0] == names(7) + names(20)[8:] and read(data)[1] == {"ok": 19, "damaged": 1}, place
        num_noticed += read(data, check_digests=False)[1].get("damaged", 0)
    assert num_noticed < 10 # unpacking alone does not see them all
