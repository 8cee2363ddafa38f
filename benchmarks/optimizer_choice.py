"""Which optimizer gives the lower validation bits per byte in the default run's time?

    python benchmarks/optimizer_choice.py [--seeds 0 1 2] [--kinds muon adamw] [--threads N] [--ratio R]

Both optimizers get the same time: their steps are timed in turn, and AdamW gets as many more steps as it is faster.
Prints a table and appends a line a run to results/optimizer_choice.jsonl.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

from llm_from_scratch.config import Config, build_config
from llm_from_scratch.dataloader import endless
from llm_from_scratch.env import Ranks, environment_report
from llm_from_scratch.launch import keep_freed_memory, set_threads
from llm_from_scratch.optim import set_lr
from llm_from_scratch.training_loop import build_training, prepare_data, split_batch, validate

RESULTS = Path(__file__).parent / "results" / "optimizer_choice.jsonl"
CHOICES = {"muon": {}, "adamw": {}}  # their default rates; adamw: the best of 2e-3, 3e-3 and 5e-3 in runs of 0.4 million tokens


def configure(kind: str, seed: int, steps: int | None = None) -> Config:
    return build_config({"optim": {"kind": kind, **CHOICES[kind]}, "train": {"seed": seed, **({"steps": steps} if steps else {})}})


def step_seconds(data, num_steps: int = 12) -> dict[str, float]:
    "Median seconds of a step of each, timed in turn so that both meet the same noise."
    runs = {kind: build_training(configure(kind, 0), data, Ranks()) for kind in CHOICES}
    batches = {kind: endless(run.loader) for kind, run in runs.items()}
    seconds = {kind: [] for kind in CHOICES}
    for step in range(num_steps):
        for kind, run in runs.items():
            batch, began = next(batches[kind]), time.perf_counter()
            set_lr(run.engine.optimizer, step, run.schedule)
            run.engine.train_step(split_batch(batch, run.config.train.micro_batch))
            seconds[kind].append(time.perf_counter() - began)
    return {kind: statistics.median(times[2:]) for kind, times in seconds.items()}


def train_and_score(config: Config, data) -> dict:
    training = build_training(config, data, Ranks())
    for batch in endless(training.loader):
        set_lr(training.engine.optimizer, training.step, training.schedule)
        result = training.engine.train_step(split_batch(batch, config.train.micro_batch))
        training.step, training.tokens = training.step + 1, training.tokens + result.num_tokens
        if training.step == config.train.steps:
            return {"steps": training.step, "tokens": training.tokens, **validate(training)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--kinds", nargs="+", default=list(CHOICES), choices=list(CHOICES), help="train these; both are timed")
    parser.add_argument("--threads", type=int, default=None, help="of this process; none: all cores")
    parser.add_argument("--ratio", type=float, default=None, help="seconds of a muon step over an adamw step, where it was timed before")
    options = parser.parse_args()
    set_threads(options.threads, Ranks())
    keep_freed_memory()
    data, report = prepare_data(Config()), environment_report()
    seconds = {"muon": options.ratio, "adamw": 1.0} if options.ratio else step_seconds(data)
    steps = {kind: round(Config().train.steps * seconds["muon"] / seconds[kind]) for kind in CHOICES}
    print(f"a step of muon takes {seconds['muon'] / seconds['adamw']:.2f} times one of adamw; steps {steps}")
    scores = {kind: [] for kind in CHOICES}
    for seed in options.seeds:
        for kind in options.kinds:
            row = {"kind": kind, "seed": seed, **train_and_score(configure(kind, seed, steps[kind]), data)}
            scores[kind].append(row["val_bpb"])
            RESULTS.parent.mkdir(exist_ok=True)
            with RESULTS.open("a") as file:
                file.write(json.dumps({**row, "step_seconds_ratio": seconds[kind] / seconds["adamw"], "cpu": report.get("cpu"), "torch": report.get("torch")}) + "\n")
            print(f"{kind:6} seed {seed}: {row['val_bpb']:.4f} bits per byte after {row['steps']} steps, {row['tokens']:,} tokens", flush=True)
    for kind, values in ((kind, scores[kind]) for kind in options.kinds):
        print(f"{kind:6} mean {statistics.mean(values):.4f}, lowest {min(values):.4f}, highest {max(values):.4f}")


if __name__ == "__main__":
    main()
