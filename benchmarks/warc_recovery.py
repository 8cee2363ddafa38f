"""How many records of a damaged archive are read, and what does the care cost?

    python benchmarks/warc_recovery.py PAGES_FOLDER [--pages 1210] [--trials 30] [--flips 1 5 20] [--rounds 15]

Builds a gzip WARC (one member a record, seed 0) from the folder's .html files, flips random bits in it, and counts the records that
come back byte for byte from this package's reader, from fastwarc's and from warcio's (where it is installed). Then the
time of reading the healthy file over that of a bare fastwarc loop, in turn, best of the rounds, processor time. Appends a line a
measurement to results/warc_recovery.jsonl.
"""

import argparse
import base64
import contextlib
import gzip
import hashlib
import io
import json
import random
import statistics
import time
from importlib.metadata import version
from pathlib import Path

from fastwarc.warc import ArchiveIterator

from llm_from_scratch.env import environment_report
from llm_from_scratch.warc import WarcReader

try:
    from warcio.archiveiterator import ArchiveIterator as WarcioIterator
except ImportError:
    WarcioIterator = None

RESULTS = Path(__file__).parent / "results" / "warc_recovery.jsonl"


def build_records(folder: Path, num_pages: int) -> list[bytes]:
    paths = sorted(path for path in folder.rglob("*.html") if path.is_file() and 0 < path.stat().st_size < 400_000)
    random.Random(0).shuffle(paths)
    return [build_record(path.relative_to(folder).as_posix(), path.read_bytes()) for path in paths[:num_pages]]


def build_record(name: str, body: bytes) -> bytes:
    lines = ["HTTP/1.1 200 OK", "Content-Type: text/html; charset=utf-8", "Server: nginx", f"Content-Length: {len(body)}", "", ""]
    block = "\r\n".join(lines).encode() + body
    digest = base64.b32encode(hashlib.sha1(block).digest()).decode()
    head = ["WARC/1.0", "WARC-Type: response", f"WARC-Record-ID: <urn:md5:{hashlib.md5(name.encode()).hexdigest()}>", "WARC-Date: 2026-01-01T00:00:00Z"]
    head += [f"WARC-Target-URI: https://docs.example/{name}", f"WARC-Block-Digest: sha1:{digest}", "Content-Type: application/http; msgtype=response"]
    return "\r\n".join([*head, f"Content-Length: {len(block)}", "", ""]).encode() + block + b"\r\n\r\n"


def read_ours(data: bytes):
    yield from ((record.url, record.body) for record in WarcReader("damaged.warc.gz", stream=io.BytesIO(data)))


def read_fastwarc(data: bytes):
    try:
        for record in ArchiveIterator(io.BytesIO(data)):
            yield record.headers.get("WARC-Target-URI"), record.reader.read()
    except OSError:
        return


def read_warcio(data: bytes):
    found = []
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):  # it prints a line for each error
        try:
            for record in WarcioIterator(io.BytesIO(data)):
                found.append((record.rec_headers.get_header("WARC-Target-URI"), record.content_stream().read()))
        except Exception:  # its own errors have no common parent
            pass
    return found


def recovery(data: bytes, num_flips: int, trials: int) -> list[dict]:
    readers = {"ours": read_ours, "fastwarc": read_fastwarc} | ({"warcio": read_warcio} if WarcioIterator else {})
    pages = dict(read_fastwarc(data))
    saved, wrong = {name: [] for name in readers}, dict.fromkeys(readers, 0)
    for trial in range(trials):
        spots = random.Random(1000 * num_flips + trial)
        damaged = bytearray(data)
        for _ in range(num_flips):
            damaged[spots.randrange(len(data))] ^= 1 << spots.randrange(8)
        for name, read in readers.items():
            right = [pages.get(url) == body for url, body in read(bytes(damaged))]
            saved[name].append(sum(right))
            wrong[name] += len(right) - sum(right)
    return [
        {"flips": num_flips, "reader": name, "records": len(pages), "trials": trials, "mean_saved": statistics.mean(counts), "least_saved": min(counts)}
        | {"share": statistics.mean(counts) / len(pages), "wrong": wrong[name]}
        for name, counts in saved.items()
    ]


def bare_loop(data: bytes):
    for record in ArchiveIterator(io.BytesIO(data), auto_decode="all"):
        record.reader.read(), record.http_headers.status_code


def same_fields(data: bytes):
    for record in ArchiveIterator(io.BytesIO(data), auto_decode="all"):
        headers = record.http_headers
        dict(headers.items()), headers.status_code, str(record.record_type), record.headers.get("WARC-Target-URI"), record.reader.read()


def our_loop(data: bytes):
    for _ in WarcReader("healthy.warc.gz", stream=io.BytesIO(data)):
        pass


def our_loop_without_digests(data: bytes):
    for _ in WarcReader("healthy.warc.gz", stream=io.BytesIO(data), check_digests=False):
        pass


def speed(data: bytes, num_records: int, rounds: int) -> dict:
    loops = [bare_loop, same_fields, our_loop, our_loop_without_digests]
    best = {loop.__name__: float("inf") for loop in loops}
    for _ in range(rounds):
        for loop in loops:
            began = time.process_time()
            loop(data)
            best[loop.__name__] = min(best[loop.__name__], time.process_time() - began)
    ratios = {"ratio_to_bare": best["bare_loop"] / best["our_loop"], "ratio_to_same_fields": best["same_fields"] / best["our_loop"]}
    ratios["ratio_to_bare_without_digests"] = best["bare_loop"] / best["our_loop_without_digests"]
    return {"microseconds_a_record": {name: 1e6 * seconds / num_records for name, seconds in best.items()}} | ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pages", type=int, default=1210)
    parser.add_argument("--trials", type=int, default=30)
    parser.add_argument("--flips", type=int, nargs="+", default=[1, 5, 20])
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    records = build_records(options.folder, options.pages)
    packed, plain = b"".join(gzip.compress(record, 6, mtime=0) for record in records), b"".join(records)
    report = environment_report()
    about = {"fastwarc": version("fastwarc"), "cpu": report.get("cpu")}
    lines = [
        {"measured": "speed", "container": name, "bytes": len(data)} | speed(data, len(records), options.rounds)
        for name, data in [("gzip", packed), ("plain", plain)]
    ]
    lines += [{"measured": "recovery"} | line for flips in options.flips for line in recovery(packed, flips, options.trials)]
    RESULTS.parent.mkdir(exist_ok=True)
    with RESULTS.open("a") as file:
        for line in lines:
            print(line)
            file.write(json.dumps(line | about) + "\n")


if __name__ == "__main__":
    main()
