"Cases of schedules, clipping, sixteen-bit training and the guard, apart from a run."
import copy
import json

import pytest
import torch
from torch import nn

from llm_from_scratch.clipping import Clipper, broken_gradients
from llm_from_scratch.config import Config, GuardConfig, OptimConfig, TrainConfig
from llm_from_scratch.env import UserError
from llm_from_scratch.guard import SpikeGuard
from llm_from_scratch.optim import Schedule, build_optimizer, clip_gradients, load_named_state, lr_at, named_state
from llm_from_scratch.precision import LossScaler, MasterWeights, unscale_gradients


def rates(schedule, steps, **observed): return [(schedule.lr(step, peak=1.0, floor=0.1), schedule.observe(step, grad_norm=1.0, **observed))[0] for step in steps]


@pytest.mark.parametrize("kind", ["cosine", "linear", "wsd", "constant"])
@pytest.mark.parametrize("warmup, total", [(0, 1), (0, 7), (3, 3), (1, 2), (4, 50)])
def test_every_curve_starts_above_zero_keeps_its_bounds_and_ends_at_the_floor(kind, warmup, total):
    curve = [lr_at(step, peak=1.0, floor=0.1, warmup=warmup, total=total, kind=kind) for step in range(total + 2)]
    assert 0 < curve[0] and max(curve) == 1.0 and curve[total:] == [0.1, 0.1]
    assert all(earlier >= later >= 0.1 for earlier, later in zip(curve[warmup:], curve[warmup + 1:]))
    assert Schedule(OptimConfig(schedule=kind, warmup_steps=warmup), total).lr(0, peak=1.0, floor=0.1) == curve[0]


def test_wsd_holds_the_peak_until_its_share_of_the_run():
    curve = [lr_at(step, peak=1.0, floor=0.0, warmup=10, total=100, kind="wsd", decay_share=0.3) for step in range(101)]
    assert curve[9:71] == [1.0] * 62 and curve[71] < 1.0 and curve[85] == pytest.approx(0.5) and curve[99] == pytest.approx(1 / 30)


def test_the_warmup_has_a_floor_of_twice_adams_memory():
    assert [OptimConfig().warmup(total) for total in (1, 60, 300, 800, 50_000, 10**6)] == [1, 6, 30, 40, 2000, 2000]
    assert OptimConfig(beta2=0.999).warmup(50_000) == 2000 and OptimConfig(warmup_steps=7).warmup(50_000) == 7


BREATHING = OptimConfig(schedule="breathing", warmup_steps=2, breathing_hold_steps=3, breathing_decay=0.5, breathing_quiet_steps=3, breathing_freeze_steps=4)


def test_breathing_goes_through_its_phases():
    schedule = Schedule(BREATHING, 100)
    assert rates(schedule, range(2)) == [0.5, 1.0] and schedule.breath.phase == "hold"
    assert rates(schedule, range(2, 8)) == [1.0, 1.0, 1.0, 1.0, 0.5, 0.25] and schedule.breath.phase == "freeze"
    assert rates(schedule, range(8, 12), val_loss=2.0) == [0.125] * 4 and schedule.breath.phase == "hold"
    assert rates(schedule, [12]) == [pytest.approx(0.15)]


@pytest.mark.parametrize("before, within, phase", [(None, None, "decay"), (2.0, 2.0, "decay"), (2.0, 1.9, "hold")])
def test_only_a_new_best_within_the_freeze_breathes_in(before, within, phase):
    schedule = Schedule(BREATHING, 100)
    rates(schedule, range(8), **({"val_loss": before} if before else {}))
    rates(schedule, range(8, 12), **({"val_loss": within} if within else {}))
    assert schedule.breath.phase == phase


def test_breathing_never_rises_above_the_peak_or_falls_below_the_floor():
    schedule, val_loss, seen = Schedule(OptimConfig(**{**BREATHING.model_dump(), "breathing_raise": 50.0}), 1000), 9.0, []
    for step in range(300):
        seen.append(schedule.lr(step, peak=1.0, floor=0.1))
        val_loss -= 0.01
        schedule.observe(step, grad_norm=1.0, val_loss=val_loss)
    assert max(seen) == 1.0 and min(seen[2:]) >= 0.1
    restless = Schedule(BREATHING, 1000)
    for step in range(50): restless.observe(step, grad_norm=1.0 + step % 2)
    assert restless.breath.phase == "decay" and restless.lr(50, peak=1.0, floor=0.1) == 0.1


