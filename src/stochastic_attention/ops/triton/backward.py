"""The backward kernels: of queries, a tile of queries against the keys it meets; of keys, the other way round.

Both recompute the weights from the final log-sum-exp. Each gradient is summed by one program a pass, in the order of
tiles, and passes follow each other: always the same sum, without atomic additions.
"""

# pyright: reportArgumentType=false, reportOperatorIssue=false, reportPossiblyUnboundVariable=false
# (a kernel's numbers are not Python's, and what a constant leaves out is not read)
import triton
import triton.language as tl

from .masks import allowed, capped, load_keys, load_queries, meet, span

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["rows", "queries"])
def prepare(
    out_ptr, d_out_ptr, lse_ptr, d_lse_ptr, delta_ptr, safe_lse_ptr,
    g_b, g_h, g_n, heads, queries, rows,
    DIM_V: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, LSE_GRADIENT: tl.constexpr,
):  # fmt: skip
    """delta = sum(d_out * out) - d_lse, and an lse of inf, which makes all weights 0, for rows empty or not finite."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = row < rows
    lse = tl.load(lse_ptr + row, mask=inside, other=float("inf"))
    live = inside & (tl.abs(lse) < float("inf"))
    dv = tl.arange(0, BLOCK_DV)
    mask = live[:, None] & (dv < DIM_V)[None, :]
    head = row // queries
    g_at = d_out_ptr + head // heads * g_b + head % heads * g_h + row % queries * g_n
    out = tl.load(out_ptr + row[:, None] * DIM_V + dv[None, :], mask=mask, other=0.0).to(lse.dtype)
    d_out = tl.load(g_at[:, None] + dv[None, :], mask=mask, other=0.0).to(lse.dtype)
    delta = tl.sum(out * d_out, axis=1)
    if LSE_GRADIENT:
        delta -= tl.load(d_lse_ptr + row, mask=live, other=0.0)
    tl.store(delta_ptr + row, delta, mask=inside)
    tl.store(safe_lse_ptr + row, tl.where(live, lse, float("inf")), mask=inside)


@triton.jit(do_not_specialize=["slots", "key_slots", "query_tiles", "key_tiles", "queries", "keys", "local", "sinks"])
def of_queries(
    q_ptr, k_ptr, v_ptr, d_out_ptr, lse_ptr, delta_ptr, dq_ptr,
    query_rows_ptr, start_ptr, stop_ptr, query_position_ptr, bias_ptr, query_tiles_ptr,
    key_rows_ptr, key_slot_ptr, key_position_ptr, key_tiles_ptr,
    any_bad_ptr, bad_query_ptr, bad_key_ptr,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, g_b, g_h, g_n,
    heads, kv_heads, queries, keys, order_rows, order_heads, key_order_rows, key_order_heads,
    slots, key_slots, query_tiles, key_tiles, local, sinks, scale, softcap,
    DIM: tl.constexpr, DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr, SORTED: tl.constexpr, RULE: tl.constexpr,
    SOFTCAP: tl.constexpr, BIAS: tl.constexpr, FRESH: tl.constexpr, CHECKED: tl.constexpr, WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dq [B, Hq, Nq, D], dense; added to unless `FRESH`. The rest as in `forward`."""
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
    lse = tl.load(lse_ptr + result, mask=used, other=float("inf"))
    delta = tl.load(delta_ptr + result, mask=used, other=0.0)
    if BIAS:
        lse -= tl.load(bias_ptr + at, mask=used, other=0.0)
    lse *= LOG2_E
    readable = used
    live = used
    if CHECKED:
        readable = used & (tl.load(bad_query_ptr + result, mask=used, other=1) == 0)
        live = used & (lse < float("inf"))
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    q = tl.load(
        q_ptr + b * q_b + h * q_h + rows[:, None] * q_n + d[None, :],
        mask=readable[:, None] & (d < DIM)[None, :],
        other=0.0,
    ).to(product)
    d_out = tl.load(
        d_out_ptr + b * g_b + h * g_h + rows[:, None] * g_n + dv[None, :],
        mask=live[:, None] & (dv < DIM_V)[None, :],
        other=0.0,
    ).to(product_v)
    dq = tl.zeros([BLOCK_M, BLOCK_D], dtype=accumulator)

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
            v_at = v_ptr + key_rows[None, :] * v_n + dv[:, None]
            k_mask = (d < DIM)[:, None]
            v_mask = (dv < DIM_V)[:, None]
            if CHECKED:
                bad = tl.load(bad_key_ptr + (b * kv_heads + kv) * keys + key_rows) != 0
                k_mask = k_mask & ~bad[None, :]
                v_mask = v_mask & ~bad[None, :]
            k = tl.load(k_at) if DIM == BLOCK_D and not CHECKED else tl.load(k_at, mask=k_mask, other=0.0)
            k = k.to(product)
            scores = tl.dot(q, k, input_precision=PRECISION) * scale
            if SOFTCAP:
                scores = capped(scores, softcap)
                slope = 1.0 - (scores / softcap) * (scores / softcap)
            if ((whole >> i) & 1) == 0:
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
            weights = tl.exp2(scores * LOG2_E - lse[:, None])
            v = tl.load(v_at) if DIM_V == BLOCK_DV and not CHECKED else tl.load(v_at, mask=v_mask, other=0.0)
            d_scores = weights * (tl.dot(d_out, v.to(product_v), input_precision=PRECISION) - delta[:, None])
            if SOFTCAP:
                d_scores *= slope
            dq = tl.dot(d_scores.to(product), tl.trans(k), dq, input_precision=PRECISION)

    dq *= scale
    dq_at = dq_ptr + result[:, None] * DIM + d[None, :]
    dq_mask = used[:, None] & (d < DIM)[None, :]
    if not FRESH:
        dq += tl.load(dq_at, mask=dq_mask, other=0.0)
    tl.store(dq_at, dq.to(dq_ptr.dtype.element_ty), mask=dq_mask)


