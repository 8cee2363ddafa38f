"""What does not waiting cost? Two workers on the standard library: DDP, ZeRO-2, a parameter server and DiLoCo at equal tokens.

    python benchmarks/parameter_server.py [--steps 200] [--seeds 0 1 2] [--only NAME...]

With `pauses` a worker sleeps for a second after one step in ten, at steps of its own. `killed` loses one of three workers, a sixth of the tokens, half way.
Appends a line a run to results/parameter_server.jsonl; prints a table. Talking includes waiting for the others; validation loss is rank 0's at the end.
"""

import argparse
import json
import multiprocessing
import os
import random
import socket
import time
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist

from llm_from_scratch.async_training import LocalSGD, ParameterServer, Worker, outer_step
from llm_from_scratch.comm_timing import time_comm
from llm_from_scratch.config import EngineConfig, build_config
from llm_from_scratch.dataloader import TokenLoader, endless
from llm_from_scratch.deepspeed_engine import build_engine
from llm_from_scratch.distributed import next_token_loss, prepare
from llm_from_scratch.env import Ranks, open_process_group, read_ranks, seed_everything
from llm_from_scratch.eval import evaluate_loader
from llm_from_scratch.moe import build_model
from llm_from_scratch.optim import Schedule, build_optimizer, set_lr
from llm_from_scratch.training_loop import prepare_data

RESULTS = Path(__file__).parent / "results" / "parameter_server.jsonl"
CPU, ROWS, PAUSE_SECONDS, ZERO_2 = torch.device("cpu"), 8, 1.0, EngineConfig(kind="deepspeed", zero_stage=2)
SMALL = {"model": dict(hidden_size=64, num_layers=2, num_heads=2, num_kv_heads=1, max_seq_len=64), "tokenizer": dict(vocab_size=512, train_bytes=2_000_000),
         "data": dict(document_mask=False, val_fraction=0.004), "train": dict(seq_len=64), "optim": dict(kind="adamw")}
VARIANTS = {
    "DDP": dict(kind="ddp"),
    "ZeRO-2": dict(kind="zero"),
    **{f"server, bound {bound}": dict(kind="server", bound=bound) for bound in (0, 4, 16)},
    **{f"DiLoCo, H {every}": dict(kind="local", every_steps=every) for every in (1, 10, 50)},
    **{f"averaging, H {every}": dict(kind="local", every_steps=every, outer_lr=1.0, outer_momentum=0.0) for every in (1, 10, 50)},
    "DDP, pauses": dict(kind="ddp", pauses=True),
    **{f"server, bound {bound}, pauses": dict(kind="server", bound=bound, pauses=True) for bound in (0, 4, 16)},
    "server, bound 4, killed": dict(kind="server", bound=4, killed=True),
}


def talk(tally, bucket):
    "All-reduce a DDP bucket and wait for it: seconds in communication, nothing hidden behind the backward pass."
    began, buffer, done = time.perf_counter(), bucket.buffer(), torch.futures.Future()
    dist.all_reduce(buffer)
    tally += Counter(seconds=time.perf_counter() - began, payload_bytes=buffer.nbytes)
    done.set_result(buffer.div_(dist.get_world_size()))
    return done


