"Cases of the schedule and the optimizer: first step, floor, resume, groups, epsilon, broken gradients."
import copy

import pytest
import torch
from torch import nn

from llm_from_scratch.config import Config, ModelConfig, OptimConfig
from llm_from_scratch.env import UserError
from llm_from_scratch.launch import check_resume
from llm_from_scratch.model import Transformer
from llm_from_scratch.optim import (Clipper, Muon, Schedule, build_optimizer, clip_gradients, hidden_matrices, load_named_state, lr_at, named_state,
                                    orthogonalize, param_groups, set_lr)

CURVE = [0.25, 0.5, 0.75, 1.0, 1.0, 0.939711, 0.775, 0.55, 0.325, 0.160289, 0.1, 0.1]
CONFIG = OptimConfig(kind="adamw", lr=1.0, min_lr_ratio=0.1, warmup_steps=4)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.proj = nn.Embedding(10, 4), nn.RMSNorm(4), nn.Linear(4, 4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids): return self.head(self.norm(self.proj(self.embed(ids))))


def small_transformer(**options):
    torch.manual_seed(0)
    return Transformer(ModelConfig(vocab_size=32, hidden_size=16, num_layers=2, num_heads=2, num_kv_heads=1, max_seq_len=16, **options))


def train(model, optimizer, steps, cfg=CONFIG, total=10):
    rates, schedule = [], Schedule(cfg, total)
    for step in steps:
        rates.append(set_lr(optimizer, step, schedule))
        ids = torch.randint(10, (4, 8), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimizer.step()
    return rates


def test_sch_1_first_step_moves_and_the_peak_is_reached():
    rates = [lr_at(step, peak=1.0, floor=0.1, warmup=4, total=10) for step in range(12)]
    assert rates == pytest.approx(CURVE, abs=1e-6) and rates[0] > 0 and max(rates) == 1.0


def test_sch_1_the_value_returned_is_the_value_used():
    model = Tied()
    optimizer = build_optimizer(model, CONFIG)
    for step in range(12):
        assert set_lr(optimizer, step, Schedule(CONFIG, 10)) == pytest.approx(CURVE[step], abs=1e-6)
        assert {group["lr"] for group in optimizer.param_groups} == {optimizer.param_groups[0]["lr"]}
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)


@pytest.mark.parametrize("warmup, total, expected", [(0, 4, [1.0, 0.868198, 0.55, 0.231802, 0.1]), (4, 4, [0.25, 0.5, 0.75, 1.0, 0.1]), (1, 1, [1.0, 0.1]), (0, 0, [0.1])])
def test_sch_1_edges_of_the_warmup(warmup, total, expected):
    assert [lr_at(step, peak=1.0, floor=0.1, warmup=warmup, total=total) for step in range(len(expected))] == pytest.approx(expected, abs=1e-6)


def test_sch_1_a_warmup_longer_than_the_run_is_refused():
    with pytest.raises(UserError, match="warmup_steps 11 is above train.steps 10"): lr_at(0, peak=1.0, floor=0.1, warmup=11, total=10)
    with pytest.raises(UserError, match="schedule 'step' does not exist"): lr_at(0, peak=1.0, floor=0.1, warmup=1, total=10, kind="step")
    with pytest.raises(UserError, match="negative"): lr_at(-1, peak=1.0, floor=0.1, warmup=1, total=10)


def test_sch_3_a_resumed_run_has_the_same_rates_and_weights():
    whole, stopped = Tied(), Tied()
    stopped.load_state_dict(whole.state_dict())
    optimizer = build_optimizer(whole, CONFIG)
    rates = train(whole, optimizer, range(12))
    first = build_optimizer(stopped, CONFIG)
    train(stopped, first, range(6))
    saved = copy.deepcopy(named_state(stopped, first))
    second = build_optimizer(stopped, CONFIG)
    load_named_state(stopped, second, saved)
    assert train(stopped, second, range(6, 12)) == rates[6:]
    assert all(torch.equal(p, q) for p, q in zip(whole.parameters(), stopped.parameters()))


def test_sch_4_the_floor_is_the_end_point_of_the_cosine():
    assert lr_at(9, peak=1.0, floor=0.1, warmup=4, total=10) == pytest.approx(0.160289, abs=1e-6)
    tail = [lr_at(step, peak=1.0, floor=0.1, warmup=4, total=100) for step in range(90, 101)]
    assert all(earlier > later for earlier, later in zip(tail, tail[1:])) and tail[-1] == 0.1


