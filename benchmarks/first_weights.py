"""How large are the gradients of each block in the first steps, by the kind of first weights?

    python benchmarks/first_weights.py [--init scaled kaiming xavier] [--steps N] [--layers N] [--threads N]

A deep and narrow model on the standard library under AdamW, with the norm of each block's gradient before clipping.
Appends a line a kind to results/first_weights.jsonl.
"""

import argparse
import json
from pathlib import Path

import torch

from llm_from_scratch.config import Config, build_config
from llm_from_scratch.dataloader import endless
from llm_from_scratch.env import Ranks
from llm_from_scratch.launch import keep_freed_memory, set_threads
from llm_from_scratch.optim import set_lr
from llm_from_scratch.training_loop import build_training, prepare_data, split_batch

RESULTS = Path(__file__).parent / "results" / "first_weights.jsonl"


def configure(init: str, options) -> Config:
    return build_config({
        "model": {"init": init, "num_layers": options.layers, "hidden_size": 96, "num_heads": 3, "num_kv_heads": 3}, "tokenizer": {"vocab_size": 1024},
        "optim": {"kind": "adamw", "warmup_steps": 20}, "train": {"steps": 300, "global_batch": 4, "micro_batch": 4},
    })  # fmt: skip


def gradients_by_block(config: Config, data, num_steps: int) -> dict:
    "Loss and the gradient norm of each block, step by step."
    training, found = build_training(config, data, Ranks()), {"loss": [], "norms": []}
    take = training.engine.step

    def note_and_step():
        norms = [torch.stack([weight.grad.norm() for weight in block.parameters()]).norm().item() for block in training.model.blocks]
        found["norms"].append([float(f"{norm:.4g}") for norm in norms])
        return take()

    training.engine.step = note_and_step
    for step, batch in zip(range(num_steps), endless(training.loader)):
        set_lr(training.engine.optimizer, step, config.optim, config.train.steps)
        found["loss"].append(round(training.engine.train_step(split_batch(batch, config.train.micro_batch)).loss, 4))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--init", nargs="+", default=["scaled", "kaiming", "xavier"])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--threads", type=int, default=None, help="of this process; none: all cores")
    options = parser.parse_args()
    set_threads(options.threads, Ranks())
    keep_freed_memory()
    data = prepare_data(configure("scaled", options))
    for init in options.init:
        row = {"init": init, "layers": options.layers, **gradients_by_block(configure(init, options), data, options.steps)}
        print(init, row["loss"][0], row["loss"][-1], row["norms"][0])
        with RESULTS.open("a") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
