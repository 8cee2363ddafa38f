"Training with real processes over gloo: the same weights on all ranks, the same losses as one process, no hang."
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist
from ranks import free_port, run_ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from llm_from_scratch.config import ModelConfig, OptimConfig
from llm_from_scratch.dataloader import IGNORED, Batch, TokenLoader
from llm_from_scratch.distributed import (ParityError, all_sum, barrier, broadcast_object, check_parity, gather_objects,
                                          next_token_loss, parameter_hashes, prepare)
from llm_from_scratch.env import Ranks, UserError
from llm_from_scratch.eval import evaluate_loader
from llm_from_scratch.loss_classes import class_means, loss_classes
from llm_from_scratch.model import Transformer
from llm_from_scratch.moe import build_model, router_report
from llm_from_scratch.optim import build_optimizer
from llm_from_scratch.token_shards import open_shards, write_shards

CPU = torch.device("cpu")
ROWS, SEQ_LEN = 12, 12


@pytest.fixture(autouse=True)
def environment_is_left_alone():
    before = dict(os.environ)
    yield
    ignored = {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR"}  # pytest's own and torch's own
    assert {key: value for key, value in os.environ.items() if key not in ignored} == {key: value for key, value in before.items() if key not in ignored}


def make_engine(ranks, *, model=None, loss=next_token_loss, **options):
    torch.manual_seed(ranks.rank)
    model = model or Transformer(ModelConfig(vocab_size=32, hidden_size=16, num_layers=2, num_heads=2, num_kv_heads=1, max_seq_len=16))
    optimizer = build_optimizer(model, OptimConfig(**{"kind": "adamw", "lr": 3e-3, **options}))
    return prepare(model, optimizer, ranks=ranks, device=CPU, dtype=torch.float32, max_grad_norm=1.0, loss=loss)


def make_part(step, rows, counted=None):
    "Rows of a step's global batch: documents of 7 tokens, so many targets a row, some rows with none."
    ids = torch.randint(32, (ROWS, SEQ_LEN + 1), generator=torch.Generator().manual_seed(step))
    targets = ids[:, 1:].clone()
    for row in range(ROWS): targets[row, (row * 5 + step) % (SEQ_LEN + 1) if counted is None else counted:] = IGNORED
    rows = list(rows)
    positions, doc_ids = torch.arange(SEQ_LEN) % 7, torch.arange(SEQ_LEN) // 7
    return Batch(ids[rows, :-1], targets[rows], positions.expand(len(rows), -1), doc_ids.expand(len(rows), -1), torch.tensor(rows))


def parts_of(step, ranks, micro_batch=2):
    share = ROWS // ranks.world_size
    first = ranks.rank * share
    return [make_part(step, range(row, row + micro_batch)) for row in range(first, first + share, micro_batch)]


def train(engine, ranks, steps): return [engine.train_step(parts_of(step, ranks)) for step in steps]
def hashes(engine): return parameter_hashes(engine.model)


def who_am_i(ranks): return dist.get_rank(), ranks.local_rank, ranks.is_main


def test_dist_3_the_group_rank_is_the_global_one():
    assert run_ranks(who_am_i, 4, ranks_per_machine=2) == [(0, 0, True), (1, 1, False), (2, 0, False), (3, 1, False)]


def until_stop(ranks, num_batches):
    engine, num_steps = make_engine(ranks), 0
    batches = [make_part(step, [ranks.rank]) for step in range(num_batches[ranks.rank])]
    while True:
        result = engine.train_step(batches[num_steps:num_steps + 1])
        if result.skipped: return num_steps, result.stop, result.reason, dict(engine.skipped), hashes(engine)
        num_steps += 1


def test_dist_4_a_rank_that_runs_dry_stops_all_at_the_same_step():
    first, second = run_ranks(until_stop, 2, (7, 6))
    assert first == second and first[:3] == (6, True, "a rank has no batch left") and first[3] == {"a rank has no batch left": 1}


def uneven_parts(ranks):
    engine = make_engine(ranks)
    rows = [range(0, 2), range(2, 4), range(4, 6)] if ranks.is_main else [range(6, 12)]
    return engine.train_step([make_part(0, part) for part in rows]), hashes(engine)


def test_dist_4_ranks_with_other_numbers_of_micro_batches_take_one_step():
    first, second = run_ranks(uneven_parts, 2)
    whole = make_engine(Ranks())
    expected = whole.train_step([make_part(0, range(ROWS))])
    assert first == second and first[0].num_tokens == expected.num_tokens and first[0].loss == pytest.approx(expected.loss, rel=1e-6)
    assert first[0].grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)


