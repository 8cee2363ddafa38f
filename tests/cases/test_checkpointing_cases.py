"Faults that other people's checkpoints had, each as a small input with the right value."

import copy
import json
import math
import os
import random
import re
import stat
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import llm_from_scratch.checkpointing as checkpointing
from llm_from_scratch.checkpointing import (
    checkpoint_step,
    latest_checkpoint,
    list_checkpoints,
    load_checkpoint,
    load_run,
    main,
    prune_checkpoints,
    save_checkpoint,
    verify_checkpoint,
)
from llm_from_scratch.config import Config, ModelConfig, OptimConfig, to_yaml
from llm_from_scratch.env import UserError
from llm_from_scratch.model import Transformer, cross_entropy
from llm_from_scratch.optim import build_optimizer, load_named_state, named_state
from llm_from_scratch.state_trees import capture_rng, match_weights, pack_tree, restore_rng, strip_wrappers, unpack_tree

SHAPE = ModelConfig(vocab_size=64, hidden_size=16, num_layers=2, num_heads=2, num_kv_heads=1, mlp_multiple=8, max_seq_len=16)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.embed(ids))


class Compiled(nn.Module):
    "Names as torch.compile makes them, without its import of many seconds."

    def __init__(self, net):
        super().__init__()
        self._orig_mod = net


class ByName:
    "An optimizer's moments by parameter name, as an engine hands them out."

    def __init__(self, model, optimizer):
        self.parts = model, optimizer

    def state_dict(self):
        return named_state(*self.parts)

    def load_state_dict(self, state):
        load_named_state(*self.parts, state)


def small_net():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def draw():
    return [(random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(()).item()) for _ in range(3)]


def model_steps(model, optimizer, num_steps):
    losses = []
    for _ in range(num_steps):
        ids = torch.randint(0, 64, (2, 9))
        loss_sum, count = cross_entropy(model(ids[:, :-1]), ids[:, 1:])
        optimizer.zero_grad()
        (loss_sum / count).backward()
        optimizer.step()
        losses.append(loss_sum.item())
    return losses


@pytest.fixture(autouse=True)
def random_states():
    "A test may move the generators; the next one does not notice."
    state = capture_rng()
    yield
    restore_rng(state)


def test_ckpt_2_random_states_survive_the_disk(tmp_path):
    draw()
    path = save_checkpoint(tmp_path, {"rng": capture_rng()}, step=1)
    expected = draw()
    random.seed(9), np.random.seed(9), torch.manual_seed(9)
    assert restore_rng(load_checkpoint(path, {})["rng"]) == []
    assert draw() == expected


def test_ckpt_2_the_state_is_plain_for_the_safe_loader(tmp_path):
    torch.save(capture_rng(), tmp_path / "rng.pt")
    expected = draw()
    restore_rng(torch.load(tmp_path / "rng.pt", weights_only=True))
    assert draw() == expected


@pytest.mark.parametrize("name", ["python", "numpy", "torch", "cuda"])
def test_ckpt_2_a_missing_generator_is_no_silent_fallback(name):
    state = capture_rng()
    del state[name]
    with pytest.raises(KeyError, match=name):
        restore_rng(state)


def test_ckpt_3_wrappers_go_in_any_order_at_the_start_only():
    assert strip_wrappers("_orig_mod.module._orig_mod.blocks.0.w") == "blocks.0.w"
    assert strip_wrappers("blocks.module.0._orig_modules.w") == "blocks.module.0._orig_modules.w"


@pytest.mark.parametrize("wrap_saved", [lambda net: net, Compiled, nn.DataParallel, lambda net: Compiled(nn.DataParallel(net))])
@pytest.mark.parametrize("wrap_target", [lambda net: net, Compiled, nn.DataParallel])
def test_ckpt_3_wrapped_and_bare_models_load_into_each_other(tmp_path, wrap_saved, wrap_target):
    saved, target = small_net(), small_net()
    path = save_checkpoint(tmp_path, {"model": wrap_saved(saved)}, step=1)
    load_checkpoint(path, {"model": wrap_target(target)})
    assert all(torch.equal(a, b) for a, b in zip(saved.parameters(), target.parameters()))


