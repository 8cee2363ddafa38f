"""What does a kill cost? Two replica groups on the standard library under torchft; one is killed with -9 and comes back.

    python benchmarks/hot_replacement.py [--steps 120] [--kill-at 30] [--back-at 45] [--runs undisturbed killed]

Writes results/hot_replacement.jsonl anew for each run named: a line a committed step and group, with wall time, place, rows and loss.
"""

import argparse
import json
import multiprocessing
import os
import signal
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import torch

from llm_from_scratch.config import build_config
from llm_from_scratch.dataloader import TokenLoader
from llm_from_scratch.distributed import next_token_loss, parameter_hashes, prepare
from llm_from_scratch.env import Ranks, hash_json, seed_everything
from llm_from_scratch.hot_replacement import BatchesByStep, join_groups, open_lighthouse, own_share, read_lighthouse, replica_step
from llm_from_scratch.moe import build_model
from llm_from_scratch.optim import Schedule, build_optimizer, set_lr
from llm_from_scratch.training_loop import prepare_data

RESULTS = Path(__file__).parent / "results" / "hot_replacement.jsonl"
SMALL = {"model": dict(hidden_size=64, num_layers=2, num_heads=2, num_kv_heads=1, max_seq_len=64), "tokenizer": dict(vocab_size=512, train_bytes=2_000_000),
         "data": dict(document_mask=False, val_fraction=0.004), "train": dict(seq_len=64), "optim": dict(kind="adamw")}


def train_group(name, seed, address, steps, log):
    "One group's life; each committed step is a line of its log."
    torch.set_num_threads(1)
    config = build_config(SMALL)
    data = prepare_data(config)
    config = config.model_copy(update={"model": config.model.model_copy(update={"vocab_size": data.tokenizer.vocab_size})})
    seed_everything(seed)
    model = build_model(config.model)
    optimizer, schedule = build_optimizer(model, config.optim), Schedule(config.optim, steps)
    loss = lambda wrapped, batch: next_token_loss(wrapped, batch, document_mask=False)
    engine = prepare(model, optimizer, ranks=Ranks(), device=torch.device("cpu"), dtype=torch.float32, loss=loss)
    batches = BatchesByStep(TokenLoader(data.train, batch_size=16, seq_len=64, document_mask=False))
    with join_groups(engine, batches, name=name, lighthouse=address, before_update=lambda step: set_lr(optimizer, step, schedule)) as replica, log.open("a") as file:
        while replica.step < steps:
            result = replica_step(replica)
            step = replica.step - 1
            rows = [] if result.skipped else own_share(batches(step), replica.place, replica.num_groups).row_ids.tolist()
            file.write(json.dumps({"group": name, "pid": os.getpid(), "time": time.time(), "step": step, "skipped": result.skipped, "num_groups": replica.num_groups, "place": replica.place,
                                   "rows": rows, "loss": None if result.skipped else result.loss}) + "\n")
            file.flush()
        file.write(json.dumps({"group": name, "pid": os.getpid(), "weights": hash_json(parameter_hashes(model))}) + "\n")
    os._exit(0)


def read_log(log):
    return [json.loads(line) for line in log.read_text().splitlines() if line.endswith("}")] if log.exists() else []


def measure(steps, kill_at, back_at, folder):
    "Run two groups to the end; kill and bring back group_1 where steps are named."
    forks, lives, watched = multiprocessing.get_context("forkserver"), [], []
    def start(name, seed):
        process = forks.Process(target=train_group, args=(name, seed, address, steps, folder / f"{name}.jsonl"), daemon=True)
        process.start()
        lives.append(process)
        return process
    def reach(name, step, until=300):
        deadline = time.monotonic() + until
        while max((line.get("step", -1) for line in read_log(folder / f"{name}.jsonl")), default=-1) < step:
            assert time.monotonic() < deadline and lives[0].is_alive(), f"{name} did not reach step {step}"
            watched.append((time.time(), [(group.name, group.heartbeat_age_seconds, group.step) for group in read_lighthouse(address)]))
            time.sleep(0.1)
    killed_time = None
    with open_lighthouse(heartbeat_timeout_seconds=3.0) as address:
        try:
            start("group_0", 0)
            other = start("group_1", 0)
            if kill_at is not None:
                reach("group_1", kill_at)
                os.kill(other.pid, signal.SIGKILL)
                killed_time = time.time()
                reach("group_0", back_at)
                start("group_1", 7)
            reach("group_0", steps - 1)
            for process in lives: process.join(60)
        finally:
            for process in lives:
                with suppress(ProcessLookupError): process.kill()
    return sorted((line for name in ("group_0", "group_1") for line in read_log(folder / f"{name}.jsonl")), key=lambda line: line.get("time", 1e12)), killed_time, watched


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--kill-at", type=int, default=30)
    parser.add_argument("--back-at", type=int, default=45)
    parser.add_argument("--runs", nargs="+", default=["undisturbed", "killed"])
    options = parser.parse_args()
    multiprocessing.get_context("forkserver").set_forkserver_preload(["torch._dynamo", "torchft", "llm_from_scratch.train"])
    prepare_data(build_config(SMALL))
    kept = [line for line in RESULTS.read_text().splitlines() if json.loads(line)["run"] not in options.runs] if RESULTS.exists() else []
    for run in options.runs:
        with tempfile.TemporaryDirectory() as folder:
            lines, killed_time, watched = measure(options.steps, *((options.kill_at, options.back_at) if run == "killed" else (None, None)), Path(folder))
        began = lines[0]["time"]
        if killed_time: kept.append(json.dumps({"run": run, "killed_seconds": killed_time - began, "watched": [(round(at - began, 2), groups) for at, groups in watched[::10]]}))
        kept += [json.dumps({"run": run, **{key: value for key, value in line.items() if key not in ("time", "pid")}, **({"seconds": round(line["time"] - began, 3)} if "time" in line else {})}) for line in lines]
        RESULTS.write_text("\n".join(kept) + "\n")
        print(run, len(lines), "lines,", f"{max(line.get('time', 0) for line in lines) - began:.1f} s", flush=True)


if __name__ == "__main__":
    main()
