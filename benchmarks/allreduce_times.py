"""How long do messages take between gloo ranks of one machine? All-reduce, all-gather and a parameter server's exchange, by size and ranks.

    python benchmarks/allreduce_times.py [--ranks 2 3 4] [--repeats 12]

Writes results/allreduce_times.jsonl anew: a line a call, number of ranks and size, with the least and the median seconds of the slowest rank; four times the repeats below 2 MB.
"""

import argparse
import json
import multiprocessing
import os
import socket
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist

RESULTS = Path(__file__).parent / "results" / "allreduce_times.jsonl"
SIZES = [1_000 * 4**power for power in range(9)]  # bytes, 1 kB to 66 MB


def all_reduce(buffer, ranks): dist.all_reduce(buffer)


def all_gather(buffer, ranks): dist.all_gather(list(buffer.view(ranks, -1)), buffer.view(ranks, -1)[dist.get_rank()].clone())


def server(buffer, ranks):
    "Weights to every worker and a gradient from each, all through rank 0."
    if dist.get_rank(): return dist.recv(buffer, 0), dist.send(buffer, 0)
    for work in [dist.isend(buffer, rank) for rank in range(1, ranks)]: work.wait()
    for work in [dist.irecv(torch.empty_like(buffer), rank) for rank in range(1, ranks)]: work.wait()


CALLS = {"all_reduce": all_reduce, "all_gather": all_gather, "server": server}


def enter(environ, sender, num_repeats):
    os.environ.update(environ)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ranks, rows = dist.get_world_size(), []
    for name, call in CALLS.items():
        for size in SIZES:
            seconds, buffer = [], torch.ones(size // 4 // 12 * 12)
            tries = num_repeats * (4 if size < 2_000_000 else 1)
            for repeat in range(tries + 2):
                dist.barrier()
                began = time.perf_counter()
                call(buffer, ranks)
                slowest = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
                dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
                if repeat > 1: seconds.append(slowest.item())
                buffer.fill_(1)
            rows.append({"call": name, "ranks": ranks, "bytes": buffer.nbytes, "tries": tries, "least_seconds": min(seconds), "median_seconds": statistics.median(seconds)})
    sender.send(rows)
    dist.barrier()
    os._exit(0)


def measure(num_ranks, num_repeats):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        shared = {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    forks, started = multiprocessing.get_context("forkserver"), []
    try:
        for rank in range(num_ranks):
            receiver, sender = forks.Pipe(duplex=False)
            process = forks.Process(target=enter, args=({**shared, "RANK": str(rank)}, sender, num_repeats), daemon=True)
            process.start(), sender.close(), started.append((process, receiver))
        return started[0][1].recv()
    finally:
        for process, _ in started: process.join(10), process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--repeats", type=int, default=12)
    options = parser.parse_args()
    multiprocessing.get_context("forkserver").set_forkserver_preload(["torch"])
    rows = []
    for num_ranks in options.ranks:
        rows += measure(num_ranks, options.repeats)
        for row in rows[-len(SIZES) * len(CALLS):]: print(f"{row['call']:10} {num_ranks} ranks {row['bytes']:>11,} bytes: {row['least_seconds'] * 1e3:9.3f} ms, median {row['median_seconds'] * 1e3:9.3f}", flush=True)
    RESULTS.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