def test_ckpt_3_a_real_submodule_named_module_is_kept(tmp_path):
    def build():
        outer = nn.Module()
        outer.module, outer.tail = small_net(), nn.Linear(2, 2)
        return outer

    saved, target = build(), build()
    path = save_checkpoint(tmp_path, {"model": saved}, step=1)
    load_checkpoint(path, {"model": target})
    load_checkpoint(path, {"model": nn.DataParallel(target)})
    assert torch.equal(saved.module[0].weight, target.module[0].weight)
    assert torch.equal(saved.tail.weight, target.tail.weight)


def test_ckpt_3_no_matching_name_is_an_error_and_changes_nothing(tmp_path):
    path = save_checkpoint(tmp_path, {"model": nn.ModuleDict({"other": nn.Linear(4, 8)})}, step=1)
    net = small_net()
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(UserError, match=r"has none of the model's tensors: it has other.weight.*; the model has 0.weight"):
        load_checkpoint(path, {"model": net})
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())


def test_ckpt_3_a_partial_match_is_an_error(tmp_path):
    path = save_checkpoint(tmp_path, {"model": small_net()[:1]}, step=1)
    with pytest.raises(UserError, match="missing 2.weight; 2.bias; unknown nothing"):
        load_checkpoint(path, {"model": small_net()})


def test_ckpt_3_two_names_that_become_one_are_an_error():
    with pytest.raises(UserError, match="two tensors of one name"):
        match_weights(nn.Linear(1, 1), {"weight": torch.zeros(1, 1), "module.weight": torch.ones(1, 1)}, source="x")


def test_a_shape_error_names_the_tensor_and_both_shapes(tmp_path):
    path = save_checkpoint(tmp_path, {"model": nn.Linear(4, 8)}, step=1)
    with pytest.raises(UserError, match=r"weight is \(8, 4\) in step_00000001 model but \(8, 5\) in the model"):
        load_checkpoint(path, {"model": nn.Linear(5, 8)})


def test_ckpt_4_a_tied_head_round_trips_and_stays_one_object(tmp_path):
    saved, target = Tied(), Tied()
    ids = torch.arange(10)
    path = save_checkpoint(tmp_path, {"model": saved}, step=1)
    load_checkpoint(path, {"model": target})
    assert torch.equal(saved(ids), target(ids))
    assert target.head.weight is target.embed.weight
    assert path.joinpath("model.safetensors").stat().st_size < 2 * 10 * 4 * 4


def test_ckpt_4_conflicting_copies_are_an_error():
    conflict = {"embed.weight": torch.zeros(10, 4), "head.weight": torch.ones(10, 4)}
    with pytest.raises(UserError, match="embed.weight and head.weight are one tensor in the model but differ in old.safetensors"):
        match_weights(Tied(), conflict, source="old.safetensors")


def test_ckpt_4_a_head_left_out_of_the_file_is_the_embedding():
    net, weight = Tied(), torch.randn(10, 4)
    net.load_state_dict(match_weights(net, {"embed.weight": weight}, source="x"), strict=False)
    assert torch.equal(net.head.weight, weight)


def test_ckpt_4_a_tied_transformer_round_trips(tmp_path):
    saved, target = Transformer(SHAPE), Transformer(SHAPE)
    ids = torch.arange(12).view(1, 12)
    load_checkpoint(save_checkpoint(tmp_path, {"model": saved}, step=1), {"model": target})
    assert torch.equal(saved(ids), target(ids))
    assert len({parameter.data_ptr() for parameter in target.parameters()}) == len(list(saved.parameters()))


def test_ckpt_5_a_default_device_does_not_move_random_states(tmp_path):
    path = save_checkpoint(tmp_path, {"rng": capture_rng()}, step=1)
    expected = draw()
    with torch.device("meta"):
        state = load_checkpoint(path, {})["rng"]
    assert (state["torch"].device.type, state["torch"].dtype) == ("cpu", torch.uint8)
    restore_rng(state)
    assert draw() == expected