def test_sch_5_a_changed_total_is_told_with_both_rates():
    short, longer = (Config(optim=CONFIG, train={"steps": steps}) for steps in (10, 20))
    message, = check_resume(short, longer, step=6)
    assert "from 10 to 20" in message and "from 0.775 to 0.965746" in message
    assert check_resume(short, short, step=6) == []


def test_amp_5_groups_hold_every_trainable_parameter_once():
    model = Tied()
    model.proj.weight.requires_grad_(False)
    decay, no_decay = param_groups(model, weight_decay=0.1)
    assert (decay["weight_decay"], no_decay["weight_decay"]) == (0.1, 0.0)
    assert sum(p.numel() for p in decay["params"]) == 40 and decay["param_names"] == ["embed.weight"]
    assert no_decay["param_names"] == ["norm.weight", "proj.bias"] and all(p.ndim == 1 for p in no_decay["params"])


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("tie", [True, False])
def test_amp_5_every_parameter_of_the_transformer_is_moved_once(kind, tie):
    model = small_transformer(tie_embeddings=tie)
    groups = build_optimizer(model, OptimConfig(kind=kind)).param_groups
    held = [id(p) for group in groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in model.parameters()) and len(held) == len(set(held))
    assert all(group["weight_decay"] == 0 for group in groups for p in group["params"] if p.ndim < 2)


@pytest.mark.parametrize("tie", [True, False])
def test_muon_leaves_embedding_head_and_norms_to_adamw(tie):
    model = small_transformer(tie_embeddings=tie)
    names = set(hidden_matrices(model))
    assert names == {name for name, p in model.named_parameters() if p.ndim == 2 and name.startswith("blocks.")} and names


def test_trn_5_adamw_equals_torchs_at_tiny_gradients():
    torch.manual_seed(0)
    start = torch.randn(4, 4)
    ours, theirs = nn.ParameterDict({"w": nn.Parameter(start.clone())}), nn.Parameter(start.clone())
    cfg = OptimConfig(kind="adamw", lr=1e-3, weight_decay=0.1)
    optimizer, oracle = build_optimizer(ours, cfg), torch.optim.AdamW([theirs], lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, foreach=False)
    for _ in range(10):
        ours["w"].grad = 1e-10 * torch.randn(4, 4)
        theirs.grad = ours["w"].grad.clone()
        optimizer.step(), oracle.step()
        assert torch.allclose(ours["w"], theirs, rtol=1e-6, atol=0)


def test_trn_5_a_single_tiny_gradient_is_bounded_by_epsilon():
    model = nn.ParameterDict({"w": nn.Parameter(torch.zeros(1, 1, dtype=torch.float64))})
    optimizer = build_optimizer(model, OptimConfig(kind="adamw", lr=1.0, eps=1e-8, weight_decay=0.0))
    model["w"].grad = torch.full((1, 1), 1e-10, dtype=torch.float64)
    optimizer.step()
    assert model["w"].item() == pytest.approx(-1e-10 / (1e-10 + 1e-8), rel=1e-6)


@pytest.mark.parametrize("shape", [(8, 8), (24, 16), (16, 24), (1, 5), (3, 8, 4)])
def test_muon_levels_singular_values(shape):
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonalize(torch.randn(shape)))
    assert values.max() < 1.3 and values.min() > 0.3


def test_muon_matches_torchs_within_its_rounding():
    torch.manual_seed(0)
    starts, travelled = torch.randn(2, 24, 16), []
    grads = torch.randn(4, 2, 24, 16)
    for kind in (Muon, torch.optim.Muon):
        params = [nn.Parameter(start.clone()) for start in starts]
        optimizer = kind(params, lr=0.02, weight_decay=0.1)
        for step in grads:
            for p, grad in zip(params, step): p.grad = grad.clone()
            optimizer.step()
        travelled.append(torch.stack([p.detach() for p in params]) - starts)
    assert nn.functional.cosine_similarity(*(moved.flatten() for moved in travelled), dim=0) > 0.999


