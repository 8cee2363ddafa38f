"Cases from practice about the model's numerics."

import json
import math
import sys
import types
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from llm_from_scratch.accounting import activation_bytes, blocks_to_recompute, memory_by_component, saved_bytes, stored_shapes
from llm_from_scratch.attention_choice import choose_attention
from llm_from_scratch.config import ModelConfig, build_config, load_preset, replace
from llm_from_scratch.env import UserError
from llm_from_scratch.model import (
    RMSNorm,
    RopeScaling,
    Transformer,
    alibi_bias,
    alibi_slopes,
    apply_rotary,
    check_shapes,
    count_parameters,
    cross_entropy,
    document_positions,
    flops_per_token,
    init_weights,
    naive_attention,
    new_cache,
    permute_rotary,
    rms_norm,
    scores_in_fp32,
    sdpa_attention,
)
from llm_from_scratch.moe import build_model
from llm_from_scratch.optim import build_optimizer
from llm_from_scratch.positions import rotary_frequencies
from llm_from_scratch.triton_attention import blockwise_attention, flash_attention

BACKENDS = [naive_attention, sdpa_attention]
PADDED = torch.tensor([[0, 0, 5, 6], [1, 2, 3, 4]])
PADDED_DOCUMENTS = torch.tensor([[-1, -1, 0, 0], [0, 0, 0, 0]])


def config(**changes) -> ModelConfig:
    shape = dict(vocab_size=64, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, max_seq_len=64, init_std=0.1)
    return ModelConfig(**(shape | changes))


def build(seed=0, attend=sdpa_attention, **changes) -> Transformer:
    torch.manual_seed(seed)
    return Transformer(config(**changes), attend=attend)


def random_ids(*shape, vocab_size=64, seed=0) -> torch.Tensor:
    return torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(seed))


def close(one, other, tolerance) -> bool:
    return (one - other).abs().max().item() <= tolerance


def test_mod_1_both_layouts_of_rope_give_their_values():
    x, position = torch.tensor([[1.0, 2, 3, 4]]), torch.tensor([1])
    half = torch.tensor([[-1.9841, 1.9599, 2.4624, 4.0198]])
    interleaved = torch.tensor([[-1.1426, 1.9221, 2.9599, 4.0298]])
    assert close(apply_rotary(x, position, base=10000.0), half, 1e-4)
    assert close(apply_rotary(x, position, base=10000.0, layout="interleaved"), interleaved, 1e-4)
    heads = x.expand(3, 5, 1, 4)
    assert close(apply_rotary(heads, position.expand(3, 1)), half.expand(3, 5, 1, 4), 1e-4)


@pytest.mark.parametrize("source, target", [("half", "interleaved"), ("interleaved", "half")])
def test_mod_1_moved_rows_give_the_same_logits(source, target):
    ours, moved, ids = build(rope_layout=source), build(seed=1, rope_layout=target), random_ids(2, 20)
    state = ours.state_dict()
    moved.load_state_dict(state)
    assert not close(ours(ids), moved(ids), 1e-2)
    for name in state:
        if name.endswith(("query.weight", "key.weight")):
            state[name] = permute_rotary(state[name], ours.cfg.head_size, source=source, target=target)
    moved.load_state_dict(state)
    assert close(ours(ids), moved(ids), 1e-5)


def test_mod_3_slopes_of_head_counts_that_are_no_power_of_two():
    assert alibi_slopes(8).tolist() == [2.0**-i for i in range(1, 9)]
    assert alibi_slopes(6).tolist() == [1 / 4, 1 / 16, 1 / 64, 1 / 256, 1 / 2, 1 / 8]
    twelve = torch.tensor([2.0**-i for i in range(1, 9)] + [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5])
    assert close(alibi_slopes(12), twelve, 1e-7)
    assert alibi_slopes(1).tolist() == [2.0**-8]


@pytest.mark.parametrize("num_heads", [6, 8, 12])
def test_mod_3_a_cached_query_has_the_bias_row_of_the_full_pass(num_heads):
    slopes = alibi_slopes(num_heads)
    full = alibi_bias(slopes, 40, 40)
    for position in (0, 1, 17, 39):
        row = alibi_bias(slopes, 1, position + 1)
        assert torch.equal(row[:, 0], full[:, position, : position + 1])
    assert torch.equal(full[:, 39, 36], -3 * slopes)


