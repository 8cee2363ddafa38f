"""How much of the experts' gradients is sent where only the used ones are, beside the dense all-reduce?

    python benchmarks/expert_bytes.py [--ranks 2 4] [--experts 8 64] [--steps N]

Small models of experts, two layers, one expert a token, over gloo on this machine. Tokens a step vary, and in one row
the router reaches a quarter of the experts only. Each is trained twice on the same tokens, dense and sparse; weights
and losses are compared. Sent bytes are those of this process's TCP sockets. Appends a line a setting to
results/expert_bytes.jsonl.
"""

import argparse
import json
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as processes

from llm_from_scratch import moe
from llm_from_scratch.comm_timing import socket_bytes_sent
from llm_from_scratch.config import EngineConfig, ModelConfig, OptimConfig
from llm_from_scratch.dataloader import Batch
from llm_from_scratch.distributed import gather_objects, parameter_hashes, prepare
from llm_from_scratch.env import Ranks
from llm_from_scratch.expert_gradients import expert_parameters, sparse_experts
from llm_from_scratch.optim import build_optimizer

RESULTS = Path(__file__).parent / "results" / "expert_bytes.jsonl"
SETTINGS = [(2, 1.0), (4, 1.0), (8, 1.0), (16, 1.0), (64, 1.0), (512, 1.0), (512, 0.25)]  # tokens a rank and step, share of experts within reach
choose_experts = moe.choose_experts


def tokens_of(step: int, ranks: Ranks, num_tokens: int) -> Batch:
    rows, length = max(1, num_tokens // 64), min(64, num_tokens)
    ids = torch.randint(256, (rows, length + 1), generator=torch.Generator().manual_seed(1000 * step + ranks.rank))
    positions, nothing = torch.arange(length).expand(rows, -1), torch.zeros(rows, length, dtype=torch.long)
    return Batch(ids[:, :-1], ids[:, 1:], positions, nothing, torch.arange(rows))


def train(ranks: Ranks, num_experts: int, num_tokens: int, reach: float, sparse: bool, num_steps: int) -> dict:
    "Losses, hashes of the weights, and bytes a step of this rank; the first step, which sets up buckets, is not counted."
    def within_reach(logits, *arguments, **options):
        return choose_experts(logits.where(torch.arange(num_experts) < reach * num_experts, -1e4), *arguments, **options)

    moe.choose_experts = within_reach
    torch.manual_seed(0)
    cfg = ModelConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_layers=2, num_heads=2, num_kv_heads=2, max_seq_len=64,
                      num_experts=num_experts, experts_per_token=1)  # fmt: skip
    model = moe.build_model(cfg)
    experts = sparse_experts(model, EngineConfig(sparse_experts=sparse), ranks)
    engine = prepare(model, build_optimizer(model, OptimConfig(kind="adamw")), ranks=ranks, device=torch.device("cpu"), dtype=torch.float32, experts=experts)
    losses, volumes, used = [engine.train_step([tokens_of(0, ranks, num_tokens)]).loss], [], []
    before = socket_bytes_sent()
    for step in range(1, num_steps + 1):
        losses.append(engine.train_step([tokens_of(step, ranks, num_tokens)]).loss)
        if sparse: volumes.append(experts.traffic.num_bytes), used.append(experts.traffic.num_used / experts.traffic.num_experts)
    sent = (socket_bytes_sent() - before) / num_steps
    everyone = sum(gather_objects(sent, everywhere=True)) / ranks.world_size
    expert_bytes = sum(p.nbytes for parts in expert_parameters(model).values() for p in parts.values())
    return {"losses": losses, "weights": parameter_hashes(model), "socket_bytes": everyone, "expert_bytes": expert_bytes,
            "volume": sum(volumes) / num_steps, "used": sum(used) / num_steps}  # fmt: skip


def compare(rank: int, world_size: int, meeting: str, options) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world_size)
    ranks = Ranks(rank, rank, world_size)
    for num_experts in options.experts:
        for num_tokens, reach in SETTINGS:
            dense, sparse = (train(ranks, num_experts, num_tokens, reach, way, options.steps) for way in (False, True))
            assert len({json.dumps(weights) for weights in gather_objects(sparse["weights"], everywhere=True)}) == 1, "ranks differ"
            row = {"ranks": world_size, "experts": num_experts, "tokens_per_rank": num_tokens, "reach": reach, "used": round(sparse["used"], 4),
                   "dense_expert_bytes": dense["expert_bytes"], "sparse_expert_bytes": round(sparse["volume"]),
                   "saved": round(1 - sparse["volume"] / dense["expert_bytes"], 4),
                   "dense_socket_bytes": round(dense["socket_bytes"]), "sparse_socket_bytes": round(sparse["socket_bytes"]),
                   "same_weights": dense["weights"] == sparse["weights"], "largest_loss_gap": max(abs(a - b) for a, b in zip(dense["losses"], sparse["losses"]))}  # fmt: skip
            if rank: continue
            with RESULTS.open("a") as file: file.write(json.dumps(row) + "\n")
            print(json.dumps(row))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--experts", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args()
    for world_size in options.ranks:
        with tempfile.TemporaryDirectory() as folder:
            processes.start_processes(compare, (world_size, f"{folder}/meeting", options), nprocs=world_size, start_method="spawn")


if __name__ == "__main__":
    main()
