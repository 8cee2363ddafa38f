"Local SGD and the parameter server with real processes: what is equal, what is sent, and who is missed when a worker is killed."
import os
import signal

import pytest
import torch
import torch.distributed as dist
from ranks import forks, free_port, run_ranks
from torch import nn

from llm_from_scratch.async_training import LocalSGD, ParameterServer, Worker, pack
from llm_from_scratch.config import OptimConfig
from llm_from_scratch.dataloader import Batch
from llm_from_scratch.distributed import parameter_hashes, prepare
from llm_from_scratch.env import Ranks, open_process_group, read_ranks
from llm_from_scratch.optim import build_optimizer

CPU = torch.device("cpu")


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(11, 8), nn.Linear(8, 8), nn.Linear(8, 11, bias=False)

    def forward(self, ids, *, positions=None, doc_ids=None): return self.head(torch.tanh(self.mix(self.embed(ids))))


def make_engine(seed, lr=1e-2):
    torch.manual_seed(seed)
    model = Tiny()
    return prepare(model, build_optimizer(model, OptimConfig(kind="adamw", lr=lr)), ranks=Ranks(), device=CPU, dtype=torch.float32)


def make_batch(seed):
    ids = torch.randint(11, (4, 6), generator=torch.Generator().manual_seed(seed))
    return Batch(ids, (3 * ids + 1) % 11, torch.arange(6).expand(4, -1), torch.zeros_like(ids), torch.arange(4))


def own_group(): return dist.distributed_c10d._get_default_group()


def rounds(ranks):
    "Six steps in rounds of three: hashes after each, bytes, and a resume from the fourth."
    local, hashes = LocalSGD(make_engine(ranks.rank), own_group(), every_steps=3), []
    for step in range(4):
        local.train_step([make_batch(10 * step + ranks.rank)])
        hashes.append(parameter_hashes(local.model))
    weights, state = {name: value.clone() for name, value in local.model.state_dict().items()}, local.state_dict()
    again = LocalSGD(make_engine(7), own_group(), every_steps=3)
    again.model.load_state_dict(weights)
    again.load_state_dict(state)
    after = []
    for step in (4, 5): after.append([actor.train_step([make_batch(10 * step + ranks.rank)]).loss for actor in (local, again)])
    return hashes + [parameter_hashes(local.model)], after, parameter_hashes(again.model), local.payload_bytes, len(pack(local.weights)), average_once(ranks)


def average_once(ranks):
    local = LocalSGD(make_engine(0), own_group(), every_steps=1, outer_lr=1.0, outer_momentum=0.0)
    alone = LocalSGD(make_engine(0), own_group(), every_steps=2)
    for actor in (local, alone): actor.train_step([make_batch(ranks.rank)])
    return pack(alone.weights), pack(local.weights)


@pytest.mark.slow
def test_local_sgd_meets_every_three_steps_and_resumes_within_a_round_and_h_1_is_plain_averaging():
    (first, losses, resumed, sent, size, (one, mean)), (second, losses_too, _, _, _, (other, mean_too)) = run_ranks(rounds, 2, timeout_seconds=120)
    assert [a == b for a, b in zip(first, second)] == [False, False, True, False, True]
    assert all(one == other for one, other in losses + losses_too)
    assert resumed == first[-1]
    assert sent == 2 * (4 * size + 24)
    assert torch.equal(mean, mean_too)
    torch.testing.assert_close(mean, (one + other) / 2, atol=1e-6, rtol=0)


def serve_or_work(killed_at):
    "Rank 0 serves and tells; the last worker kills itself between gradient and answer."
    ranks = read_ranks()
    if ranks.is_main:
        server = ParameterServer(make_engine(0, lr=3e-2), own_group(), bound=2)
        server.serve()
        return server.updates, server.num_tokens, list(server.missed), max(server.staleness), server.gate.clocks
    worker, losses = Worker(make_engine(0), own_group()), []
    for step in range(40):
        if ranks.rank == ranks.world_size - 1 and step == killed_at: os.kill(os.getpid(), signal.SIGKILL)
        losses.append(worker.train_step([make_batch(100 * step + ranks.rank)]).loss)
    worker.close()
    return losses[0], losses[-1]


def enter(environ, sender, killed_at):
    os.environ.update(environ)
    torch.set_num_threads(1)
    open_process_group(read_ranks(), CPU, timeout_seconds=60)
    sender.send(serve_or_work(killed_at))
    sender.close()
    os._exit(0)


def test_a_killed_worker_is_only_missed():
    killed_at = 10
    shared, started = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}, []
    try:
        for rank in range(3):
            receiver, sender = forks.Pipe(duplex=False)
            process = forks.Process(target=enter, args=({**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}, sender, killed_at), daemon=True)
            process.start(), sender.close(), started.append((process, receiver))
        served, worked = [receiver.recv() if receiver.poll(600) else None for _, receiver in started[:2]]
        started[2][0].join(300)
        code = started[2][0].exitcode
    finally:
        for process, receiver in started: process.kill(), process.join(), receiver.close()
    steps = 40 + killed_at
    assert served[:3] == (steps, 24 * steps, [2])
    assert served[3] <= 5 and served[4] == {}
    assert worked[1] < worked[0] / 2
    assert code == -signal.SIGKILL
