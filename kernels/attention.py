"""Flash attention: softmax(q k^T) v block by block, forward and backward, never the whole table (Dao 2023, FlashAttention-2).

Shapes: B batch, H query heads, G key heads, T time, K head width. Scores are kept in base 2: exp2 is the GPU's own exponential. The
backward pass recomputes them from the rows' logarithms; one kernel owns rows (dq, slopes), the other owns columns (dk, dv), so that
nothing is added atomically and two runs agree bit for bit.
"""

import torch
import triton
import triton.language as tl

from .blocks import block_ranges, query_documents
from .common import INTERPRETED, check_device, computable, load_tile, offset, padded, store_tile

LOG2_E = tl.constexpr(1.4426950408889634)
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


@triton.jit
def documents(docs_ptr, batch, position, num_keys, HAS_DOCS: tl.constexpr):
    "Document at each position; -1 where there is none. Without documents all positions that exist belong to number 0."
    exists = (position >= 0) & (position < num_keys)
    if HAS_DOCS:
        number = tl.load(docs_ptr + offset(batch, num_keys) + position, mask=exists, other=-1)
    else:
        number = tl.where(exists, 0, -1)
    return number


@triton.jit
def mask_scores(scores, at_query, at_key, query_doc, key_doc, CAUSAL: tl.constexpr, HAS_DOCS: tl.constexpr):
    "Minus infinity where a query does not see a key; the arguments broadcast over the tile."
    visible = key_doc >= 0
    if CAUSAL:
        visible = visible & (at_query >= at_key)
    if HAS_DOCS:
        visible = visible & (query_doc == key_doc)
    return tl.where(visible, scores, -float("inf"))


@triton.jit
def fwd_blocks(
    acc, top, total, q, at_query, query_doc, slope, k_base, v_base, k_row, v_row, docs_ptr, batch, num_keys, scale, first, last,
    K: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, CAUSAL: tl.constexpr,
    HAS_SLOPES: tl.constexpr, HAS_DOCS: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):
    "Online softmax over blocks first .. last of the keys: `top` each row's maximum so far, `total` its sum, `acc` its weighted values."
    for block in range(first, last):
        at_key = block * COLUMNS + tl.arange(0, COLUMNS)
        key_doc = documents(docs_ptr, batch, at_key, num_keys, HAS_DOCS)
        k = load_tile(k_base, block * COLUMNS, k_row, key_doc >= 0, K, COLUMNS, WIDTH)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scale * LOG2_E)
        if HAS_SLOPES:
            scores -= slope * tl.abs(at_query[:, None] - at_key[None, :]).to(tl.float32)
        if MASKED:
            scores = mask_scores(scores, at_query[:, None], at_key[None, :], query_doc[:, None], key_doc[None, :], CAUSAL, HAS_DOCS)
        new_top = tl.maximum(top, tl.max(scores, 1))
        safe_top = tl.where(new_top == -float("inf"), 0.0, new_top) if MASKED else new_top
        weights = tl.exp2(scores - safe_top[:, None])
        shrink = tl.exp2(top - safe_top)
        total = total * shrink + tl.sum(weights, 1)
        v = load_tile(v_base, block * COLUMNS, v_row, key_doc >= 0, K, COLUMNS, WIDTH)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
        top = new_top
    return acc, top, total


