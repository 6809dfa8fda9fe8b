# ruff: noqa: ANN001, ANN201, ANN202, N803 - what a kernel is given has no Python type, and its constants are capitals
"""Triton kernels of few queries: keys are looked up, read where they lie, split over programs, and the parts merged.

`find_columns` is `gather.neighbours` in one launch. `attend_part` gives each program one key/value head, the query rows
that share keys, and a run of columns; `merge_parts` weighs the runs by their log-sum-exp. Where runs are cut depends on
the number of columns alone, and they are added in order, so that a query's result has the same bits in any batch and
any chunk.

Shapes: rows T are the query heads of a group, for each query where all queries share their keys; columns C.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _tanh(x):  # a device function
    # Near zero, where scores far below the cap are, the quotient would lose digits.
    square = x * x
    series = x * (1 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835)))))
    e = tl.exp(-2 * tl.abs(x))
    quotient = (1 - e) / (1 + e)
    return tl.where(square < 0.0625, series, tl.where(x < 0, -quotient, quotient))


# A cache that grows by a token, or another number of rows, must not compile anew.
@triton.jit(
    do_not_specialize=["order_batch", "order_head", "kv_heads", "queries", "keys", "columns", "columns_of_part"],
)
def attend_part(
    q,
    k,
    v,
    slot,  # int64 [B', H', Nq, C], not read where SHARED
    allowed,  # uint8 [B', H', Nq, C]
    bias,  # float32 [B', H', Nq, C], not read without HAS_BIAS
    part_out,  # float32 [B, Hq, Nq, parts, Dv]
    part_lse,  # float32 [B, Hq, Nq, parts]
    q_batch,
    q_head,
    q_row,
    q_dim,
    k_batch,
    k_head,
    k_row,
    k_dim,
    v_batch,
    v_head,
    v_row,
    v_dim,
    order_batch,  # 0 where all rows of the batch share slots
    order_head,
    kv_heads,
    queries,
    keys,
    columns,
    columns_of_part,
    scale,
    softcap,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SHARED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    IN_FLOAT32: tl.constexpr,
):
    """Softmax of one run of columns: its weighted values, normalised, and its log-sum-exp."""
    rows_of_set = GROUP * queries if SHARED else GROUP
    tiles = tl.cdiv(rows_of_set, BLOCK_T)
    in_set, b = tl.program_id(0) // tiles, (tl.program_id(1) // kv_heads).to(tl.int64)
    h, part = tl.program_id(1) % kv_heads, tl.program_id(2)
    t = tl.program_id(0) % tiles * BLOCK_T + tl.arange(0, BLOCK_T)
    is_row = t < rows_of_set
    query = tl.where(is_row, (t // GROUP) if SHARED else in_set, 0).to(tl.int64)
    head = h * GROUP + t % GROUP

    d, dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    q_at = b * q_batch + head.to(tl.int64) * q_head + query * q_row
    rows = tl.load(q + q_at[:, None] + d * q_dim, mask=is_row[:, None] & (d < DIM), other=0.0)
    is_finite = tl.abs(rows.to(tl.float32)) < float("inf")
    bad = tl.max(tl.where(is_finite, 0, 1), axis=1)
    rows = tl.where(is_finite, rows, 0.0)
    if IN_FLOAT32:
        rows = rows.to(tl.float32)

    top = tl.full([BLOCK_T], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_T], tl.float32)
    sums = tl.zeros([BLOCK_T, BLOCK_V], tl.float32)
    order = b * order_batch + h * order_head
    k_at, v_at = k + b * k_batch + h.to(tl.int64) * k_head, v + b * v_batch + h.to(tl.int64) * v_head
    begin = part * columns_of_part
    for first in range(begin, tl.minimum(begin + columns_of_part, columns), BLOCK_C):
        column = first + tl.arange(0, BLOCK_C)
        is_column = column < columns
        in_order = order + query[:, None] * columns + column
        seen = tl.load(allowed + in_order, mask=is_row[:, None] & is_column, other=0) != 0
        wanted = tl.max(seen.to(tl.int32), axis=0) != 0
        if SHARED:
            key = column.to(tl.int64)
        else:
            key = tl.load(slot + order + in_set.to(tl.int64) * columns + column, mask=is_column, other=0)

        # A position that is no key's would be read from foreign memory; its row becomes NaN instead.
        is_key = (key >= 0) & (key < keys)
        wanted &= is_key
        rows_k = tl.load(k_at + key * k_row + d[:, None] * k_dim, mask=wanted & (d < DIM)[:, None], other=0.0)
        key_is_finite = tl.abs(rows_k.to(tl.float32)) < float("inf")
        bad_key = tl.maximum(tl.max(tl.where(key_is_finite, 0, 1), axis=0), tl.where(is_key, 0, 1))
        rows_k = tl.where(key_is_finite, rows_k, 0.0)
        rows_v = tl.load(v_at + key[:, None] * v_row + dv * v_dim, mask=wanted[:, None] & (dv < DIM_V), other=0.0)
        value_is_finite = tl.abs(rows_v.to(tl.float32)) < float("inf")
        bad_key = tl.maximum(bad_key, tl.max(tl.where(value_is_finite, 0, 1), axis=1))
        rows_v = tl.where(value_is_finite, rows_v, 0.0)
        bad = tl.maximum(bad, tl.max(tl.where(seen, bad_key, 0), axis=1))

        if IN_FLOAT32:
            rows_k, rows_v = rows_k.to(tl.float32), rows_v.to(tl.float32)
        scores = tl.dot(rows, rows_k, input_precision="ieee") * scale
        if HAS_SOFTCAP:
            scores = softcap * _tanh(scores / softcap)
        if HAS_BIAS:
            scores += tl.load(bias + in_order, mask=seen, other=0.0)
        scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp(scores - shift[:, None])
        decay = tl.exp(top - shift)
        total = total * decay + tl.sum(weights, axis=1)
        sums = sums * decay[:, None] + tl.dot(weights.to(rows_v.dtype), rows_v, input_precision="ieee")
        top = new_top

    is_empty = top == float("-inf")
    spoilt = tl.where((bad != 0) & ~is_empty, float("nan"), 0.0)
    total = tl.where(is_empty, 1.0, total)
    at = ((b * kv_heads * GROUP + head) * queries + query) * tl.num_programs(2) + part
    tl.store(part_lse + at, top + tl.log(total) + spoilt, mask=is_row)
    out = sums / total[:, None] + spoilt[:, None]
    tl.store(part_out + at[:, None] * DIM_V + dv, out, mask=is_row[:, None] & (dv < DIM_V))


@triton.jit(do_not_specialize=["parts"])
def merge_parts(
    part_out,
    part_lse,
    out,  # float32 [B, Hq, Nq, Dv]
    lse,  # float32 [B, Hq, Nq]
    parts,
    DIM_V: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """One query of one head: the parts' outputs, weighed by exp(lse)."""
    row, p = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_P)
    of_part = tl.load(part_lse + row * parts + p, mask=p < parts, other=float("-inf"))
    top = tl.max(of_part, axis=0)
    shift = tl.where(top == float("-inf"), 0.0, top)
    weights = tl.exp(of_part - shift)
    total = tl.sum(weights, axis=0)
    is_empty = total == 0.0
    total = tl.where(is_empty, 1.0, total)
    tl.store(lse + row, tl.where(is_empty, float("-inf"), shift + tl.log(total)))
    for first in range(0, DIM_V, BLOCK_V):
        dv = first + tl.arange(0, BLOCK_V)
        at = (row * parts + p[:, None]) * DIM_V + dv
        rows = tl.load(part_out + at, mask=(p < parts)[:, None] & (dv < DIM_V), other=0.0)
        tl.store(out + row * DIM_V + dv, tl.sum(rows * weights[:, None], axis=0) / total, mask=dv < DIM_V)