@pytest.mark.parametrize("attend", BACKENDS)
def test_mod_4_rows_that_see_nothing_are_zero(attend):
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, 4, 8, generator=draw) for heads in (4, 2, 2))
    for x in (q, k, v):
        x[0, :, :2] = torch.nan
        x.requires_grad_()
    for options in ({}, {"slopes": alibi_slopes(4)}, {"causal": False}):
        output = attend(q, k, v, doc_ids=PADDED_DOCUMENTS, **options)
        assert output.isfinite().all() and output[0, :, :2].abs().max() == 0
        alone = attend(q[:1, :, 2:], k[:1, :, 2:], v[:1, :, 2:], **options)
        assert close(output[:1, :, 2:], alone, 1e-6)
        for gradient in torch.autograd.grad(output.square().sum(), (q, k, v)):
            assert gradient.isfinite().all() and gradient[0, :, :2].abs().max() == 0


@pytest.mark.parametrize("attend", BACKENDS)
def test_mod_4_queries_before_the_first_key_are_zero(attend):
    x = torch.randn(1, 2, 5, 4, generator=torch.Generator().manual_seed(0))
    output = attend(x, x[:, :, :3], x[:, :, :3])
    assert output[:, :, :2].abs().max() == 0
    assert close(output[:, :, 2:], attend(x[:, :, 2:], x[:, :, :3], x[:, :, :3]), 1e-6)
    assert attend(x, x[:, :, :0], x[:, :, :0]).abs().max() == 0


@pytest.mark.parametrize("attend", BACKENDS)
@pytest.mark.parametrize("num_queries, num_keys", [(5, 3), (7, 2), (3, 0), (2, 4)])
def test_mod_3_distances_hold_with_more_queries_than_keys(attend, num_queries, num_keys):
    q, k = (torch.randn(1, 2, length, 4, generator=torch.Generator().manual_seed(length)) for length in (num_queries, num_keys))
    slopes = alibi_slopes(2)
    distance = (torch.arange(num_queries)[:, None] + num_keys - num_queries - torch.arange(num_keys)).abs()
    wanted = (q @ k.mT / 2 - slopes[:, None, None] * distance).softmax(-1) @ k
    assert close(attend(q, k, k, causal=False, slopes=slopes), wanted, 1e-6)


def test_no_heads_are_refused():
    with pytest.raises(UserError, match="at least one head, not 0"): alibi_slopes(0)
    q = torch.zeros(1, 2, 3, 4)
    with pytest.raises(UserError, match="can't share 0 key heads"): naive_attention(q, q[:, :0], q[:, :0])


@pytest.mark.parametrize("attend", BACKENDS)
@pytest.mark.parametrize("positions", ["rope", "alibi", "alibi-learned", "none"])
def test_mod_4_padded_rows_of_a_model_equal_single_runs(attend, positions):
    model = build(attend=attend, positions=positions)
    logits = model(PADDED, doc_ids=PADDED_DOCUMENTS)
    assert logits.isfinite().all()
    assert close(logits[0, 2:], model(PADDED[:1, 2:])[0], 1e-5)
    assert close(logits[1], model(PADDED[1:])[0], 1e-5)
    targets = PADDED.masked_fill(PADDED_DOCUMENTS < 0, -100)
    cross_entropy(logits, targets)[0].backward()
    assert all(weight.grad.isfinite().all() for weight in model.parameters())


def step_gradients(model, batches):
    model.zero_grad()
    results = [cross_entropy(model(ids), targets) for ids, targets in batches]
    num_tokens = sum(count for _, count in results)
    sum(total for total, _ in results).div(num_tokens).backward()
    return [weight.grad.clone() for weight in model.parameters()]


def test_mod_5_a_micro_batch_without_labels_changes_nothing():
    model, normal = build(), (random_ids(2, 8), random_ids(2, 8, seed=1))
    empty = (random_ids(2, 8, seed=2), torch.full((2, 8), -100))
    total, count = cross_entropy(model(empty[0]), empty[1])
    assert (total.item(), count.item()) == (0, 0)
    for with_empty, alone in zip(step_gradients(model, [normal, empty]), step_gradients(model, [normal])):
        assert with_empty.isfinite().all() and close(with_empty, alone, 1e-7)


