"""Where does the time of a cleaning run go? CPU milliseconds a page, by stage and process.

    python benchmarks/corpus_profile.py CRAWL.warc.gz [--extract fast]

One task in this process under cProfile with a clock of CPU time; what a library does counts for the stage that called it. The page
parser is a process of its own, measured by its own clock. A profiler makes many small calls dearer than they are: the shares of the
worker's stages are scaled to the CPU time of the same task without it. Prints a table; appends to results/corpus_profile.jsonl.
"""

import argparse
import cProfile
import json
import os
import pstats
import resource
import tempfile
import time
from collections import Counter
from pathlib import Path

from llm_from_scratch.config import build_config
from llm_from_scratch.corpus import plan_tasks
from llm_from_scratch.shard_cleaning import CorpusConfig, clean_shard, deciding_options

RESULTS = Path(__file__).parent / "results" / "corpus_profile.jsonl"
STAGES = {"warc": "read the archive", "html": "hand pages to the parser and back", "quality": "quality rules", "gates": "syntax and distribution gates",
          "dedup": "sign for deduplication", "shard_cleaning": "count and write rows", "documents": "read the archive", "storage": "read the archive"}
LANGUAGE = ("identify_language", "language_verdict", "main_script", "script_of")


def stage_of(function: tuple[str, int, str]) -> str | None:
    "The stage that a function of the package belongs to; None for a library's."
    file, _, name = function
    if "llm_from_scratch" not in Path(file).parts: return None
    if Path(file).stem == "data_cleaning": return "language" if name in LANGUAGE else "normalise, and pass on"
    return STAGES.get(Path(file).stem, "other")


def seconds_by_stage(stats: dict) -> Counter:
    "Own time of every function, given to the nearest caller in the package."
    found, memo = Counter(), {}

    def shares(function: tuple, seen: frozenset = frozenset()) -> dict[str, float]:
        if function in memo: return memo[function]
        if stage := stage_of(function): return {stage: 1.0}
        callers = {caller: max(values[3], 1e-9) for caller, values in stats[function][4].items() if caller in stats and caller not in seen}
        total, split = sum(callers.values()), Counter()
        for caller, weight in callers.items():
            for stage, share in shares(caller, seen | {function}).items(): split[stage] += share * weight / total
        if not seen: memo[function] = dict(split)
        return dict(split) or {"other": 1.0}

    for function, (_, _, own, _, _) in stats.items():
        for stage, share in shares(function).items(): found[stage] += own * share
    return found


def cpu_seconds(who: int) -> float:
    used = resource.getrusage(who)
    return used.ru_utime + used.ru_stime


def run_task(crawl: str, extract: str, profile: cProfile.Profile | None = None) -> tuple[int, float, float]:
    "Pages read, CPU seconds of this process and of the page parser."
    options = deciding_options(build_config({"inputs": [crawl], "out": "x", "clean": {"extract": extract}}, kind=CorpusConfig))
    [task] = plan_tasks([(crawl, os.path.getsize(crawl))], options)
    own, child = cpu_seconds(resource.RUSAGE_SELF), cpu_seconds(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as folder:
        if profile: profile.enable()
        clean_shard(task.payload, Path(folder))
        if profile: profile.disable()
        read = json.loads(Path(folder, "summary.json").read_text())["read"]
    return read, cpu_seconds(resource.RUSAGE_SELF) - own, cpu_seconds(resource.RUSAGE_CHILDREN) - child


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("crawl")
    parser.add_argument("--extract", choices=["fast", "accurate"], default="fast")
    options = parser.parse_args()
    run_task(options.crawl, options.extract) # loads the language model and the tables of characters
    read, own, child = run_task(options.crawl, options.extract)
    profile = cProfile.Profile(time.process_time)
    run_task(options.crawl, options.extract, profile)
    by_stage = seconds_by_stage(pstats.Stats(profile).stats)
    scale = own / sum(by_stage.values())
    rows = {"extract text, in a process of its own": child} | {stage: seconds * scale for stage, seconds in by_stage.most_common()}
    milliseconds = {stage: round(1000 * seconds / read, 2) for stage, seconds in rows.items()}
    for stage, value in milliseconds.items(): print(f"{stage:<40} {value:>7.2f} ms a page {value / sum(milliseconds.values()):>6.1%}")
    print(f"{'all':<40} {sum(milliseconds.values()):>7.2f} ms a page, {read:,} pages")
    with open(RESULTS, "a") as results: results.write(json.dumps({"extract": options.extract, "pages": read, "milliseconds_a_page": milliseconds}) + "\n")


if __name__ == "__main__":
    main()