@triton.jit(
    do_not_specialize=[
        *("token_batch", "token_query", "table_half", "table_head", "heads", "queries", "keys", "columns"),
        *("window", "span", "sinks"),
    ]
)
def find_columns(
    token,  # int64 [B', Nq]
    table,  # int32 [2, H', ...], of `rank_tables`; not read where RANDOM is false
    slot,  # int64 [B', H', Nq, C]
    allowed,  # uint8 [B', H', Nq, C]
    bias,  # float32 [B', H', Nq, C], not written without a correction
    token_batch,
    token_query,
    table_half,
    table_head,
    heads,
    queries,
    keys,
    columns,
    window,
    span,
    sinks,
    correction,
    RANDOM: tl.constexpr,
    IN_BLOCKS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    LEVELS: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """The keys of one query of one document: the last `span`, the first `sinks`, then those near in rank."""
    row, h, b = tl.program_id(1) % queries, tl.program_id(1) // queries % heads, tl.program_id(1) // queries // heads
    column = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    i = tl.load(token + b * token_batch + row * token_query)
    place = tl.program_id(1).to(tl.int64) * columns + column
    is_local, is_sink = column < span, (column >= span) & (column < span + sinks)
    is_token = (i >= 0) & (i < keys)
    position = tl.where(is_local, i - column, column - span)
    sees = tl.where(is_local, position >= sinks, position <= i)
    if RANDOM:
        ranks = i * 0 + window
        for _ in range(LEVELS - 1):
            ranks = tl.where(i >= ranks, 2 * ranks, ranks)
        at = table + h * table_head + ranks - window
        rank = tl.load(at + i, mask=is_token, other=0).to(tl.int64)
        ranks = tl.where(is_token, ranks, 0)
        nth = column - span - sinks
        near = rank // (2 * window) * (2 * window) + nth if IN_BLOCKS else rank + nth - (window - 1)
        is_near = (nth >= 0) & (near >= 0) & (near < ranks) & (column < columns)
        sampled = tl.load(at + table_half + near, mask=is_near, other=0).to(tl.int64)
        position = tl.where(is_local | is_sink, position, sampled)
        sees = tl.where(is_local | is_sink, sees, is_near & (sampled <= i - span) & (sampled >= sinks))
        if HAS_BIAS:
            chance = tl.minimum((2.0 * window - 1.0) / tl.maximum(ranks, 1).to(tl.float32), 1.0)
            of_sampled = tl.where(nth >= 0, -correction * tl.log(chance), 0.0)
            tl.store(bias + place, of_sampled, mask=column < columns)
    tl.store(slot + place, tl.where(sees, position, i), mask=column < columns)
    # An impossible query sees its impossible key, for `attend_part` to find.
    tl.store(allowed + place, tl.where(is_token, sees.to(tl.uint8), 1), mask=column < columns)


IS_INTERPRETED = not isinstance(merge_parts, triton.JITFunction)