def test_mod_5_the_sum_counts_labelled_tokens_only():
    logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([[1, -100, 2], [-100, -100, 4]])
    total, count = cross_entropy(logits, targets)
    kept = targets >= 0
    assert count == 3
    assert close(total / count, F.cross_entropy(logits[kept], targets[kept]), 1e-6)
    total, count = cross_entropy(logits, torch.where(kept, targets, 0), ignore_index=0)
    assert count == 3


def test_mod_6_half_precision_neither_overflows_nor_changes_type():
    loud = torch.full((2, 3, 64), 300.0)
    for kind in (torch.float16, torch.bfloat16, torch.float32):
        for weight_kind in (kind, torch.float32):
            normed = rms_norm(loud.to(kind), torch.ones(64, dtype=weight_kind))
            assert normed.dtype == kind
            assert close(normed.float(), torch.ones(2, 3, 64), 1e-3)
    assert RMSNorm(64)(loud.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("tied", [True, False])
def test_mod_7_first_weights_have_the_wanted_spread(tied):
    model = build(vocab_size=1024, hidden_size=256, num_layers=8, num_heads=8, num_kv_heads=4, init_std=0.02, tie_embeddings=tied)
    for name, weight in model.named_parameters():
        if weight.ndim == 1:
            assert torch.equal(weight, torch.ones_like(weight))
        else:
            wanted = 0.005 if name.endswith(("attention.out.weight", "mlp.down.weight")) else 0.02
            assert abs(weight.std().item() / wanted - 1) < 0.03, name
    assert (model.head.weight is model.embedding.weight) == tied


def test_mod_7_a_tied_weight_is_drawn_once():
    model = build()
    init_weights(model, torch.Generator().manual_seed(7))
    first = torch.empty(64, 32).normal_(0, 0.1, generator=torch.Generator().manual_seed(7))
    assert torch.equal(model.embedding.weight, first) and model.head.weight is model.embedding.weight
    assert count_parameters(model)["head"] == 0
    assert count_parameters(build(tie_embeddings=False))["head"] == 64 * 32


@pytest.mark.parametrize("tied", [True, False])
def test_mod_8_padded_rows_have_no_logits(tied):
    model = build(vocab_size=1003, vocab_multiple=1024, tie_embeddings=tied)
    ids, targets = random_ids(2, 8, vocab_size=1003), random_ids(2, 8, vocab_size=1003, seed=1)
    with torch.no_grad():
        model.head.weight[1003:] = 100 * model.hidden(ids)[0, -1]
        assert model.head(model.hidden(ids))[0, -1].argmax() >= 1003
        logits = model(ids)
    assert model.embedding.weight.shape[0] == 1024 and logits.shape == (2, 8, 1003)
    assert logits.argmax(-1).max() < 1003 and logits.topk(50).indices.max() < 1003
    assert close(logits.log_softmax(-1).exp().sum(-1), torch.ones(2, 8), 1e-5)
    total, _ = cross_entropy(model(ids), targets)
    assert close(total, -logits.log_softmax(-1).gather(-1, targets[..., None]).sum(), 1e-2)
    total.backward()
    assert model.head.weight.grad[1003:].abs().max() == 0


@pytest.mark.parametrize("attend", BACKENDS)
def test_ker_5_heads_are_grouped_not_tiled(attend):
    q, k = torch.zeros(1, 4, 3, 2), torch.zeros(1, 2, 3, 2)
    v = torch.tensor([10.0, 20.0]).view(1, 2, 1, 1).expand(1, 2, 3, 2)
    assert attend(q, k, v)[0, :, 0, 0].tolist() == [10, 10, 20, 20]
    with pytest.raises(UserError, match="divisible"):
        attend(torch.zeros(1, 6, 3, 2), torch.zeros(1, 4, 3, 2), torch.zeros(1, 4, 3, 2))
    with pytest.raises(ValueError, match="divisible"):
        config(num_heads=6, num_kv_heads=4, hidden_size=48)


@pytest.mark.parametrize("attend", BACKENDS)
def test_ker_5_gradients_sum_over_the_group(attend):
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, 5, 8, generator=draw).requires_grad_() for heads in (4, 2, 2))
    upstream = torch.randn(2, 4, 5, 8, generator=draw)
    grouped = torch.autograd.grad(attend(q, k, v), (k, v), upstream)
    wide = [x.detach().repeat_interleave(2, 1).requires_grad_() for x in (k, v)]
    for ours, each in zip(grouped, torch.autograd.grad(attend(q, *wide), wide, upstream)):
        assert ours.shape[1] == 2
        assert close(ours, each.unflatten(1, (2, 2)).sum(2), 1e-5)


