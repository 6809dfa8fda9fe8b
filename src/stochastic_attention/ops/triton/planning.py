"""The kernels that plan: routing keys, and the extremes of tiles, in a launch each where PyTorch takes dozens.

All is integer arithmetic, and equals `routing.routing_keys` and `schedule` bit for bit.
"""

# pyright: reportArgumentType=false, reportOperatorIssue=false
# (a kernel's numbers are not Python's)
import triton
import triton.language as tl


@triton.jit
def _mix(x):
    """`routing._mix`, of 32-bit words that wrap."""
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _mix_words(state, step_ptr, layer, head, STEP: tl.constexpr):
    """`routing.mix_words` of what `state` has not taken in yet."""
    key = state.to(tl.uint32, bitcast=True)
    if STEP:
        step = tl.load(step_ptr)
        key = _mix(key ^ step.to(tl.uint32))
        key = _mix(key ^ (step >> 32).to(tl.uint32))
        key = _mix(key ^ layer.to(tl.uint32, bitcast=True))
    return _mix(key ^ head)


@triton.jit(do_not_specialize=["first", "second", "layer", "head", "heads", "positions"])
def draw(
    position_ptr, head_ptr, step_ptr, keys_ptr, first, second, layer, head, heads, positions,
    STEP: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Routing keys int64 [rows, heads, positions] of int64 [rows, positions]; see `keys`, which launches it."""
    blocks = tl.cdiv(positions, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    word = tl.load(head_ptr + row % heads).to(tl.uint32) if HEADS else head.to(tl.uint32, bitcast=True)
    n = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    u = tl.load(position_ptr + row // heads * positions + n, mask=n < positions, other=0).to(tl.uint32)
    u = _mix(u ^ _mix_words(first, step_ptr, layer, word, STEP))
    u = _mix(u ^ _mix_words(second, step_ptr, layer, word, STEP))
    tl.store(keys_ptr + row * positions + n, u.to(tl.int64), mask=n < positions)


_NONE = tl.constexpr(2147483647)  # `schedule.NONE`


@triton.jit
def _extremes(values_ptr, used):
    """(least, greatest) of the values in use."""
    values = tl.load(values_ptr, mask=used, other=0)
    return tl.min(tl.where(used, values, _NONE), axis=0), tl.max(tl.where(used, values, -1), axis=0)


@triton.jit
def _store(to_ptr, stride, least, most):
    tl.store(to_ptr, least)
    tl.store(to_ptr + stride, most)


@triton.jit(do_not_specialize=["slots", "key_slots", "query_tiles", "key_tiles", "key_orders"])
def extremes(
    query_rows_ptr, start_ptr, stop_ptr, query_position_ptr, key_slot_ptr, key_position_ptr, queries_ptr, keys_ptr,
    slots, key_slots, query_tiles, key_tiles, key_orders,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SORTED: tl.constexpr,
):  # fmt: skip
    """One tile of queries and one of keys a program: `schedule.Tiles` of [B' * H'] orders of queries."""
    tiles = tl.maximum(query_tiles, key_tiles)
    tile = tl.program_id(0) % tiles
    order = (tl.program_id(0) // tiles).to(tl.int64)
    if tile < query_tiles:
        m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        at = order * slots + m
        used = tl.load(query_rows_ptr + at, mask=m < slots, other=-1) >= 0
        to_ptr = queries_ptr + order * 6 * query_tiles + tile
        least, most = _extremes(start_ptr + at, used)
        _store(to_ptr, query_tiles, least, most)
        least, most = _extremes(stop_ptr + at, used)
        _store(to_ptr + 2 * query_tiles, query_tiles, least, most)
        least, most = _extremes(query_position_ptr + at, used)
        _store(to_ptr + 4 * query_tiles, query_tiles, least, most)
    if tile < key_tiles and order < key_orders:
        n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        at = order * key_slots + n
        to_ptr = keys_ptr + order * 4 * key_tiles + tile
        least, most = tile * BLOCK_N, (tile + 1) * BLOCK_N - 1
        if SORTED:
            least, most = _extremes(key_slot_ptr + at, n < key_slots)
        most = tl.where((tile + 1) * BLOCK_N > key_slots, _NONE, most)  # no query sees all of a tile that is not full
        _store(to_ptr, key_tiles, least, most)
        least, most = _extremes(key_position_ptr + at, n < key_slots)
        _store(to_ptr + 2 * key_tiles, key_tiles, least, most)
