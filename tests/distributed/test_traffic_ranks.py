"What travels between ranks over gloo: experts beside DDP, one sync a step, and its time and bytes."
import sys

import pytest
import torch
from ranks import run_ranks
from torch import distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import fully_shard

from llm_from_scratch import moe
from llm_from_scratch.comm_timing import CommTimer, rank_account, socket_bytes_sent, time_comm
from llm_from_scratch.config import EngineConfig, ModelConfig, OptimConfig
from llm_from_scratch.dataloader import IGNORED, Batch
from llm_from_scratch.distributed import gather_objects, next_token_loss, parameter_hashes, prepare
from llm_from_scratch.env import Ranks, UserError
from llm_from_scratch.expert_gradients import sparse_experts
from llm_from_scratch.optim import build_optimizer

CPU, SEQ_LEN, NUM_EXPERTS = torch.device("cpu"), 8, 8


def make_model(seed=0, change=lambda model: None, balance_weight=0.0):
    torch.manual_seed(seed)
    shape = dict(vocab_size=32, hidden_size=16, num_layers=2, num_heads=2, num_kv_heads=1, max_seq_len=16, balance_weight=balance_weight)
    model = moe.build_model(ModelConfig(**shape, num_experts=NUM_EXPERTS, experts_per_token=2))
    change(model)
    return model


def make_engine(ranks, model, loss=next_token_loss, **options):
    options = EngineConfig(**options)
    return prepare(model, build_optimizer(model, OptimConfig(kind="adamw", lr=3e-3)), ranks=ranks, device=CPU, dtype=torch.float32, loss=loss,
                   options=options, experts=sparse_experts(model, options, ranks))


def parts_of(step, ranks, rows=4):
    ids = torch.randint(32, (rows, SEQ_LEN + 1), generator=torch.Generator().manual_seed(step))
    share = rows // ranks.world_size
    mine = ids[ranks.rank * share:(ranks.rank + 1) * share]
    return [Batch(row[None, :-1], row[None, 1:], torch.arange(SEQ_LEN)[None], torch.zeros(1, SEQ_LEN, dtype=torch.long), torch.zeros(1)) for row in mine]


def starve(engine, ranks, num_steps=3, starved=lambda ranks: [3] if ranks.rank == 1 else []):
    "Losses, gradients' norms and weights where the router passes some experts over."
    choose, kept_back = moe.choose_experts, torch.zeros(NUM_EXPERTS)
    kept_back[starved(ranks)] = -1e4
    moe.choose_experts = lambda logits, *arguments, **options: choose(logits + kept_back, *arguments, **options)
    try: results = [engine.train_step(parts_of(step, ranks)) for step in range(num_steps)]
    finally: moe.choose_experts = choose
    return [(result.loss, result.grad_norm) for result in results], parameter_hashes(engine.model)


def starve_each_way(ranks):
    found = {"dense": starve(make_engine(ranks, make_model(ranks.rank), sparse_experts=False), ranks)}
    engine = make_engine(ranks, make_model(ranks.rank))
    syncs, reductions, reduce = [], [], engine.experts.reduce
    engine.wrapped.register_comm_hook(syncs, lambda seen, bucket: (seen.append(1), allreduce_hook(None, bucket))[1])
    engine.experts.reduce = lambda: reductions.append(reduce())
    found["sparse"], found["syncs"], found["used"] = starve(engine, ranks), len(syncs), [traffic.num_used for traffic in reductions]
    engine = make_engine(ranks, make_model(ranks.rank))
    found["dead"] = starve(engine, ranks, starved=lambda ranks: range(2, NUM_EXPERTS))
    found["dead grad"] = engine.model.blocks[0].mlp.experts[3].up.weight.grad.abs().max().item()
    found["dead traffic"] = engine.experts.traffic
    return found


def odd_cases(ranks):
    found, model = {}, make_model(ranks.rank)
    starve(make_engine(ranks, model), ranks, 1)
    found["dense after sparse"] = starve(make_engine(ranks, model, sparse_experts=False), ranks)
    half = make_engine(ranks, make_model(ranks.rank, lambda model: model.blocks[0].mlp.experts.requires_grad_(False)))
    found["frozen"], found["frozen experts"] = starve(half, ranks), len(half.experts.experts)
    broken = make_engine(ranks, make_model(ranks.rank))
    before = parameter_hashes(broken.model)
    if ranks.rank == 1:
        for expert in broken.model.blocks[1].mlp.experts: expert.up.weight.register_hook(lambda grad: grad * float("nan"))
    result = broken.train_step(parts_of(0, ranks))
    found["broken"] = result.skipped, "experts" in result.reason, before == parameter_hashes(broken.model)
    for options in ({}, {"find_unused_parameters": True}):
        forgetful = make_model(change=lambda model: model.register_module("unused", nn.Linear(2, 2)))
        engine = make_engine(ranks, forgetful, **options)
        try: found[f"unused {options}"] = [engine.train_step(parts_of(step, ranks)).skipped for step in range(3)]
        except UserError as error: found[f"unused {options}"] = str(error)
    quick = make_engine(ranks, make_model(ranks.rank), static_graph=True)
    try: quick.train_step(parts_of(0, ranks))
    except UserError as error: found["static in parts"] = str(error)
    found["static"] = [quick.train_step(parts_of(step, ranks)[:1]).loss for step in range(3)] == [plain.loss for plain in one_part_each(ranks)]
    return found


def one_part_each(ranks):
    engine = make_engine(ranks, make_model(ranks.rank))
    return [engine.train_step(parts_of(step, ranks)[:1]) for step in range(3)]