@pytest.mark.parametrize("attend", BACKENDS)
@pytest.mark.parametrize("length", [0, 1, 8])
def test_ker_8_short_and_empty_sequences(attend, length):
    q, k, v = (torch.randn(2, heads, length, 8, requires_grad=True) for heads in (4, 2, 2))
    for options in ({}, {"slopes": alibi_slopes(4)}, {"doc_ids": torch.zeros(2, length, dtype=torch.int64)}):
        output = attend(q, k, v, **options)
        assert output.shape == (2, 4, length, 8)
        output.sum().backward()
        if length == 1:
            assert close(output, v.repeat_interleave(2, 1), 1e-6)


@pytest.mark.parametrize("num_queries", [1, 3, 9])
@pytest.mark.parametrize("kind, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_both_attentions_agree(num_queries, kind, tolerance):
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, 9, 10, generator=draw).to(kind) for heads in (6, 2, 2))
    doc_ids = torch.tensor([[-1, -1, -1, 0, 0, 0, 1, 1, 1], [0] * 9])
    for slopes in (None, alibi_slopes(6)):
        for ids in (None, doc_ids):
            for causal in (True, False):
                options = dict(causal=causal, slopes=slopes, doc_ids=ids, scale=0.4)
                ours, reference = (f(q[:, :, 9 - num_queries :], k, v, **options) for f in (sdpa_attention, naive_attention))
                assert ours.dtype == kind and close(ours.float(), reference.float(), tolerance)


@pytest.mark.parametrize("attend", BACKENDS)
@pytest.mark.parametrize("positions", ["rope", "alibi", "alibi-learned", "none"])
@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_trn_3_a_packed_document_equals_the_document_alone(attend, positions, layout):
    ids, doc_ids = torch.tensor([[1, 3, 3, 3, 1, 3, 3]]), torch.tensor([[0, 0, 0, 0, 1, 1, 1]])
    assert document_positions(doc_ids)[0].tolist() == [0, 1, 2, 3, 0, 1, 2]
    model = build(attend=attend, positions=positions, rope_layout=layout)
    for given in ({}, {"positions": document_positions(doc_ids)}):
        logits = model(ids, doc_ids=doc_ids, **given)
        assert close(logits[:, :4], model(ids[:, :4]), 1e-5)
        assert close(logits[:, 4:], model(ids[:, 4:]), 1e-5)
    assert not close(model(ids)[:, 4:], model(ids[:, 4:]), 1e-3)


def test_trn_3_rows_of_one_document_need_no_mask():
    model, ids = build(), random_ids(2, 12)
    for doc_ids in (torch.zeros(2, 12, dtype=torch.int64), torch.tensor([[3], [9]]).expand(2, 12)):
        assert torch.equal(model(ids, doc_ids=doc_ids), model(ids))


@torch.no_grad()
def greedy(model, prompts, num_new, cached):
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    doc_ids = torch.tensor([[-1] * (width - len(prompt)) + [0] * len(prompt) for prompt in prompts])
    cache, steps = new_cache(model, len(prompts), width + num_new), []
    for step in range(num_new):
        if not cached:
            known = torch.cat([doc_ids, torch.zeros(len(prompts), step, dtype=torch.int64)], 1)
            logits = model(ids, doc_ids=known)
        elif step == 0:
            logits = model(ids, doc_ids=doc_ids, cache=cache)
        else:
            logits = model(ids[:, -1:], cache=cache)
        steps.append(logits[:, -1])
        ids = torch.cat([ids, logits[:, -1:].argmax(-1)], 1)
    return ids[:, width:].tolist(), torch.stack(steps, 1)


@pytest.mark.parametrize("attend", BACKENDS)
@pytest.mark.parametrize("positions", ["rope", "alibi", "alibi-learned", "none"])
def test_eval_6_cached_left_padded_logits_equal_single_runs(attend, positions):
    model = build(attend=attend, positions=positions)
    prompts = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3]]
    ids, logits = greedy(model, prompts, 10, cached=True)
    for i, prompt in enumerate(prompts):
        single_ids, single_logits = greedy(model, [prompt], 10, cached=False)
        assert ids[i] == single_ids[0]
        assert close(logits[i], single_logits[0], 1e-4)