@pytest.mark.skipif(torch.cuda.is_available(), reason="for a machine without a GPU")
def test_ckpt_5_a_gpu_state_without_a_gpu_is_skipped_with_a_note(warnings_said):
    state = capture_rng() | {"cuda": torch.zeros(16, dtype=torch.uint8)}
    assert restore_rng(state) == warnings_said == ["the checkpoint has a GPU's random state but no GPU is here: not restored"]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_ckpt_5_a_gpu_state_is_restored(tmp_path):
    torch.rand(3, device="cuda")
    net = small_net().cuda()
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(1, 4, device="cuda")).sum().backward()
    optimizer.step()
    path = save_checkpoint(tmp_path, {"model": net, "optimizer": optimizer, "rng": capture_rng()}, step=1)
    expected = torch.rand(3, device="cuda")
    other = small_net().cuda()
    other_optimizer = torch.optim.AdamW(other.parameters())
    rng = load_checkpoint(path, {"model": other, "optimizer": other_optimizer})["rng"]
    assert rng["cuda"].device.type == "cpu"
    assert restore_rng({**rng, "cuda": rng["cuda"].cuda()}) == []
    assert torch.equal(torch.rand(3, device="cuda"), expected)
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), other.parameters()))
    assert all(value["exp_avg"].is_cuda for value in other_optimizer.state.values())


def test_more_ranks_than_states_keep_their_seed_and_say_so(warnings_said):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    restore_rng([capture_rng()], rank=2)
    assert torch.equal(torch.get_rng_state(), before)
    assert warnings_said == ["rank 2 keeps its own seed: random states were saved by 1 ranks"]


def test_trn_6_building_the_loader_leaves_restored_states_alone(tmp_path):
    from llm_from_scratch.dataloader import TokenLoader
    from llm_from_scratch.token_shards import open_shards, write_shards

    documents = [list(range(2, 60)) for _ in range(20)]
    write_shards(documents, tmp_path / "shards", vocab_size=64, tokenizer_fingerprint="0" * 64)
    shards = open_shards(tmp_path / "shards")

    def build():
        return TokenLoader(shards, batch_size=2, seq_len=8, seed=5)

    loader = build()
    next(iter(loader))
    draw()
    path = save_checkpoint(tmp_path / "checkpoints", {"loader": loader, "rng": capture_rng()}, step=1)
    undisturbed = capture_rng()
    random.seed(9), np.random.seed(9), torch.manual_seed(9)
    resumed = build()
    restore_rng(load_checkpoint(path, {"loader": resumed})["rng"])
    late = build()
    next(iter(late))
    restored = capture_rng()
    assert torch.equal(restored.pop("torch"), undisturbed.pop("torch"))
    assert restored == undisturbed
    assert torch.equal(next(iter(resumed)).inputs, next(iter(loader)).inputs)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_resumed_run_gives_the_same_losses_to_the_bit(tmp_path, kind):
    def build():
        model = Transformer(SHAPE)
        return model, build_optimizer(model, OptimConfig(kind=kind))

    torch.manual_seed(0)
    model, optimizer = build()
    model_steps(model, optimizer, 3)
    state = {"model": model, "optimizer": ByName(model, optimizer), "rng": [capture_rng()]}
    path = save_checkpoint(tmp_path, state, step=3)
    expected = model_steps(model, optimizer, 3)
    model, optimizer = build()
    rest = load_checkpoint(path, {"model": model, "optimizer": ByName(model, optimizer)})
    restore_rng(rest["rng"])
    assert model_steps(model, optimizer, 3) == expected


def test_bfloat16_and_scalars_are_exact(tmp_path):
    net = small_net().bfloat16()
    for parameter in net.parameters():
        parameter.data = torch.randn_like(parameter)
    values = {"zero_dim": torch.tensor(3.5, dtype=torch.bfloat16), "empty": torch.zeros(0, 4), "flag": torch.tensor(True)}
    path = save_checkpoint(tmp_path, {"model": net, "values": values}, step=1)
    other = small_net().bfloat16()
    back = load_checkpoint(path, {"model": other})["values"]
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), other.parameters()))
    assert {name: (value.dtype, value.shape) for name, value in back.items()} == {
        name: (value.dtype, value.shape) for name, value in values.items()
    }


def test_widening_is_allowed_and_narrowing_is_not(tmp_path):
    path = save_checkpoint(tmp_path, {"model": small_net().bfloat16()}, step=1)
    load_checkpoint(path, {"model": small_net()})
    path = save_checkpoint(tmp_path, {"model": small_net()}, step=2)
    with pytest.raises(UserError, match=r"0.weight is torch.float32 in step_00000002 model, which torch.bfloat16"):
        load_checkpoint(path, {"model": small_net().bfloat16()})


