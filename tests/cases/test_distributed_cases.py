"Cases of the training step in one process: accumulation, empty micro-batches, skipped steps, wiring, state."
import copy
import math
import os

import pytest
import torch
from torch import nn

from llm_from_scratch.config import ModelConfig, OptimConfig
from llm_from_scratch.dataloader import IGNORED, Batch, TokenLoader
from llm_from_scratch.distributed import (StepResult, all_sum, barrier, broadcast_object, check_parity, check_wiring, gather_objects,
                                          next_token_loss, plan_batch, prepare, watch_launcher)
from llm_from_scratch.env import Ranks, UserError
from llm_from_scratch.eval import evaluate_loader
from llm_from_scratch.model import Transformer
from llm_from_scratch.optim import build_optimizer
from llm_from_scratch.token_shards import open_shards, write_shards

CPU = torch.device("cpu")


def make_engine(*, dtype=torch.float32, max_grad_norm=1.0, model=None, **options):
    torch.manual_seed(0)
    model = model or Transformer(ModelConfig(vocab_size=32, hidden_size=16, num_layers=2, num_heads=2, num_kv_heads=1, max_seq_len=16))
    optimizer = build_optimizer(model, OptimConfig(**{"kind": "adamw", "lr": 0.01, **options}))
    return prepare(model, optimizer, ranks=Ranks(), device=CPU, dtype=dtype, max_grad_norm=max_grad_norm)