def test_eval_6_a_cache_takes_tokens_in_any_pieces():
    model, ids = build(), random_ids(2, 12)
    cache, parts = new_cache(model, 2, 12), []
    for piece in ids.split([4, 1, 5, 2], 1):
        parts.append(model(piece, cache=cache))
    assert cache.length == 12 and close(torch.cat(parts, 1), model(ids), 1e-5)
    cache.reset()
    assert close(model(ids, cache=cache), model(ids), 1e-5)


def test_eval_6_running_out_of_context_is_an_error():
    model = build(max_seq_len=8)
    cache = new_cache(model, 1, 6)
    model(random_ids(1, 5), cache=cache)
    with pytest.raises(UserError, match="no room for 2"):
        model(random_ids(1, 2), cache=cache)
    assert cache.length == 5
    with pytest.raises(UserError, match="max_seq_len 8"):
        model(random_ids(1, 9))
    cache = new_cache(model, 1, 20)
    model(random_ids(1, 8), cache=cache)
    with pytest.raises(UserError, match="max_seq_len 8"):
        model(random_ids(1, 1), cache=cache)
    assert build(max_seq_len=8, positions="alibi")(random_ids(1, 9)).shape == (1, 9, 64)


def test_shapes_are_checked_by_name():
    model = build()
    assert check_shapes(model) == 21
    model.blocks[1].attention.value = torch.nn.Linear(32, 8, bias=False)
    with pytest.raises(UserError, match=r"blocks.1.attention.value.weight has shape \(8, 32\), the configuration asks for \(16, 32\)"):
        check_shapes(model)
    with pytest.raises(UserError, match="vocab_size"):
        Transformer(ModelConfig())


def test_another_mlp_can_take_the_place():
    class Wide(torch.nn.Module):
        def __init__(self, cfg):
            super().__init__()
            self.down = torch.nn.Linear(cfg.hidden_size, cfg.hidden_size, bias=False)

        def forward(self, x):
            return self.down(x)

        def aux_losses(self):
            return {"balance": self.down.weight.square().sum()}

    torch.manual_seed(0)
    model = Transformer(config(), mlp=Wide)
    wanted = torch.stack([block.mlp.down.weight.square().sum() for block in model.blocks]).mean()
    assert close(model.aux_losses()["balance"], wanted, 1e-6)
    assert check_shapes(model) == 15 and build().aux_losses() == {}
    assert abs(model.blocks[0].mlp.down.weight.std().item() / 0.05 - 1) < 0.1


def test_flops_count_every_matrix_and_pair():
    cfg = config(num_layers=3, head_dim=10)
    weights = 3 * (2 * 32 * 40 + 2 * 32 * 20 + 3 * 32 * 96) + 64 * 32
    assert flops_per_token(cfg, 50) == 6 * weights + 12 * 3 * 40 * 50


LLAMA_NAMES = {
    "embedding": "model.embed_tokens",
    "final_norm": "model.norm",
    "head": "lm_head",
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.out": "self_attn.o_proj",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}


def llama_name(name: str) -> str:
    name = name.removesuffix(".weight")
    if not name.startswith("blocks."):
        return LLAMA_NAMES[name] + ".weight"
    _, layer, part = name.split(".", 2)
    return f"model.layers.{layer}.{LLAMA_NAMES[part]}.weight"


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_the_same_weights_give_llamas_logits_and_gradients(tied, layout):
    transformers = pytest.importorskip("transformers")
    model = build(tie_embeddings=tied, rope_layout=layout, head_dim=12, num_layers=3)
    cfg, ids, targets = model.cfg, random_ids(2, 40), random_ids(2, 40, seed=1)
    llama = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=cfg.vocab_size, hidden_size=cfg.hidden_size, intermediate_size=cfg.mlp_size,
            num_hidden_layers=cfg.num_layers, num_attention_heads=cfg.num_heads, num_key_value_heads=cfg.num_kv_heads,
            head_dim=cfg.head_size, max_position_embeddings=cfg.max_seq_len, rms_norm_eps=cfg.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": cfg.rope_base}, tie_word_embeddings=tied,
        )
    )  # fmt: skip

    def theirs(name, tensor):
        if not name.endswith(("query.weight", "key.weight")):
            return tensor
        return permute_rotary(tensor, cfg.head_size, source=layout, target="half")

    weights = {llama_name(name): theirs(name, weight.detach()) for name, weight in model.named_parameters(remove_duplicate=False)}
    llama.load_state_dict(weights, strict=True)
    logits = llama(ids).logits
    assert logits.std() > 0.1 and close(model(ids), logits, 1e-5)
    for result in (model(ids), logits):
        total, count = cross_entropy(result, targets)
        (total / count).backward()
    gradients = dict(llama.named_parameters())
    for name, weight in model.named_parameters():
        assert close(theirs(name, weight.grad), gradients[llama_name(name)].grad, 1e-5), name


