"ZeRO over gloo: the losses of DDP, a file from every rank, an exact resume, and a clear word where the pieces don't fit."
import json
import math
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from ranks import run_ranks, server_with_torch
from test_distributed_ranks import Forgetful, Late, make_part, parts_of, refusal
from test_train_ranks import command, errors, finish, forked, losses
from torch.utils.cpp_extension import get_default_build_root

from llm_from_scratch.checkpointing import load_checkpoint, load_run, pack_state, verify_checkpoint, write_checkpoint
from llm_from_scratch.config import ModelConfig, build_config
from llm_from_scratch.deepspeed_engine import build_engine
from llm_from_scratch.distributed import barrier, broadcast_object, next_token_loss
from llm_from_scratch.env import Ranks, UserError
from llm_from_scratch.eval import evaluate_loader
from llm_from_scratch.model import Transformer
from llm_from_scratch.moe import build_model
from llm_from_scratch.optim import build_optimizer

pytest.importorskip("deepspeed")

CPU = torch.device("cpu")
SHAPE = ModelConfig(vocab_size=33, hidden_size=16, num_layers=2, num_heads=2, num_kv_heads=1, max_seq_len=16)  # 33 rows divide by no number of ranks


@pytest.fixture(scope="module", autouse=True)
def loaded_server():
    with server_with_torch("deepspeed.runtime.engine", "deepspeed.runtime.zero.muon.original_muon"):
        yield


def make(ranks, stage, *, shape=SHAPE, model=None, dtype=torch.float32, own=None, loss=next_token_loss, recomputed=(), **sections):
    "An engine like any run's; every weight of stage 3 is cut, which DeepSpeed would spare such small ones."
    torch.manual_seed(ranks.rank)
    engine = {"kind": "deepspeed" if stage else "ddp", "zero_stage": stage, "deepspeed_config": str(own) if own and stage else None}
    sections = {"optim": dict(kind="adamw", lr=3e-3), **sections}
    config = build_config({"train": dict(global_batch=12, micro_batch=2, loss_scale=1024.0), "engine": engine}, sections)
    model = model or Transformer(shape)
    model.recomputed = frozenset(recomputed)
    if config.train.weights == "bf16":
        model.bfloat16()
    return build_engine(config, model, build_optimizer(model, config.optim), ranks=ranks, device=CPU, dtype=dtype, loss=loss)


def train(engine, ranks, steps):
    results = [engine.train_step(parts_of(step, ranks)) for step in steps]
    return [result.loss for result in results], [result.grad_norm for result in results]


def save(engine, folder, step):
    files = engine.save_files(folder, "full")
    if engine.weights is None:
        return broadcast_object(None)
    return broadcast_object(write_checkpoint(folder, pack_state({"model": engine.weights, "engine": engine}, step=step), files=files))


def load(engine, path):
    load_checkpoint(path, {"model": engine.weights, "engine": engine})
    engine.load_files(path)


def whole_life(ranks, folder, stage, own):
    "DDP's losses and ZeRO's; a save at step 2 without which the losses to step 4 stay the same; back from it, an uneven step, and a broken gradient."
    plain, zero = make(ranks, 0), make(ranks, stage, own=own)
    ddp = train(plain, ranks, range(4))
    first = train(zero, ranks, range(2))
    path = save(zero, folder, 2)
    rest = train(zero, ranks, range(2, 4))
    again = make(ranks, stage, own=own)
    load(again, path)
    resumed = train(again, ranks, range(2, 4))
    uneven = [engine.train_step(parts_of(step, ranks)[: 3 - ranks.rank]).loss for engine in (plain, again) for step in (4, 5)]
    batches = [[parts_of(9, ranks)[0]] * (2 - ranks.rank), []][ranks.rank == 1 and stage == 3]  # a rank with fewer, or none
    nll, count = evaluate_loader(zero.model, zero.even(batches), CPU)
    zero.loss = lambda model, batch: next_token_loss(model, batch) * (math.nan if ranks.rank == 1 else 1.0)
    broken = zero.train_step(parts_of(5, ranks))
    load(zero, path)  # as after a spike: back, in the same engine
    zero.loss = next_token_loss
    back = train(zero, ranks, range(2, 4))
    zero.close()
    alone = next_token_loss(zero.model, parts_of(9, ranks)[0]).item() if ranks.is_main else None
    barrier()
    return ddp, [a + b for a, b in zip(first, rest)], rest, resumed, back, uneven, (broken.skipped, broken.reason), (nll, count), alone, path