@pytest.mark.parametrize(
    ("saved", "own", "fits"),
    [
        (torch.int64, torch.float32, False),
        (torch.int32, torch.float32, False),
        (torch.int16, torch.float32, True),
        (torch.int64, torch.float64, False),
        (torch.int32, torch.float64, True),
        (torch.uint8, torch.bfloat16, True),
        (torch.int16, torch.bfloat16, False),
        (torch.uint16, torch.float32, True),
        (torch.uint32, torch.float32, False),
        (torch.bool, torch.float16, True),
        (torch.float32, torch.int64, False),
        (torch.int32, torch.int64, True),
    ],
)
def test_integers_load_only_where_every_value_is_exact(saved, own, fits):
    model = nn.Module()
    model.register_buffer("count", torch.zeros(3, dtype=own))
    value = {"count": torch.tensor([0, 1, 1]).to(saved)}
    if fits:
        assert list(match_weights(model, value, source="x")) == ["count"]
        return
    with pytest.raises(UserError, match="count is .* in x, which .* in the model can't hold exactly"):
        match_weights(model, value, source="x")


def test_views_of_one_memory_are_saved_apart():
    base = torch.arange(12.0)
    value = {"whole": base, "part": base[3:6], "turned": base.view(3, 4).T, "again": base}
    plain, tensors = pack_tree(value)
    assert sorted(tensors) == ["part", "turned", "whole"]
    back = unpack_tree(json.loads(json.dumps(plain)), tensors)
    assert back["again"] is back["whole"]


def test_views_of_one_memory_survive_the_disk(tmp_path):
    base = torch.arange(12.0)
    value = {"whole": base, "part": base[3:6], "turned": base.view(3, 4).T, "again": base}
    back = load_checkpoint(save_checkpoint(tmp_path, {"views": value}, step=1), {})["views"]
    assert all(torch.equal(back[name], value[name]) for name in value)
    assert back["again"] is back["whole"] and back["part"].untyped_storage().data_ptr() != back["whole"].untyped_storage().data_ptr()


def test_plain_values_keep_their_types(tmp_path):
    value = {
        "groups": [{"params": [0, 1], "betas": (0.9, 0.95), "lr": 1e-3, "foreach": None, "fused": True}],
        "state": {0: {"step": torch.tensor(4.0)}, 1: {"step": torch.tensor(4.0)}},
        "best": (math.inf, -0.0, 2**80, "naïve \ud800"),
        "$": {"$": 1},
    }
    back = load_checkpoint(save_checkpoint(tmp_path, {"values": value}, step=1), {})["values"]
    assert back.pop("state") == value.pop("state")
    assert repr(back) == repr(value)


def test_what_cannot_be_stored_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(UserError, match="hooks/0: a builtin_function_or_method"):
        save_checkpoint(tmp_path / "run", {"extra": {"hooks": [print]}}, step=1)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["../evil", "a/b", "", "a b"])
def test_an_entry_name_stays_in_its_folder(tmp_path, name):
    with pytest.raises(UserError, match="state entry"):
        save_checkpoint(tmp_path, {name: {"a": 1}}, step=1)


def test_nothing_is_pickled(tmp_path):
    net = small_net()
    path = save_checkpoint(tmp_path, {"model": net, "optimizer": torch.optim.AdamW(net.parameters()), "rng": capture_rng()}, step=1)
    assert {file.suffix for file in path.rglob("*") if file.is_file()} == {".json", ".safetensors"}
    source = Path(checkpointing.__file__).read_text(encoding="utf-8")
    assert not re.search(r"^\s*(import|from) (pickle|dill|joblib)|torch\.(load|save)\(", source, re.M)


def test_non_finite_weights_or_moments_are_not_saved(tmp_path):
    net = small_net()
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    optimizer.state[net[0].bias]["exp_avg"][0] = math.inf
    with pytest.raises(UserError, match="step 7 is not saved: optimizer state/1/exp_avg has 1 of 8 values"):
        save_checkpoint(tmp_path, {"model": net, "optimizer": optimizer}, step=7)
    assert latest_checkpoint(tmp_path) is None
    net.register_buffer("mask", torch.full((2,), -math.inf))
    assert save_checkpoint(tmp_path, {"model": net}, step=7).name == "step_00000007"


def test_a_light_checkpoint_has_the_weights_alone(tmp_path, warnings_said):
    net = small_net()
    state = {"model": net, "optimizer": torch.optim.AdamW(net.parameters()), "progress": {"tokens": 5}}
    full = save_checkpoint(tmp_path, state, step=1)
    light = save_checkpoint(tmp_path, state, step=2, kind="light")
    assert load_checkpoint(light, {"model": small_net()}) == {}
    with pytest.raises(UserError, match="light checkpoint without optimizer; it has model"):
        load_checkpoint(light, state)
    assert latest_checkpoint(tmp_path) == light
    assert latest_checkpoint(tmp_path, kind="full") == full
    assert warnings_said == ["passed over step_00000002: it is light, not full"]


