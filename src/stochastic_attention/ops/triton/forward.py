"""The forward kernel: one tile of queries of one head against the key tiles that it meets, in one pass.

Rows of q, k and v are read where they lie, through the orders of the pass, and results written back in place. What an
earlier pass found for a query is merged as it is written: a softmax over two disjoint sets of keys.
"""

# pyright: reportArgumentType=false, reportOperatorIssue=false, reportPossiblyUnboundVariable=false
# (a kernel's numbers are not Python's, and what a constant leaves out is not read)
import triton
import triton.language as tl

from .masks import allowed, capped, load_keys, load_queries, meet, span

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit(do_not_specialize=["slots", "key_slots", "query_tiles", "key_tiles", "queries", "keys", "local", "sinks"])
def forward(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr,
    query_rows_ptr, start_ptr, stop_ptr, query_position_ptr, bias_ptr, query_tiles_ptr,
    key_rows_ptr, key_slot_ptr, key_position_ptr, key_tiles_ptr,
    any_bad_ptr, bad_query_ptr, bad_key_ptr,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n,
    heads, kv_heads, queries, keys, order_rows, order_heads, key_order_rows, key_order_heads,
    slots, key_slots, query_tiles, key_tiles, local, sinks, scale, softcap,
    DIM: tl.constexpr, DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr, SORTED: tl.constexpr, RULE: tl.constexpr,
    SOFTCAP: tl.constexpr, BIAS: tl.constexpr, FRESH: tl.constexpr, CHECKED: tl.constexpr, WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Shapes as in `schedule`; out [B, Hq, Nq, Dv] and lse [B, Hq, Nq] are dense. `CHECKED` skips non-finite rows."""
    if tl.load(any_bad_ptr) != CHECKED:
        return
    tile = tl.program_id(0) % query_tiles
    head = tl.program_id(0) // query_tiles
    b = (head // heads).to(tl.int64)
    h = (head % heads).to(tl.int64)
    kv = h * kv_heads // heads
    of_query = tl.minimum(b, order_rows - 1) * order_heads + h * order_heads // heads
    of_key = tl.minimum(b, key_order_rows - 1) * key_order_heads + h * key_order_heads // heads
    accumulator = lse_ptr.dtype.element_ty
    product = k_ptr.dtype.element_ty if q_ptr.dtype == k_ptr.dtype and not WIDE else accumulator
    product_v = v_ptr.dtype.element_ty if not WIDE else accumulator

    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    at = of_query * slots + m
    rows = tl.load(query_rows_ptr + at, mask=m < slots, other=-1)
    start = tl.load(start_ptr + at, mask=m < slots, other=0)
    stop = tl.load(stop_ptr + at, mask=m < slots, other=0)
    query_position = tl.load(query_position_ptr + at, mask=m < slots, other=0)
    used = rows >= 0
    rows = rows.to(tl.int64)
    result = (b * heads + h) * queries + rows
    poisoned = tl.zeros([BLOCK_M], dtype=tl.int32)
    readable = used
    if CHECKED:
        poisoned = tl.load(bad_query_ptr + result, mask=used, other=0).to(tl.int32)
        readable = used & (poisoned == 0)
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    q = tl.load(
        q_ptr + b * q_b + h * q_h + rows[:, None] * q_n + d[None, :],
        mask=readable[:, None] & (d < DIM)[None, :],
        other=0.0,
    ).to(product)

    top = tl.full([BLOCK_M], float("-inf"), dtype=accumulator)
    total = tl.zeros([BLOCK_M], dtype=accumulator)
    out = tl.zeros([BLOCK_M, BLOCK_DV], dtype=accumulator)

    query_tiles_ptr += of_query * 6 * query_tiles
    key_tiles_ptr += of_key * 4 * key_tiles
    k_ptr += b * k_b + kv * k_h
    v_ptr += b * v_b + kv * v_h
    start_least, start_most, stop_least, stop_most, earliest, latest = load_queries(
        query_tiles_ptr, tile, True, query_tiles
    )
    step: tl.constexpr = CHUNK * BLOCK_N if SORTED else BLOCK_N
    first_tile = start_least // step * (step // BLOCK_N)
    end_tile = tl.minimum((stop_most + step - 1) // step * (step // BLOCK_N), key_tiles)
    for chunk in range(first_tile, end_tile, CHUNK):
        index = chunk + tl.arange(0, CHUNK)
        low, high, k_earliest, k_latest = load_keys(key_tiles_ptr, index, index < end_tile, key_tiles)
        some, every = meet(
            start_least, start_most, stop_least, stop_most, earliest, latest, low, high, k_earliest, k_latest,
            local, sinks, RULE,
        )  # fmt: skip
        first, end, whole = span(some, every, CHUNK)
        for i in range(first, end):
            n = (chunk + i) * BLOCK_N + tl.arange(0, BLOCK_N)
            inside = n < key_slots
            key_rows = tl.load(key_rows_ptr + of_key * key_slots + n, mask=inside, other=0).to(tl.int64)
            k_at = k_ptr + key_rows[None, :] * k_n + d[:, None]
            v_at = v_ptr + key_rows[:, None] * v_n + dv[None, :]
            k_mask = (d < DIM)[:, None]
            v_mask = (dv < DIM_V)[None, :]
            if CHECKED:
                bad = tl.load(bad_key_ptr + (b * kv_heads + kv) * keys + key_rows) != 0
                k_mask = k_mask & ~bad[None, :]
                v_mask = v_mask & ~bad[:, None]
            k = tl.load(k_at) if DIM == BLOCK_D and not CHECKED else tl.load(k_at, mask=k_mask, other=0.0)
            scores = tl.dot(q, k.to(product), input_precision=PRECISION) * scale
            if SOFTCAP:
                scores = capped(scores, softcap)
            scores *= LOG2_E
            if ((whole >> i) & 1) == 0 or CHECKED:
                slot = n
                if SORTED:
                    slot = tl.load(key_slot_ptr + of_key * key_slots + n, mask=inside, other=2147483647)
                key_position = n
                if RULE != 0:
                    key_position = tl.load(key_position_ptr + of_key * key_slots + n, mask=inside, other=0)
                pairs = allowed(
                    start[:, None], stop[:, None], query_position[:, None], slot[None, :], key_position[None, :],
                    local, sinks, RULE,
                )  # fmt: skip
                scores = tl.where(pairs, scores, float("-inf"))
                if CHECKED:
                    poisoned = poisoned | tl.max((pairs & bad[None, :]).to(tl.int32), axis=1)
            new_top = tl.maximum(top, tl.max(scores, axis=1))
            finite_top = tl.where(new_top == float("-inf"), 0.0, new_top)
            weights = tl.exp2(scores - finite_top[:, None])
            kept = tl.exp2(top - finite_top)
            total = total * kept + tl.sum(weights, axis=1)
            v = tl.load(v_at) if DIM_V == BLOCK_DV and not CHECKED else tl.load(v_at, mask=v_mask, other=0.0)
            out = tl.dot(weights.to(product_v), v.to(product_v), out * kept[:, None], input_precision=PRECISION)
            top = new_top

    has_keys = used & (total > 0)
    total = tl.where(total > 0, total, 1.0)
    own = (tl.where(has_keys, top, 0.0) + tl.log2(total)) * LN_2
    if BIAS:
        own += tl.load(bias_ptr + at, mask=m < slots, other=0.0)
    factor = 1.0 / total
    out_at = out_ptr + result[:, None] * DIM_V + dv[None, :]
    out_mask = has_keys[:, None] & (dv < DIM_V)[None, :]
    if FRESH:
        out *= factor[:, None]
    else:
        old = tl.load(lse_ptr + result, mask=has_keys, other=float("-inf"))
        larger = tl.maximum(own, old)
        merged = larger + tl.log2(tl.exp2((own - larger) * LOG2_E) + tl.exp2((old - larger) * LOG2_E)) * LN_2
        factor *= tl.exp2((own - merged) * LOG2_E)
        kept = tl.exp2((old - merged) * LOG2_E)
        own = merged
        out = out * factor[:, None] + tl.load(out_at, mask=out_mask, other=0.0) * kept[:, None]
    if CHECKED:
        own = tl.where(poisoned != 0, float("nan"), own)
        out = tl.where((poisoned != 0)[:, None], float("nan"), out)
    tl.store(lse_ptr + result, own, mask=has_keys)
    tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=out_mask)
