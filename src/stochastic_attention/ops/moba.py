"""MoBA's routing (arXiv 2502.13189): which past blocks a query attends to, by its affinity to their mean key."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .call import Call

_SCORES_AT_ONCE = 1 << 22  # bounds the queries x blocks table, which would be quadratic if it were whole


def choose_blocks(call: Call) -> Tensor:
    """The top_k - 1 past blocks of each query, as the packed slot of their first token.

    Affinity is q . mean(k) over blocks of the query's document that end before its own; ties go to the earlier block.
    The choice is not differentiated.

    Returns:
        int64 [B, Hq, Nq, choices], best first, -1 where there are fewer past blocks than choices; at most top_k - 1
        choices, and no more than the longest document has past blocks.
    """
    layout, size = call.layout, call.pattern.block_size
    choices = min(call.pattern.top_k, layout.longest // size + 1) - 1
    batch, heads, queries, width = call.q.shape
    groups = call.k.shape[1]
    q, k = (x.detach().to(call.compute_dtype) for x in (call.q, call.k))
    q, k = (x.masked_fill(~x.isfinite().all(-1, keepdim=True), 0.0) for x in (q, k))
    q = q.unflatten(1, (groups, heads // groups))

    # Blocks are numbered along the packed key axis; -1 is padding.
    opens = ((layout.position % size == 0) & (layout.first >= 0)).gather(-1, layout.packed_order)
    number = (opens.cumsum(-1) - 1).gather(-1, layout.packed).masked_fill(layout.first < 0, -1)
    blocks = int(number.max()) + 1 if number.numel() else 0
    if not choices or not blocks:
        return torch.full((batch, heads, queries, choices), -1, dtype=torch.int64, device=k.device)
    slot_of_block = torch.zeros(len(number), blocks + 1, dtype=torch.int64, device=k.device).scatter_(
        -1, torch.where(layout.position % size == 0, number, blocks).masked_fill(number < 0, blocks), layout.packed
    )
    # Only whole blocks are ever chosen, so the sum over `size` keys is the mean.
    means = torch.zeros(batch, groups, blocks + 1, width, dtype=k.dtype, device=k.device)
    target = number.masked_fill(number < 0, blocks).expand(batch, -1)[:, None, :, None].expand_as(k)
    means = means.scatter_add_(2, target, k / size)[:, :, None, :blocks]

    own = layout.of_queries(number)
    oldest = own - layout.of_queries(layout.position) // size
    chosen = torch.full((batch, heads, queries, choices), -1, dtype=torch.int64, device=k.device)
    index = torch.arange(blocks, device=k.device)
    step = max(1, _SCORES_AT_ONCE // max(1, batch * heads * blocks))
    for begin in range(0, queries, step):
        part = slice(begin, begin + step)
        allowed = (index >= oldest[:, part, None]) & (index < own[:, part, None])
        affinity = (q[..., part, :] @ means.mT).flatten(1, 2).masked_fill(~allowed[:, None], -math.inf)
        slots = slot_of_block.expand(batch, -1)[:, None, None].expand(*affinity.shape[:3], -1)
        for choice in range(min(choices, blocks)):  # a maximum at a time: unlike topk, it settles ties by index
            best, block = affinity.max(dim=-1, keepdim=True)
            chosen[:, :, part, choice] = torch.where(best == -math.inf, -1, slots.gather(-1, block))[..., 0]
            affinity.scatter_(-1, block, -math.inf)
    return chosen