def test_other_inputs_are_refused_naming_both(tmp_path):
    path = save_checkpoint(tmp_path, {"model": small_net()}, step=1, inputs={"tokenizer": "a" * 64})
    load_checkpoint(path, {}, inputs={"tokenizer": "a" * 64})
    with pytest.raises(UserError, match="(?s)(?=.*aaaa)(?=.*bbbb)"):
        load_checkpoint(path, {}, inputs={"tokenizer": "b" * 64})


def test_a_step_is_saved_again_over_the_old_one(tmp_path):
    save_checkpoint(tmp_path, {"progress": {"tokens": 1}}, step=1)
    path = save_checkpoint(tmp_path, {"progress": {"tokens": 2}}, step=1)
    assert verify_checkpoint(path) == []
    assert load_checkpoint(path, {})["progress"] == {"tokens": 2}
    assert [entry.name for entry in tmp_path.iterdir()] == ["step_00000001"]


def test_steps_beyond_eight_digits_are_the_newest(tmp_path):
    for step in (99_999_999, 100_000_000, 5):
        save_checkpoint(tmp_path, {"progress": {}}, step=step)
    assert [checkpoint_step(path) for path in list_checkpoints(tmp_path)] == [5, 99_999_999, 100_000_000]
    assert checkpoint_step(latest_checkpoint(tmp_path)) == 100_000_000


def test_pruning_keeps_the_newest_and_the_best(tmp_path):
    for step in range(1, 7):
        save_checkpoint(tmp_path, {"model": small_net()}, step=step)
    removed = prune_checkpoints(tmp_path, keep=2, best=tmp_path / "step_00000002")
    assert [checkpoint_step(path) for path in removed] == [1, 3, 4]
    assert [checkpoint_step(path) for path in list_checkpoints(tmp_path)] == [2, 5, 6]
    assert prune_checkpoints(tmp_path, keep=2, best=2) == []
    assert [entry.name for entry in tmp_path.iterdir() if entry.name.startswith(".")] == []


def test_an_optimizer_that_refuses_leaves_the_weights_alone(tmp_path):
    net = small_net()
    path = save_checkpoint(tmp_path, {"model": net, "optimizer": torch.optim.AdamW(net.parameters())}, step=1)
    other = small_net()
    optimizer = torch.optim.AdamW(other[:1].parameters(), lr=0.5)
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(UserError, match="step_00000001 optimizer does not fit"):
        load_checkpoint(path, {"model": other, "optimizer": optimizer})
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())
    assert optimizer.param_groups[0]["lr"] == 0.5 and not optimizer.state


def test_pruning_counts_short_ones_out_but_not_rotten_ones(tmp_path):
    for step in (1, 2, 3, 4):
        save_checkpoint(tmp_path, {"model": small_net()}, step=step)
    short, rotten = (tmp_path / f"step_0000000{step}" / "model.safetensors" for step in (3, 2))
    short.write_bytes(short.read_bytes()[:-1])
    rotten.write_bytes(rotten.read_bytes()[:-1] + bytes([rotten.read_bytes()[-1] ^ 1]))
    assert [checkpoint_step(path) for path in prune_checkpoints(tmp_path, keep=2)] == [1, 3]


def test_pruning_of_light_ones_leaves_the_full_ones(tmp_path):
    net = small_net()
    save_checkpoint(tmp_path, {"model": net}, step=1)
    for step in (2, 3, 4):
        save_checkpoint(tmp_path, {"model": net}, step=step, kind="light")
    prune_checkpoints(tmp_path, keep=1)
    assert [checkpoint_step(path) for path in list_checkpoints(tmp_path)] == [1, 4]


@pytest.mark.skipif(os.name != "posix", reason="POSIX permissions")
def test_files_have_the_permissions_of_the_user(tmp_path):
    old = os.umask(0o027)
    try:
        path = save_checkpoint(tmp_path, {"model": small_net()}, step=1)
    finally:
        os.umask(old)
    assert {stat.S_IMODE(file.stat().st_mode) for file in path.rglob("*.safetensors")} == {0o640}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_loaded_values_do_not_hold_the_files(tmp_path):
    net = small_net()
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    path = save_checkpoint(tmp_path, {"model": net, "optimizer": optimizer, "extra": {"a": torch.ones(5)}}, step=1)
    rest = load_checkpoint(path, {"model": net, "optimizer": optimizer})
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    assert torch.equal(rest["extra"]["a"], torch.ones(5))


