"Cases from practice about the model's numerics."

import pytest
import torch
import torch.nn.functional as F

from llm_from_scratch.config import ModelConfig
from llm_from_scratch.env import UserError
from llm_from_scratch.model import (
    RMSNorm,
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
    sdpa_attention,
)

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
@pytest.mark.parametrize("positions", ["rope", "alibi", "none"])
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
@pytest.mark.parametrize("positions", ["rope", "alibi", "none"])
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
@pytest.mark.parametrize("positions", ["rope", "alibi", "none"])
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
