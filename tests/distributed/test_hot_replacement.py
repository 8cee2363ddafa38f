"Two replica groups under torchft; one is killed with -9, the other goes on, the killed one comes back and nothing is lost or seen twice."
import json
import os
import signal
import time
from collections import defaultdict

import numpy as np
import pytest
import torch
from ranks import forks
from torch import nn

from llm_from_scratch.artifacts import write_atomic
from llm_from_scratch.config import OptimConfig
from llm_from_scratch.dataloader import TokenLoader
from llm_from_scratch.distributed import parameter_hashes, prepare
from llm_from_scratch.env import Ranks, hash_json
from llm_from_scratch.hot_replacement import BatchesByStep, join_groups, open_lighthouse, own_share, read_lighthouse, replica_step
from llm_from_scratch.optim import build_optimizer
from llm_from_scratch.token_shards import open_shards, write_shards

ROWS, SEQ_LEN = 6, 8
SILENCE_SECONDS = 3.0


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(11, 8), nn.Linear(8, 8), nn.Linear(8, 11, bias=False)

    def forward(self, ids, *, positions=None, doc_ids=None): return self.head(torch.tanh(self.mix(self.embed(ids))))


def make_engine(seed):
    torch.manual_seed(seed)
    model = Tiny()
    return prepare(model, build_optimizer(model, OptimConfig(kind="adamw", lr=1e-2)), ranks=Ranks(), device=torch.device("cpu"), dtype=torch.float32)


def make_batches(shards): return BatchesByStep(TokenLoader(open_shards(shards), batch_size=ROWS, seq_len=SEQ_LEN, seed=1))


def train_group(name, seed, address, shards, log, goal):
    "A life of a group: every attempt at a step is a line; the goal is a file, since nobody knows when the others will have started."
    torch.set_num_threads(1)
    engine, batches = make_engine(seed), make_batches(shards)
    with join_groups(engine, batches, name=name, lighthouse=address) as replica, log.open("a") as file:
        def tell(**line): file.write(json.dumps({"pid": os.getpid(), "time": time.time(), **line}) + "\n"), file.flush()
        while replica.step < int(goal.read_text()):
            result = replica_step(replica)
            time.sleep(0.05)
            if result.skipped: tell(skipped=result.reason)
            else:
                step = replica.step - 1
                tell(step=step, num_groups=replica.num_groups, place=replica.place, loss=result.loss, rows=own_share(batches(step), replica.place, replica.num_groups).row_ids.tolist())
        tell(weights=hash_json(parameter_hashes(engine.model)))
    os._exit(0)


def read_log(log): return [json.loads(line) for line in log.read_text().splitlines() if line.endswith("}")] if log.exists() else []


@pytest.mark.slow
def test_a_killed_group_is_replaced_and_no_batch_is_lost_or_seen_twice(tmp_path):
    pytest.importorskip("torchft")
    write_shards([np.random.default_rng(0).integers(4, 11, 4_000)], tmp_path / "shards", vocab_size=11, tokenizer_fingerprint="x")
    goal = tmp_path / "goal"
    goal.write_text("1000000")
    logs, lives = [tmp_path / f"group_{number}.jsonl" for number in range(2)], []

    def start(number, seed):
        process = forks.Process(target=train_group, args=(f"group_{number}", seed, address, tmp_path / "shards", logs[number], goal), daemon=True)
        process.start(), lives.append(process)
        return process

    def reach(number, step):
        deadline = time.monotonic() + 120
        while max((line.get("step", -1) for line in read_log(logs[number])), default=-1) < step:
            assert time.monotonic() < deadline and lives[0].is_alive(), f"group {number} did not reach step {step}"
            time.sleep(0.05)

    with open_lighthouse(heartbeat_timeout_seconds=SILENCE_SECONDS) as address:
        try:
            start(0, 0)
            reach(0, 2)
            other = start(1, 1)
            reach(1, 12)
            os.kill(other.pid, signal.SIGKILL)
            killed, killed_at = time.time(), max(line["step"] for line in read_log(logs[0]) if "step" in line)
            reach(0, killed_at + 5)
            ages = {group.name: group.heartbeat_age_seconds for group in read_lighthouse(address)}
            start(1, 7)
            reach(1, killed_at + 6)
            steps = max(line["step"] for line in read_log(logs[0]) if "step" in line) + 30
            write_atomic(goal, str(steps))
            for process in lives: process.join(60)
        finally:
            for process in lives: process.kill(), process.join()
    stayed, returned = read_log(logs[0]), read_log(logs[1])
    assert [line["step"] for line in stayed if "step" in line] == list(range(steps)), "the survivor did every step once"
    assert len({line["pid"] for line in stayed}) == 1 and len({line["pid"] for line in returned}) == 2
    alone = next(line["time"] for line in stayed if line.get("num_groups") == 1 and line["step"] >= killed_at)
    assert alone - killed < 60, "the survivor went on without a restart"
    assert ages["group_1"] > SILENCE_SECONDS > ages["group_0"]

    again = [line for line in returned if "step" in line and line["pid"] != returned[0]["pid"]]
    assert again[0]["step"] > killed_at and again[0]["num_groups"] == 2, "the returning group began at its peer's step"
    assert stayed[-1]["weights"] == returned[-1]["weights"], "both ended with the same weights"

    batches, seen = make_batches(tmp_path / "shards"), defaultdict(list)
    for line in stayed:
        if "step" not in line: continue
        for place in range(line["num_groups"]): seen[line["step"]] += own_share(batches(line["step"]), place, line["num_groups"]).row_ids.tolist()
    assert all(sorted(seen[step]) == sorted(batches(step).row_ids.tolist()) for step in range(steps))
    for line in [*returned, *stayed]:
        if "step" in line: assert line["rows"] == own_share(batches(line["step"]), line["place"], line["num_groups"]).row_ids.tolist()

    undisturbed = make_engine(0)
    for line in stayed:
        if "step" in line: assert undisturbed.train_step([batches(line["step"])]).loss == pytest.approx(line["loss"], rel=1e-3)