@pytest.mark.parametrize("kind", ["linear", "llama3"])
def test_mod_1_stretched_rope_turns_as_transformers_does(kind):
    pytest.importorskip("transformers")
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {"rope_type": kind, "rope_theta": 500000.0, "factor": 8.0}
    if kind == "llama3":
        parameters |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    theirs = LlamaConfig(hidden_size=4096, num_attention_heads=32, max_position_embeddings=65536, rope_parameters=parameters)
    wanted, scale = ROPE_INIT_FUNCTIONS[kind](theirs, torch.device("cpu"))
    ours = rotary_frequencies(128, base=500000.0, scaling=RopeScaling(kind, 8.0))
    assert scale == 1.0 and torch.allclose(ours, wanted, rtol=1e-5)


def test_mod_1_angles_are_fp32_whatever_the_weights_type():
    x, position = torch.randn(1, 1, 1, 64, generator=torch.Generator().manual_seed(0)), torch.tensor([[100_003]])
    for kind in (torch.bfloat16, torch.float16):
        low = x.to(kind)
        assert torch.equal(apply_rotary(low, position), apply_rotary(low.float(), position).to(kind))
    model, ids = build(rope_scaling="linear", rope_factor=2.0).bfloat16(), random_ids(1, 40)
    assert model(ids).dtype == torch.bfloat16
    whole = build(rope_scaling="linear", rope_factor=2.0)(ids)
    assert (model(ids).float() - whole).norm() / whole.norm() < 0.03
    assert not close(build()(ids), whole, 1e-3)


@pytest.mark.parametrize("attend", BACKENDS)
def test_mod_3_learned_slopes_begin_as_the_fixed_ones_and_learn(attend):
    fixed, learned = build(positions="alibi", num_heads=6, num_kv_heads=2, head_dim=8), build(positions="alibi-learned", num_heads=6, num_kv_heads=2, head_dim=8)
    ids = random_ids(2, 20)
    assert close(fixed(ids), learned(ids), 1e-5) and count_parameters(learned)["total"] - count_parameters(fixed)["total"] == 2 * 6
    assert check_shapes(learned) == check_shapes(fixed) + 2
    reference = build(attend=naive_attention, positions="alibi-learned", num_heads=6, num_kv_heads=2, head_dim=8)
    for model in (learned, reference):
        for block in model.blocks:
            block.attention.attend = attend if model is learned else naive_attention
        cross_entropy(model(ids), ids)[0].backward()
    for ours, wanted in zip(learned.blocks, reference.blocks):
        gradient = ours.attention.slopes.grad
        assert gradient.abs().min() > 0 and torch.allclose(gradient, wanted.attention.slopes.grad, rtol=1e-3, atol=1e-4)


def gradients_with(model, recomputed, ids, doc_ids=None):
    model.zero_grad()
    model.recomputed = frozenset(recomputed)
    (cross_entropy(model(ids, doc_ids=doc_ids), ids)[0] + sum(model.aux_losses().values())).backward()
    return [weight.grad.clone() for weight in model.parameters()]


@pytest.mark.parametrize("shape", [{}, {"positions": "alibi-learned"}, {"num_experts": 4}, {"num_experts": 4, "capacity_factor": 1.0}])
def test_recomputed_blocks_give_the_same_gradients_to_the_bit(shape):
    torch.manual_seed(0)
    model, ids = build_model(config(num_layers=4, **shape)), random_ids(2, 24)
    documents = torch.tensor([[0] * 10 + [1] * 14, [-1] * 3 + [0] * 21])
    for doc_ids in (None, documents):
        wanted = gradients_with(model, (), ids, doc_ids)
        for recomputed in ((1, 3), range(4)):
            assert all(map(torch.equal, gradients_with(model, recomputed, ids, doc_ids), wanted))