def make_rows(seed, counted, seq_len=12):
    "A batch with a row for each entry of `counted`, of so many targets, in two documents."
    ids = torch.randint(32, (len(counted), seq_len + 1), generator=torch.Generator().manual_seed(seed))
    targets = ids[:, 1:].clone()
    for row, count in enumerate(counted): targets[row, count:] = IGNORED
    positions = torch.arange(seq_len).expand(len(counted), -1) % 7
    return Batch(ids[:, :-1], targets, positions, (torch.arange(seq_len) // 7).expand(len(counted), -1), torch.arange(len(counted)))


def rows_of(batch): return [Batch(*(getattr(batch, name)[row:row + 1] for name in Batch.__dataclass_fields__)) for row in range(len(batch.inputs))]
def weights(engine): return [p.detach().clone() for p in engine.model.parameters()]
def close(left, right, tolerance): return all(torch.allclose(p, q, rtol=tolerance, atol=tolerance) for p, q in zip(left, right))
def equal(left, right): return all(torch.equal(p, q) for p, q in zip(left, right))


@pytest.mark.parametrize("counted", [[12] * 8, [12, 1, 7, 0, 3, 12, 5, 2]])
def test_trn_4_eight_by_one_equals_one_by_eight(counted):
    together, apart = make_engine(lr=1e-3, eps=1e-3), make_engine(lr=1e-3, eps=1e-3)
    batch = make_rows(0, counted)
    first, second = together.train_step([batch]), apart.train_step(rows_of(batch))
    assert first.num_tokens == second.num_tokens == sum(counted)
    assert first.grad_norm == pytest.approx(second.grad_norm, rel=1e-6) and first.loss == pytest.approx(second.loss, rel=1e-6)
    assert close(weights(together), weights(apart), 1e-6)


def test_trn_4_a_last_partial_group_counts_its_own_tokens():
    whole, part = make_engine(), make_engine()
    batch = make_rows(0, [12, 12])
    assert part.train_step(rows_of(batch)[:1]).loss == pytest.approx(next_token_loss(whole.model, rows_of(batch)[0]).item() / 12, rel=1e-6)


def test_mod_5_a_micro_batch_without_targets_changes_nothing():
    alone, beside = make_engine(), make_engine()
    normal, empty = make_rows(0, [12, 5]), make_rows(1, [0, 0])
    first, second = alone.train_step([normal]), beside.train_step([empty, normal])
    assert first == second and math.isfinite(first.loss) and equal(weights(alone), weights(beside))
    assert alone.train_step([normal, empty]) == beside.train_step([normal])


def test_mod_5_a_step_without_any_target_is_skipped_and_counted():
    engine = make_engine()
    before = weights(engine)
    result = engine.train_step([make_rows(0, [0]), make_rows(1, [0, 0])])
    assert result.skipped and result.num_tokens == 0 and math.isnan(result.loss) and not result.stop
    assert result.reason == "no rank has a target" and engine.skipped == {result.reason: 1} and equal(before, weights(engine))


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_norm_that_is_not_finite_leaves_weights_and_moments(bad):
    engine = make_engine()
    engine.train_step([make_rows(0, [12])])
    before, moments = weights(engine), copy.deepcopy(engine.state_dict()["optimizer"]["moments"])
    good, engine.loss = engine.loss, lambda model, batch: next_token_loss(model, batch) * bad
    result = engine.train_step([make_rows(1, [12])])
    assert result.skipped and "gradient norm" in result.reason and not math.isfinite(result.grad_norm) and sum(engine.skipped.values()) == 1
    after = engine.state_dict()["optimizer"]["moments"]
    assert equal(before, weights(engine)) and all(torch.equal(after[name][key], moments[name][key]) for name in moments for key in moments[name])
    engine.loss = good
    assert not engine.train_step([make_rows(2, [12])]).skipped and all(p.isfinite().all() for p in weights(engine))


def test_the_gradient_is_clipped_once_over_the_whole_step():
    engine = make_engine(max_grad_norm=1e-3)
    result = engine.train_step(rows_of(make_rows(0, [12, 7, 3])))
    norm = torch.nn.utils.get_total_norm([p.grad for p in engine.model.parameters()])
    assert result.grad_norm > 0.01 and norm.item() == pytest.approx(1e-3, rel=1e-2)


def test_stop_is_reported_after_the_step():
    engine = make_engine()
    before = weights(engine)
    result = engine.train_step([make_rows(0, [12])], stop=True)
    assert result.stop and not result.skipped and not equal(before, weights(engine))


def test_no_batch_stops_without_a_step():
    engine = make_engine()
    before = weights(engine)
    result = engine.train_step([])
    assert result.stop and result.skipped and result.reason == "a rank has no batch left" and equal(before, weights(engine))


class Forgetful(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.unused, self.head = nn.Embedding(32, 4), nn.Linear(4, 4), nn.Linear(4, 32)

    def forward(self, ids, **context): return self.head(self.embed(ids))


def test_a_parameter_without_a_gradient_is_named_at_the_first_step():
    engine = make_engine(model=Forgetful())
    with pytest.raises(UserError, match="'unused.weight' got no gradient in the first step"): engine.train_step([make_rows(0, [12])])
    engine.model.unused.requires_grad_(False)
    assert not engine.train_step([make_rows(0, [12])]).skipped


def test_a_parameter_made_after_the_optimizer_is_named():
    engine = make_engine()
    engine.model.late = nn.Parameter(torch.zeros(2))
    with pytest.raises(UserError, match="'late' is not in the optimizer"): engine.train_step([make_rows(0, [12])])
    with pytest.raises(UserError, match="'late'"): check_wiring(engine.model, engine.optimizer)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_an_engine_resumes_to_the_bit(kind):
    whole, stopped = make_engine(kind=kind), make_engine(kind=kind)
    steps = [rows_of(make_rows(step, [12, step, 4])) for step in range(6)]
    expected = [whole.train_step(step) for step in steps]
    assert [stopped.train_step(step) for step in steps[:3]] == expected[:3]
    state, model_state = copy.deepcopy(stopped.state_dict()), copy.deepcopy(stopped.model.state_dict())
    resumed = make_engine(kind=kind)
    resumed.model.load_state_dict(model_state)
    resumed.load_state_dict(state)
    assert [resumed.train_step(step) for step in steps[3:]] == expected[3:] and equal(weights(whole), weights(resumed))


def test_autocast_keeps_weights_and_moments_in_fp32():
    low, high = make_engine(dtype=torch.bfloat16), make_engine()
    losses = [engine.train_step([make_rows(0, [12, 9])]).loss for engine in (low, high)]
    assert losses[0] == pytest.approx(losses[1], rel=0.02) and losses[0] != losses[1]
    moments = low.state_dict()["optimizer"]["moments"].values()
    assert {tensor.dtype for saved in moments for tensor in saved.values()} == {torch.float32} == {p.dtype for p in low.model.parameters()}
    with pytest.raises(UserError, match="use bf16, fp16 or fp32"): make_engine(dtype=torch.float64)


def test_without_the_document_mask_positions_are_left_out():
    seen = []
    class Spy(Forgetful):
        def forward(self, ids, **context): seen.append(sorted(context)); return super().forward(ids)
    next_token_loss(Spy(), make_rows(0, [3])), next_token_loss(Spy(), make_rows(0, [3]), document_mask=False)
    assert seen == [["doc_ids", "positions"], []]


@pytest.mark.parametrize("plan, accumulation", [((16, 16, 1), 1), ((16, 16, 2), 1), ((64, 8, 1), 8), ((64, 8, 2), 4), ((4, 16, 4), 1), ((480, 16, 3), 10)])
def test_a_global_batch_is_split_exactly(plan, accumulation):
    assert plan_batch(*plan) == accumulation and plan[0] % (plan[2] * accumulation) == 0 and plan[0] // plan[2] // accumulation <= plan[1]


@pytest.mark.parametrize("plan, advice", [((30, 8, 2), "use 16 or 32"), ((3, 8, 2), "use 16"), ((1, 8, 4), "use 32"), ((20, 8, 1), "use 16 or 24")])
def test_a_mismatched_global_batch_is_refused_with_its_arithmetic(plan, advice):
    with pytest.raises(UserError, match=f"global_batch {plan[0]} is not train.micro_batch {plan[1]} x {plan[2]} ranks.*{advice}"): plan_batch(*plan)


def test_collectives_work_alone_and_change_nothing():
    before, value = dict(os.environ), torch.ones(2)
    assert (all_sum(3), all_sum(0.5), gather_objects("a"), broadcast_object("b"), barrier()) == (3, 0.5, ["a"], "b", None)
    assert all_sum(value).data_ptr() != value.data_ptr() and type(all_sum(3)) is int
    assert check_parity(nn.Linear(2, 2), step=1) and not watch_launcher() and dict(os.environ) == before


@pytest.mark.parametrize("num_rows, world_size", [(10, 4), (1, 2), (3, 3), (8, 4)])
def test_dist_9_each_row_is_scored_once(tmp_path, num_rows, world_size):
    ids = torch.randint(32, (num_rows * 8 + 1,), generator=torch.Generator().manual_seed(1)).tolist()
    write_shards([ids], tmp_path / "val", vocab_size=32, tokenizer_fingerprint="none")
    model, shards = make_engine().model, open_shards(tmp_path / "val")

    def score(rank, world_size):
        return evaluate_loader(model, TokenLoader(shards, batch_size=2, seq_len=8, rank=rank, world_size=world_size, shuffle=False), CPU)
    total, count = map(sum, zip(*[score(rank, world_size) for rank in range(world_size)]))
    assert count == num_rows * 8 and (total, count) == pytest.approx(score(0, 1), rel=1e-5)


def test_results_are_plain_numbers():
    result = make_engine().train_step([make_rows(0, [12])])
    assert [type(value) for value in (result.loss, result.num_tokens, result.grad_norm, result.skipped, result.stop)] == [float, int, float, bool, bool]
    assert isinstance(result, StepResult)