@triton.jit
def key_blocks(ranges_ptr, batch, block, num_blocks, lowest, num_rows, num_keys, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
               CAUSAL: tl.constexpr, HAS_DOCS: tl.constexpr):
    "Blocks of keys that a block of queries touches: first, the first that needs a mask, one past the last. `lowest`: its first position."
    first = 0
    last = tl.cdiv(num_keys, COLUMNS)
    whole = num_keys // COLUMNS
    if CAUSAL:
        last = tl.minimum(last, tl.cdiv(tl.maximum(lowest + num_rows, 0), COLUMNS))
        whole = tl.minimum(whole, tl.maximum(lowest + 1, 0) // COLUMNS)
    if HAS_DOCS:
        entry = ranges_ptr + offset(batch * num_blocks + block, 2)
        first = tl.maximum(first, tl.load(entry))
        last = tl.minimum(last, tl.load(entry + 1))
        whole = first
    return first, whole, last


@triton.jit(do_not_specialize=["num_queries", "num_keys"])
def attention_fwd_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, log_ptr, slopes_ptr, docs_ptr, ranges_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, out_batch, out_head, out_row,
    num_queries, num_keys, scale, HEADS: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, CAUSAL: tl.constexpr, HAS_SLOPES: tl.constexpr, HAS_DOCS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    "One program: ROWS queries of one head; writes their outputs and the base-2 logarithm of their sums (infinity: saw nothing)."
    num_blocks = tl.cdiv(num_queries, ROWS)
    block = num_blocks - 1 - tl.program_id(0) % num_blocks
    head = tl.program_id(0) // num_blocks % HEADS
    batch = tl.program_id(0) // num_blocks // HEADS
    rows = block * ROWS + tl.arange(0, ROWS)
    at_query = rows + num_keys - num_queries
    query_doc = documents(docs_ptr, batch, at_query, num_keys, HAS_DOCS)
    real = (rows < num_queries) & (query_doc >= 0) if HAS_DOCS else rows < num_queries
    q = load_tile(q_ptr + offset(batch, q_batch) + offset(head, q_head), block * ROWS, q_row, real, K, ROWS, WIDTH)
    k_base = k_ptr + offset(batch, k_batch) + offset(head // GROUP, k_head)
    v_base = v_ptr + offset(batch, v_batch) + offset(head // GROUP, v_head)
    slope = tl.load(slopes_ptr + head) * LOG2_E if HAS_SLOPES else 0.0
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    top = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    first, whole, last = key_blocks(ranges_ptr, batch, block, num_blocks, block * ROWS + num_keys - num_queries, ROWS, num_keys,
                                    ROWS, COLUMNS, CAUSAL, HAS_DOCS)
    if not HAS_DOCS:
        acc, top, total = fwd_blocks(
            acc, top, total, q, at_query, query_doc, slope, k_base, v_base, k_row, v_row, docs_ptr, batch, num_keys, scale, first, whole,
            K, WIDTH, COLUMNS, CAUSAL, HAS_SLOPES, HAS_DOCS, False, PRECISION)
    acc, top, total = fwd_blocks(
        acc, top, total, q, at_query, query_doc, slope, k_base, v_base, k_row, v_row, docs_ptr, batch, num_keys, scale, whole, last,
        K, WIDTH, COLUMNS, CAUSAL, HAS_SLOPES, HAS_DOCS, True, PRECISION)
    blind = total == 0
    out = acc / tl.where(blind, 1.0, total)[:, None]
    out_base = out_ptr + offset(batch, out_batch) + offset(head, out_head)
    store_tile(out_base, block * ROWS, out_row, rows < num_queries, out, K, ROWS, WIDTH)
    log = tl.where(blind, float("inf"), top + tl.log2(tl.where(blind, 1.0, total)))
    tl.store(log_ptr + offset(batch * HEADS + head, num_queries) + rows, log, mask=rows < num_queries)


@triton.jit
def dq_blocks(
    dq, dslope, q, do, log, delta, at_query, query_doc, slope, k_base, v_base, k_row, v_row, docs_ptr, batch, num_keys, scale, first, last,
    K: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, CAUSAL: tl.constexpr,
    HAS_SLOPES: tl.constexpr, HAS_DOCS: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):
    "Add up a block of queries' gradient, and the slope's of each row, over blocks first .. last of the keys."
    for block in range(first, last):
        at_key = block * COLUMNS + tl.arange(0, COLUMNS)
        key_doc = documents(docs_ptr, batch, at_key, num_keys, HAS_DOCS)
        k = load_tile(k_base, block * COLUMNS, k_row, key_doc >= 0, K, COLUMNS, WIDTH)
        v = load_tile(v_base, block * COLUMNS, v_row, key_doc >= 0, K, COLUMNS, WIDTH)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scale * LOG2_E)
        if HAS_SLOPES:
            distance = tl.abs(at_query[:, None] - at_key[None, :]).to(tl.float32)
            scores -= slope * distance
        if MASKED:
            scores = mask_scores(scores, at_query[:, None], at_key[None, :], query_doc[:, None], key_doc[None, :], CAUSAL, HAS_DOCS)
        weights = tl.exp2(scores - log[:, None])
        ds = weights * (tl.dot(do, tl.trans(v), input_precision=PRECISION) - delta[:, None])
        if HAS_SLOPES:
            dslope -= tl.sum(ds * distance, 1)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    return dq, dslope


@triton.jit(do_not_specialize=["num_queries", "num_keys"])
def attention_bwd_dq_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, do_ptr, log_ptr, delta_ptr, dq_ptr, dslopes_ptr, slopes_ptr, docs_ptr, ranges_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, out_batch, out_head, out_row, do_batch, do_head, do_row,
    dq_batch, dq_head, dq_row,
    num_queries, num_keys, scale, HEADS: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, CAUSAL: tl.constexpr, HAS_SLOPES: tl.constexpr, HAS_DOCS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    "One program: ROWS queries of one head; writes their gradient, their delta = sum(do * out), and their share of the slope's."
    num_blocks = tl.cdiv(num_queries, ROWS)
    block = num_blocks - 1 - tl.program_id(0) % num_blocks
    head = tl.program_id(0) // num_blocks % HEADS
    batch = tl.program_id(0) // num_blocks // HEADS
    rows = block * ROWS + tl.arange(0, ROWS)
    at_query = rows + num_keys - num_queries
    query_doc = documents(docs_ptr, batch, at_query, num_keys, HAS_DOCS)
    real = (rows < num_queries) & (query_doc >= 0) if HAS_DOCS else rows < num_queries
    q = load_tile(q_ptr + offset(batch, q_batch) + offset(head, q_head), block * ROWS, q_row, real, K, ROWS, WIDTH)
    do = load_tile(do_ptr + offset(batch, do_batch) + offset(head, do_head), block * ROWS, do_row, real, K, ROWS, WIDTH)
    out = load_tile(out_ptr + offset(batch, out_batch) + offset(head, out_head), block * ROWS, out_row, real, K, ROWS, WIDTH)
    delta = tl.sum(do.to(tl.float32) * out.to(tl.float32), 1)
    saved = offset(batch * HEADS + head, num_queries) + rows
    tl.store(delta_ptr + saved, delta, mask=rows < num_queries)
    log = tl.load(log_ptr + saved, mask=rows < num_queries, other=float("inf"))
    k_base = k_ptr + offset(batch, k_batch) + offset(head // GROUP, k_head)
    v_base = v_ptr + offset(batch, v_batch) + offset(head // GROUP, v_head)
    slope = tl.load(slopes_ptr + head) * LOG2_E if HAS_SLOPES else 0.0
    dq = tl.zeros([ROWS, WIDTH], tl.float32)
    dslope = tl.zeros([ROWS], tl.float32)
    first, whole, last = key_blocks(ranges_ptr, batch, block, num_blocks, block * ROWS + num_keys - num_queries, ROWS, num_keys,
                                    ROWS, COLUMNS, CAUSAL, HAS_DOCS)
    if not HAS_DOCS:
        dq, dslope = dq_blocks(
            dq, dslope, q, do, log, delta, at_query, query_doc, slope, k_base, v_base, k_row, v_row, docs_ptr, batch, num_keys, scale,
            first, whole, K, WIDTH, COLUMNS, CAUSAL, HAS_SLOPES, HAS_DOCS, False, PRECISION)
    dq, dslope = dq_blocks(
        dq, dslope, q, do, log, delta, at_query, query_doc, slope, k_base, v_base, k_row, v_row, docs_ptr, batch, num_keys, scale,
        whole, last, K, WIDTH, COLUMNS, CAUSAL, HAS_SLOPES, HAS_DOCS, True, PRECISION)
    dq_base = dq_ptr + offset(batch, dq_batch) + offset(head, dq_head)
    store_tile(dq_base, block * ROWS, dq_row, rows < num_queries, dq * scale, K, ROWS, WIDTH)
    if HAS_SLOPES:
        tl.store(dslopes_ptr + offset(batch * HEADS + head, num_blocks) + block, tl.sum(dslope, 0))


@triton.jit
def dkv_blocks(
    dk, dv, k, v, at_key, key_doc, slope, q_base, do_base, q_row, do_row, log_base, delta_base, docs_ptr, batch, num_queries, num_keys,
    scale, first, last, K: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, CAUSAL: tl.constexpr, HAS_SLOPES: tl.constexpr,
    HAS_DOCS: tl.constexpr, PRECISION: tl.constexpr,
):
    "Add up the gradients of a block of keys and values over blocks first .. last of the queries; tiles are transposed (keys, queries)."
    for block in range(first, last):
        rows = block * ROWS + tl.arange(0, ROWS)
        at_query = rows + num_keys - num_queries
        query_doc = documents(docs_ptr, batch, at_query, num_keys, HAS_DOCS)
        real = (rows < num_queries) & (query_doc >= 0) if HAS_DOCS else rows < num_queries
        q = load_tile(q_base, block * ROWS, q_row, real, K, ROWS, WIDTH)
        do = load_tile(do_base, block * ROWS, do_row, real, K, ROWS, WIDTH)
        log = tl.load(log_base + rows, mask=rows < num_queries, other=float("inf"))
        delta = tl.load(delta_base + rows, mask=rows < num_queries, other=0.0)
        scores = tl.dot(k, tl.trans(q), input_precision=PRECISION) * (scale * LOG2_E)
        if HAS_SLOPES:
            scores -= slope * tl.abs(at_query[None, :] - at_key[:, None]).to(tl.float32)
        if CAUSAL or HAS_DOCS:
            scores = mask_scores(scores, at_query[None, :], at_key[:, None], query_doc[None, :], key_doc[:, None], CAUSAL, HAS_DOCS)
        weights = tl.exp2(scores - log[None, :])
        dv = tl.dot(weights.to(do.dtype), do, dv, input_precision=PRECISION)
        ds = weights * (tl.dot(v, tl.trans(do), input_precision=PRECISION) - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=["num_queries", "num_keys"])
def attention_bwd_dkv_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, log_ptr, delta_ptr, dk_ptr, dv_ptr, slopes_ptr, docs_ptr, ranges_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, do_batch, do_head, do_row,
    dk_batch, dk_head, dk_row, dv_batch, dv_head, dv_row,
    num_queries, num_keys, scale, HEADS: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, CAUSAL: tl.constexpr, HAS_SLOPES: tl.constexpr, HAS_DOCS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    "One program: COLUMNS keys of one key head; adds over its group of query heads and writes the gradients of keys and values."
    num_blocks = tl.cdiv(num_keys, COLUMNS)
    block = tl.program_id(0) % num_blocks
    key_head = tl.program_id(0) // num_blocks % (HEADS // GROUP)
    batch = tl.program_id(0) // num_blocks // (HEADS // GROUP)
    at_key = block * COLUMNS + tl.arange(0, COLUMNS)
    key_doc = documents(docs_ptr, batch, at_key, num_keys, HAS_DOCS)
    k = load_tile(k_ptr + offset(batch, k_batch) + offset(key_head, k_head), block * COLUMNS, k_row, key_doc >= 0, K, COLUMNS, WIDTH)
    v = load_tile(v_ptr + offset(batch, v_batch) + offset(key_head, v_head), block * COLUMNS, v_row, key_doc >= 0, K, COLUMNS, WIDTH)
    dk = tl.zeros([COLUMNS, WIDTH], tl.float32)
    dv = tl.zeros([COLUMNS, WIDTH], tl.float32)
    first = 0
    last = tl.cdiv(num_queries, ROWS)
    if CAUSAL:
        first = tl.maximum(block * COLUMNS - (num_keys - num_queries), 0) // ROWS
    if HAS_DOCS:
        entry = ranges_ptr + offset(batch * num_blocks + block, 2)
        first = tl.maximum(first, tl.load(entry))
        last = tl.minimum(last, tl.load(entry + 1))
    for member in range(GROUP):
        head = key_head * GROUP + member
        q_base = q_ptr + offset(batch, q_batch) + offset(head, q_head)
        do_base = do_ptr + offset(batch, do_batch) + offset(head, do_head)
        saved = offset(batch * HEADS + head, num_queries)
        slope = tl.load(slopes_ptr + head) * LOG2_E if HAS_SLOPES else 0.0
        dk, dv = dkv_blocks(
            dk, dv, k, v, at_key, key_doc, slope, q_base, do_base, q_row, do_row, log_ptr + saved, delta_ptr + saved, docs_ptr, batch,
            num_queries, num_keys, scale, first, last, K, WIDTH, ROWS, CAUSAL, HAS_SLOPES, HAS_DOCS, PRECISION)
    inside = at_key < num_keys
    store_tile(dk_ptr + offset(batch, dk_batch) + offset(key_head, dk_head), block * COLUMNS, dk_row, inside, dk * scale, K, COLUMNS, WIDTH)
    store_tile(dv_ptr + offset(batch, dv_batch) + offset(key_head, dv_head), block * COLUMNS, dv_row, inside, dv, K, COLUMNS, WIDTH)


# Rows, columns, warps and stages for heads of at most so many columns. The largest tiles tried (2^n of 32 to 128, 4 or 8 warps) that
# compile without a spill in halves up to width 128 on sm_80, sm_86 and sm_90 and fit sm_86's 99 KiB of shared memory: see
# benchmarks/compile_kernels.py. Not yet timed on a GPU.
TILES = {
    "fwd": {64: (128, 64, 8, 3), 128: (128, 32, 8, 3), 256: (64, 32, 8, 2)},
    "dq": {64: (128, 32, 8, 2), 128: (64, 32, 4, 2), 256: (32, 32, 8, 2)},
    "dkv": {64: (32, 128, 8, 2), 128: (32, 64, 8, 2), 256: (32, 32, 8, 2)},
}
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


def check_attention(q, k, v) -> None:
    "Raise ValueError of one line for what the kernels don't take."
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads can't share {k.shape[1]} key heads: num_heads must be divisible by num_kv_heads")
    if not 16 <= q.shape[3] <= 256:
        raise ValueError(f"flash attention takes head widths from 16 to 256, not {q.shape[3]}")
    if q.dtype not in (torch.bfloat16, torch.float16, torch.float32) or not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"flash attention takes q, k and v all in bf16, fp16 or fp32, not {q.dtype}, {k.dtype} and {v.dtype}")
    check_device(q)


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
    "Softmax attention in one pass over blocks; raises ValueError of one line where the kernels can't run."
    check_attention(q, k, v)
    slopes = None if slopes is None else slopes.float().contiguous()
    doc_ids = None if doc_ids is None else doc_ids.to(torch.int32).contiguous()
    return torch.ops.llm_from_scratch.flash_forward(q, k, v, slopes, doc_ids, causal, q.shape[3] ** -0.5 if scale is None else scale)[0]