@pytest.mark.parametrize("stop", range(0, 40, 3))
def test_sch_3_a_schedule_with_a_state_resumes_exactly(stop):
    cfg = OptimConfig(**{**BREATHING.model_dump(), "plateau_evals": 2})
    def walk(schedule, steps):
        seen = []
        for step in steps:
            seen.append(schedule.lr(step, peak=1.0, floor=0.01))
            schedule.observe(step, grad_norm=None if step % 11 == 5 else 1 + 0.001 * (step % 3), val_loss=(3.0, 2.9, 2.95, 2.99, 2.8)[step // 4 % 5] if step % 4 == 3 else None)
        return seen
    whole = walk(Schedule(cfg, 60), range(60))
    first, second = Schedule(cfg, 60), Schedule(cfg, 60)
    begun = walk(first, range(stop))
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert begun + walk(second, range(stop, 60)) == whole and len(set(whole)) > 6


def test_a_plateau_halves_any_rate_and_starts_counting_again():
    schedule = Schedule(OptimConfig(schedule="wsd", warmup_steps=0, plateau_evals=3), 1000)
    for val_loss in [2.0] + [2.0] * 3 + [2.1] * 3 + [1.9]: schedule.observe(1, grad_norm=1.0, val_loss=val_loss)
    assert schedule.lr(5, peak=1.0, floor=0.5) == 0.25 and schedule.plateau.num_worse == 0


def two_parts():
    torch.manual_seed(0)
    return nn.ModuleDict({"embedding": nn.Embedding(6, 4), "mlp": nn.Linear(4, 4, bias=False), "norm": nn.RMSNorm(4)})


def set_grads(model, scale):
    for number, p in enumerate(model.parameters()): p.grad = torch.full_like(p, scale * 10.0 ** -number)


def test_limits_by_group_are_the_percentile_of_the_first_steps():
    model = two_parts()
    clipper = Clipper(model, OptimConfig(clip="groups", clip_steps=10, clip_percentile=90, max_grad_norm=1e9))
    for step in range(10):
        set_grads(model, 1.0 + step)
        clipper.measure(), clipper.clip()
    norms = [p.grad.norm().item() / 10 for p in model.parameters()]
    assert list(clipper.limits) == ["embedding", "mlp", "norms"]
    assert list(clipper.limits.values()) == pytest.approx([9.1 * norm for norm in norms], rel=1e-4)
    set_grads(model, 100.0)
    model["mlp"].weight.grad.mul_(0.01)
    norm = clipper.measure().item()
    clipper.clip()
    assert norm > 100 and [p.grad.norm().item() for p in model.parameters()] == pytest.approx([9.1 * norms[0], norms[1], 9.1 * norms[2]], rel=1e-4)


@pytest.mark.parametrize("kind", ["global", "groups", "dynamic"])
def test_the_norm_is_that_of_all_gradients_and_the_first_steps_obey_the_global_limit(kind):
    ours, theirs = two_parts(), two_parts()
    clipper = Clipper(ours, OptimConfig(clip=kind, max_grad_norm=0.7))
    set_grads(ours, 3.0), set_grads(theirs, 3.0)
    assert clipper.measure().item() == pytest.approx(clip_gradients(theirs.parameters(), max_norm=0.7).item())
    clipper.clip()
    assert all(torch.allclose(p.grad, q.grad) for p, q in zip(ours.parameters(), theirs.parameters()))


def test_clipping_by_group_needs_whole_gradients():
    for stage, refused in ((0, False), (1, True), (2, True), (3, True)):
        if refused:
            with pytest.raises(ValueError, match=f"ZeRO-{stage} spreads them"): OptimConfig(clip="groups").check_zero_stage(stage)
        else: OptimConfig(clip="groups").check_zero_stage(stage)
    OptimConfig(clip="dynamic").check_zero_stage(3)
    Config(optim={"clip": "groups"})


def test_a_broken_gradient_is_named():
    model = two_parts()
    set_grads(model, 1.0)
    assert broken_gradients(model) == []
    model["mlp"].weight.grad[1, 2] = float("nan")
    assert broken_gradients(model) == ["mlp.weight"] and not Clipper(model, OptimConfig(clip="groups")).measure().isfinite()


def test_amp_1_an_overflow_backs_off_once_and_growth_waits_for_its_interval():
    scaler, seen = LossScaler(TrainConfig(loss_scale=1024.0, loss_scale_interval=3)), []
    for skipped in (False, True, False, False, False, False):
        scaler.update(skipped)
        seen.append(scaler.scale)
    assert seen == [1024.0, 512.0, 512.0, 512.0, 1024.0, 1024.0]


def test_amp_2_the_limit_is_that_of_the_true_norm():
    weight = nn.ParameterDict({"w": nn.Parameter(torch.zeros(1))})
    weight["w"].grad = torch.full((1,), 0.5 * 1024.0)
    unscale_gradients(weight, 1024.0)
    assert clip_gradients(weight.parameters(), max_norm=1.0).item() == 0.5 and weight["w"].grad.item() == pytest.approx(0.5)


def test_amp_4_small_updates_and_decay_reach_bf16_weights():
    for grad, cfg, end in ((0.001, None, 0.9), (0.0, OptimConfig(kind="adamw", lr=3e-4, weight_decay=0.1), 0.9970)):
        model = nn.ParameterDict({"w": nn.Parameter(torch.ones(1, 1, dtype=torch.bfloat16))})
        optimizer = build_optimizer(model, cfg) if cfg else MasterWeights(torch.optim.SGD(model.parameters(), lr=1.0))
        for _ in range(100):
            model["w"].grad = torch.full_like(model["w"], grad)
            optimizer.step()
        assert optimizer.state[model["w"]]["master"].item() == pytest.approx(end, abs=1e-4)
        assert model["w"].dtype == torch.bfloat16 and model["w"].item() == pytest.approx(end, abs=4e-3)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_amp_4_fp32_copies_are_saved_and_resume_to_the_bit(kind):
    def walk(model, optimizer, steps):
        for step in steps:
            for number, p in enumerate(model.parameters()): p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step * 7 + number)).to(p.dtype)
            optimizer.step()
    cfg = OptimConfig(kind=kind, lr=1e-3, muon_lr=1e-3)
    first, second, plain = (two_parts().bfloat16() for _ in range(3))
    optimizer, resumed = build_optimizer(first, cfg), build_optimizer(second, cfg)
    walk(first, optimizer, range(4))
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    saved = named_state(first, optimizer)
    assert {tensor.dtype for moments in saved["moments"].values() for tensor in moments.values()} == {torch.float32}
    load_named_state(second, resumed, saved)
    walk(first, optimizer, range(4, 8)), walk(second, resumed, range(4, 8))
    assert all(torch.equal(p, q) for p, q in zip(first.parameters(), second.parameters()))
    with pytest.raises(UserError, match="set optim.kind and train.weights to match"): load_named_state(plain.float(), build_optimizer(plain, cfg), saved)


def test_sixteen_bit_types_that_do_not_go_together_are_refused():
    with pytest.raises(ValueError, match="can't be multiplied in fp16"): TrainConfig(weights="bf16", dtype="fp16")


def test_the_guard_waits_for_its_window_and_ignores_what_it_cannot_undo():
    guard = SpikeGuard(GuardConfig(enabled=True, window=5, max_times=1, norm_multiple=4, loss_rise=0.5))
    assert [guard.judge(3.0, 100.0 if step == 2 else 1.0) for step in range(5)] == [""] * 5
    assert "5.0 times the median 1" in guard.judge(3.0, 5.0) and "0.60 above the median 3" in guard.judge(3.6, 1.0) and guard.judge(3.4, 3.9) == ""
    guard.note_return(7)
    assert not guard.may_go_back and guard.num_lost == 7
    assert [bool(guard.judge(5.0, 1.0)) for _ in range(5)] == [True, True, True, False, False]


def test_a_negative_warmup_is_refused():
    with pytest.raises(UserError, match="warmup_steps -1 is negative"): lr_at(0, peak=1.0, floor=0.0, warmup=-1, total=10)
