"Flash attention against the written-out table: values, every gradient, edges, documents, determinism."

import pytest
import torch
from kernels_checks import relative_error, surrounded

from llm_from_scratch import triton_attention
from llm_from_scratch.config import ModelConfig
from llm_from_scratch.kernels import attention
from llm_from_scratch.kernels.attention import attention_reference, flash_attention
from llm_from_scratch.model import Transformer, naive_attention

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}


def inputs(device, batch=1, heads=2, key_heads=1, queries=40, keys=None, width=32, dtype=torch.float32, alibi=False, documents=False):
    "q, k, v and options; documents of uneven lengths, some padding in front."
    keys = queries if keys is None else keys
    shapes = (batch, heads, queries, width), (batch, key_heads, keys, width), (batch, key_heads, keys, width)
    options = {}
    if alibi:
        options["slopes"] = torch.rand(heads, device=device).requires_grad_()
    if documents:
        options["doc_ids"] = (torch.arange(keys, device=device) // 23 - 1).clamp(-1).expand(batch, -1)
    return [surrounded(*shape, dtype=dtype, device=device) for shape in shapes], options


def check(tensors, options, causal=True, reference=naive_attention, attend=flash_attention):
    "Output and all gradients; the worst is within the type's tolerance."
    leaves = tensors + [options[name] for name in ("slopes",) if name in options]
    upstream = torch.randn_like(tensors[0])
    found, wanted = ([out, *torch.autograd.grad(out, leaves, upstream)] for out in (f(*tensors, causal=causal, **options) for f in (attend, reference)))
    errors = [relative_error(one, other) for one, other in zip(found, wanted)]
    assert max(errors) < TOLERANCE[tensors[0].dtype], errors


@pytest.mark.parametrize("length, causal", [(1, True), (7, False), (33, True), (33, False)])
def test_ker_2_ragged_lengths_in_poisoned_memory(device, length, causal):
    check(*inputs(device, queries=length, width=16), causal=causal)


@pytest.mark.slow
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("length", [16, 65, 127, 129, 257])
def test_ker_2_more_lengths(device, length, causal):
    check(*inputs(device, queries=length, heads=4, key_heads=2, width=64), causal=causal)
    check(*inputs(device, queries=length, alibi=True, documents=True, batch=2), causal=causal)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("length", [129, 1025])
def test_ker_2_long_rows_in_every_type(device, length, dtype):
    if device.type != "cuda":
        pytest.skip("too long for the interpreter")
    for causal in (True, False):
        check(*inputs(device, queries=length, heads=8, key_heads=2, width=128, dtype=dtype, alibi=True, documents=True), causal=causal)


@pytest.mark.parametrize("width", [80, pytest.param(96, marks=pytest.mark.slow), pytest.param(128, marks=pytest.mark.slow),
                                   pytest.param(256, marks=pytest.mark.slow)])
def test_ker_3_head_widths_that_are_no_power_of_two(device, width):
    check(*inputs(device, queries=17, width=width))


def test_ker_3_other_widths_and_types_are_refused(device):
    (q, k, v), _ = inputs(device, width=8)
    with pytest.raises(ValueError, match="head widths from 16 to 256, not 8"):
        flash_attention(q, k, v)
    with pytest.raises(ValueError, match="all in bf16, fp16 or fp32"):
        (q, k, v), _ = inputs(device, width=16)
        flash_attention(q, k, v.double())


def test_shapes_that_do_not_fit_are_refused(device):
    (q, k, v), _ = inputs(device, batch=2, queries=5, width=16)
    documents = torch.zeros(2, 5, dtype=torch.int64, device=device)
    for tensors, options, message in [
        ((q, k, v[:, :, :4]), {}, r"queries \(2, 2, 5, 16\), keys \(2, 1, 5, 16\) and values \(2, 1, 4, 16\)"),
        ((q, k[:1], v[:1]), {}, r"keys \(1, 1, 5, 16\)"),
        ((q, k[..., :8], v[..., :8]), {}, r"keys \(2, 1, 5, 8\)"),
        ((q[0], k, v), {}, r"queries \(2, 5, 16\)"),
        ((q, k[:, :0], v[:, :0]), {}, "can't share 0 key heads"),
        ((q, k, v), {"slopes": torch.ones(3, device=device)}, r"slopes \(3,\) don't fit queries \(2, 2, 5, 16\)"),
        ((q, k, v), {"doc_ids": documents[:, 1:]}, r"doc_ids \(2, 4\) don't fit keys \(2, 1, 5, 16\)"),
    ]:
        with pytest.raises(ValueError, match=message):
            flash_attention(*tensors, **options)
    if device.type == "cpu":
        with pytest.raises(ValueError, match="doc_ids hold 4294967296, which int32 can't hold"):
            flash_attention(q, k, v, doc_ids=documents + 2**32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves_stay_within_their_tolerance(device, dtype):
    check(*inputs(device, dtype=dtype, alibi=True), reference=attention_reference)


@pytest.mark.parametrize("queries, keys", [(5, 40), pytest.param(70, 33, marks=pytest.mark.slow)])
@pytest.mark.parametrize("causal", [True, False])
def test_everything_together(device, queries, keys, causal):
    "Queries and keys of different lengths, grouped heads, learned slopes, documents."
    check(*inputs(device, heads=4, key_heads=2, queries=queries, keys=keys, alibi=True, documents=True), causal=causal, reference=attention_reference)


def test_ker_5_heads_are_grouped_not_tiled(device):
    q, k = torch.randn(1, 4, 6, 16, device=device), torch.randn(1, 2, 6, 16, device=device)
    v = torch.tensor([10.0, 20.0], device=device)[None, :, None, None].expand(1, 2, 6, 16)
    assert torch.allclose(flash_attention(q, k, v)[0, :, 0, 0], torch.tensor([10.0, 10, 20, 20], device=device))
    with pytest.raises(ValueError, match="6 query heads can't share 4 key heads"):
        flash_attention(q.repeat(1, 2, 1, 1)[:, :6], k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1))


def test_ker_7_two_runs_agree_bit_for_bit(device, monkeypatch):
    tensors, options = inputs(device, queries=400 if device.type == "cuda" else 20, width=16, alibi=True)
    leaves, upstream = tensors + [options["slopes"]], torch.randn_like(tensors[0])
    of_warps = []
    for warps in (4, 8) if device.type == "cuda" else (4,):
        monkeypatch.setattr(attention, "attention_tiles", lambda *_: dict(ROWS=16, COLUMNS=32, num_warps=warps, num_stages=1))
        runs = []
        for _ in range(50 if device.type == "cuda" else 2):
            out = flash_attention(*tensors, **options)
            runs.append([out, *torch.autograd.grad(out, leaves, upstream)])
        assert all(torch.equal(one, other) for run in runs for one, other in zip(run, runs[0]))
        of_warps.append(runs[0])
    assert all(relative_error(one, other) < 1e-5 for one, other in zip(of_warps[0], of_warps[-1]))


@pytest.mark.parametrize("batch, queries, keys", [(1, 0, 0), (0, 4, 4), (1, 3, 0), (1, 1, 1), (1, 8, 8)])
def test_ker_8_short_and_empty_sequences(device, batch, queries, keys):
    (q, k, v), _ = inputs(device, batch=batch, heads=2, key_heads=2, queries=queries, keys=keys, width=16)
    out = flash_attention(q, k, v)
    assert out.shape == q.shape
    gradients = torch.autograd.grad(out.sum(), (q, k, v))
    assert all(torch.isfinite(x).all() for x in gradients)
    if queries == 1:
        assert torch.equal(out, v) and torch.equal(gradients[2], torch.ones_like(v))
    if not keys:
        assert not out.any() and not gradients[0].any()


@pytest.mark.filterwarnings("ignore:All-NaN slice")
def test_other_documents_blocks_are_not_read(device):
    "Keys of another document hold NaN: any block of theirs that a query touched would show."
    (q, k, v), _ = inputs(device, heads=1, queries=128, width=16)
    doc_ids = (torch.arange(128, device=device) // 64)[None]
    with torch.no_grad():
        k[:, :, :64], v[:, :, :64] = float("nan"), float("nan")
    out = flash_attention(q, k, v, doc_ids=doc_ids)
    gradients = torch.autograd.grad(out[:, :, 64:].sum(), (q, k, v))
    assert torch.isfinite(out[:, :, 64:]).all()
    assert all(torch.isfinite(x[:, :, 64:]).all() for x in gradients)


def test_a_transformer_takes_it(device):
    cfg = ModelConfig(vocab_size=32, hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, positions="alibi", max_seq_len=64)
    ids, doc_ids = torch.randint(0, 32, (2, 20), device=device), (torch.arange(20, device=device) // 9).expand(2, -1)
    results = []
    for attend in (flash_attention, naive_attention):
        torch.manual_seed(0)
        model = Transformer(cfg, attend=attend).to(device)
        logits = model(ids, doc_ids=doc_ids)
        logits.square().sum().backward()
        results.append([logits, *(p.grad for p in model.parameters())])
    assert max(relative_error(one, other) for one, other in zip(*results)) < 1e-5


def test_no_graph_break(device):
    "The whole function is one graph, forward and backward, with the operators in it."
    tensors, options = inputs(device, queries=20, width=16, alibi=True, documents=True)
    torch._dynamo.reset()
    check(tensors, options, attend=torch.compile(triton_attention.flash_attention, backend="aot_eager", fullgraph=True))


@pytest.mark.slow
def test_the_operator_keeps_torchs_rules(device):
    (q, k, v), options = inputs(device, queries=20, width=16, alibi=True, documents=True)
    torch.library.opcheck(attention.flash_forward, (q, k, v, options["slopes"], options["doc_ids"].to(torch.int32).contiguous(), True, 0.25))
