"""Do ZeRO 1, 2 and 3 train as one process does, and what does a rank hold? A small model on the standard library, in fp32 with AdamW.

    python benchmarks/zero_stages.py [--steps 50] [--ranks 1 2 4]

Starts the ranks itself, over gloo. Losses of one process and of two ranks under DDP and each stage; bytes a rank holds, counted tensor by
tensor between backward and step, for each number of ranks. Writes results/zero_stages.jsonl anew, a line a run; prints a table.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from llm_from_scratch.config import build_config
from llm_from_scratch.dataloader import endless
from llm_from_scratch.distributed import gather_objects
from llm_from_scratch.env import Ranks, choose_device, close_process_group, open_process_group, read_ranks
from llm_from_scratch.launch import set_threads
from llm_from_scratch.training_loop import build_training, prepare_data, train_on

RESULTS = Path(__file__).parent / "results" / "zero_stages.jsonl"
SMALL = {"model": dict(hidden_size=64, num_layers=2, num_heads=2, num_kv_heads=1, max_seq_len=64), "tokenizer": dict(vocab_size=513, train_bytes=2_000_000),
         "data": dict(document_mask=False, val_fraction=0.004), "optim": dict(kind="adamw"), "log": dict(tensorboard=False)}
WHOLE = {"zero_optimization": {"stage3_param_persistence_threshold": 0}} # DeepSpeed would leave such small weights in one piece


def num_bytes(tensors) -> int:
    "Bytes of all tensors, each place in memory counted once."
    found = {(tensor.data_ptr(), tensor.numel()): tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor) and tensor.numel()}
    return sum(found.values())


def leaves(value):
    if isinstance(value, dict): value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value: yield from leaves(item)
    else:
        yield value


def held_bytes(engine) -> dict[str, int]:
    "What this rank holds between backward and step; the moments are there from the second step on."
    optimizer, parameters = engine.optimizer, list(engine.model.parameters())
    parts = [getattr(p, "ds_tensor", None) for p in parameters]
    copies = getattr(optimizer, "single_partition_of_fp32_groups", None) or getattr(optimizer, "fp32_partitioned_groups_flat", [])
    return {
        "weights": num_bytes([*(p.data for p in parameters), *parts]),
        "gradients": num_bytes([*(p.grad for p in parameters), *leaves(getattr(optimizer, "averaged_gradients", {}))]),
        "moments": num_bytes(leaves([dict(state) for state in optimizer.state.values()])),
        "copies": num_bytes(copies),
    }


def work(stage: int, steps: int) -> None:
    "On each rank: train, and print a row on the first."
    ranks = read_ranks()
    set_threads(1, Ranks())
    open_process_group(ranks, choose_device(ranks))
    with tempfile.TemporaryDirectory() as folder:
        own = Path(folder, "deepspeed.json")
        own.write_text(json.dumps(WHOLE))
        engine = dict(kind="deepspeed" if stage else "ddp", zero_stage=stage, deepspeed_config=str(own) if stage == 3 else None)
        config = build_config({**SMALL, "train": dict(steps=max(steps, 10), global_batch=16, micro_batch=4, seq_len=64, dtype="fp32"), "engine": engine})
        training, losses, held = build_training(config, prepare_data(config), ranks), [], {}
    step = training.engine.step
    def measured():
        held.update(held_bytes(training.engine))
        return step()
    training.engine.step = measured
    for batch in endless(training.loader):
        losses.append(train_on(training, batch, stop=False)[0].loss)
        if training.step == steps: break
    everyone = gather_objects(held)
    if ranks.is_main:
        whole = sum(p.numel() for p in (training.engine.weights or training.model).parameters())
        print("row " + json.dumps({"ranks": ranks.world_size, "stage": stage, "parameters": whole, "bytes": everyone, "losses": losses}))
    close_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--work", type=int, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work is not None: return work(options.work, options.steps)
    rows = []
    for num_ranks in options.ranks:
        for stage in range(4):
            steps = options.steps if num_ranks == 2 or (num_ranks, stage) == (1, 0) else 3
            launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
            out = subprocess.run([*launcher, __file__, "--work", str(stage), "--steps", str(steps)], capture_output=True, text=True, check=False)
            if out.returncode: sys.exit(out.stdout + out.stderr)
            row = json.loads(next(line for line in out.stdout.splitlines() if line.startswith("row ")).removeprefix("row "))
            first = {name: row["bytes"][0][name] / row["parameters"] for name in row["bytes"][0]}
            print(f"{num_ranks} ranks, stage {stage}: loss {row['losses'][-1]:.6f} after {steps} steps; bytes a parameter: " + ", ".join(f"{name} {value:.2f}" for name, value in first.items()), flush=True)
            rows.append(row)
    RESULTS.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