def make_run(folder, tokenizer_inputs=None):
    from llm_from_scratch.tokenizer import Tokenizer

    texts = [f"def f{n}(x):\n    return x + {n}\n" for n in range(200)]
    tokenizer = Tokenizer.train(texts, vocab_size=300, out=folder / "tokenizer")
    shape = dict(hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, mlp_multiple=8, max_seq_len=16)
    config = Config(model=shape, tokenizer={"vocab_size": 300}, train={"seq_len": 16})
    (folder / "config.yaml").write_text(to_yaml(config))
    model = Transformer(config.model.model_copy(update={"vocab_size": tokenizer.vocab_size}))
    inputs = tokenizer_inputs or {"tokenizer": tokenizer.fingerprint}
    save_checkpoint(folder / "checkpoints", {"model": model}, step=12, inputs=inputs)
    return model, tokenizer


def test_load_run_gives_the_trained_model_and_draws_nothing(tmp_path):
    model, tokenizer = make_run(tmp_path)
    before = capture_rng()
    run = load_run(tmp_path)
    after = capture_rng()
    assert torch.equal(before.pop("torch"), after.pop("torch")) and before == after
    ids = torch.tensor([tokenizer.encode("def f1(x):", bos=True)])[:, :16]
    assert torch.equal(run.model(ids), model.eval()(ids))
    assert (run.step, run.path.name, run.model.training) == (12, "step_00000012", False)
    assert run.tokenizer.fingerprint == tokenizer.fingerprint


@pytest.mark.parametrize("inputs, found", [({"tokenizer": "f" * 64}, "ffffffffffff"), ({"corpus": "a" * 64}, r"\(not recorded\)")])
def test_load_run_refuses_another_or_an_unrecorded_tokenizer(tmp_path, inputs, found):
    make_run(tmp_path, inputs)
    with pytest.raises(UserError, match=f"made with tokenizer {found}"):
        load_run(tmp_path)


def test_load_run_says_what_a_folder_lacks(tmp_path):
    with pytest.raises(UserError, match="is not a run: it has no config.yaml"):
        load_run(tmp_path)
    make_run(tmp_path)
    (tmp_path / "checkpoints" / "step_00000012" / "model.safetensors").unlink()
    with pytest.raises(UserError, match="has no good checkpoint"):
        load_run(tmp_path)


