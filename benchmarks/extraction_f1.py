"""How good and how fast is text extraction, with the libraries alone and with our own steps?

    python benchmarks/extraction_f1.py [--data FOLDER] [--pages FOLDER] [--num-pages N] [--seconds S]

Quality: 78 gold pages in 13 languages, each with segments that must and must not be in the text (trafilatura's evaluation
data). A segment counts where it is found literally. Speed: real HTML pages of --pages (Debian's documentation packages,
say), the processor time of all processes that take part. Prints two tables, appends a line a row to
results/extraction_f1.jsonl.
"""

import argparse
import gzip
import json
import os
import random
import resource
import time
from pathlib import Path

import resiliparse
import trafilatura
from resiliparse.extract.html2text import extract_plain_text
from resiliparse.parse.encoding import bytes_to_str, detect_encoding

from llm_from_scratch.html import PageParser, extract_text

RESULTS = Path(__file__).parent / "results" / "extraction_f1.jsonl"
DATA = Path(os.environ.get("LLM_SHARED_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))


def resiliparse_alone(body: bytes) -> str:
    source = bytes_to_str(body, detect_encoding(body, from_html_meta=True))
    return extract_plain_text(source, main_content=True, alt_texts=False, comments=False)


def trafilatura_alone(body: bytes) -> str:
    return trafilatura.extract(body) or ""


EXTRACTIONS = {
    "resiliparse alone": resiliparse_alone,
    "fast": extract_text,
    "trafilatura alone": trafilatura_alone,
    "accurate": lambda body: extract_text(body, extractor="accurate"),
}


def gold_pages(folder: Path) -> list[tuple[dict, bytes]]:
    entries = json.loads((folder / "evaldata.json").read_bytes()).values()
    return [(entry, gzip.open(folder / "html" / entry["file"]).read()) for entry in entries]


def segment_scores(extract, gold: list[tuple[dict, bytes]]) -> dict[str, float]:
    texts = [(entry, extract(body)) for entry, body in gold]
    right, wrong = (sum(segment in text for entry, text in texts for segment in entry[kind]) for kind in ("with", "without"))
    missed = sum(len(entry["with"]) for entry, _ in texts) - right
    precision, recall = right / (right + wrong), right / (right + missed)
    return {"precision": precision, "recall": recall, "f1": 2 * precision * recall / (precision + recall)}


def used_seconds() -> float:
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def speed(run, bodies: list[bytes], seconds: float) -> dict[str, float]:
    "Pages a second of processor time and of elapsed time, over as many pages as fit."
    began, used, num_pages = time.perf_counter(), used_seconds(), 0
    while num_pages < len(bodies) and time.perf_counter() - began < seconds:
        run(bodies[num_pages : num_pages + 50])
        num_pages += len(bodies[num_pages : num_pages + 50])
    return {"pages": num_pages, "pages_per_cpu_second": num_pages / (used_seconds() - used), "pages_per_second": num_pages / (time.perf_counter() - began)}


def speed_rows(bodies: list[bytes], seconds: float):
    for name, extract in EXTRACTIONS.items():
        yield name, speed(lambda part: [extract(body) for body in part], bodies, seconds)
    for extractor in ("fast", "accurate"):
        used, began = used_seconds(), time.perf_counter()
        with PageParser(extractor=extractor) as parser:
            num_pages = speed(lambda part: list(parser.parse_many((body, None) for body in part)), bodies, seconds)["pages"]
        used, elapsed = used_seconds() - used, time.perf_counter() - began  # a child's time counts once it has ended
        yield f"{extractor}, watched", {"pages": num_pages, "pages_per_cpu_second": num_pages / used, "pages_per_second": num_pages / elapsed}


def report(row: dict):
    with RESULTS.open("a") as file:
        file.write(json.dumps({key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()}) + "\n")
    print("  ".join(f"{key} {value:.3f}" if isinstance(value, float) else f"{value!s:20}" for key, value in row.items() if key != "versions"), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA / "extraction" / "trafilatura")
    parser.add_argument("--pages", type=Path, default=None, help="a folder with HTML files; none: the gold pages")
    parser.add_argument("--num-pages", type=int, default=400)
    parser.add_argument("--seconds", type=float, default=6.0, help="for each row of the speed table")
    options = parser.parse_args()
    gold = gold_pages(options.data)
    versions = {"resiliparse": getattr(resiliparse, "__version__", "2.0.1"), "trafilatura": trafilatura.__version__}
    for name, extract in EXTRACTIONS.items():
        report({"kind": "quality", "name": name, **segment_scores(extract, gold), "versions": versions})
    bodies = [body for _, body in gold]
    if options.pages:
        paths = sorted(options.pages.rglob("*.html"))
        bodies = [path.read_bytes() for path in random.Random(0).sample(paths, min(options.num_pages, len(paths)))]
    mean = sum(map(len, bodies)) / len(bodies) / 1000
    for name, row in speed_rows(bodies, options.seconds):
        report({"kind": "speed", "name": name, **row, "mean_kB": mean, "versions": versions})


if __name__ == "__main__":
    main()
