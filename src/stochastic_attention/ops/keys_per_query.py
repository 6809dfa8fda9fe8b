"""How many keys each query sees: the measure that comparisons are held equal by."""

from __future__ import annotations

import torch
from torch import Tensor

from .call import Call
from .layout import make_layout
from .pattern import Pattern
from .plan import lower
from .tiles import groups, tiles
from .validation import check_count


def keys_per_query(
    pattern: Pattern, n: int, *, layer: int = 0, step: int = 0, causal: bool = True, heads: int = 1
) -> Tensor:
    """abs(N(i)) of every query of one document of n tokens, in O(n * window) time and O(n) memory.

    `heads` is the number of key/value heads, used with per_head only. MoBA's count depends on the position alone:
    the own block up to i, and min(top_k - 1, past blocks) whole blocks.

    Returns:
        int64 [1, n], or [heads, n] with per_head.
    """
    check_count("n", n, minimum=0)
    check_count("heads", heads, minimum=1)
    pattern.check_causal(causal)
    if pattern.kind == "moba":
        position = torch.arange(n)
        past = (position // pattern.block_size).clamp(max=pattern.top_k - 1)
        return (position % pattern.block_size + 1 + past * pattern.block_size)[None]
    token = torch.zeros(1, heads if pattern.per_head else 1, n, 1)
    layout = make_layout(None, None, batch=1, queries=n, keys=n, device=token.device)
    call = Call.checked(token, token, token, pattern, layout=layout, layer=layer, step=step, causal=causal)
    counts = torch.zeros(token.shape[1], n, dtype=torch.int64)
    for p in lower(call):
        for group in groups(p, token.shape[1]):
            for tile in tiles(p, group):
                keys = tile.keys.stop - tile.keys.start if tile.allowed is None else tile.allowed.sum(-1)
                counts[group.kv_heads, group.rows[tile.queries]] += keys
    return counts
