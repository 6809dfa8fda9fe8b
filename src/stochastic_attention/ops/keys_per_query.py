"""How many keys each query sees: the measure that comparisons are held equal by."""

from __future__ import annotations

import torch
from torch import Tensor

from .call import Call
from .gather import neighbours, sees_whole_past
from .layout import make_layout
from .pattern import Pattern
from .plan import lower
from .tiles import groups, tiles
from .validation import check_count

_QUERIES_AT_ONCE = 64  # of those with a permutation each, which takes n integers a query


def keys_per_query(
    pattern: Pattern,
    n: int,
    *,
    layer: int = 0,
    step: int = 0,
    causal: bool = True,
    heads: int = 1,
    first: int = 0,
    decode: bool = False,
) -> Tensor:
    """abs(N(i)) of the queries i = first ... n - 1 of one document of n tokens, in O(n * window) time and O(n) memory.

    `heads` is the number of key/value heads, used with per_head only. MoBA's count depends on the position alone:
    the own block up to i, and min(top_k - 1, past blocks) whole blocks.

    `decode`: each query counts as the newest token of its document, as in `attention`. That changes the counts of scope
    "sequence" alone, whose permutation is then one of i + 1 tokens; it adds O(n) integers a query to the time.

    Returns:
        int64 [1, n - first], or [heads, n - first] with per_head.
    """
    check_count("n", n, minimum=0)
    check_count("heads", heads, minimum=1)
    check_count("first", first, minimum=0, maximum=n)
    pattern.check_causal(causal)
    position = torch.arange(first, n)
    if pattern.kind == "moba":
        past = (position // pattern.block_size).clamp(max=pattern.top_k - 1)
        return (position % pattern.block_size + 1 + past * pattern.block_size)[None]
    key = torch.zeros(1, heads if pattern.per_head else 1, n, 1)
    layout = make_layout(None, position, batch=1, queries=n - first, keys=n, device=key.device)
    call = Call.checked(
        key[:, :, first:], key, key, pattern, layout=layout, layer=layer, step=step, causal=causal, decode=decode
    )
    counts = torch.zeros(key.shape[1], n - first, dtype=torch.int64)
    if call.permutes_each_prefix and not sees_whole_past(call):
        for begin in range(0, n - first, _QUERIES_AT_ONCE):
            queries = slice(begin, begin + _QUERIES_AT_ONCE)
            counts[:, queries] = neighbours(call, queries).allowed.sum(-1)[0]
        return counts
    for p in lower(call):
        for group in groups(p, key.shape[1]):
            for tile in tiles(p, group):
                keys = tile.keys.stop - tile.keys.start if tile.allowed is None else tile.allowed.sum(-1)
                counts[group.kv_heads, group.rows[tile.queries]] += keys
    return counts
