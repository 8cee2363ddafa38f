"""The kernels of flash attention: forward, and backward once by rows (dq, slopes) and once by columns (dk, dv).

Scores are kept in base 2: exp2 is the GPU's own exponential. Each program owns what it writes, so nothing is added atomically and two
runs agree bit for bit. Names: a row is a query, a column a key; `at_query` and `at_key` are positions.
"""

import triton
import triton.language as tl

from .common import load_tile, offset, store_tile

LOG2_E = tl.constexpr(1.4426950408889634)


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
