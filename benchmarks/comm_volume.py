"""What do DDP, FSDP2 and DeepSpeed's ZeRO hold and send, beside the formula?

    python benchmarks/comm_volume.py [--ranks 2 4] [--engines ddp fsdp2 zero1 zero2 zero3] [--steps N]

A small transformer in fp32 with AdamW over gloo on this machine. Held bytes are those of the tensors on a rank after a step
(ZeRO's are measured by zero_stages.py), sent bytes those of its TCP sockets, heard bytes those of the collectives that the timer
heard. Appends a line an engine, number of ranks and of micro-batches to results/comm_volume.jsonl.
"""

import argparse
import itertools
import json
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from llm_from_scratch.comm_timing import ENGINES, CommTimer, socket_bytes_sent
from llm_from_scratch.config import ModelConfig
from llm_from_scratch.distributed import gather_objects
from llm_from_scratch.model import Transformer

RESULTS = Path(__file__).parent / "results" / "comm_volume.jsonl"


def with_deepspeed(stage: int, model: Transformer, micro_batches: int):
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled, for a minute
    small = {"stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}  # else so small a model stays whole
    zero = {"stage": stage, **small}
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": micro_batches, "zero_optimization": zero,
              "optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}  # fmt: skip
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), dist_init_required=False, config=config)[0]


def wrap(engine: str, model: Transformer, micro_batches: int):
    if engine.startswith("zero"): return with_deepspeed(int(engine[-1]), model, micro_batches)
    if engine == "ddp": return DistributedDataParallel(model, forward_sync_buffers=False, gradient_as_bucket_view=True)
    for block in model.blocks: fully_shard(block)
    return fully_shard(model)


def local_bytes(tensors) -> int: return sum((tensor.to_local() if hasattr(tensor, "to_local") else tensor).nbytes for tensor in tensors)


def measure(engine: str, num_steps: int, micro_batches: int) -> dict:
    torch.manual_seed(0)
    model = Transformer(ModelConfig(vocab_size=512, hidden_size=192, num_layers=4, num_heads=4, num_kv_heads=4, max_seq_len=32))
    num_parameters = sum(p.numel() for p in model.parameters())
    wrapped, is_zero = wrap(engine, model, micro_batches), engine.startswith("zero")
    optimizer, timer, sent = torch.optim.AdamW(model.parameters()), CommTimer(torch.device("cpu"), dist.get_world_size()), 0
    for step in range(num_steps + 1):
        if step == 1: dist.barrier(), timer.window(), (sent := socket_bytes_sent())
        with timer.step():
            if not is_zero: optimizer.zero_grad()
            for part in range(micro_batches):
                if engine == "ddp": wrapped.require_backward_grad_sync = part == micro_batches - 1
                loss = wrapped(torch.randint(512, (1, 32))).square().mean()
                if is_zero: wrapped.backward(loss), wrapped.step()
                else: loss.backward()
            if not is_zero: optimizer.step()
    sent = (socket_bytes_sent() - sent) / num_steps
    heard = {name: tally.message_bytes / (num_steps + 1) for name, tally in timer.tallies.items()}
    if is_zero: return {"num_parameters": num_parameters, "sent": sent, **heard}
    parameters = list(model.parameters())
    states = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value) and value.ndim]
    return {"num_parameters": num_parameters, "parameters": local_bytes(parameters), "gradients": local_bytes(p.grad for p in parameters),
            "optimizer": local_bytes(states), "sent": sent, **heard}  # fmt: skip


def work(rank: int, world_size: int, meeting: str, engine: str, options) -> None:
    os.environ |= {"OMP_NUM_THREADS": "1", "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world_size)
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
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=list(ENGINES))
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    for world_size, engine in itertools.product(options.ranks, options.engines):
        with tempfile.TemporaryDirectory() as folder:
            processes.start_processes(work, (world_size, f"{folder}/meeting", engine, options), nprocs=world_size, start_method="spawn")


if __name__ == "__main__":
    main()
