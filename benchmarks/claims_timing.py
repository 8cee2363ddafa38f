"""Claims about time, each as a ratio of interleaved tries in one process, and what emptying an allocator's cache does to memory.

    python benchmarks/claims_timing.py [--tries 11] [--only CLAIM ...]

Prefetching: five steps of a small model, batches read in a thread two ahead against batches read when they are asked for, from
memory and from a store whose every read waits for a share of a step. Fused mask: attention over packed documents, forward and
backward, torch's fused kernel against matrix products, a mask and a softmax one after the other. SwiGLU: a product of 256 rows
of 4,096 with 11,008 columns against 11,000. Emptying: the C library is told to give back what it keeps after every step, as
`torch.cuda.empty_cache` tells torch's allocator. One thread; seconds of the clock for prefetching, where waiting is the point,
and of the processor for the rest, so that other work on the machine counts less. Replaces the lines of the claims measured in
results/claims_timing.jsonl; `low` and `high` are the tenth and ninetieth percentile of the tries.
"""

import argparse
import ctypes
import json
import statistics
import time
from collections.abc import Callable
from itertools import repeat
from pathlib import Path

import torch

from llm_from_scratch.attention import naive_attention, sdpa_attention
from llm_from_scratch.config import build_config
from llm_from_scratch.dataloader import endless
from llm_from_scratch.env import Ranks
from llm_from_scratch.launch import keep_freed_memory, set_threads
from llm_from_scratch.prefetch import read_ahead
from llm_from_scratch.training_loop import build_training, prepare_data, train_on

RESULTS = Path(__file__).parent / "results" / "claims_timing.jsonl"
SMALL = {"model": dict(hidden_size=64, num_layers=4, num_heads=4, num_kv_heads=4, max_seq_len=128), "tokenizer": dict(vocab_size=512, train_bytes=2_000_000),
         "data": dict(prefetch_batches=0, val_fraction=0.004), "train": dict(global_batch=16, micro_batch=16, seq_len=128, dtype="fp32"), "optim": dict(kind="adamw")}
WAITS, STEPS_A_TRY = (0.0, 0.15, 0.5), 5


def seconds(work: Callable, clock: Callable = time.perf_counter) -> float:
    began = clock()
    work()
    return clock() - began


def compare(claim: str, condition: str, slow: Callable, fast: Callable, tries: int, clock: Callable = time.process_time) -> dict:
    "How many times as fast `fast` is as `slow`, run in turn."
    slow(), fast()
    ratios = sorted(seconds(slow, clock) / seconds(fast, clock) for _ in range(tries))
    return {"claim": claim, "condition": condition, "tries": tries, "ratio": statistics.median(ratios), "low": ratios[tries // 10], "high": ratios[-1 - tries // 10]}


def step_on(training, batches) -> Callable:
    return lambda: [train_on(training, next(batches), stop=False) for _ in range(STEPS_A_TRY)]


def reader(training, wait: float) -> Callable:
    "Waits, then takes the loader's next batch."
    loaded = endless(training.loader)

    def read(_):
        time.sleep(wait)
        return next(loaded)

    return read


def prefetching(asking, ahead, tries: int):
    "Two equal trainings, one of which reads ahead."
    step_seconds = seconds(step_on(asking, endless(asking.loader))) / STEPS_A_TRY
    for share in WAITS:
        feeds = [(batch for _, batch in read_ahead(repeat(None), reader(training, share * step_seconds), count)) for training, count in ((asking, 0), (ahead, 2))]
        condition = f"each read waits for {share:.0%} of a step" if share else "reads from memory"
        yield compare("prefetching", condition, step_on(asking, feeds[0]), step_on(ahead, feeds[1]), tries, time.perf_counter)
        for feed in feeds:
            feed.close()


def fused_mask(length: int, tries: int) -> dict:
    q, k, v = (torch.randn(2, 8, length, 64, requires_grad=True) for _ in range(3))
    documents = (torch.arange(length) // (length // 4)).expand(2, -1)

    def attend(attention) -> Callable:
        return lambda: torch.autograd.grad(attention(q, k, v, doc_ids=documents).sum(), (q, k, v))

    return compare("fused mask", f"rows of {length:,}, on a CPU", attend(naive_attention), attend(sdpa_attention), tries)


def wide_product(tries: int) -> dict:
    rows, narrow, wide = torch.randn(256, 4096), torch.randn(4096, 11000), torch.randn(4096, 11008)
    return compare("SwiGLU width", "fp32 product, on a CPU", lambda: rows @ narrow, lambda: rows @ wide, tries)


def peak_bytes(work: Callable) -> int:
    "Largest resident size while it works (Linux)."
    Path("/proc/self/clear_refs").write_text("5")
    work()
    return next(int(line.split()[1]) * 1024 for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))


def emptying(training, tries: int) -> dict:
    batches, libc = endless(training.loader), ctypes.CDLL(None)

    def step(empty: bool) -> Callable:
        def work():
            for _ in range(STEPS_A_TRY):
                train_on(training, next(batches), stop=False)
                if empty:
                    libc.malloc_trim(0)
        return work

    times = compare("emptying", "the C library's cache, after every step", step(False), step(True), tries)
    return {**times, "peak_bytes": peak_bytes(step(False)), "peak_bytes_emptied": peak_bytes(step(True))}


def two_trainings() -> tuple:
    config = build_config(SMALL)
    data = prepare_data(config)
    return tuple(build_training(config, data, Ranks()) for _ in range(2))


CLAIMS = {
    "prefetching": lambda tries: prefetching(*two_trainings(), tries),
    "emptying": lambda tries: [emptying(two_trainings()[0], tries)],
    "SwiGLU width": lambda tries: [wide_product(tries)],
    "fused mask": lambda tries: [fused_mask(length, tries) for length in (256, 1024)],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tries", type=int, default=11)
    parser.add_argument("--only", nargs="+", default=list(CLAIMS), choices=CLAIMS)
    options = parser.parse_args()
    set_threads(1, Ranks())
    keep_freed_memory()
    rows = [row for row in map(json.loads, RESULTS.read_text().splitlines()) if row["claim"] not in options.only] if RESULTS.exists() else []
    for claim in options.only:
        for row in CLAIMS[claim](options.tries):
            print(row, flush=True)
            rows.append(row)
    RESULTS.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