def learn(ranks):
    engine = make_engine(ranks, make_model())
    return [engine.train_step(parts_of(step, ranks)).loss for step in range(5)], len(set(gather_objects(str(parameter_hashes(engine.model)), everywhere=True)))


def time_steps(ranks):
    "Losses and weights without and with the timer, its calls, its window, and what the sockets say."
    found = {}
    for name in ("plain", "timed"):
        engine = make_engine(ranks, make_model(ranks.rank))
        timer = time_comm(engine, "never" if name == "plain" else "auto")
        engine.train_step(parts_of(0, ranks))
        if timer: timer.window()
        before = socket_bytes_sent() if sys.platform == "linux" else 0
        found[name] = starve(engine, ranks)
    found["sent"] = gather_objects(socket_bytes_sent() - before if sys.platform == "linux" else None, everywhere=True)
    found["window"] = window = timer.window()
    found["calls"] = {name: tally.num_calls for name, tally in timer.tallies.items()}
    found["gradients"] = timer.tallies["gradients all_reduce"].message_bytes
    found["dense"] = sum(p.nbytes for name, p in engine.model.named_parameters() if name not in engine.experts.names)
    return {**found, "window": window["comm_bytes"], "share": 0 < window["comm_share"] < 1 and window["comm_seconds"] > 0}


def hear_shards(ranks):
    "What the timer hears of FSDP2, and of calls that are not among all ranks alike."
    model, timer = fully_shard(nn.Linear(8, 8, bias=False), mesh=dist.init_device_mesh("cpu", (2,))), CommTimer(CPU, 2)
    with timer.step(): model(torch.ones(2, 8)).sum().backward()
    alone = [dist.new_group([rank]) for rank in range(2)][ranks.rank]
    with timer.step():
        dist.all_reduce(torch.ones(1000), group=alone)
        dist.gather(torch.ones(10), [torch.ones(10), torch.ones(10)] if ranks.is_main else None, dst=0)
    sent = {name: tally.sent_bytes for name, tally in timer.tallies.items()}
    return gather_objects(sent, everywhere=True)


def sit_out(ranks):
    "Losses and norms where all ranks but the first have padding alone, and another number of micro-batches."
    engine = make_engine(ranks, make_model(balance_weight=0.01))
    def padded(batch): return Batch(batch.inputs, torch.full_like(batch.targets, IGNORED), batch.positions, torch.full_like(batch.doc_ids, -1), batch.row_ids)
    results = [engine.train_step(parts_of(step, Ranks()) if ranks.is_main else [padded(part) for part in parts_of(step, Ranks())[:1 + step % 2]]) for step in range(3)]
    return [(result.loss, result.grad_norm, result.reason) for result in results]


def everything(ranks): return starve_each_way(ranks), odd_cases(ranks), learn(ranks), time_steps(ranks), hear_shards(ranks), sit_out(ranks)


@pytest.fixture(scope="module")
def of_two_ranks():
    "What two ranks found, the same on both."
    first, second = run_ranks(everything, 2)
    assert first == second
    return first


def test_dist_6_starved_experts_finish_and_equal_the_dense_way(of_two_ranks):
    found, *_ = of_two_ranks
    assert found["sparse"] == found["dense"]
    assert found["dead grad"] == 0.0 and found["dead traffic"].num_used <= 4
    assert found["dead traffic"].num_bytes < 0.32 * found["dead traffic"].dense_bytes


def test_dist_5_one_sync_and_one_reduction_a_step(of_two_ranks):
    found, *_ = of_two_ranks
    assert found["syncs"] == len(found["used"]) == 3


def test_dist_6_frozen_broken_and_forgotten_parameters(of_two_ranks):
    _, found, *_ = of_two_ranks
    assert found["frozen experts"] == NUM_EXPERTS and found["broken"] == (True, True, True)
    assert "'unused.weight' got no gradient" in found["unused {}"]
    assert found["unused {'find_unused_parameters': True}"] == [False] * 3
    assert found["static"] and "one micro-batch a step" in found["static in parts"]


def test_mod_9_experts_on_a_rank_with_padding_alone_change_nothing(of_two_ranks):
    for found, alone in zip(of_two_ranks[5], sit_out(Ranks()), strict=True):
        assert found[:2] == pytest.approx(alone[:2], rel=1e-5) and found[2] == alone[2] == ""


def test_trn_4_experts_on_ranks_train_as_one_process_does(of_two_ranks):
    (losses, num_different), (alone, _) = of_two_ranks[2], learn(Ranks())
    assert losses == pytest.approx(alone, rel=1e-5) and num_different == 1


def test_timing_changes_nothing_and_counts_what_the_sockets_count(of_two_ranks):
    found = of_two_ranks[3]
    assert found["timed"] == found["plain"] and found["share"]
    assert found["calls"] == {"all_reduce": 12, "gradients all_reduce": 4, "experts all_reduce": 8}  # three small sums a step; a vote and a piece
    assert found["gradients"] == 4 * found["dense"] == 4 * rank_account("ddp", found["dense"] // 4, 2).sent
    if sys.platform == "linux": assert sum(found["sent"]) / 2 == pytest.approx(found["window"], rel=0.1)


def test_fsdp2_is_heard_and_small_groups_and_roots_count_as_such(of_two_ranks):
    shards = {"all_gather_single": 128.0, "reduce_scatter_single": 128.0, "all_reduce": 0.0}
    assert of_two_ranks[4] == [{**shards, "gather": 0.0}, {**shards, "gather": 40.0}]
