"""What do DDP and FSDP2 hold and send, beside the formula?

    python benchmarks/comm_volume.py [--ranks 2 4] [--engines ddp fsdp2] [--steps N]

A small transformer in fp32 with AdamW over gloo on this machine. Held bytes are those of the tensors on a rank after a step,
sent bytes those of its TCP sockets. Appends a line an engine and number of ranks to results/comm_volume.jsonl.
"""

import argparse
import json
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from llm_from_scratch.comm_timing import socket_bytes_sent
from llm_from_scratch.config import ModelConfig
from llm_from_scratch.distributed import gather_objects
from llm_from_scratch.model import Transformer

RESULTS = Path(__file__).parent / "results" / "comm_volume.jsonl"


def wrap(engine: str, model: Transformer):
    if engine == "ddp": return DistributedDataParallel(model, forward_sync_buffers=False, gradient_as_bucket_view=True)
    for block in model.blocks: fully_shard(block)
    return fully_shard(model)


def local_bytes(tensors) -> int: return sum((tensor.to_local() if hasattr(tensor, "to_local") else tensor).nbytes for tensor in tensors)


def measure(engine: str, num_steps: int, micro_batches: int) -> dict:
    torch.manual_seed(0)
    model = Transformer(ModelConfig(vocab_size=512, hidden_size=192, num_layers=4, num_heads=4, num_kv_heads=4, max_seq_len=32))
    num_parameters = sum(p.numel() for p in model.parameters())
    wrapped = wrap(engine, model)
    optimizer, sent = torch.optim.AdamW(model.parameters()), 0
    for step in range(num_steps + 1):
        if step == 1: dist.barrier(), (sent := socket_bytes_sent())
        optimizer.zero_grad()
        for part in range(micro_batches):
            if engine == "ddp": wrapped.require_backward_grad_sync = part == micro_batches - 1
            wrapped(torch.randint(512, (1, 32))).square().mean().backward()
        optimizer.step()
    sent = (socket_bytes_sent() - sent) / num_steps
    parameters = list(model.parameters())
    states = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value) and value.ndim]
    return {"num_parameters": num_parameters, "parameters": local_bytes(parameters), "gradients": local_bytes(p.grad for p in parameters),
            "optimizer": local_bytes(states), "sent": sent}  # fmt: skip


def work(rank: int, world_size: int, meeting: str, options) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world_size)
    for engine in options.engines:
        for micro_batches in (1, 4):
            found = gather_objects(measure(engine, options.steps, micro_batches), everywhere=True)
            mean = {name: round(sum(one[name] for one in found) / world_size) for name in found[0]}
            row = {"engine": engine, "ranks": world_size, "micro_batches": micro_batches, **mean}
            if rank: continue
            with RESULTS.open("a") as file: file.write(json.dumps(row) + "\n")
            print(json.dumps(row))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--engines", nargs="+", default=["ddp", "fsdp2"], choices=["ddp", "fsdp2"])
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    for world_size in options.ranks:
        with tempfile.TemporaryDirectory() as folder:
            processes.start_processes(work, (world_size, f"{folder}/meeting", options), nprocs=world_size, start_method="spawn")


if __name__ == "__main__":
    main()