def summed_output(model, batch): return model(batch.inputs.float()).sum()


def count_syncs(ranks, group_sizes):
    model = nn.Linear(1, 1, bias=False)
    engine, syncs = make_engine(ranks, model=model, loss=summed_output), []
    engine.wrapped.register_comm_hook(syncs, lambda seen, bucket: (seen.append(1), allreduce_hook(None, bucket))[1])
    one = torch.full((1, 1), ranks.rank + 1)
    seen = []
    for size in group_sizes:
        norm = engine.train_step([Batch(one, one, one, one, one[0])] * size).grad_norm
        seen.append((len(syncs), norm, model.weight.grad.item()))
        syncs.clear()
    return seen


def test_dist_5_one_sync_a_step_and_equal_gradients():
    assert run_ranks(count_syncs, 2, (4, 4, 1, 3)) == [[(1, pytest.approx(1.5), pytest.approx(1.0, abs=1e-5))] * 4] * 2


def write_rows(folder, num_rows):
    ids = torch.randint(32, (num_rows * SEQ_LEN + 1,), generator=torch.Generator().manual_seed(num_rows)).tolist()
    write_shards([ids], folder, vocab_size=32, tokenizer_fingerprint="none")
    return folder


def evaluate(ranks, folder):
    "Loss and targets over all ranks, this rank's targets, whether the next training step was skipped, and the loss of each class."
    engine = make_engine(ranks)
    for step in range(2): engine.train_step(parts_of(step, ranks, micro_batch=1))
    loader = TokenLoader(open_shards(folder), batch_size=2, seq_len=SEQ_LEN, rank=ranks.rank, world_size=ranks.world_size, shuffle=False)
    classes = loss_classes(loader, loader.shards)
    mine = evaluate_loader(engine.model, loader, CPU, observe=classes.add)
    total, count = (all_sum(part) for part in mine)
    return total / count, count, mine[1], engine.train_step(parts_of(2, ranks, micro_batch=1)).skipped, class_means(classes, all_sum(classes.sums))


def test_dist_9_ten_samples_on_four_ranks_count_once(tmp_path):
    folder = write_rows(tmp_path / "val", 10)
    everyone, expected = run_ranks(evaluate, 4, folder), evaluate(Ranks(), folder)
    assert [found[:2] for found in everyone] == [(pytest.approx(expected[0], rel=1e-5), 10 * SEQ_LEN)] * 4
    assert [found[2] for found in everyone] == [4 * SEQ_LEN] + [2 * SEQ_LEN] * 3


def test_trn_7_one_validation_batch_on_two_ranks(tmp_path):
    folder = write_rows(tmp_path / "val", 2)
    (first, second), expected = run_ranks(evaluate, 2, folder), evaluate(Ranks(), folder)
    assert first[:2] == second[:2] == (pytest.approx(expected[0], rel=1e-5), 2 * SEQ_LEN)
    assert (first[2], second[2]) == (2 * SEQ_LEN, 0) and not first[3] and not second[3]
    assert first[4] == second[4] == pytest.approx(expected[4], rel=1e-5) and first[4]


def empty_on_one_rank(ranks):
    engine = make_engine(ranks)
    result = engine.train_step([make_part(0, [0, 1], counted=SEQ_LEN if ranks.is_main else 0)])
    nothing = engine.train_step([make_part(1, [0, 1], counted=0)])
    return result, nothing.reason, hashes(engine)


def test_mod_5_a_rank_without_targets_changes_nothing():
    first, second = run_ranks(empty_on_one_rank, 2)
    alone = make_engine(Ranks()).train_step([make_part(0, [0, 1], counted=SEQ_LEN)])
    assert first == second and first[1] == "no rank has a target" and first[0].num_tokens == alone.num_tokens
    assert (first[0].loss, first[0].grad_norm) == pytest.approx((alone.loss, alone.grad_norm), rel=1e-5)