def test_the_command_verifies_and_lists(tmp_path, capsys):
    for step in (1, 2):
        save_checkpoint(tmp_path / "checkpoints", {"model": small_net()}, step=step)
    assert main(["verify", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "step 1: good\nstep 2: good\n"
    assert main(["list", str(tmp_path)]) == 0
    assert "full" in capsys.readouterr().out
    (tmp_path / "checkpoints" / "step_00000002" / "model.safetensors").unlink()
    assert main(["verify", str(tmp_path)]) == 1
    assert "model.safetensors" in capsys.readouterr().out
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="has no checkpoints"):
        main(["list", str(tmp_path / "empty")])


def test_large_entries_are_split_and_come_back(tmp_path):
    torch.manual_seed(0)
    model = Transformer(SHAPE)
    optimizer = build_optimizer(model, OptimConfig(kind="adamw"))
    model_steps(model, optimizer, 1)
    state = {"model": model, "optimizer": ByName(model, optimizer), "views": {"a": torch.arange(6.0).view(2, 3).T, "n": torch.tensor(2, dtype=torch.int8)}}
    path = save_checkpoint(tmp_path, state, step=1, max_shard_bytes=2000)
    files = sorted(file.name for file in path.glob("model-*"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((path / "model.safetensors.index.json").read_text())
    assert sorted(set(index["weight_map"].values())) == files and index["metadata"]["total_size"] == sum(p.nbytes for p in model.parameters())
    assert all(not name.startswith(("module.", "_orig_mod.")) for name in index["weight_map"])
    expected = model_steps(model, optimizer, 2)
    torch.manual_seed(0)
    model = Transformer(SHAPE)
    optimizer = build_optimizer(model, OptimConfig(kind="adamw"))
    model_steps(model, optimizer, 1)
    draws = torch.get_rng_state()
    rest = load_checkpoint(path, {"model": model, "optimizer": ByName(model, optimizer)})
    torch.set_rng_state(draws)
    assert model_steps(model, optimizer, 2) == expected
    assert torch.equal(rest["views"]["a"], torch.arange(6.0).view(2, 3).T) and rest["views"]["n"].dtype == torch.int8


def test_a_missing_part_of_a_split_entry_is_named(tmp_path):
    path = save_checkpoint(tmp_path, {"model": small_net()}, step=1, max_shard_bytes=64)
    next(path.glob("model-00002*")).unlink()
    with pytest.raises(UserError, match="damaged: model-00002-of-0000"):
        load_checkpoint(path, {"model": small_net()})


def test_trn_11_an_odd_vocabulary_resumes_to_the_same_losses(tmp_path):
    shape = SHAPE.model_copy(update={"vocab_size": 67, "vocab_multiple": 8})

    def build():
        torch.manual_seed(0)
        model = Transformer(shape)
        return model, build_optimizer(model, OptimConfig(kind="adamw"))

    model, optimizer = build()
    model_steps(model, optimizer, 3)
    path = save_checkpoint(tmp_path, {"model": model, "optimizer": ByName(model, optimizer), "rng": capture_rng()}, step=3, max_shard_bytes=999)
    undisturbed = model_steps(model, optimizer, 3)
    model, optimizer = build()
    restore_rng(load_checkpoint(path, {"model": model, "optimizer": ByName(model, optimizer)})["rng"])
    assert model_steps(model, optimizer, 3) == undisturbed


def test_a_stranger_with_a_name_of_ours_is_left_alone(tmp_path):
    for step in (10, 20, 30, 40):
        save_checkpoint(tmp_path, {"model": small_net()}, step=step)
    for name, text in [("step_00000001", None), ("step_00000002", '{"kind": "corpus"}'), ("step_00000003", "{"), ("step_00000004", "[]")]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights.bin").write_bytes(b"precious")
        if text is not None:
            (tmp_path / name / "manifest.json").write_text(text)
    assert [checkpoint_step(path) for path in prune_checkpoints(tmp_path, keep=1)] == [10, 20, 30]
    assert [checkpoint_step(path) for path in list_checkpoints(tmp_path)] == [1, 2, 3, 4, 40]
    assert latest_checkpoint(tmp_path).name == "step_00000040"


def test_every_kth_stays_and_full_and_light_are_counted_apart(tmp_path):
    for step in range(1, 11):
        save_checkpoint(tmp_path, {"model": small_net(), "extra": {}}, step=step, kind="light" if step % 2 else "full")
    prune_checkpoints(tmp_path, keep=1, keep_light=2, keep_every=4, best=3)
    assert [checkpoint_step(path) for path in list_checkpoints(tmp_path)] == [3, 4, 7, 8, 9, 10]


def test_order_is_by_step_and_never_by_name_or_time(tmp_path):
    for step in (100_000_000, 99_999_999, 5):
        save_checkpoint(tmp_path, {"model": small_net()}, step=step)
    os.utime(tmp_path / "step_100000000", (0, 0))
    assert latest_checkpoint(tmp_path).name == "step_100000000"
    assert [checkpoint_step(path) for path in prune_checkpoints(tmp_path, keep=1)] == [5, 99_999_999]


def test_links_and_strangers_in_the_folder_are_never_deleted(tmp_path):
    folder = tmp_path / "checkpoints"
    for step in (2, 4, 6):
        save_checkpoint(folder, {"net": small_net()}, step=step)
    elsewhere = folder.parent / "other-disk" / "step_00000002"
    (folder / "step_00000002").rename(elsewhere.parent.mkdir() or elsewhere)
    (folder / "step_00000002").symlink_to(elsewhere)
    (folder / "step_00000003").symlink_to("nowhere")
    (folder / "step_5").write_text("a file")
    (folder / "step_00000005").mkdir()
    assert [path.name for path in checkpointing.prune_checkpoints(folder, keep=1)] == ["step_00000004"]
    assert {path.name for path in folder.iterdir()} == {"step_00000002", "step_00000003", "step_5", "step_00000005", "step_00000006"}
    assert latest_checkpoint(folder).name == "step_00000006" and verify_checkpoint(elsewhere) == []
