"""What practitioners claim about training, each variant beside the same plain run, three seeds each.

    python benchmarks/claims.py [--steps 240] [--seeds 0 1 2] [--only NAME ...]

A small model on the standard library, in one thread. Appends a line a run to results/claims.jsonl and skips the runs that
stand there; a run that is stopped leaves no line. `spread` is the deviation of the training loss round its own running mean
over the second half of the run; `plain` is AdamW, cosine, fp32, RoPE, the global norm clipped at 1, rows packed without
masks. Variants called short have two layers and rows of 64: some cut each row at a random length and fill it up, and count
the filling as targets, or not; `long_loss` is that of the places beyond 64 in validation rows of four times that length.
"""

import argparse
import json
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from llm_from_scratch.config import build_config
from llm_from_scratch.dataloader import IGNORED, Batch, endless
from llm_from_scratch.env import Ranks
from llm_from_scratch.launch import StopRequest, keep_freed_memory, set_threads
from llm_from_scratch.training_loop import Training, build_training, fit, prepare_data, train_on, validate

RESULTS, PAD = Path(__file__).parent / "results" / "claims.jsonl", 0
PLAIN = {"model": dict(hidden_size=64, num_layers=4, num_heads=4, num_kv_heads=4, max_seq_len=128), "tokenizer": dict(vocab_size=512, train_bytes=2_000_000),
         "data": dict(document_mask=False, val_fraction=0.004), "train": dict(global_batch=16, micro_batch=16, seq_len=128, dtype="fp32"), "optim": dict(kind="adamw")}
BREATHING = dict(schedule="breathing", breathing_hold_steps=60, breathing_decay=0.99, breathing_threshold=0.01, breathing_quiet_steps=10, breathing_freeze_steps=30)
SHORT = {"model": dict(num_layers=2, num_heads=2, num_kv_heads=1, max_seq_len=256), "train": dict(seq_len=64)}
FILLED = {"short, padding left out": IGNORED, "short, padding counted": PAD}  # target of a place that is filled up
VARIANTS = {
    "plain": {},
    "ALiBi": {"model": dict(positions="alibi")},
    "Kaiming": {"model": dict(init="kaiming")},
    "Xavier": {"model": dict(init="xavier")},
    "clipping by group": {"optim": dict(clip="groups", clip_steps=30)},
    "clipping at a tenth of the mean norm": {"optim": dict(max_grad_norm=0.07)},
    "breathing": {"optim": BREATHING},
    "constant rate": {"optim": dict(schedule="constant")},
    "document masks": {"data": dict(document_mask=True)},
    "bf16": {"train": dict(dtype="bf16")},
    "fp16": {"train": dict(dtype="fp16")},
    "activation checkpointing": {"train": dict(checkpoint_activations="all")},
    **dict.fromkeys(["short", *FILLED], SHORT),
    "short, ALiBi": {**SHORT, "model": {**SHORT["model"], "positions": "alibi"}},
}


def joined(change: dict, steps: int, seed: int) -> dict:
    "The plain run's options with a variant's on top."
    asked = {section: {**PLAIN.get(section, {}), **change.get(section, {})} for section in {*PLAIN, *change}}
    return {**asked, "train": {**asked["train"], "steps": steps, "seed": seed}, "eval": dict(every_steps=30), "checkpoint": dict(every_steps=steps)}


def filled_up(batch: Batch, target: int, lengths: torch.Generator) -> Batch:
    "Rows cut at random lengths; the rest is padding, with the given target."
    num_rows, seq_len = batch.inputs.shape
    beyond = torch.arange(seq_len) >= torch.randint(1, seq_len + 1, (num_rows, 1), generator=lengths)
    return replace(batch, inputs=batch.inputs.masked_fill(beyond, PAD), targets=batch.targets.masked_fill(beyond, target))


def train_short(training: Training, target: int | None, observe) -> None:
    "Steps alone, with rows filled up where a target for that is given."
    lengths = torch.Generator().manual_seed(training.config.train.seed)
    for batch in endless(training.loader):
        result, _ = train_on(training, batch if target is None else filled_up(batch, target, lengths), stop=False)
        observe(training.step, loss=result.loss, grad_norm=result.grad_norm)
        if training.step == training.config.train.steps:
            return


def train_whole(training: Training, observe) -> None:
    with tempfile.TemporaryDirectory() as folder, StopRequest() as stop:
        fit(training, Path(folder), observe, stop)
    if stop.reason:
        raise SystemExit(f"stopped by {stop.reason} after {training.step} steps: nothing written")


@torch.no_grad()
def long_loss(training: Training) -> float:
    "Mean loss of the places beyond the trained length, in rows of validation text that are four times as long."
    trained, model = training.config.train.seq_len, training.model.eval()
    text = torch.from_numpy(np.concatenate([np.asarray(shard, np.int64) for shard in training.data.val.shards]))
    rows = text[: len(text) // (4 * trained + 1) * (4 * trained + 1)].view(-1, 4 * trained + 1)
    losses = [cross_entropy(model(ids[:, :-1]).mT, ids[:, 1:], reduction="none") for ids in rows.split(32)]
    return torch.cat(losses)[:, trained:].mean().item()


def measure(name: str, config, data) -> dict:
    training, losses, norms = build_training(config, data, Ranks()), [], []

    def observe(step, throughput=None, **values):
        losses.append(values["loss"])
        norms.append(values["grad_norm"])

    is_short = name.startswith("short")
    train_short(training, FILLED.get(name), observe) if is_short else train_whole(training, observe)
    half = len(losses) // 2
    off = [loss - statistics.mean(losses[max(0, place - 10) : place + 11]) for place, loss in enumerate(losses)][half:-10]
    return {"val_loss": validate(training)["val_loss"], **({"long_loss": long_loss(training)} if is_short else {}), "spread": statistics.pstdev(off), "mean_norm": statistics.mean(norms[half:]), "largest_norm": max(norms[5:])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    options = parser.parse_args()
    set_threads(1, Ranks())
    keep_freed_memory()
    done = {(row["variant"], row["steps"], row["seed"]) for row in map(json.loads, RESULTS.read_text().splitlines())} if RESULTS.exists() else set()
    for seed in options.seeds:
        for name in options.only:
            if (name, options.steps, seed) in done:
                continue
            config = build_config(joined(VARIANTS[name], options.steps, seed))
            row = {"variant": name, "steps": options.steps, "seed": seed, **measure(name, config, prepare_data(config))}
            print(f"{name:38} seed {seed}: {row['val_loss']:.4f} nats, spread {row['spread']:.4f}, norm {row['mean_norm']:.3f}", flush=True)
            with RESULTS.open("a") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