def test_recomputed_blocks_keep_less_and_a_budget_is_met():
    cfg = config(num_layers=6, vocab_size=128)
    model, ids = build_model(cfg), random_ids(4, 64, vocab_size=128)
    parameters = list(model.parameters())
    needed = {}
    for choice in ("none", "every-3", "all"):
        model.recomputed = blocks_to_recompute(choice, cfg, 4, 64, torch.float32)
        needed[choice] = saved_bytes(lambda: cross_entropy(model(ids), ids)[0], parameters)
        assert needed[choice] / activation_bytes(cfg, 4, 64, torch.float32, len(model.recomputed)) == pytest.approx(1, abs=0.02)
    assert needed["all"] < needed["every-3"] < needed["none"]
    budget = (needed["none"] + needed["all"]) / 2
    model.recomputed = blocks_to_recompute(f"{budget / 1e9:.6f}GB", cfg, 4, 64, torch.float32)
    assert 0 < len(model.recomputed) < 6
    assert saved_bytes(lambda: cross_entropy(model(ids), ids)[0], parameters) <= budget


def test_a_budget_is_met_under_weights_in_bf16_with_fewer_blocks():
    cfg = config(num_layers=6, vocab_size=128)
    model, ids = build_model(cfg).bfloat16(), random_ids(4, 64, vocab_size=128)
    keep = lambda: saved_bytes(lambda: cross_entropy(model(ids), ids)[0], list(model.parameters()))
    whole = keep()
    assert blocks_to_recompute(f"{1.02 * whole / 1e9:.6f}GB", cfg, 4, 64, torch.float32, torch.bfloat16) == frozenset()
    assert blocks_to_recompute(f"{1.02 * whole / 1e9:.6f}GB", cfg, 4, 64, torch.float32)
    model.recomputed = blocks_to_recompute(f"{0.7 * whole / 1e9:.6f}GB", cfg, 4, 64, torch.float32, torch.bfloat16)
    assert 0 < len(model.recomputed) < 6 and keep() <= 0.7 * whole


@pytest.mark.parametrize("weights", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_memory_is_what_torch_allocates(kind, weights):
    options = {"micro_batch": 1, "global_batch": 1, "seq_len": 32, "weights": weights}
    whole = replace(build_config(load_preset("moe-tiny")), model={"vocab_size": 4096}, optim={"kind": kind}, train=options)
    model = build_model(whole.model).to(torch.bfloat16 if weights == "bf16" else torch.float32)
    optimizer, ids = build_optimizer(model, whole.optim), random_ids(1, 32)
    found = memory_by_component(whole, dtype=torch.float32)
    kept = saved_bytes(lambda: cross_entropy(model(ids), ids)[0], model.parameters())
    (cross_entropy(model(ids), ids)[0] + sum(model.aux_losses().values())).backward()
    optimizer.step()
    moments = sum(value.nbytes for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor) and value.ndim)
    assert found["weights"] == found["gradients"] == sum(weight.grad.nbytes for weight in model.parameters())
    assert found["optimizer"] == moments
    assert found["activations"] / kept == pytest.approx(1, abs=0.03)
    assert found["total"] == sum(size for name, size in found.items() if name != "total")


def test_memory_under_zero_is_what_was_measured():
    tiny = replace(build_config(load_preset("tiny")), model={"vocab_size": 4096}, optim={"kind": "adamw"})
    numbers = sum(math.prod(shape) for shape in stored_shapes(tiny.model).values())
    for line in (Path(__file__).parents[2] / "benchmarks/results/zero_stages.jsonl").read_text().splitlines():
        row = json.loads(line)
        found = memory_by_component(tiny, dtype=torch.float32, world_size=row["ranks"], zero_stage=row["stage"])
        seen = {part: size / row["parameters"] for part, size in row["bytes"][0].items()}
        seen["optimizer"] = seen.pop("moments") + seen.pop("copies")
        if row["stage"] == 1: seen["gradients"] *= row["ranks"] # measured after backward, the account says the peak
        assert seen == pytest.approx({part: found[part] / numbers for part in seen}, rel=1e-3), row["stage"]


