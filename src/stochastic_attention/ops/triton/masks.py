"""Which pairs of a tile may meet: what forward and backward share. Mirrored, in PyTorch, by `work`."""

import triton
import triton.language as tl

# How a pass's rule reads distances; see `plan.Rule`.
NO_RULE = tl.constexpr(0)
CAUSAL = tl.constexpr(1)
BOTH_WAYS = tl.constexpr(2)


@triton.jit
def allowed(start, stop, query_position, slot, key_position, local, sinks, RULE: tl.constexpr):
    """The pairs of a tile that its intervals and the rule allow; queries and keys broadcast against each other."""
    pairs = (slot >= start) & (slot < stop)
    if RULE == CAUSAL:
        pairs = pairs & (query_position - key_position >= local) & (key_position >= sinks)
    elif RULE == BOTH_WAYS:
        pairs = pairs & (tl.abs(query_position - key_position) > local) & (key_position >= sinks)
    return pairs


@triton.jit
def load_queries(tiles, index, valid, TILES):
    """The six extremes of query tiles; see `schedule.Tiles`. What is not valid is an empty tile."""
    start_least = tl.load(tiles + index, mask=valid, other=2147483647)
    start_most = tl.load(tiles + TILES + index, mask=valid, other=-1)
    stop_least = tl.load(tiles + 2 * TILES + index, mask=valid, other=2147483647)
    stop_most = tl.load(tiles + 3 * TILES + index, mask=valid, other=-1)
    earliest = tl.load(tiles + 4 * TILES + index, mask=valid, other=2147483647)
    latest = tl.load(tiles + 5 * TILES + index, mask=valid, other=-1)
    return start_least, start_most, stop_least, stop_most, earliest, latest


@triton.jit
def load_keys(tiles, index, valid, TILES):
    """The four extremes of key tiles; see `schedule.Tiles`. What is not valid is out of every query's reach."""
    low = tl.load(tiles + index, mask=valid, other=2147483647)
    high = tl.load(tiles + TILES + index, mask=valid, other=-1)
    earliest = tl.load(tiles + 2 * TILES + index, mask=valid, other=2147483647)
    latest = tl.load(tiles + 3 * TILES + index, mask=valid, other=-1)
    return low, high, earliest, latest


@triton.jit
def meet(
    start_least, start_most, stop_least, stop_most, q_earliest, q_latest, low, high, k_earliest, k_latest,
    local, sinks, RULE: tl.constexpr,
):  # fmt: skip
    """(some pair of two tiles may be allowed, every pair is); tiles broadcast against each other."""
    some = (start_least <= high) & (stop_most > low)
    every = (start_most <= low) & (stop_least > high)
    if RULE == CAUSAL:
        some = some & (q_latest - local >= k_earliest) & (k_latest >= sinks)
        every = every & (q_earliest - local >= k_latest) & (k_earliest >= sinks)
    elif RULE == BOTH_WAYS:
        some = some & ((q_latest - k_earliest > local) | (k_latest - q_earliest > local)) & (k_latest >= sinks)
        every = every & ((q_earliest - k_latest > local) | (k_earliest - q_latest > local)) & (k_earliest >= sinks)
    return some, every


@triton.jit
def span(some, every, CHUNK: tl.constexpr):
    """Of a chunk of tiles: (first that some pair meets, end of those, a bit for each that every pair meets)."""
    place = tl.arange(0, CHUNK)
    first = tl.min(tl.where(some, place, CHUNK), axis=0)
    end = tl.max(tl.where(some, place + 1, 0), axis=0)
    bits = tl.sum(tl.where(every, 1 << place, 0), axis=0)
    return first, end, bits


@triton.jit
def capped(scores, cap):
    """cap * tanh(scores / cap), the tanh by an exponential that cannot overflow to NaN."""
    return cap * (1.0 - 2.0 / (1.0 + tl.exp2(scores * (2.0 * 1.4426950408889634 / cap))))
