"""datatrove's side of corpus_vs_datatrove.py: run by an interpreter that has datatrove[io,processing] and spacy.

    PYTHON benchmarks/datatrove_pipeline.py CRAWL.warc.gz WORK LANGUAGE_MODEL.ftz TOKENIZER.json

The stages of its published FineWeb example that ours has too: WARC reader, trafilatura, language, Gopher repetition and
quality, MinHash, tokens. One process and one task, so that seconds are seconds of one core. Prints one JSON line.
"""

import json
import resource
import sys
import time
from pathlib import Path

from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.dedup import MinhashDedupCluster, MinhashDedupFilter, MinhashDedupSignature
from datatrove.pipeline.dedup.minhash import MinhashConfig, MinhashDedupBuckets
from datatrove.pipeline.extractors import Trafilatura
from datatrove.pipeline.filters import GopherQualityFilter, GopherRepetitionFilter, LanguageFilter
from datatrove.pipeline.readers import JsonlReader, WarcReader
from datatrove.pipeline.tokens import DocumentTokenizer
from datatrove.pipeline.writers.jsonl import JsonlWriter
from datatrove.utils import lid


def use_local_model(path: str) -> None:
    "Its language filter downloads lid.176.bin; without a network it gets the small model that we use."
    lid.cached_asset_path_or_download = lambda *_, **__: path


def cpu_seconds() -> float:
    "CPU time of this process and of its finished children: trafilatura runs in one."
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def run(name: str, work: Path, *steps) -> tuple[float, float]:
    "Seconds by the wall clock and of CPU time."
    wall, cpu = time.perf_counter(), cpu_seconds()
    LocalPipelineExecutor(pipeline=list(steps), tasks=1, workers=1, logging_dir=str(work / "logs" / name)).run()
    return time.perf_counter() - wall, cpu_seconds() - cpu


def main(crawl: str, folder: str, model: str, tokenizer: str) -> None:
    work = Path(folder)
    use_local_model(model)
    config = MinhashConfig(n_grams=5, num_buckets=14, hashes_per_bucket=8)
    names = ["clean", "signatures", "filter"]
    path = {name: str(work / name) for name in ["clean", "signatures", "buckets", "remove", "filter", "tokens"]}
    seconds = {
        "clean": run("clean", work, WarcReader(str(Path(crawl).parent), glob_pattern=Path(crawl).name), Trafilatura(favour_precision=True),
                     LanguageFilter(languages=None, language_threshold=0.65), GopherRepetitionFilter(), GopherQualityFilter(), JsonlWriter(path["clean"])),
        "signatures": run("signatures", work, JsonlReader(path["clean"]), MinhashDedupSignature(path["signatures"], config)),
        "buckets": bucket_seconds(work, path, config),
        "cluster": run("cluster", work, MinhashDedupCluster(path["buckets"], path["remove"], config)),
        "filter": run("filter", work, JsonlReader(path["clean"]), MinhashDedupFilter(path["remove"]), JsonlWriter(path["filter"])),
        "tokens": run("tokens", work, JsonlReader(path["filter"]), DocumentTokenizer(path["tokens"], tokenizer_name_or_path=tokenizer)),
    }
    kept = {name: count_lines(Path(path[name])) for name in names if Path(path[name]).exists()}
    print(json.dumps({"wall_seconds": {name: pair[0] for name, pair in seconds.items()}, "cpu_seconds": {name: pair[1] for name, pair in seconds.items()},
                      "kept": kept, "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}))


def bucket_seconds(work: Path, path: dict[str, str], config: MinhashConfig) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), cpu_seconds()
    LocalPipelineExecutor(pipeline=[MinhashDedupBuckets(path["signatures"], path["buckets"], config=config)],
                          tasks=config.num_buckets, workers=1, logging_dir=str(work / "logs" / "buckets")).run()
    return time.perf_counter() - wall, cpu_seconds() - cpu


def count_lines(folder: Path) -> int:
    import gzip

    return sum(1 for path in folder.glob("*.jsonl.gz") for _ in gzip.open(path))


if __name__ == "__main__":
    main(*sys.argv[1:])