def learn(ranks, kind, steps):
    engine = make_engine(ranks, kind=kind)
    return [result.loss for result in train(engine, ranks, steps)], hashes(engine)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_trn_4_ranks_train_as_one_process_does(num_ranks):
    everyone = run_ranks(learn, num_ranks, "adamw", range(20))
    expected, _ = learn(Ranks(), "adamw", range(20))
    assert all(found == everyone[0] for found in everyone) and everyone[0][0] == pytest.approx(expected, rel=1e-5)


def test_muon_keeps_ranks_equal():
    first, second = run_ranks(learn, 2, "muon", range(10))
    expected, _ = learn(Ranks(), "muon", range(10))
    assert first == second and first[0] == pytest.approx(expected, rel=2e-4)


def broken_on_one_rank(ranks):
    engine = make_engine(ranks)
    train(engine, ranks, [0])
    before, engine.loss = hashes(engine), lambda model, batch: next_token_loss(model, batch) * (float("inf") if ranks.rank == 1 else 1.0)
    result, after = train(engine, ranks, [1])[0], hashes(engine)
    engine.loss = next_token_loss
    good = train(engine, ranks, [2])[0]
    return result.skipped, result.reason, before == after, sum(engine.skipped.values()), good, hashes(engine)


def test_a_broken_gradient_on_one_rank_is_skipped_by_all():
    first, second = run_ranks(broken_on_one_rank, 2)
    assert first == second and first[0] and "gradient norm" in first[1] and first[2] and first[3] == 1 and not first[4].skipped


def asks_to_stop(ranks):
    engine = make_engine(ranks)
    results = [engine.train_step(parts_of(step, ranks), stop=step == 2 and ranks.rank == 1) for step in range(4)]
    return [result.stop for result in results], [result.skipped for result in results]


def test_a_stop_of_one_rank_reaches_all_in_the_same_step():
    assert run_ranks(asks_to_stop, 2) == [([False, False, True, False], [False] * 4)] * 2