def check_life(answers):
    (ddp, zero, rest, resumed, back, uneven, broken, (nll, count), alone, path), other = answers
    assert zero[0] == pytest.approx(ddp[0], rel=1e-5) and zero[1] == pytest.approx(ddp[1], rel=1e-4)
    assert resumed == rest == back
    assert uneven[2:] == pytest.approx(uneven[:2], rel=1e-5)  # rank 1 had a micro-batch less
    assert broken[0] and "ZeRO keeps no whole gradient" in broken[1] and other[6] == broken
    assert verify_checkpoint(path) == [] and len(list(path.glob("deepspeed/*optim_states.pt"))) == 2
    assert not [name for name in path.parent.iterdir() if name.name != path.name and "tmp" not in name.name]
    assert count > 0 and math.isfinite(nll) and math.isfinite(alone)


def test_dist_2_trn_11_zero_2_from_start_to_resume(tmp_path):
    check_life(run_ranks(whole_life, 2, tmp_path, 2, None, timeout_seconds=150))


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_dist_2_trn_11_other_stages(tmp_path, stage):
    own = tmp_path / "ds.json"
    own.write_text(json.dumps({"train_batch_size": "auto", "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}))
    check_life(run_ranks(whole_life, 2, tmp_path / "checkpoints", stage, own, timeout_seconds=150))


class Odd(torch.nn.Module):
    "297 weights: 33 x 4 of an embedding, 4 x 33 and 33 of a head."
    def __init__(self):
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(33, 4), torch.nn.Linear(4, 33)

    def forward(self, ids, **context): return self.head(self.embed(ids))


def make_experts(): return build_model(SHAPE.model_copy(update=dict(num_experts=8, experts_per_token=1)))


def odd_steps(ranks, own):
    "Losses and norms by model and stage: three micro-batches, one, and two that count nothing; then what is said of a wrong model."
    rows = [[range(0, 2), range(2, 4), range(4, 6)], [range(6, 12)], [range(0, 2), range(2, 4)]][ranks.rank]
    parts, found = [make_part(0, part, counted=0 if ranks.rank == 2 else None) for part in rows], {}
    for build in (Odd, make_experts):
        for stage in range(4):
            torch.manual_seed(1)
            engine = make(ranks, stage, model=build(), own=own if stage == 3 else None)
            found[build.__name__, stage] = [(result.loss, result.grad_norm) for result in [engine.train_step(parts) for _ in range(2)]]
    return found, [refusal(partial(make, stage=stage), ranks, model) for stage in (1, 2, 3) for model in (Forgetful(), Late())]


@pytest.mark.slow
def test_mod_5_three_uneven_ranks_one_without_targets_an_odd_number_of_weights_and_idle_experts(tmp_path):
    own = tmp_path / "ds.json"
    own.write_text(json.dumps({"zero_optimization": {"stage3_param_persistence_threshold": 0}}))
    first, *others = run_ranks(odd_steps, 3, own, timeout_seconds=150)
    assert all(other == first for other in others)
    found, said = first
    for (name, _), steps in found.items(): assert torch.tensor(steps).allclose(torch.tensor(found[name, 0]), rtol=1e-5, atol=0)
    torch.manual_seed(1)
    alone = make(Ranks(), 0, model=Odd()).train_step([make_part(0, range(12))])
    assert found["Odd", 0][0] == pytest.approx((alone.loss, alone.grad_norm), rel=1e-5)
    assert all("'unused.weight' got no gradient" in unused and "'late' is not in the optimizer" in late for unused, late in zip(said[::2], said[1::2]))


def low_precision(ranks, stage):
    found = {}
    for name, options in {"fp32": {}, "bf16": dict(dtype=torch.bfloat16), "fp16": dict(dtype=torch.float16),
                          "weights": dict(dtype=torch.bfloat16, train=dict(global_batch=12, micro_batch=2, weights="bf16")),
                          "recomputed": dict(recomputed=[0, 1]), "offload": dict(engine=dict(kind="deepspeed", zero_stage=stage, offload="cpu"))}.items():
        found[name] = [train(make(ranks, kind, **({} if name == "offload" and not kind else options)), ranks, range(4)) for kind in (0, stage)]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_type_recomputation_and_offload_train_as_under_ddp(stage):
    found, _ = run_ranks(low_precision, 2, stage, timeout_seconds=300)
    for name, (ddp, zero) in found.items():
        if name == "weights":  # moved in fp32, multiplied in bf16: near the run in fp32
            ddp = found["fp32"][0]
        assert zero[0] == pytest.approx(ddp[0], rel=2e-3 if name == "weights" else 1e-4), name
        assert zero[1] == pytest.approx(ddp[1], rel=2e-2 if name == "weights" else 1e-3), name


def muon_life(ranks, folder, stage):
    "DDP's losses without a limit to the norm, DeepSpeed's own Muon's, and those after a resume from step 10."
    ddp = train(make(ranks, 0, optim=dict(kind="muon", max_grad_norm=1e9)), ranks, range(20))[0]
    muon = dict(kind="muon")
    zero, again = make(ranks, stage, optim=muon), make(ranks, stage, optim=muon)
    first = train(zero, ranks, range(10))[0]
    path = save(zero, folder, 10)
    load(again, path)
    return ddp, first + train(zero, ranks, range(10, 20))[0], train(again, ranks, range(10, 20))[0]


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2])
def test_deepspeeds_own_muon_follows_ours_and_resumes_exactly(tmp_path, stage):
    ddp, zero, resumed = run_ranks(muon_life, 2, tmp_path / "checkpoints", stage, timeout_seconds=150)[0]
    assert zero == pytest.approx(ddp, rel=5e-3) and resumed == zero[10:]


def first_half(ranks, folder, stage, own):
    engine = make(ranks, stage, own=own)
    train(engine, ranks, range(3))
    return save(engine, folder, 3), train(engine, ranks, range(3, 6))


def second_half(ranks, path, stage, own):
    engine = make(ranks, stage, own=own)
    load(engine, path)
    return train(engine, ranks, range(3, 6))


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_ckpt_6_another_number_of_ranks_goes_on_with_the_same_curve(tmp_path, stage):
    own = tmp_path / "ds.json"
    own.write_text(json.dumps({"zero_optimization": {"stage3_param_persistence_threshold": 0}}))
    path, expected = run_ranks(first_half, 2, tmp_path / "checkpoints", stage, own, timeout_seconds=150)[0]
    for num_ranks in (1, 3):
        found = run_ranks(second_half, num_ranks, path, stage, own, timeout_seconds=150)[0]
        assert found[0] == pytest.approx(expected[0], rel=1e-6) and found[1] == pytest.approx(expected[1], rel=1e-6)


WIDE = SHAPE.model_copy(update=dict(hidden_size=128, num_layers=4))  # DeepSpeed moves nothing below a MiB to a disk
IS_BUILT = any(Path(get_default_build_root()).glob("*/async_io/async_io.so"))


def on_disk(ranks, folder, offload):
    "Losses of six steps with a save after three, and those of the last three after going back in the same engine; the files on the disk."
    engine = make(ranks, 3, shape=WIDE, engine=dict(kind="deepspeed", zero_stage=3, offload=offload, nvme_path=str(folder / "first")))
    first = train(engine, ranks, range(3))[0]
    path = save(engine, folder / offload, 3)
    rest = train(engine, ranks, range(3, 6))[0]
    load(engine, path)
    return first + rest, train(engine, ranks, range(3, 6))[0], [file.name for file in folder.glob("first/**/*.swp")], path


def from_disk(ranks, folder, path):
    engine = make(ranks, 3, shape=WIDE, engine=dict(kind="deepspeed", zero_stage=3, offload="nvme", nvme_path=str(folder / "second")))
    load(engine, path)
    return train(engine, ranks, range(3, 6))[0]


@pytest.mark.slow
@pytest.mark.skipif(not IS_BUILT, reason="DeepSpeed's async_io has not been compiled: minutes, and libaio's headers")
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_moments_on_a_disk_train_as_in_memory_and_resume_exactly(tmp_path, num_ranks):
    memory, again, files, _ = run_ranks(on_disk, num_ranks, tmp_path, "none", timeout_seconds=150)[0]
    assert again == memory[3:] and not files
    disk, again, files, path = run_ranks(on_disk, num_ranks, tmp_path, "nvme", timeout_seconds=150)[0]
    assert disk == pytest.approx(memory, rel=1e-5) and again == disk[3:]
    assert {name.split("-")[0] for name in files if "gradient" not in name} >= {"exp_avg", "exp_avg_sq"}
    assert run_ranks(from_disk, num_ranks, tmp_path, path, timeout_seconds=150)[0] == disk[3:]


def overflow(ranks, stage):
    "Step 2 overflows on rank 1."
    seen = []
    def loss(model, batch): return next_token_loss(model, batch) * (math.inf if ranks.rank == 1 and len(seen) == 1 else 1.0)
    engine = make(ranks, stage, dtype=torch.float16, loss=loss)
    for step in range(3):
        result = engine.train_step(parts_of(step, ranks))
        seen.append((result.skipped, engine.scaler.scale, round(result.loss, 3) if step != 1 else None))
    return seen, dict(engine.skipped) != {}


@pytest.mark.slow
def test_amp_1_an_overflow_on_one_rank_is_skipped_by_all_and_halves_the_scale():
    ddp, zero = (run_ranks(overflow, 2, stage, timeout_seconds=150) for stage in (0, 2))
    assert zero[0] == zero[1] == ddp[0] and [row[:2] for row in zero[0][0]] == [(False, 1024.0), (True, 512.0), (False, 512.0)]


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(30):
        (folder / f"page-{number}.txt").write_text("".join(f"{number} times {factor} is {number * factor}\n" for factor in range(40)))
    return ["--model.hidden-size", 32, "--model.num-layers", 1, "--model.num-heads", 2, "--tokenizer.vocab-size", 301, "--train.seq-len", 32,
            "--train.global-batch", 8, "--train.micro-batch", 2, "--train.num-threads", 1, "--train.dtype", "fp32", "--optim.kind", "adamw",
            "--log.tensorboard", "False", "--eval.num-completions", 0, "--eval.num-samples", 1, "--eval.sample-tokens", 4, "--eval.every-steps", 4,
            "--checkpoint.every-steps", 3, "--data.path", folder, "--data.val-fraction", 0.2, "--data.cache-dir", folder.parent / "cache"]


@pytest.fixture(scope="module")
def losses_of_ddp(options, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ddp")
    code, out = finish(forked(folder, 2, *options, "--train.steps", 6, "--run-dir", folder / "run"))
    assert code == 0, out
    return losses(folder / "run")


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_ckpt_6_training_under_torchrun_from_start_to_resume(options, losses_of_ddp, tmp_path, stage):
    own = tmp_path / "ds.json"
    own.write_text(json.dumps({"zero_optimization": {"stage3_param_persistence_threshold": 0}}))
    engine = ["--engine.kind", "deepspeed", "--engine.zero-stage", stage, "--engine.deepspeed-config", own]
    launch = partial(command, 2) if stage == 2 else partial(forked, tmp_path, 2)  # once with processes that import DeepSpeed as a user's do
    code, out = finish(launch(*options, *engine, "--train.steps", 6, "--run-dir", tmp_path / "zero"))
    assert code == 0, out
    whole = losses(tmp_path / "zero")
    assert whole == pytest.approx(losses_of_ddp, rel=1e-5) and list(whole) == list(range(1, 7))
    shutil.rmtree(tmp_path / "zero" / "checkpoints" / "step_00000006")
    shutil.copytree(tmp_path / "zero", tmp_path / "alone")
    other = ["--resume", "auto", "--allow-change", "engine.zero_stage", "--engine.zero-stage", 1]
    code, out = finish(forked(tmp_path, 2, "--run-dir", tmp_path / "zero", *other))
    assert code != 0 and len(errors(out)) == 1 and f"is of ZeRO-{stage}, this run of ZeRO-1" in out, out
    code, out = finish(forked(tmp_path, 2, "--run-dir", tmp_path / "zero", "--resume", "auto"))
    assert code == 0, out
    assert losses(tmp_path / "zero") == whole
    code, out = finish(forked(tmp_path, 1, "--run-dir", tmp_path / "alone", "--resume", "auto"))
    assert code == 0 and "the checkpoint was written by 2 ranks: its pieces are cut anew for 1" in out, out
    assert losses(tmp_path / "alone") == pytest.approx(whole, rel=1e-5)
    assert not [path for path in (tmp_path / "alone" / "checkpoints").iterdir() if path.name.startswith(".")]
    run = load_run(tmp_path / "zero")
    assert run.step == 6 and all(bool(weight.isfinite().all()) for weight in run.model.parameters())


@pytest.mark.slow
def test_muon_and_a_contradicting_json_are_refused_in_one_line(options, tmp_path):
    own = Path(tmp_path, "ds.json")
    own.write_text(json.dumps({"train_batch_size": 16}))
    engine = ["--engine.kind", "deepspeed", "--run-dir", tmp_path / "run"]
    code, out = finish(forked(tmp_path, 2, *options, *engine, "--optim.kind", "muon", "--engine.zero-stage", 3))
    assert code != 0 and len(errors(out)) == 1 and "ZeRO-3 cuts them" in errors(out)[0], out
    code, out = finish(forked(tmp_path, 2, *options, *engine, "--engine.deepspeed-config", own))
    assert code != 0 and len(errors(out)) == 1 and "train_batch_size 16, the run's train.global_batch makes it 8" in errors(out)[0], out


def test_a_limit_that_muon_does_not_keep_is_refused_with_its_reason(tmp_path):
    own = tmp_path / "ds.json"
    own.write_text(json.dumps({"gradient_clipping": 1.0}))
    with pytest.raises(UserError, match="gradient_clipping 1.0, the run's optim.kind muon, which ZeRO does not clip, makes it 0.0"):
        make(Ranks(), 1, own=own, optim=dict(kind="muon"))
    with pytest.raises(UserError, match="gradient_clipping 1.0, the run's optim.max_grad_norm makes it 0.5"):
        make(Ranks(), 1, own=own, optim=dict(kind="adamw", max_grad_norm=0.5))
