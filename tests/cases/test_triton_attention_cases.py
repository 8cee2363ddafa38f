"Attention in blocks: the torch version against the written-out table, and what flash attention says on a CPU."

import pytest
import torch

from llm_from_scratch.env import UserError
from llm_from_scratch.model import naive_attention
from llm_from_scratch.triton_attention import attention_flops, blockwise_attention, flash_attention, touched_blocks


def inputs(queries, keys, heads=4, key_heads=2, width=8, dtype=torch.float32):
    torch.manual_seed(0)
    shapes = (2, queries, heads, width), (2, keys, key_heads, width), (2, keys, key_heads, width)
    return [torch.randn(shape, dtype=dtype).transpose(1, 2).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("queries, keys", [(1, 1), (7, 7), (33, 33), (5, 40), (64, 64)])
@pytest.mark.parametrize("kind", ["plain", "slopes", "documents", "both"])
def test_ker_2_blockwise_equals_naive_with_every_gradient(queries, keys, kind, causal):
    leaves, options = inputs(queries, keys), {"causal": causal}
    if kind in ("slopes", "both"):
        options["slopes"] = torch.rand(4).requires_grad_()
        leaves.append(options["slopes"])
    if kind in ("documents", "both"):
        options["doc_ids"] = torch.stack([torch.arange(keys) // 9 - 1, torch.randint(-1, 3, (keys,))])
    upstream, results = torch.randn(2, 4, queries, 8), []
    for attend in (lambda *x, **o: blockwise_attention(*x, block_size=16, **o), naive_attention):
        out = attend(*leaves[:3], **options)
        results.append([out, *torch.autograd.grad(out, leaves, upstream)])
    for one, other in zip(*results):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4)


def test_blockwise_gradients_are_the_differences_of_its_values():
    leaves = inputs(6, 9, heads=2, key_heads=1, width=3, dtype=torch.float64) + [torch.rand(2, dtype=torch.float64).requires_grad_()]
    doc_ids = torch.arange(9).expand(2, -1) // 4
    assert torch.autograd.gradcheck(lambda q, k, v, slopes: blockwise_attention(q, k, v, slopes=slopes, doc_ids=doc_ids, block_size=4), leaves)


def test_mod_4_blockwise_rows_that_see_nothing_are_zero():
    q, k, v = inputs(5, 3)
    out = blockwise_attention(q, k, v, block_size=2)
    assert not out[:, :, :2].any() and out[:, :, 2:].any()
    assert all(torch.isfinite(x).all() for x in torch.autograd.grad(out.sum(), (q, k, v)))


def test_mod_4_nan_in_padding_reaches_nothing():
    q, k, v = inputs(6, 6)
    doc_ids = torch.tensor([[-1, -1, 0, 0, 0, 0], [0, 0, 0, 1, 1, -1]])
    with torch.no_grad():
        for x in (q, k, v):
            x.masked_fill_((doc_ids < 0)[:, None, :, None], torch.nan)
    out = blockwise_attention(q, k, v, doc_ids=doc_ids)
    assert torch.isfinite(out).all()
    assert all(torch.isfinite(x).all() for x in torch.autograd.grad(out.sum(), (q, k, v)))


def test_ker_5_blockwise_groups_heads():
    q, k = torch.randn(1, 4, 6, 16), torch.randn(1, 2, 6, 16)
    v = torch.tensor([10.0, 20.0])[None, :, None, None].expand(1, 2, 6, 16)
    assert torch.allclose(blockwise_attention(q, k, v)[0, :, 0, 0], torch.tensor([10.0, 10, 20, 20]))
    with pytest.raises(UserError, match="6 query heads can't share 4 key heads"):
        blockwise_attention(torch.zeros(1, 6, 2, 16), *torch.zeros(2, 1, 4, 2, 16))


@pytest.mark.parametrize("batch, queries, keys", [(1, 0, 0), (0, 4, 4), (1, 3, 0), (1, 1, 1)])
def test_ker_8_blockwise_of_short_and_empty_sequences(batch, queries, keys):
    q, k, v = (torch.randn(batch, 2, length, 16).requires_grad_() for length in (queries, keys, keys))
    out = blockwise_attention(q, k, v)
    assert out.shape == q.shape
    gradients = torch.autograd.grad(out.sum(), (q, k, v))
    assert all(torch.isfinite(x).all() for x in gradients)
    assert torch.equal(out, v) if queries == 1 else not out[:, :, : queries - keys].any()


@pytest.mark.parametrize("dtype, tolerance", [(torch.float16, 4e-3), (torch.bfloat16, 2e-2)])
def test_halves_come_back_as_halves(dtype, tolerance):
    leaves = inputs(20, 20, dtype=dtype)
    out = blockwise_attention(*leaves)
    assert out.dtype == dtype
    assert (out.float() - naive_attention(*(x.float() for x in leaves))).abs().max() < tolerance


def test_flash_refuses_what_it_cannot_take_in_one_line():
    with pytest.raises(UserError, match="^flash attention takes head widths from 16 to 256, not 8; or take sdpa_attention$"):
        flash_attention(*torch.zeros(3, 1, 1, 4, 8))


def test_touched_blocks_and_work():
    assert touched_blocks(130, 130, rows=64, columns=64)[0].tolist() == [[True, False, False], [True, True, False], [True] * 3]
    assert touched_blocks(64, 192, rows=64, columns=64)[0].tolist() == [[True] * 3]
    assert attention_flops(4, 4, 2) == 4 * 10 * 2


def test_no_tokens_of_no_documents():
    q, k = torch.zeros(2, 2, 0, 8), torch.zeros(2, 1, 0, 8)
    assert blockwise_attention(q, k, k, doc_ids=torch.zeros(2, 0, dtype=torch.int64)).shape == q.shape
    with pytest.raises(ValueError, match="can't share 0 key heads"): blockwise_attention(q, k[:, :0], k[:, :0])
