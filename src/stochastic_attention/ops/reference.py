"""The oracle: N(i) and its softmax written out densely, O(n^2) in time and memory. No backend imports it.

    allowed[i, j] = same document, j <= i if causal, and the pattern's rule
    score[i, j]   = softcap * tanh(scale * q_i . k_j / softcap) + bias[i, j]      (softcap and bias where given)
    out[i]        = sum_j over allowed of exp(score[i, j]) v_j / (sum_j exp(score[i, j]) + exp(sink_logit))

Shapes: B rows, Hq query heads, Hkv key/value heads, H' = heads that route apart (1, Hkv or Hq), Nq, Nk, D, Dv.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .call import Call
from .layout import Layout, make_layout
from .pattern import Pattern
from .routing import draw_distinct, permutation_ranks


def unsupported(call: Call) -> str | None:
    """The oracle runs whatever SPEC-conforming call reaches it."""
    del call
    return None


def run(call: Call) -> tuple[Tensor, Tensor]:
    """(out [B, Hq, Nq, Dv], lse [B, Hq, Nq]) in the call's compute dtype; the sink is outside the lse."""
    group = call.q.shape[1] // call.k.shape[1]
    q = call.q.to(call.compute_dtype)
    k, v = (x.to(call.compute_dtype).repeat_interleave(group, dim=1) for x in (call.k, call.v))

    # A non-finite key or value poisons the rows that see it, and those alone: 0 * NaN must not leak through products.
    broken_query = ~q.isfinite().all(-1, keepdim=True)
    broken_key, broken_value = (~x.isfinite().all(-1, keepdim=True) for x in (k, v))
    q, k, v = (x.masked_fill(bad, 0.0) for x, bad in ((q, broken_query), (k, broken_key), (v, broken_value)))
    allowed, bias = neighbourhood(call, q, k)
    poisoned = (allowed & ((broken_key | broken_value).mT | broken_query)).any(-1, keepdim=True)

    scores = q @ k.mT * call.scale
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    scores = (scores + bias).masked_fill(~allowed, -math.inf)
    empty = ~allowed.any(-1, keepdim=True)
    lse = scores.masked_fill(empty, 0.0).logsumexp(-1, keepdim=True).masked_fill(empty, -math.inf)
    columns = [scores]
    if call.sink_logits is not None:
        columns.append(call.sink_logits.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:-1], 1))
    weights = torch.cat(columns, dim=-1).masked_fill(empty, 0.0).softmax(-1)[..., : scores.shape[-1]]
    out = weights.masked_fill(~allowed, 0.0) @ v
    return out.masked_fill(poisoned, math.nan), lse.masked_fill(poisoned, math.nan)[..., 0]


