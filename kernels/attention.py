"""Flash attention: softmax(q k^T) v block by block, forward and backward, never the whole table (Dao 2023, FlashAttention-2).

Shapes: B batch, H query heads, G key heads, T time, K head width. The backward pass computes the scores again from the logarithm of each
row's sum. The kernels themselves stand in attention_kernels.
"""

import torch
import triton

from . import why_not_attention
from .attention_kernels import attention_bwd_dkv_kernel, attention_bwd_dq_kernel, attention_fwd_kernel
from .blocks import block_ranges, query_documents
from .common import computable, padded

PRECISION = "tf32x3"  # fp32 products of three TF32 ones on tensor cores; halves are not touched by it


def attention_reference(q, k, v, *, causal=True, scale=None, slopes=None, doc_ids=None):
    "The same written out in plain torch, in fp32 or better, with the whole table."
    kind = torch.promote_types(q.dtype, torch.float32)
    group, at_key = q.shape[1] // k.shape[1], torch.arange(k.shape[2], device=q.device)
    at_query = torch.arange(q.shape[2], device=q.device)[:, None] + k.shape[2] - q.shape[2]
    visible = (at_query >= at_key if causal else at_query >= -q.shape[2])[None, None]
    if doc_ids is not None:
        rows = query_documents(doc_ids, q.shape[2])[:, None, :, None]
        columns = doc_ids[:, None, None, :]
        visible = visible & (rows == columns) & (columns >= 0)
        k, v = (x.masked_fill(doc_ids[:, None, :, None] < 0, 0) for x in (k, v))
        q = q.masked_fill(rows < 0, 0)
    k, v = (x.repeat_interleave(group, 1).to(kind) for x in (k, v))
    scores = q.to(kind) @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if slopes is not None:
        scores = scores - slopes[:, None, None] * (at_query - at_key).abs()
    weights = scores.masked_fill(~visible, torch.finfo(kind).min).softmax(-1).masked_fill(~visible, 0)
    return (weights @ v).to(q.dtype)


# Rows, columns, warps and stages for heads of at most so many columns. The largest tiles tried (2^n of 32 to 128, 4 or 8 warps) that
# compile without a spill in halves up to width 128 on sm_80, sm_86 and sm_90 and fit sm_86's 99 KiB of shared memory: see
# benchmarks/compile_kernels.py. Not yet timed on a GPU.
TILES = {
    "fwd": {32: (128, 32, 8, 3), 64: (128, 64, 8, 3), 128: (128, 32, 8, 2), 256: (64, 32, 8, 2)},
    "dq": {64: (128, 32, 8, 2), 128: (64, 32, 4, 2), 256: (32, 32, 8, 2)},
    "dkv": {64: (32, 128, 8, 1), 128: (32, 64, 8, 2), 256: (32, 32, 8, 2)},
}
# fp32 is for tests and small models: it compiles for 99 KiB too, but spills beyond width 64.
FP32_TILES = {64: (32, 32, 4, 2), 128: (16, 32, 4, 1), 256: (16, 16, 4, 1)}


def attention_tiles(kernel: str, width: int, dtype: torch.dtype) -> dict:
    "Tiles of `fwd`, `dq` or `dkv` for a padded head width, as a launch takes them."
    table = FP32_TILES if dtype == torch.float32 else TILES[kernel]
    rows, columns, warps, stages = table[min(size for size in table if size >= width)]
    return dict(ROWS=rows, COLUMNS=columns, num_warps=warps, num_stages=stages)


def _options(kernel, q, k, slopes, doc_ids, causal):
    "What a launch fixes at compile time."
    return dict(
        HEADS=q.shape[1], GROUP=q.shape[1] // k.shape[1], K=q.shape[3], WIDTH=padded(q.shape[3]), CAUSAL=causal,
        HAS_SLOPES=slopes is not None, HAS_DOCS=doc_ids is not None, PRECISION=PRECISION, **attention_tiles(kernel, padded(q.shape[3]), q.dtype))


def _time_first(x: torch.Tensor) -> torch.Tensor:
    "Memory for something like x (B, heads, T, K) that lies as (B, T, heads, K): the output projection then needs no copy."
    return x.new_empty(x.shape[0], x.shape[2], x.shape[1], x.shape[3]).transpose(1, 2)


def _strides(*tensors: torch.Tensor) -> list[int]:
    return [stride for x in tensors for stride in x.stride()[:3]]


def _ranges(row_ids, column_ids, rows, columns):
    "Blocks to visit, or nothing without documents."
    return None if row_ids is None else block_ranges(row_ids, column_ids, rows, columns)


@torch.library.custom_op("llm_from_scratch::flash_forward", mutates_args=())
def flash_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slopes: torch.Tensor | None, doc_ids: torch.Tensor | None, causal: bool, scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    "Output (B, H, Tq, K) and the base-2 logarithm of each row's sum (B, H, Tq)."
    out, log = _time_first(q), q.new_empty(q.shape[:3], dtype=torch.float32)
    if out.numel() == 0 or k.numel() == 0:
        return out.zero_(), log.fill_(torch.inf)
    options = _options("fwd", q, k, slopes, doc_ids, causal)
    queries = None if doc_ids is None else query_documents(doc_ids, q.shape[2])
    ranges = _ranges(queries, doc_ids, options["ROWS"], options["COLUMNS"])
    grid = (triton.cdiv(q.shape[2], options["ROWS"]) * q.shape[1] * q.shape[0],)
    q, k, v, result = computable(q, k, v, out)
    attention_fwd_kernel[grid](
        q, k, v, result, log, slopes, doc_ids, ranges, *_strides(q, k, v, result), q.shape[2], k.shape[2], scale, **options)
    return out.copy_(result), log