def train(variant, config, steps, seed):
    "One rank's part: what it learned, how long it computed and talked."
    ranks, kind = read_ranks(), variant["kind"]
    data = prepare_data(config)
    config = config.model_copy(update={"model": config.model.model_copy(update={"vocab_size": data.tokenizer.vocab_size})})
    seed_everything(seed)
    model = build_model(config.model)
    optimizer = build_optimizer(model, config.optim)
    loss = lambda wrapped, batch: next_token_loss(wrapped, batch, document_mask=False)
    if kind == "zero": engine = build_engine(config.model_copy(update={"engine": ZERO_2}), model, optimizer, ranks=ranks, device=CPU, dtype=torch.float32, loss=loss)
    else: engine = prepare(model, optimizer, ranks=ranks if kind == "ddp" else Ranks(), device=CPU, dtype=torch.float32, loss=loss)
    timer = time_comm(engine) if kind == "zero" else None
    workers = ranks.world_size - (kind == "server")
    steps = 2 * steps // workers
    place = ranks.rank - (kind == "server")
    updates = steps * workers if kind == "server" else steps
    schedule, group = Schedule(config.optim, updates), dist.distributed_c10d._get_default_group()
    began, tally = time.perf_counter(), Counter()
    if kind == "server" and ranks.is_main:
        server = ParameterServer(engine, group, bound=variant["bound"], before_update=lambda update: set_lr(optimizer, update, schedule))
        server.serve()
        val = TokenLoader(data.val, batch_size=64, seq_len=64, shuffle=False, document_mask=False)
        total, count = evaluate_loader(model, val, CPU, torch.float32)
        return {"val_loss": total / count, "updates": server.updates, "missed": len(server.missed), "staleness": dict(sorted(server.staleness.items()))}
    if kind == "server": actor = Worker(engine, group)
    elif kind == "local": actor = LocalSGD(engine, group, **{key: value for key, value in variant.items() if key not in ("kind", "pauses")})
    else: actor = engine
    if kind == "ddp": engine.wrapped.register_comm_hook(tally, talk)
    loader, losses, pauses = TokenLoader(data.train, batch_size=ROWS, seq_len=64, rank=place, world_size=workers, seed=seed, document_mask=False), [], random.Random(place)
    for step, batch in enumerate(endless(loader), 1):
        if kind != "server": set_lr(engine.optimizer, step - 1, schedule)
        if kind in ("ddp", "zero"):
            before = time.perf_counter()
            dist.barrier()  # the engine's first small sum would wait here for a late rank, unseen
            tally["seconds"] += time.perf_counter() - before
        losses.append(actor.train_step([batch]).loss)
        if variant.get("pauses") and pauses.random() < 0.1: time.sleep(PAUSE_SECONDS)
        if variant.get("killed") and ranks.rank == 1 and step == steps // 2: os._exit(9)
        if step == steps: break
    seconds = time.perf_counter() - began
    if timer: tally += Counter(seconds=timer.window()["comm_seconds"], payload_bytes=sum(heard.message_bytes for heard in timer.tallies.values()))
    talking = tally["seconds"] if kind in ("ddp", "zero") else actor.seconds["talking"]
    sent = tally["payload_bytes"] if kind in ("ddp", "zero") else actor.payload_bytes
    if kind == "server": actor.close()
    if kind == "local" and steps % variant["every_steps"]: outer_step(actor)
    row = {"losses": losses, "seconds": seconds, "talking": talking, "payload_bytes": sent}
    if kind != "server" and ranks.is_main:
        total, count = evaluate_loader(model, TokenLoader(data.val, batch_size=64, seq_len=64, shuffle=False, document_mask=False), CPU, torch.float32)
        row |= {"val_loss": total / count, "updates": steps}
    return row


def enter(environ, sender, *arguments):
    os.environ.update(environ)
    torch.set_num_threads(1)
    open_process_group(read_ranks(), CPU, timeout_seconds=60)
    sender.send(train(*arguments))
    sender.close()
    if "killed" not in arguments[0]: dist.barrier()
    os._exit(0)


def measure(variant, config, steps, seed):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    forks, started = multiprocessing.get_context("forkserver"), []
    num_ranks = 2 + (variant["kind"] == "server") + bool(variant.get("killed"))
    try:
        for rank in range(num_ranks):
            receiver, sender = forks.Pipe(duplex=False)
            environ = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            process = forks.Process(target=enter, args=(environ, sender, variant, config, steps, seed), daemon=True)
            process.start(), sender.close(), started.append((process, receiver))
        rows = []
        for _, receiver in started:
            try: rows.append(receiver.recv())
            except EOFError: rows.append(None)
    finally:
        for process, _ in started: process.join(10), process.kill()
    workers = [row for row in rows if row and "losses" in row]
    steps = len(workers[0]["losses"])
    size = max(1, steps // 30)
    curve = [sum(sum(row["losses"][at:at + size]) for row in workers) / (len(workers) * size) for at in range(0, steps - size + 1, size)]
    seconds = max(row["seconds"] for row in workers)
    return {**{key: value for key, value in rows[0].items() if key in ("val_loss", "updates", "missed", "staleness")}, "tokens": 64 * ROWS * rows[0]["updates"] * (1 if variant["kind"] == "server" else 2),
            "curve": [round(loss, 4) for loss in curve], "curve_steps": size, "talking_share": sum(row["talking"] for row in workers) / sum(row["seconds"] for row in workers),
            "seconds": seconds, "payload_bytes": workers[0]["payload_bytes"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    options = parser.parse_args()
    multiprocessing.get_context("forkserver").set_forkserver_preload(["torch._dynamo", "llm_from_scratch.train"])
    config = build_config(SMALL)
    prepare_data(config)
    for name in options.only:
        for seed in options.seeds:
            row = {"variant": name, "steps": options.steps, "seed": seed, **measure(VARIANTS[name], config, options.steps, seed)}
            print(f"{name:30} seed {seed}: {row['val_loss']:.4f} nats, {row['talking_share']:.0%} talking, {row['seconds']:.1f} s, {row['payload_bytes'] / 1e6:.1f} MB", flush=True)
            with RESULTS.open("a") as file: file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