def test_attention_is_chosen_by_device_and_told(monkeypatch):
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    for asked, wanted in (("auto", sdpa_attention), ("naive", naive_attention), ("sdpa", sdpa_attention)):
        attend, reason = choose_attention(config(attention=asked), cpu, torch.float32)
        assert attend is wanted and ("as asked" in reason) == (asked != "auto")
    for asked in ("flex", "flash"):
        with pytest.raises(UserError, match=f"model.attention {asked}: .*; use auto"):
            choose_attention(config(attention=asked), cpu, torch.float32)
    later = types.ModuleType("llm_from_scratch.triton_attention")
    later.flash_attention, later.blockwise_attention = (lambda *_, **__: None for _ in range(2))
    monkeypatch.setitem(sys.modules, later.__name__, later)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert choose_attention(config(attention="blockwise"), cpu, torch.float32)[0] is later.blockwise_attention
    wide = config(head_dim=32)
    assert choose_attention(wide, gpu, torch.bfloat16)[0] is later.flash_attention
    assert choose_attention(wide, gpu, torch.bfloat16, document_mask=False)[0] is sdpa_attention
    assert choose_attention(wide.model_copy(update={"positions": "alibi"}), gpu, torch.bfloat16, document_mask=False)[0] is later.flash_attention
    attend, reason = choose_attention(config(head_dim=8), gpu, torch.bfloat16)
    assert attend is sdpa_attention and "head width 8 is outside 16 to 256" in reason
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "an old one")
    assert "not flash: an old one is older" in choose_attention(wide, gpu, torch.bfloat16)[1]


@pytest.mark.parametrize("attend", BACKENDS)
def test_scores_stay_in_fp32_under_autocast(attend):
    draw = torch.Generator().manual_seed(0)
    common = 5 * torch.ones(8)
    q, k, v = (torch.randn(1, heads, 40, 8, generator=draw) for heads in (4, 2, 2))
    q, k, v = (q + common), (k + common), v.bfloat16()
    exact = naive_attention(q, k, v.float())
    with torch.autocast("cpu", torch.bfloat16):
        assert close(scores_in_fp32(attend)(q, k, v).float(), exact, 2e-2)
        model, ids = build(attend=attend, scores_fp32=True), random_ids(2, 12)
        logits = model(ids)
        logits.float().sum().backward()
        cache = new_cache(model, 2, 12)
        parts = torch.cat([model(piece, cache=cache) for piece in ids.split([7, 5], 1)], 1)
    assert logits.dtype == torch.bfloat16 and (parts - logits).float().norm() / logits.float().norm() < 0.02
    assert not close(attend(q.bfloat16(), k.bfloat16(), v).float(), exact, 2e-2)


@pytest.mark.parametrize("kind", ["kaiming", "xavier"])
def test_mod_7_other_first_weights_follow_each_matrix_shape(kind):
    model = build(init=kind, vocab_size=512, hidden_size=128, intermediate_size=512)
    for name, weight in model.named_parameters():
        if weight.ndim == 2:
            fan = weight.shape[1] if kind == "kaiming" else sum(weight.shape)
            assert abs(weight.std().item() / (2 / fan) ** 0.5 - 1) < 0.05, name


@pytest.mark.parametrize("change", [{"k": (1, 1, 4, 8), "v": (1, 1, 4, 8)}, {"v": (1, 1, 2, 16)}, {"q": (2, 1, 4, 16)}, {"doc_ids": (1, 2)}, {"slopes": (2,)}, {"q": (1, 1, 5, 16), "doc_ids": (1, 4)}])
@pytest.mark.parametrize("attend", [naive_attention, sdpa_attention, blockwise_attention, flash_attention])
def test_shapes_that_do_not_fit_are_refused_by_every_attention(attend, change):
    shapes = {"q": (1, 1, 4, 16), "k": (1, 1, 4, 16), "v": (1, 1, 4, 16)} | change
    tensors = {name: torch.zeros(shape, dtype=torch.int64 if name == "doc_ids" else torch.float32) for name, shape in shapes.items()}
    with pytest.raises(UserError, match="don't fit"): attend(tensors.pop("q"), tensors.pop("k"), tensors.pop("v"), **tensors)
