"""What the device monitor adds to a training step.

    python benchmarks/monitor_overhead.py [--blocks 40] [--steps 3]

Blocks of the same steps in one process, the monitor at 0, 10 and 100 samples a second by turns in a
new order each round. What a block used of the processor more than the mean block without a monitor is
divided by the seconds that it took: the share of a core. Where a step has its core to itself this is
the part by which it grows; on a crowded machine a step takes longer and meets more samples, which the
division takes out. The last figure is the same of the sampling thread alone. The GPU is made up: each
of its calls goes to C and back, as NVML's do, and answers at once, so that a driver's own time is not
in the figures.
"""

import argparse
import ctypes
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import pynvml
import torch

from llm_from_scratch.config import ModelConfig
from llm_from_scratch.device_monitor import DeviceMonitor, HostReader, NvidiaReader
from llm_from_scratch.model import Transformer, cross_entropy

RATES = (0, 10, 100)


class MadeUpLibrary:
    "Answers as pynvml does, through a call of a C function each time."

    def __getattr__(self, name):
        return getattr(pynvml, name) if name.startswith("NVML") else call_c

    def nvmlDeviceGetFieldValues(self, gpu, asked):
        call_c()
        answer = SimpleNamespace(nvmlReturn=0, valueType=pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG, value=SimpleNamespace(ullVal=time.perf_counter_ns()))
        return [answer] * len(asked)


class Answer(int):
    "A number, and a structure of numbers."

    gpu = memory = used = property(int)


get_parent = ctypes.CDLL(None).getppid


def call_c(*arguments):
    return Answer(get_parent())


def watch(folder, hz):
    return DeviceMonitor([NvidiaReader("gpu", MadeUpLibrary())], [HostReader(folder)], hz=hz)


def thread_seconds(seconds=3.0):
    "Processor seconds of a second of what goes on beside this thread."
    begun, clock = time.process_time(), time.perf_counter()
    time.sleep(seconds)
    return (time.process_time() - begun) / (time.perf_counter() - clock)


def added_share(used, plain, took):
    "Share of a core that was added, and how far chance moves it: the middle 90 % of 2,000 draws of rounds."
    draw, shares = random.Random(0), []
    share_of = lambda rounds: sum(used[number] - plain[number] for number in rounds) / sum(took[number] for number in rounds)
    for _ in range(2000):
        shares.append(share_of(draw.choices(range(len(plain)), k=len(plain))))
    low, *_, high = statistics.quantiles(shares, n=20)
    return {"low": round(low, 5), "mean": round(share_of(range(len(plain))), 5), "high": round(high, 5)}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--blocks", type=int, default=40)
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Transformer(ModelConfig(vocab_size=512, hidden_size=128, num_layers=2, num_heads=4, max_seq_len=64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.randint(0, 512, (8, 65))

    def step():
        total, count = cross_entropy(model(ids[:, :-1]), ids[:, 1:])
        optimizer.zero_grad()
        (total / count).backward()
        optimizer.step()

    for _ in range(10):
        step()
    used, took = {hz: [] for hz in RATES}, {hz: [] for hz in RATES}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.blocks):
            for hz in random.Random(number).sample(RATES, len(RATES)):
                with watch(folder, hz) as monitor:
                    processor, clock = time.process_time(), time.perf_counter()
                    for _ in range(options.steps):
                        step()
                        monitor.window()
                    used[hz].append(time.process_time() - processor)
                    took[hz].append(time.perf_counter() - clock)
        shares = {}
        for hz in RATES[1:]:
            with watch(folder, hz):
                shares[str(hz)] = round(thread_seconds(), 5)
    row = {
        "step_ms": round(1000 * statistics.mean(used[0]) / options.steps, 2),
        "blocks": options.blocks,
        "steps": options.steps,
        "crowding": round(sum(took[0]) / sum(used[0]), 2),
        "added_share": {str(hz): added_share(used[hz], used[0], took[hz]) for hz in RATES[1:]},
        "thread_alone": shares,
    }
    with open(Path(__file__).parent / "results" / "monitor_overhead.jsonl", "a") as file:
        print(json.dumps(row), file=file)
    print(json.dumps(row, indent=1))


if __name__ == "__main__":
    main()
