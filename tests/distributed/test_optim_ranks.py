"Two ranks skip, clip and scale alike, whatever one of them sees."
import math

import pytest
import torch
from ranks import run_ranks
from torch import nn

from llm_from_scratch.config import OptimConfig, TrainConfig
from llm_from_scratch.dataloader import Batch
from llm_from_scratch.distributed import parameter_hashes, prepare
from llm_from_scratch.optim import Clipper, build_optimizer
from llm_from_scratch.precision import LossScaler

CPU = torch.device("cpu")


class Line(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

    def forward(self, x): return self.second(self.first(x))


def make_engine(ranks, dtype, **options):
    torch.manual_seed(ranks.rank)
    model, train = Line(), TrainConfig(loss_scale=1024.0, loss_scale_interval=3)
    def loss(wrapped, batch):
        broken = ranks.rank == 1 and batch.row_ids[0] == 2
        return wrapped(torch.full((1, 4), float("inf") if broken else 1.0 + ranks.rank)).float().square().sum()
    optim = OptimConfig(kind="adamw", lr=0.01, **options)
    return prepare(model, build_optimizer(model, optim), ranks=ranks, device=CPU, dtype=dtype, loss=loss, clipper=Clipper(model, optim), scaler=LossScaler(train))


def batch(step):
    ids = torch.zeros(1, 1, dtype=torch.int64)
    return Batch(ids, ids, ids, ids, torch.tensor([step]))


def overflow_on_one_rank(ranks, dtype, spoil):
    "Step 2 overflows on rank 1; at step 4 only rank 1's copy of a gradient is spoilt, after the ranks have exchanged them."
    engine, seen = make_engine(ranks, dtype, clip="dynamic", clip_steps=2), []
    if spoil:
        measure, count = engine.clipper.measure, []
        def spoilt():
            count.append(1)
            if len(count) == 4 and ranks.rank == 1: engine.model.second.weight.grad[0, 0] = math.nan
            return measure()
        engine.clipper.measure = spoilt
    for step in range(1, 7):
        before = parameter_hashes(engine.model)
        result = engine.train_step([batch(step)])
        seen.append((result.skipped, before == parameter_hashes(engine.model), engine.scaler.scale if engine.scaler else None, result.reason))
    return seen, parameter_hashes(engine.model), engine.clipper.state_dict(), {name: int(moments["step"]) for name, moments in engine.state_dict()["optimizer"]["moments"].items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_all_ranks_take_the_same_decision_to_skip(dtype):
    first, second = run_ranks(overflow_on_one_rank, 2, dtype, True)
    skipped, unmoved, scales, reasons = zip(*first[0])
    assert skipped == unmoved == (False, True, False, True, False, False)
    assert [row[:3] for row in first[0]] == [row[:3] for row in second[0]] and first[1:] == second[1:]
    assert "first.weight" in reasons[1] and reasons[3] == "gradient norm is nan: second.weight on rank 1" and set(first[3].values()) == {4}
    if dtype == torch.float16: assert scales == (1024.0, 512.0, 512.0, 256.0, 256.0, 256.0)


def bf16_weights(ranks):
    "Each rank sees inputs of its own, so that weights stay equal only while gradients travel."
    torch.manual_seed(0)
    model, optim = Line().to(torch.bfloat16), OptimConfig(kind="adamw", lr=0.01)
    def loss(wrapped, batch): return wrapped(torch.full((1, 4), 1.0 + ranks.rank, dtype=torch.bfloat16)).float().square().sum()
    engine = prepare(model, build_optimizer(model, optim), ranks=ranks, device=CPU, dtype=torch.bfloat16, loss=loss)
    return [(engine.train_step([batch(step)]).grad_norm, parameter_hashes(model)) for step in range(4)]


def test_gradients_of_bf16_weights_travel_at_every_step():
    first, second = run_ranks(bf16_weights, 2)
    assert first == second