def neighbourhood(call: Call, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """allowed: bool [B, Hq, Nq, Nk] and bias, broadcastable to it; q and k with equal head counts."""
    pattern, layout = call.pattern, call.layout
    position = layout.position[:, None, :]
    mine = layout.of_queries(position)
    same = layout.of_queries(layout.first[:, None, :])[..., :, None] == layout.first[:, None, None, :]
    same &= layout.first[:, None, None, :] >= 0
    distance = mine[..., :, None] - position[..., None, :]
    if call.causal:
        same &= distance >= 0
    shape = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    bias = torch.zeros((), dtype=q.dtype, device=q.device)
    if pattern.kind == "full":
        return same.expand(shape), bias
    if pattern.kind == "moba":
        return same & _chosen_blocks(q, k, pattern, layout), bias

    span = pattern.reach if pattern.kind == "local" else pattern.local_window
    certain = position[..., None, :] < pattern.sinks
    if span > 0:
        certain = certain | (distance < span if call.causal else distance.abs() <= span)
    if pattern.kind == "local":
        return (same & certain).expand(shape), bias

    if pattern.kind == "strided":
        steps = distance.abs() // pattern.stride
        near = steps < pattern.reach if call.causal else steps <= pattern.reach
        return (same & (certain | ((distance % pattern.stride == 0) & near))).expand(shape), bias

    if pattern.kind == "bigbird":
        return (same & (certain | _drawn_blocks(call, mine))).expand(shape), bias

    sampled, chance = _sampled(call, mine)
    if pattern.correction:
        bias = torch.where(certain, 0.0, -pattern.correction * chance.log()).to(q.dtype)
    allowed = same & (certain | sampled)
    if allowed.shape[1] > 1:
        allowed = allowed.repeat_interleave(shape[1] // allowed.shape[1], dim=1)
    return allowed.expand(shape), bias


def _sampled(call: Call, mine: Tensor) -> tuple[Tensor, Tensor]:
    """The stochastic rule: bool [B', H', Nq, Nk] where ranks are near, and the chance of it, float64 [B', 1, Nq, 1]."""
    pattern, layout = call.pattern, call.layout
    w, position = pattern.reach, layout.position[:, None, :]
    heads = torch.arange(call.k.shape[1] if pattern.per_head else 1, device=mine.device)[:, None]
    # The number of ranks that each query's permutation has.
    ranks_of_query = mine + 1 if call.decode else layout.of_queries(layout.length[:, None, :])
    if pattern.scope == "prefix":
        ranks_of_query = torch.full_like(mine, w)
        while bool((ranks_of_query <= mine).any()):
            ranks_of_query = torch.where(ranks_of_query <= mine, 2 * ranks_of_query, ranks_of_query)

    shape = (mine.shape[0], len(heads), mine.shape[-1], position.shape[-1])
    sampled = torch.zeros(shape, dtype=torch.bool, device=mine.device)
    for n in ranks_of_query.unique().tolist():
        if n == 0:  # padding
            continue
        if n <= w:  # every rank is near every other
            sampled |= (ranks_of_query == n)[..., :, None]
            continue
        rank = permutation_ranks(n, seed=pattern.seed, step=call.step, layer=call.layer, head=heads, device=mine.device)
        of_query = rank[:, mine.clamp(max=n - 1)].movedim(0, 1)[:, :, 0, :, None]
        of_key = rank[:, position.clamp(max=n - 1)].movedim(0, 1)[:, :, 0, None, :]
        if pattern.shape == "block":
            near = of_query // (2 * w) == of_key // (2 * w)
        elif call.causal:
            near = (of_query - of_key).abs() < w
        else:
            near = (of_query - of_key).abs() <= w
        sampled |= near & (ranks_of_query == n)[..., :, None] & (position < n)[..., None, :]
    chance = ((2 * w - 1) / ranks_of_query.clamp(min=1).double()).clamp(max=1.0)
    return sampled, chance[..., :, None]


def _drawn_blocks(call: Call, mine: Tensor) -> Tensor:
    """BigBird's own and random blocks, without causality inside the own one: bool [B', 1, Nq, Nk]."""
    pattern, layout = call.pattern, call.layout
    block_of_key = layout.position[:, None, None] // pattern.block_size
    own = mine // pattern.block_size
    draws = min(pattern.random_blocks, layout.longest // pattern.block_size)  # more would find no more blocks
    drawn = draw_distinct(own, draws, seed=pattern.seed, step=call.step, layer=call.layer)
    allowed = block_of_key == own[..., None]
    for block in drawn.unbind(-1):
        allowed |= block_of_key == block[..., None]
    return allowed


def _chosen_blocks(q: Tensor, k: Tensor, pattern: Pattern, layout: Layout) -> Tensor:
    """MoBA's rule, without causality inside the own block: bool [B, Hq, Nq, Nk]."""
    size = pattern.block_size
    block_of_key = layout.position // size
    block_of_query = layout.of_queries(block_of_key)
    first_of_query = layout.of_queries(layout.first)
    allowed = torch.zeros(q.shape[0], q.shape[1], q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
    for row in range(q.shape[0]):
        at = min(row, layout.first.shape[0] - 1)
        at_query = min(row, first_of_query.shape[0] - 1)
        for i in range(q.shape[2]):
            own = int(block_of_query[at_query, i])
            members = [
                (layout.first[at] == first_of_query[at_query, i]) & (block_of_key[at] == b) for b in range(own + 1)
            ]
            allowed[row, :, i] = members[own]
            affinity = [(q[row, :, i] * k[row][:, members[b]].mean(1)).sum(-1) for b in range(own)]
            if affinity and pattern.top_k > 1:
                best = torch.stack(affinity).argsort(dim=0, descending=True, stable=True)[: pattern.top_k - 1]
                for head in range(q.shape[1]):
                    for b in best[:, head].tolist():
                        allowed[row, head, i] |= members[b]
    return allowed


def dense_mask(pattern: Pattern, n: int, *, layer: int, step: int, causal: bool, heads: int) -> Tensor:
    """See `Pattern.dense_mask`."""
    if pattern.kind == "moba":
        raise ValueError("dense_mask needs a pattern whose N(i) depends on positions alone; MoBA's depends on q and k")
    heads = heads if pattern.per_head else 1
    tokens = torch.zeros(1, heads, n, 1)
    layout = make_layout(None, None, batch=1, queries=n, keys=n, device=tokens.device)
    call = Call.checked(tokens, tokens, tokens, pattern, layout=layout, layer=layer, step=step, causal=causal)
    return neighbourhood(call, tokens, tokens)[0][0]