class Forgetful(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.unused, self.head = nn.Embedding(32, 4), nn.Linear(4, 4), nn.Linear(4, 32)

    def forward(self, ids, **context): return self.head(self.embed(ids))


class Late(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 4), nn.Linear(4, 32)

    def forward(self, ids, **context):
        if not hasattr(self, "late"): self.late = nn.Parameter(torch.ones(4))
        return self.head(self.embed(ids) * self.late)


def refusal(make, ranks, model):
    "What the first step says of a model's wiring."
    try: train(make(ranks, model=model), ranks, [0])
    except UserError as error: return str(error)


def forgets(ranks): return [refusal(make_engine, ranks, model) for model in (Forgetful(), Late())]


def test_an_unused_and_a_late_parameter_are_named_on_every_rank():
    first, second = run_ranks(forgets, 2)
    assert first == second and "'unused.weight' got no gradient" in first[0] and "'late' is not in the optimizer" in first[1]


def drift(ranks, odd_rank):
    engine = make_engine(ranks)
    train(engine, ranks, range(2))
    agreed = check_parity(engine.model, step=2)
    if ranks.rank == odd_rank: engine.model.head.weight.data[3, 1] += 1e-6
    errors = []
    for values in ({"step": 2}, {"position": 7 if ranks.rank == odd_rank else 5}):
        try: check_parity(engine.model, **values)
        except ParityError as error: errors.append(str(error))
        engine.model.load_state_dict(broadcast_object(engine.model.state_dict()))
    return agreed, errors, check_parity(engine.model)


def test_drift_names_tensor_and_rank_on_every_rank():
    first, second, third = run_ranks(drift, 3, 0)
    assert first == second == third
    assert " on rank 0 and " in first[1][0] and ("head.weight is" in first[1][0] or "embedding.weight is" in first[1][0])
    assert "position is 7 on rank 0 and 5 elsewhere" in first[1][1]


def continue_from(ranks, saved, steps):
    engine = make_engine(ranks)
    engine.model.load_state_dict(saved["model"]), engine.load_state_dict(saved["engine"])
    return [result.loss for result in train(engine, ranks, steps)]


def save_after(ranks, steps):
    engine = make_engine(ranks)
    train(engine, ranks, steps)
    return {"model": engine.model.state_dict(), "engine": engine.state_dict()} if ranks.is_main else None


@pytest.mark.slow
def test_a_state_of_two_ranks_goes_on_with_one_or_three():
    saved, _ = run_ranks(save_after, 2, range(5))
    expected, _ = learn(Ranks(), "adamw", range(10))
    same = run_ranks(continue_from, 2, saved, range(5, 10))
    assert same[0] == run_ranks(learn, 2, "adamw", range(10))[0][0][5:]
    for losses in (continue_from(Ranks(), saved, range(5, 10)), run_ranks(continue_from, 3, saved, range(5, 10))[2]):
        assert losses == pytest.approx(same[0], rel=1e-5) and losses == pytest.approx(expected[5:], rel=1e-5)


def talk(ranks):
    value = torch.full((2,), float(ranks.rank))
    summed = all_sum(value)
    barrier()
    return (all_sum(ranks.rank), all_sum(0.5), summed.tolist(), value.tolist(),
            gather_objects({"rank": ranks.rank}), gather_objects(ranks.rank, everywhere=True), broadcast_object(f"from {ranks.rank}"))


def test_small_talk_between_three_ranks():
    for rank, answer in enumerate(run_ranks(talk, 3)):
        everyone = [{"rank": number} for number in range(3)]
        assert answer == (3, 1.5, [3.0, 3.0], [float(rank)] * 2, everyone if rank == 0 else None, [0, 1, 2], "from 0")


def stuck(ranks):
    if ranks.is_main: time.sleep(60)
    return ranks.rank


def test_dist_7_a_rank_that_hangs_fails_the_test_and_leaves_nothing():
    with pytest.raises(AssertionError, match="rank 0: no answer in time"): run_ranks(stuck, 2, timeout_seconds=1)


WORKER = """
import json, os, pathlib, sys, time
from llm_from_scratch.distributed import watch_launcher
watching = watch_launcher()
pathlib.Path(sys.argv[1]).write_text(json.dumps([os.getpid(), watching]))
time.sleep(600)
"""


def is_running(pid):
    with suppress(FileNotFoundError, ProcessLookupError):
        with open(f"/proc/{pid}/cmdline", "rb") as file: return bool(file.read())
    return False


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_worker_ends_when_its_torchrun_is_killed(tmp_path):
    script, note = tmp_path / "worker.py", tmp_path / "note.json"
    script.write_text(WORKER)
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1", "--master-port", str(free_port()), str(script), str(note)]
    launcher = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 300
        while not (note.exists() and note.read_text()) and time.monotonic() < deadline: time.sleep(0.1)
        pid, watching = json.loads(note.read_text())
        assert watching and is_running(pid)
    finally:
        launcher.kill(), launcher.wait()
    deadline = time.monotonic() + 60
    while is_running(pid) and time.monotonic() < deadline: time.sleep(0.1)
    try: assert not is_running(pid)
    finally:
        with suppress(ProcessLookupError): os.kill(pid, signal.SIGKILL)


def train_recomputing(ranks, recomputed, shape):
    torch.manual_seed(ranks.rank)
    model = build_model(ModelConfig(vocab_size=32, hidden_size=16, num_layers=2, num_heads=2, num_kv_heads=1, max_seq_len=16, **shape))
    model.recomputed = frozenset(recomputed)
    engine = make_engine(ranks, model=model)
    losses = [result.loss for result in train(engine, ranks, range(2))]
    return losses, hashes(engine), router_report(model)


def recompute_each_way(ranks):
    return [train_recomputing(ranks, recomputed, shape) for shape in ({}, {"num_experts": 24, "experts_per_token": 1}) for recomputed in ((), (0, 1))]


def test_blocks_computed_again_and_idle_experts_train_alike_on_two_ranks():
    first, second = run_ranks(recompute_each_way, 2)
    for (losses, weights, _), (other_losses, other_weights, _) in zip(first, second):
        assert losses == other_losses and weights == other_weights
    for plain, recomputed in (first[:2], first[2:]):
        assert plain[:2] == recomputed[:2]
    assert first[2][2]["expert_least"] == 0 and first[0][2] == {}
