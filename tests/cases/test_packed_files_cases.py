"Damage costs what it hits, and what is too large is not held."
import bz2
import gzip
import io
import json
import lzma
import random
import subprocess
import sys
import zlib
from collections import Counter

import pyarrow
import pytest
import xxhash
from pyarrow import parquet

from llm_from_scratch import documents as d
from llm_from_scratch import packed_files
from llm_from_scratch.data_cleaning import CleanConfig, read_source
from llm_from_scratch.env import UserError
from llm_from_scratch.packed_files import next_member, read_lines, read_members, unpack
from llm_from_scratch.provenance import table_row


def numbered(start, stop):
    rng = random.Random(start)
    return [json.dumps({"id": str(number), "text": rng.randbytes(20).hex()}).encode() + b"\n" for number in range(start, stop)]


def test_every_member_behind_a_damaged_one_is_read():
    pieces = [numbered(number * 100, number * 100 + 100) for number in range(20)]
    packed = [bytearray(gzip.compress(b"".join(piece))) for piece in pieces]
    for number in (3, 4, 11): packed[number][len(packed[number]) // 2] ^= 0x40
    found = list(read_lines(io.BytesIO(b"".join(packed)), "a.jsonl.gz"))
    whole = [line for number, piece in enumerate(pieces) if number not in (3, 4, 11) for line in piece]
    assert [line for line in found if line != "damaged"] == whole and 2 <= found.count("damaged") <= 3 # neighbours may be one stretch


@pytest.mark.parametrize("num_members", [1, 10])
def test_no_line_is_given_that_damage_wrote(num_members):
    lines = numbered(0, 2000)
    size, rng = len(lines) // num_members, random.Random(5)
    whole = b"".join(gzip.compress(b"".join(lines[at:at + size])) for at in range(0, len(lines), size))
    for _ in range(20):
        damaged, place = bytearray(whole), rng.randrange(len(whole))
        damaged[place] ^= 1 << rng.randrange(8)
        found = [line for line in read_lines(io.BytesIO(damaged), "a.gz") if line != "damaged"]
        assert set(found) <= set(lines) and len(found) >= len(lines) - size


def test_a_cut_member_gives_what_is_there():
    lines = numbered(0, 2000)
    packed = gzip.compress(b"".join(lines))
    found = list(read_lines(io.BytesIO(packed[:len(packed) // 2]), "a.gz"))
    assert found[-1] == "damaged" and len(found) > 900 and found[:-1] == lines[:len(found) - 1]


def test_a_damaged_header_costs_its_member():
    packed = [bytearray(gzip.compress(b'{"line": %d}\n' % number)) for number in range(5)]
    packed[2][0] = 0
    found = list(read_lines(io.BytesIO(b"".join(packed)), "a.gz"))
    assert found == [b'{"line": 0}\n', b'{"line": 1}\n', "damaged", b'{"line": 3}\n', b'{"line": 4}\n']


def test_blocks_that_end_within_a_line_lose_that_line_only(tmp_path):
    text = b"".join(numbered(0, 400))
    blocks = [bytearray(gzip.compress(text[at:at + 1000])) for at in range(0, len(text), 1000)] # cut by bytes, as block compressors do
    blocks[7][len(blocks[7]) // 2] ^= 0x40
    (tmp_path / "a.jsonl.gz").write_bytes(b"".join(blocks))
    found = list(d.read_jsonl(tmp_path / "a.jsonl.gz"))
    kept = [each.id for each in found if isinstance(each, d.Document)]
    lost = {str(number) for number in range(400)} - set(kept)
    assert 400 - len(lost) == len(kept) and len(lost) <= 1000 // len(numbered(0, 1)[0]) + 3
    assert {each.reason for each in found if isinstance(each, d.Skipped)} == {"damaged"}


def test_a_row_behind_damage_is_traced_to_its_line(tmp_path):
    text = b"".join(numbered(0, 400))
    blocks = [bytearray(gzip.compress(text[at:at + 1000])) for at in range(0, len(text), 1000)]
    blocks[7][len(blocks[7]) // 2] ^= 0x40
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(b"".join(blocks))
    found = [each for each in read_source(str(path), CleanConfig(lang_threshold=0), Counter()) if isinstance(each, d.Document)]
    assert len(found) > 380
    for each in (found[0], found[200], found[-1]):
        assert json.loads(table_row(str(path), each.warc_offset)) == {"id": each.id, "text": each.text}
    lost = next(number for number in range(1, 400) if number not in {each.warc_offset for each in found})
    with pytest.raises(UserError, match=f"line {lost} is damaged"): table_row(str(path), lost)


@pytest.mark.parametrize("rest", [b"", b"\0" * 70_000, b"\0" * 5])
def test_zeros_behind_the_last_member_are_no_damage(rest):
    assert unpack(io.BytesIO(gzip.compress(b"one") + rest + gzip.compress(b"two") + rest), "a.gz").read() == b"onetwo"


def test_rubbish_behind_the_last_member_is_told_once():
    assert list(read_lines(io.BytesIO(gzip.compress(b"one\n") + b"rubbish"), "a.gz")) == [b"one\n", "damaged"]


def test_a_candidate_across_two_stretches_of_the_search_is_found():
    for shift in (-2, -1, 0, 1):
        file = io.BytesIO(b"?" * (2**20 + shift) + gzip.compress(b"text"))
        assert next_member(file, 0) == 2**20 + shift


def frame(text, checksum=True): # pyarrow writes no checksum: its bit is set, and it is appended
    packed = bytearray(pyarrow.compress(text, "zstd", asbytes=True))
    packed[4] |= 4 * checksum
    return bytes(packed) + xxhash.xxh64_digest(text)[:3:-1] * checksum


def xz_blocks(texts, check=lzma.CHECK_CRC64): # one stream with a block for each text, as `xz --block-size` makes them
    streams = [lzma.compress(text, check=check) for text in texts]
    width = {lzma.CHECK_CRC32: 4, lzma.CHECK_CRC64: 8, lzma.CHECK_SHA256: 32, lzma.CHECK_NONE: 0}[check]
    bodies, records = [], b""
    for text, stream in zip(texts, streams):
        body = stream[12:-12 - (int.from_bytes(stream[-8:-4], "little") + 1) * 4]
        padding = -(packed_files._lzma2_end(io.BytesIO(body), 12) + width) % 4
        bodies.append(body)
        records += packed_files._xz_number(len(body) - padding) + packed_files._xz_number(len(text))
    index = b"\0" + packed_files._xz_number(len(texts)) + records
    index = packed_files._with_crc(index + b"\0" * (-len(index) % 4))
    foot = (len(index) // 4 - 1).to_bytes(4, "little") + streams[0][6:8]
    return streams[0][:12] + b"".join(bodies) + index + packed_files._with_crc(foot)[6:] + foot + b"YZ"


def cut(lines, size): # by bytes, as block compressors do
    text = b"".join(lines)
    return [text[at:at + size] for at in range(0, len(text), size)]


def by_lines(lines, num_units): # as writers of rows do
    size = len(lines) // num_units
    return [b"".join(lines[at:at + size]) for at in range(0, len(lines), size)]


PACKED = { # name: what is packed, and the most lines that one unit touches
    "members.gz": lambda lines: (b"".join(map(gzip.compress, by_lines(lines, 8))), len(lines) // 8),
    "cut.gz": lambda lines: (b"".join(map(gzip.compress, cut(lines, 4000))), 4000 // len(lines[0]) + 2),
    "frames.zst": lambda lines: (b"".join(map(frame, by_lines(lines, 8))), len(lines) // 8),
    "cut.zst": lambda lines: (b"\x50\x2a\x4d\x18\3\0\0\0abc".join(map(frame, cut(lines, 4000))), 4000 // len(lines[0]) + 2),
    "streams.xz": lambda lines: (b"".join(map(lzma.compress, by_lines(lines, 8))), len(lines) // 8),
    "blocks.xz": lambda lines: (xz_blocks(cut(lines, 4000)), 4000 // len(lines[0]) + 2),
    "streams.bz2": lambda lines: (b"".join(map(bz2.compress, by_lines(lines, 8))), len(lines) // 8),
}


@pytest.mark.parametrize("name", PACKED)
def test_a_flipped_byte_costs_one_unit_and_gives_no_wrong_line(name):
    lines = numbered(0, 480)
    whole, most = PACKED[name](lines)
    assert list(read_lines(io.BytesIO(whole), name)) == lines and packed_files.faults(io.BytesIO(whole), name) == []
    rng, numbers = random.Random(7), {line: number for number, line in enumerate(lines)}
    for place in [*range(0, 20, 3), *range(len(whole) - 40, len(whole), 4), *rng.sample(range(len(whole)), 10)]:
        damaged = bytearray(whole)
        damaged[place] ^= 1 << rng.randrange(8)
        found = list(read_lines(io.BytesIO(damaged), name))
        kept = [line for line in found if isinstance(line, bytes)]
        order = [numbers.get(line, -1) for line in kept] # of a wrong line: -1
        assert order == sorted(set(order) - {-1}), place
        lost = sorted(set(numbers.values()) - set(order))
        assert len(lost) <= most and (not lost or lost[-1] - lost[0] < most), (place, len(lost))
        assert found.count("damaged") == 1 or not lost and not found.count("damaged"), place # a time or a flag of a gzip header


def test_blocks_of_bzip2_are_kept_around_a_damaged_one():
    lines = numbered(0, 4500)
    whole = bz2.compress(b"".join(lines), 1)
    marks = [bit // 8 for bit, _ in packed_files._bzip2_marks(io.BytesIO(whole))]
    assert len(marks) == 5 and list(read_lines(io.BytesIO(whole), "a.bz2")) == lines
    per_block = 100_000 // len(lines[0]) + 2
    for place, num_blocks in [(10, 1), (marks[1] + 500, 1), (marks[2] - 9, 1), (marks[2] + 3, 2), (marks[3] + 100, 1), (marks[4] + 2, 1), (len(whole) - 2, 0), (0, 0)]:
        damaged = bytearray(whole)
        damaged[place] ^= 0x10
        found = list(read_lines(io.BytesIO(damaged), "a.bz2"))
        kept = [line for line in found if line != "damaged"]
        assert set(kept) <= set(lines) and len(lines) - len(kept) <= num_blocks * per_block, (place, len(kept))


@pytest.mark.parametrize("name", PACKED)
def test_a_file_that_is_cut_off_gives_its_whole_units(name):
    lines = numbered(0, 480)
    whole, most = PACKED[name](lines)
    for place in (1, 30, len(whole) // 2, len(whole) - 30, len(whole) - 13):
        found = list(read_lines(io.BytesIO(whole[:place]), name))
        kept = [line for line in found if line != "damaged"]
        assert kept == lines[:len(kept)] and len(kept) >= len(lines) * place // len(whole) - 2 * most and "damaged" in found, place


@pytest.mark.parametrize("check", [lzma.CHECK_CRC32, lzma.CHECK_SHA256, lzma.CHECK_NONE])
def test_every_checksum_of_xz_is_known(check):
    texts = by_lines(numbered(0, 80), 4)
    whole = xz_blocks(texts, check) + bytes(8) + xz_blocks(texts, check)
    assert unpack(io.BytesIO(whole), "a.xz", checks_first=True).read() == b"".join(texts) * 2
    assert [fault.reason for fault in packed_files.faults(io.BytesIO(whole), "a.xz")] == ["no checksum"] * 8 * (check == lzma.CHECK_NONE)


def test_frames_without_a_checksum_are_read_and_told():
    lines = numbered(0, 100)
    whole = b"".join(frame(text, checksum=number % 2 == 0) for number, text in enumerate(by_lines(lines, 4)))
    assert list(read_lines(io.BytesIO(whole), "a.zst")) == lines
    found = packed_files.faults(io.BytesIO(whole), "a.zst")
    assert [fault.is_lost for fault in found] == [False, False] and whole[found[1].stop - 1:] == whole[-1:]


def test_damage_at_the_end_of_a_member_does_not_look_like_a_cut():
    lines = numbered(0, 200)
    whole = gzip.compress(b"".join(lines))
    for place in range(len(whole) - 40, len(whole)):
        for bit in range(8):
            damaged = bytearray(whole)
            damaged[place] ^= 1 << bit
            found = list(read_lines(io.BytesIO(damaged), "a.gz"))
            assert found == ["damaged"] or found == lines and zlib.decompress(damaged, 31), place # bits that only fill the last byte


def test_a_unit_larger_than_what_is_held_is_read_twice(monkeypatch):
    monkeypatch.setattr(packed_files, "_HELD_BYTES", 1000)
    lines = numbered(0, 480)
    for name, pack in PACKED.items():
        whole, _ = pack(lines)
        assert list(read_lines(io.BytesIO(whole), name)) == lines


def test_the_end_of_a_line_is_not_given_as_one():
    lines = [json.dumps({"id": number, "text": '{"text": "in a text"}', "scores": {"a": {"text": 1}}}).encode() + b"\n" for number in range(100, 160)]
    text = b"".join(lines)
    for at in range(len(lines[0]) * 20, len(lines[0]) * 21):
        damaged = bytearray(gzip.compress(text[:at]))
        damaged[-6] ^= 1
        assert list(read_lines(io.BytesIO(damaged + gzip.compress(text[at:])), "a.gz")) == ["damaged", *lines[20 + (at % len(lines[0]) > 0):]]


def test_a_line_that_is_too_long_ends_where_it_ends(monkeypatch):
    monkeypatch.setattr(packed_files, "MAX_LINE_BYTES", 10)
    lines = b"a\n" + b"x" * 25 + b"\nb\n" + b"y" * 11 + b"\nc"
    assert list(read_lines(io.BytesIO(lines), "a")) == [b"a\n", "too_long", b"b\n", "too_long", b"c"]
    torn = gzip.compress(b"x" * 25)[:-9] + gzip.compress(b"y" * 25 + b"\n{}\n") # both are the line that damage took
    assert list(read_lines(io.BytesIO(torn), "a.gz")) == ["damaged", b"{}\n"]


def test_the_standard_library_gives_up_where_we_go_on(): # what this module guards against: when it mends itself, we may go
    with pytest.raises(zlib.error):
        gzip.decompress(gzip.compress(b"one") + gzip.compress(b"two")[:12] + b"\xff" * 9 + gzip.compress(b"three"))


def test_damage_in_parquet_costs_one_row_group_and_each_row_is_counted(tmp_path):
    texts = [f"{number} " + random.Random(number).randbytes(100).hex() for number in range(5000)]
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": texts}), path, row_group_size=1000, compression="zstd", use_dictionary=False, write_page_checksum=True)
    column = parquet.ParquetFile(path).metadata.row_group(2).column(0)
    data = bytearray(path.read_bytes())
    place = column.data_page_offset + column.total_compressed_size // 2
    data[place:place + 64] = b"\xff" * 64
    path.write_bytes(data)
    found = list(d.read_parquet(path))
    assert [each.text for each in found[:2000]] == texts[:2000] and [each.text for each in found[3000:]] == texts[3000:]
    assert len(found) == 5000 and found[2999] == d.Skipped(f"{d.document_id(path)}:3000", "damaged")
    assert found[3000].id.endswith(":3001")


def test_a_page_that_is_too_large_is_counted_by_its_rows(tmp_path, monkeypatch):
    for module in (packed_files, d): monkeypatch.setattr(module, "MAX_PAGE_BYTES", 10**6)
    path = tmp_path / "a.parquet"
    with parquet.ParquetWriter(path, pyarrow.schema({"text": pyarrow.string()})) as writer:
        for texts in (["one", "two"], ["x" * 2_000_000, "three"], ["four"]): writer.write_table(pyarrow.table({"text": texts}))
    found = [getattr(each, "text", None) or each.reason for each in d.read_parquet(path)]
    assert found == ["one", "two", "too_long", "too_long", "four"]


READ = """
import resource, sys
from collections import Counter; from pathlib import Path
from llm_from_scratch.documents import read_documents
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
tally = Counter()
for document in read_documents([Path(name) for name in sys.argv[1:]], tally): pass
print(tally["kept"], tally["too_long"], (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


@pytest.mark.slow # half a gigabyte is packed
@pytest.mark.parametrize("num_bytes", [200 << 20, 700 << 20])
def test_one_giant_text_in_parquet_does_not_take_the_workers_memory(tmp_path, num_bytes):
    maker = "import pyarrow, sys; from pyarrow import parquet; parquet.write_table(pyarrow.table({'text': ['one', 'x' * int(sys.argv[2])]}), sys.argv[1], use_dictionary=False)"
    subprocess.run([sys.executable, "-c", maker, tmp_path / "a.parquet", str(num_bytes)], check=True)
    (tmp_path / "b.txt").write_text("good")
    said = subprocess.run([sys.executable, "-c", READ, tmp_path / "a.parquet", tmp_path / "b.txt"], check=True, capture_output=True, text=True).stdout
    kept, too_long, megabytes = map(int, said.split())
    assert kept + too_long == 3 and too_long >= 1 and megabytes < 850


def test_members_behind_damaged_extended_headers_are_read():
    import tarfile
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for number in range(6):
            info = tarfile.TarInfo(f"{number}.txt")
            info.size, info.mtime = 4, 1.5 # a time with a fraction takes a header of its own, as WebDataset's writer makes them
            tar.addfile(info, io.BytesIO(b"text"))
    whole = archive.getvalue()
    block = 512 * 4 # extended header, its record, header, content
    for place in range(block * 2, block * 3, 512):
        damaged = whole[:place] + b"?" * 512 + whole[place + 512:]
        names = [name for name, _ in read_members(io.BytesIO(damaged), "a.tar", (".txt",))]
        assert set(names) >= {f"{number}.txt" for number in (0, 1, 3, 4, 5)}, place


@pytest.mark.parametrize("name, pack", [("a.tar.gz", gzip.compress), ("a.tgz", gzip.compress), ("a.tar.xz", lambda text: lzma.compress(text, preset=0)), ("a.tar.zst", frame), ("a.tar.bz2", bz2.compress)])
def test_members_of_a_packed_archive_behind_a_lost_unit_are_read(name, pack):
    import tarfile
    archive, rng = io.BytesIO(), random.Random(3)
    texts = {f"{number}.txt": rng.randbytes(20_000).hex().encode() for number in range(30)}
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for each, text in texts.items():
            info = tarfile.TarInfo(each)
            info.size = len(text)
            tar.addfile(info, io.BytesIO(text))
    whole, step = archive.getvalue(), 250_000
    units = [bytearray(pack(whole[at:at + step])) for at in range(0, len(whole), step)]
    units[2][len(units[2]) // 2] ^= 4
    found = list(read_members(io.BytesIO(b"".join(units)), name, (".txt",)))
    kept = {each: text for each, text in found if text != "damaged"}
    assert kept.items() <= texts.items() and len(kept) >= 21 and {"0.txt", "11.txt", "19.txt", "29.txt"} <= set(kept)
    assert 1 <= sum(text == "damaged" for _, text in found) <= 2


@pytest.mark.parametrize("name, pack", [("a.gz", gzip.compress), ("a.xz", lzma.compress), ("a.zst", frame)])
def test_a_file_that_is_cut_off_is_said_to_end_too_early(name, pack):
    packed = pack(random.Random(4).randbytes(9000))
    for num_bytes in (100, 5000, len(packed) - (2 if name != "a.xz" else 60)):
        assert packed_files.faults(io.BytesIO(packed[:num_bytes]), name)[-1].reason == "the file ends inside it", num_bytes