@triton.jit(do_not_specialize=["slots", "key_slots", "query_tiles", "key_tiles", "queries", "keys", "local", "sinks"])
def of_keys(
    q_ptr, k_ptr, v_ptr, d_out_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr,
    query_rows_ptr, start_ptr, stop_ptr, query_position_ptr, bias_ptr, query_tiles_ptr,
    key_rows_ptr, key_slot_ptr, key_position_ptr, key_tiles_ptr, reach_ptr,
    any_bad_ptr, bad_query_ptr, bad_key_ptr,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, g_b, g_h, g_n,
    heads, kv_heads, queries, keys, order_rows, order_heads, key_order_rows, key_order_heads,
    slots, key_slots, query_tiles, key_tiles, local, sinks, scale, softcap,
    DIM: tl.constexpr, DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr, SORTED: tl.constexpr, RULE: tl.constexpr,
    SOFTCAP: tl.constexpr, BIAS: tl.constexpr, FIRST: tl.constexpr, CHECKED: tl.constexpr, WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dk [B, Hkv, Nk, D] and dv [B, Hkv, Nk, Dv], dense; added to unless this pass is the `FIRST`.

    `CHUNK` and `SORTED` are of the query tiles here. Heads of a group are summed one after the other. Scores are held
    transposed, a row a key.
    """
    if tl.load(any_bad_ptr) != CHECKED:
        return
    tile = tl.program_id(0) % key_tiles
    head = tl.program_id(0) // key_tiles
    b = (head // kv_heads).to(tl.int64)
    kv = (head % kv_heads).to(tl.int64)
    group = heads // kv_heads
    of_key = tl.minimum(b, key_order_rows - 1) * key_order_heads + kv * key_order_heads // kv_heads
    accumulator = lse_ptr.dtype.element_ty
    product = k_ptr.dtype.element_ty if q_ptr.dtype == k_ptr.dtype and not WIDE else accumulator
    product_v = v_ptr.dtype.element_ty if not WIDE else accumulator

    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = n < key_slots
    key_rows = tl.load(key_rows_ptr + of_key * key_slots + n, mask=inside, other=0).to(tl.int64)
    slot = tl.load(key_slot_ptr + of_key * key_slots + n, mask=inside, other=2147483647) if SORTED else n
    key_position = tl.load(key_position_ptr + of_key * key_slots + n, mask=inside, other=0)
    result_k = (b * kv_heads + kv) * keys + key_rows
    readable = inside
    if CHECKED:
        readable = inside & (tl.load(bad_key_ptr + result_k) == 0)
    d = tl.arange(0, BLOCK_D)
    dv_ = tl.arange(0, BLOCK_DV)
    k = tl.load(
        k_ptr + b * k_b + kv * k_h + key_rows[:, None] * k_n + d[None, :],
        mask=readable[:, None] & (d < DIM)[None, :],
        other=0.0,
    ).to(product)
    v = tl.load(
        v_ptr + b * v_b + kv * v_h + key_rows[:, None] * v_n + dv_[None, :],
        mask=readable[:, None] & (dv_ < DIM_V)[None, :],
        other=0.0,
    ).to(product_v)
    dk = tl.zeros([BLOCK_N, BLOCK_D], dtype=accumulator)
    dv = tl.zeros([BLOCK_N, BLOCK_DV], dtype=accumulator)
    low, high, k_earliest, k_latest = load_keys(key_tiles_ptr + of_key * 4 * key_tiles, tile, True, key_tiles)

    for member in range(0, group):
        h = kv * group + member
        of_query = tl.minimum(b, order_rows - 1) * order_heads + h * order_heads // heads
        first_tile = tl.load(reach_ptr + of_query * 2 * key_tiles + tile)
        end_tile = tl.load(reach_ptr + (of_query * 2 + 1) * key_tiles + tile)
        if SORTED:
            first_tile = first_tile // CHUNK * CHUNK
        for chunk in range(first_tile, end_tile, CHUNK):
            index = chunk + tl.arange(0, CHUNK)
            start_least, start_most, stop_least, stop_most, earliest, latest = load_queries(
                query_tiles_ptr + of_query * 6 * query_tiles, index, index < end_tile, query_tiles
            )
            some, every = meet(
                start_least, start_most, stop_least, stop_most, earliest, latest, low, high, k_earliest, k_latest,
                local, sinks, RULE,
            )  # fmt: skip
            first, end, whole = span(some, every, CHUNK)
            for i in range(first, end):
                m = (chunk + i) * BLOCK_M + tl.arange(0, BLOCK_M)
                at = of_query * slots + m
                rows = tl.load(query_rows_ptr + at, mask=m < slots, other=-1)
                used = rows >= 0
                rows = tl.maximum(rows, 0).to(tl.int64)
                result = (b * heads + h) * queries + rows
                lse = tl.load(lse_ptr + result, mask=used, other=float("inf"))
                delta = tl.load(delta_ptr + result, mask=used, other=0.0)
                if BIAS:
                    lse -= tl.load(bias_ptr + at, mask=used, other=0.0)
                lse *= LOG2_E
                q_mask = (d < DIM)[None, :]
                g_mask = used[:, None] & (dv_ < DIM_V)[None, :]
                if CHECKED:
                    q_mask = q_mask & (tl.load(bad_query_ptr + result) == 0)[:, None]
                    g_mask = g_mask & (lse < float("inf"))[:, None]
                q_at = q_ptr + b * q_b + h * q_h + rows[:, None] * q_n + d[None, :]
                q = tl.load(q_at) if DIM == BLOCK_D and not CHECKED else tl.load(q_at, mask=q_mask, other=0.0)
                q = q.to(product)
                d_out = tl.load(
                    d_out_ptr + b * g_b + h * g_h + rows[:, None] * g_n + dv_[None, :], mask=g_mask, other=0.0
                ).to(product_v)
                scores = tl.dot(k, tl.trans(q), input_precision=PRECISION) * scale
                if SOFTCAP:
                    scores = capped(scores, softcap)
                    slope = 1.0 - (scores / softcap) * (scores / softcap)
                if ((whole >> i) & 1) == 0:
                    start = tl.load(start_ptr + at, mask=m < slots, other=0)
                    stop = tl.load(stop_ptr + at, mask=m < slots, other=0)
                    query_position = tl.load(query_position_ptr + at, mask=m < slots, other=0)
                    pairs = allowed(
                        start[None, :], stop[None, :], query_position[None, :], slot[:, None], key_position[:, None],
                        local, sinks, RULE,
                    )  # fmt: skip
                    scores = tl.where(pairs, scores, float("-inf"))
                weights = tl.exp2(scores * LOG2_E - lse[None, :])
                dv = tl.dot(weights.to(product_v), d_out, dv, input_precision=PRECISION)
                d_weights = tl.dot(v, tl.trans(d_out), input_precision=PRECISION)
                d_scores = weights * (d_weights - delta[None, :])
                if SOFTCAP:
                    d_scores *= slope
                dk = tl.dot(d_scores.to(product), q, dk, input_precision=PRECISION)

    dk *= scale
    dk_at = dk_ptr + result_k[:, None] * DIM + d[None, :]
    dv_at = dv_ptr + result_k[:, None] * DIM_V + dv_[None, :]
    dk_mask = inside[:, None] & (d < DIM)[None, :]
    dv_mask = inside[:, None] & (dv_ < DIM_V)[None, :]
    if not FIRST:
        dk += tl.load(dk_at, mask=dk_mask, other=0.0)
        dv += tl.load(dv_at, mask=dv_mask, other=0.0)
    tl.store(dk_at, dk.to(dk_ptr.dtype.element_ty), mask=dk_mask)
    tl.store(dv_at, dv.to(dv_ptr.dtype.element_ty), mask=dv_mask)