def test_a_zero_gradient_moves_nothing_under_muon():
    weight = nn.Parameter(torch.ones(3, 3))
    weight.grad = torch.zeros(3, 3)
    Muon([weight], lr=0.1, weight_decay=0.0).step()
    assert torch.equal(weight, torch.ones(3, 3))


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_clipping_leaves_gradients_alone_when_the_norm_is_not_finite(bad):
    params = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2))]
    params[0].grad, params[1].grad = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([bad, 1.0])
    norm = clip_gradients((p for p in params), max_norm=1.0)
    assert not norm.isfinite() and params[0].grad.tolist() == [1.0, 2.0, 3.0] and params[1].grad[1] == 1.0


def test_clipping_scales_to_one_global_norm_and_ignores_missing_gradients():
    params = [nn.Parameter(torch.zeros(1)) for _ in range(3)]
    assert clip_gradients(params, max_norm=1.0) == 0
    params[0].grad, params[1].grad = torch.tensor([3.0]), torch.tensor([4.0])
    assert clip_gradients(params, max_norm=1.0).item() == pytest.approx(5.0)
    assert [p.grad.item() for p in params[:2]] == pytest.approx([0.6, 0.8], abs=1e-5)
    assert clip_gradients(params, max_norm=9.0).item() == pytest.approx(1.0, abs=1e-5)
    assert [p.grad.item() for p in params[:2]] == pytest.approx([0.6, 0.8], abs=1e-5)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_state_by_name_continues_to_the_bit(kind):
    cfg = OptimConfig(kind=kind, lr=0.01, warmup_steps=2)
    first, second = Tied(), Tied()
    optimizer, resumed = build_optimizer(first, cfg), build_optimizer(second, cfg)
    train(first, optimizer, range(3), cfg)
    second.load_state_dict(first.state_dict())
    load_named_state(second, resumed, named_state(first, optimizer))
    train(first, optimizer, range(3, 6), cfg), train(second, resumed, range(3, 6), cfg)
    assert all(torch.equal(p, q) for p, q in zip(first.parameters(), second.parameters()))


def test_state_of_another_optimizer_or_model_is_refused():
    model = Tied()
    adamw, muon = build_optimizer(model, OptimConfig(kind="adamw")), build_optimizer(model, OptimConfig(kind="muon"))
    with pytest.raises(UserError, match="optimizer is AdamW, this run's MuonWithAdamW"): load_named_state(model, muon, named_state(model, adamw))
    state = named_state(model, adamw)
    with pytest.raises(UserError, match="'norm.weight' is missing in the checkpoint"): load_named_state(model, adamw, {**state, "names": [name for name in state["names"] if name != "norm.weight"]})
    with pytest.raises(UserError, match="'gone' is missing in the model"): load_named_state(model, adamw, {**state, "names": [*state["names"], "gone"]})
    wide = {**state, "moments": {"proj.weight": {"exp_avg": torch.zeros(5, 4)}}}
    with pytest.raises(UserError, match=r"'proj.weight' has shape \(5, 4\), the parameter \(4, 4\)"): load_named_state(model, adamw, wide)


def test_a_fresh_optimizers_state_loads_as_no_state():
    model = Tied()
    used, fresh = build_optimizer(model, OptimConfig(kind="muon")), build_optimizer(model, OptimConfig(kind="muon"))
    empty = named_state(model, fresh)
    train(model, used, range(2))
    load_named_state(model, used, empty)
    assert named_state(model, used) == empty and empty["moments"] == {}


def test_options_that_muon_does_not_read_are_refused():
    with pytest.raises(UserError, match="adjust_lr_fn can't be chosen"): Muon([nn.Parameter(torch.zeros(2, 2))], lr=1.0, adjust_lr_fn="match_rms_adamw")


def test_a_group_without_gradients_leaves_the_other_groups_their_limits():
    model = Tied()
    clipper = Clipper(model, OptimConfig(clip="groups", clip_steps=2, clip_percentile=50))
    for _ in range(3):
        for name, p in model.named_parameters(): p.grad = None if name.startswith("embed") else torch.full_like(p, 0.5)
        clipper.measure()
        clipper.clip()
    assert set(clipper.limits) == {group for group, part in clipper.parts.items() if not any(p is model.embed.weight for p in part)}
    norms = {group: torch.cat([torch.full((p.numel(),), 0.5) for p in part]).norm().item() for group, part in clipper.parts.items() if group in clipper.limits}
    assert clipper.limits == pytest.approx(norms)
