"""How long should the warmup be? A small model on the standard library, trained with warmups from 1 step to a quarter of the run.

    python benchmarks/warmup.py [--steps 300] [--seeds 0 1] [--warmups 1 6 15 30 75] [--only NAME]

1 step of 300 is the share 0.004, as 200 of 50,000 are. Appends a line a run to results/warmup.jsonl; prints a table.
"""

import argparse
import json
from pathlib import Path

from llm_from_scratch.config import build_config
from llm_from_scratch.dataloader import endless
from llm_from_scratch.env import Ranks
from llm_from_scratch.launch import keep_freed_memory, set_threads
from llm_from_scratch.training_loop import build_training, prepare_data, train_on, validate

RESULTS = Path(__file__).parent / "results" / "warmup.jsonl"
SMALL = {"model": dict(hidden_size=64, num_layers=2, num_heads=2, num_kv_heads=1, max_seq_len=64), "tokenizer": dict(vocab_size=512, train_bytes=2_000_000),
         "data": dict(document_mask=False, val_fraction=0.004), "train": dict(global_batch=16, micro_batch=16, seq_len=64)}
VARIANTS = {
    "AdamW": dict(kind="adamw"),
    "AdamW, 3 times the rate": dict(kind="adamw", lr=9e-3),
    "AdamW, 3 times the rate, beta2 0.999": dict(kind="adamw", lr=9e-3, beta2=0.999),
    "Muon": dict(kind="muon"),
}


def measure(optim: dict, steps: int, seed: int, data) -> dict:
    config = build_config({**SMALL, "train": {**SMALL["train"], "steps": steps, "seed": seed}, "optim": optim})
    training, losses, norms = build_training(config, data, Ranks()), [], []
    for batch in endless(training.loader):
        result, _ = train_on(training, batch, stop=False)
        losses.append(result.loss)
        norms.append(result.grad_norm)
        if training.step == steps: break
    return {"val_loss": validate(training)["val_loss"], "loss_at_half": sum(losses[steps // 2 - 25:steps // 2 + 25]) / 50, "largest_norm": max(norms[5:]), "worst_loss": max(losses)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--warmups", type=int, nargs="+", default=[1, 6, 15, 30, 75])
    parser.add_argument("--only", default=None, choices=VARIANTS)
    options = parser.parse_args()
    set_threads(1, Ranks())
    keep_freed_memory()
    data = prepare_data(build_config(SMALL))
    for name, optim in VARIANTS.items():
        if options.only and name != options.only: continue
        for warmup in options.warmups:
            for seed in options.seeds:
                row = {"variant": name, "warmup": warmup, "steps": options.steps, "seed": seed, **measure({**optim, "warmup_steps": warmup}, options.steps, seed, data)}
                print(f"{name:38} warmup {warmup:4} seed {seed}: {row['val_loss']:.4f} nats, {row['loss_at_half']:.4f} half way, norm up to {row['largest_norm']:.2f}", flush=True)
                with RESULTS.open("a") as file: file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