@flash_forward.register_fake
def _(q, k, v, slopes, doc_ids, causal, scale):
    return _time_first(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("llm_from_scratch::flash_backward", mutates_args=())
def flash_backward(
    do: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, log: torch.Tensor,
    slopes: torch.Tensor | None, doc_ids: torch.Tensor | None, causal: bool, scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    "Gradients of q, k, v and the slopes (H,), which are empty where there are none."
    dq, dk, dv = _time_first(q), _time_first(k), _time_first(v)
    num_slopes = 0 if slopes is None else q.shape[1]
    if q.numel() == 0 or k.numel() == 0:
        return dq.zero_(), dk.zero_(), dv.zero_(), q.new_zeros(num_slopes, dtype=torch.float32)
    by_rows, by_columns = (_options(kernel, q, k, slopes, doc_ids, causal) for kernel in ("dq", "dkv"))
    queries = None if doc_ids is None else query_documents(doc_ids, q.shape[2])
    num_blocks = triton.cdiv(q.shape[2], by_rows["ROWS"])
    delta, shares = torch.empty_like(log), log.new_empty(q.shape[0], num_slopes, num_blocks)
    q, k, v, out, do, dq_, dk_, dv_ = computable(q, k, v, out, do, dq, dk, dv)
    attention_bwd_dq_kernel[(num_blocks * q.shape[1] * q.shape[0],)](
        q, k, v, out, do, log, delta, dq_, shares, slopes, doc_ids, _ranges(queries, doc_ids, by_rows["ROWS"], by_rows["COLUMNS"]),
        *_strides(q, k, v, out, do, dq_), q.shape[2], k.shape[2], scale, **by_rows)
    attention_bwd_dkv_kernel[(triton.cdiv(k.shape[2], by_columns["COLUMNS"]) * k.shape[1] * k.shape[0],)](
        q, k, v, do, log, delta, dk_, dv_, slopes, doc_ids, _ranges(doc_ids, queries, by_columns["COLUMNS"], by_columns["ROWS"]),
        *_strides(q, k, v, do, dk_, dv_), q.shape[2], k.shape[2], scale, **by_columns)
    return dq.copy_(dq_), dk.copy_(dk_), dv.copy_(dv_), shares.sum((0, 2))


@flash_backward.register_fake
def _(do, q, k, v, out, log, slopes, doc_ids, causal, scale):
    return _time_first(q), _time_first(k), _time_first(v), log.new_empty(0 if slopes is None else q.shape[1])


def _save(ctx, inputs, output):
    q, k, v, slopes, doc_ids, ctx.causal, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, *output, slopes, doc_ids)


def _backward(ctx, do, _):
    q, k, v, out, log, slopes, doc_ids = ctx.saved_tensors
    dq, dk, dv, dslopes = torch.ops.llm_from_scratch.flash_backward(do, q, k, v, out, log, slopes, doc_ids, ctx.causal, ctx.scale)
    return dq, dk, dv, None if slopes is None else dslopes, None, None, None


flash_forward.register_autograd(_backward, setup_context=_save)


def _check_shapes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slopes: torch.Tensor | None, doc_ids: torch.Tensor | None) -> None:
    "Raise ValueError where queries, keys, values, slopes or documents don't fit together."
    if q.ndim != 4 or k.ndim != 4 or k.shape != v.shape or (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3]):
        raise ValueError(f"queries {tuple(q.shape)}, keys {tuple(k.shape)} and values {tuple(v.shape)} don't fit: "
                         "(B, H, Tq, K), (B, G, Tk, K) and (B, G, Tk, K) are wanted")
    if slopes is not None and slopes.shape != q.shape[1:2]:
        raise ValueError(f"slopes {tuple(slopes.shape)} don't fit queries {tuple(q.shape)}: one each head is wanted")
    if doc_ids is None:
        return
    if doc_ids.shape != (k.shape[0], k.shape[2]):
        raise ValueError(f"doc_ids {tuple(doc_ids.shape)} don't fit keys {tuple(k.shape)}: (B, Tk) is wanted")
    # On a GPU this would wait for all that was launched.
    if doc_ids.device.type == "cpu" and not torch.compiler.is_compiling() and (doc_ids.to(torch.int32) != doc_ids).any():
        raise ValueError(f"doc_ids hold {doc_ids.abs().max().item()}, which int32 can't hold; number the documents of a batch from 0")


def flash_attention(
    q: torch.Tensor,                      # (B, H, Tq, K), the last Tq positions, K from 16 to 256
    k: torch.Tensor,                      # (B, G, Tk, K), H divisible by G
    v: torch.Tensor,                      # (B, G, Tk, K)
    *,
    causal: bool = True,                  # hide the future; the last query sees the last key
    scale: float | None = None,           # factor on the scores; none: 1 / sqrt(K)
    slopes: torch.Tensor | None = None,   # (H,) ALiBi slopes, learned where they ask for a gradient
    doc_ids: torch.Tensor | None = None,  # (B, Tk) document of each key, -1 = padding; they fit int32
) -> torch.Tensor:                        # (B, H, Tq, K) in the type of q; zeros for a row that sees nothing
    "Softmax attention in one pass over blocks; raises ValueError of one line where the kernels can't run or shapes don't fit."
    _check_shapes(q, k, v, slopes, doc_ids)
    if not torch.compiler.is_compiling() and (reason := why_not_attention(q, k, v)):
        raise ValueError(reason)
    slopes = None if slopes is None else slopes.float().contiguous()
    doc_ids = None if doc_ids is None else doc_ids.to(torch.int32).contiguous()
    return torch.ops.llm_from_scratch.flash_forward(q, k, v, slopes, doc_ids, causal, q.shape[3] ** -0.5 if scale is None else scale)[0]
