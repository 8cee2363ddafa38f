"""What practitioners claim about training, each variant beside the same plain run, three seeds each.

    python benchmarks/claims.py [--steps 240] [--seeds 0 1 2] [--only NAME ...]

A small model on the standard library, in one thread. Appends a line a run to results/claims.jsonl and skips the runs that
stand there. `spread` is the deviation of the training loss round its own running mean over the
second half of the run; `plain` is AdamW, cosine, fp32, RoPE, the global norm clipped at 1, rows packed without masks.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path

from llm_from_scratch.config import build_config
from llm_from_scratch.env import Ranks
from llm_from_scratch.launch import StopRequest, keep_freed_memory, set_threads
from llm_from_scratch.train import build_training, fit, prepare_data, validate

RESULTS = Path(__file__).parent / "results" / "claims.jsonl"
PLAIN = {"model": dict(hidden_size=64, num_layers=4, num_heads=4, num_kv_heads=4, max_seq_len=128), "tokenizer": dict(vocab_size=512, train_bytes=2_000_000),
         "data": dict(document_mask=False, val_fraction=0.004), "train": dict(global_batch=16, micro_batch=16, seq_len=128, dtype="fp32"), "optim": dict(kind="adamw")}
BREATHING = dict(schedule="breathing", breathing_hold_steps=60, breathing_decay=0.99, breathing_threshold=0.01, breathing_quiet_steps=10, breathing_freeze_steps=30)
VARIANTS = {
    "plain": {},
    "ALiBi": {"model": dict(positions="alibi")},
    "Kaiming": {"model": dict(init="kaiming")},
    "Xavier": {"model": dict(init="xavier")},
    "clipping by group": {"optim": dict(clip="groups", clip_steps=30)},
    "clipping at a tenth of the mean norm": {"optim": dict(max_grad_norm=0.07)},
    "breathing": {"optim": BREATHING},
    "document masks": {"data": dict(document_mask=True)},
    "bf16": {"train": dict(dtype="bf16")},
    "fp16": {"train": dict(dtype="fp16")},
    "activation checkpointing": {"train": dict(checkpoint_activations="all")},
}


def joined(change: dict, steps: int, seed: int) -> dict:
    "The plain run's options with a variant's on top."
    asked = {section: {**PLAIN.get(section, {}), **change.get(section, {})} for section in {*PLAIN, *change}}
    return {**asked, "train": {**asked["train"], "steps": steps, "seed": seed}, "eval": dict(every_steps=30), "checkpoint": dict(every_steps=steps)}


def measure(config, data) -> dict:
    training, losses, norms = build_training(config, data, Ranks()), [], []

    def observe(step, throughput, **values):
        losses.append(values["loss"])
        norms.append(values["grad_norm"])

    with tempfile.TemporaryDirectory() as folder, StopRequest() as stop:
        fit(training, Path(folder), observe, stop)
    half = len(losses) // 2
    off = [loss - statistics.mean(losses[max(0, place - 10) : place + 11]) for place, loss in enumerate(losses)][half:-10]
    return {"val_loss": validate(training)["val_loss"], "spread": statistics.pstdev(off), "mean_norm": statistics.mean(norms[half:]), "largest_norm": max(norms[5:])}


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
            row = {"variant": name, "steps": options.steps, "seed": seed, **measure(config, prepare_data(config))}
            print(f"{name:38} seed {seed}: {row['val_loss']:.4f} nats, spread {row['spread']:.4f}, norm {row['mean_norm']:.3f}", flush=True)
            with RESULTS.open("a") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
