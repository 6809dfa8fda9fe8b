"""N(i) and its softmax in plain Python loops over single tokens: what the oracle itself is checked against.

Written from the definitions, sharing no code with the package: sets and sorted lists in place of masks and tensors.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from stochastic_attention import Pattern


def _mix(x: int) -> int:
    x ^= x >> 16
    x = x * 0x7FEB352D % 2**32
    x ^= x >> 15
    x = x * 0x846CA68B % 2**32
    return x ^ (x >> 16)


def hash32(position: int, *, seed: int, step: int = 0, layer: int = 0, head: int = 0) -> int:
    """The routing key of one position, in Python's unbounded integers."""
    words = (seed % 2**32, seed // 2**32, step % 2**32, step // 2**32, layer, head)
    u = position
    for key in (0x9E3779B9, 0x85EBCA77):
        for word in words:
            key = _mix(key ^ word)
        u = _mix(u ^ key)
    return u


@lru_cache(maxsize=4096)
def ranks(n: int, *, seed: int, step: int = 0, layer: int = 0, head: int = 0) -> tuple[int, ...]:
    """The rank of each of n positions: its place in the order of (key, position)."""
    drawn = sorted((hash32(p, seed=seed, step=step, layer=layer, head=head), p) for p in range(n))
    place = {p: r for r, (_, p) in enumerate(drawn)}
    return tuple(place[p] for p in range(n))


def visible(
    pattern: Pattern,
    documents: list[int],
    token: int,
    *,
    causal: bool = True,
    decode: bool = False,
    layer: int = 0,
    step: int = 0,
    head: int = 0,
    query: Tensor | None = None,
    keys: Tensor | None = None,
) -> dict[int, float]:
    """N(i) as {key index: logit bias}, of the query that stands at `token` of one row; `head` is a key/value head.

    MoBA also reads the query [D] and the row's keys [N, D].
    """
    if documents[token] < 0:
        return {}
    own = [j for j, document in enumerate(documents) if document == documents[token]]
    i = own.index(token)
    if pattern.kind == "moba":
        assert query is not None
        assert keys is not None
        chosen = _moba_blocks(pattern, own, i, query, keys)
        return {own[p]: 0.0 for p in range(i + 1) if p // pattern.block_size in chosen}
    biases = {}
    for p in range(i + 1 if causal else len(own)):
        n = i + 1 if decode else len(own)
        bias = _bias(pattern, i, p, n=n, causal=causal, layer=layer, step=step, head=head)
        if bias is not None:
            biases[own[p]] = bias
    return biases


def _bias(pattern: Pattern, i: int, p: int, *, n: int, causal: bool, layer: int, step: int, head: int) -> float | None:
    """The logit bias of the key at position p for the query at position i, None where it is not in N(i)."""
    if pattern.kind == "full":
        return 0.0
    span = pattern.window if pattern.kind == "local" else pattern.local_window
    # A causal window counts the query itself; one that looks both ways counts the steps to either side.
    if p < pattern.sinks or (span > 0 and abs(i - p) <= (span - 1 if causal else span)):
        return 0.0
    if pattern.kind == "local":
        return None
    if pattern.kind == "strided":
        most = n if pattern.window is None else pattern.window - (1 if causal else 0)
        return 0.0 if abs(i - p) in [step * pattern.stride for step in range(most + 1)] else None
    if pattern.kind == "bigbird":
        return 0.0 if p // pattern.block_size in _bigbird_blocks(pattern, i, layer=layer, step=step) else None
    w, total = pattern.window, n
    if pattern.scope == "prefix":
        total = next(w * 2**m for m in range(64) if w * 2**m >= i + 1)
    rank = ranks(total, seed=pattern.seed, step=step, layer=layer, head=head if pattern.per_head else 0)
    if pattern.shape == "block":
        near = rank[i] // (2 * w) == rank[p] // (2 * w)
    else:
        near = abs(rank[i] - rank[p]) <= (w - 1 if causal else w)
    return pattern.correction * math.log(1 / min(1, (2 * w - 1) / total)) if near else None


def _bigbird_blocks(pattern: Pattern, i: int, *, layer: int, step: int) -> set[int]:
    own = i // pattern.block_size
    if own <= pattern.random_blocks:
        return set(range(own + 1))
    drawn: set[int] = set()
    for draw in range(pattern.random_blocks):
        last = own - pattern.random_blocks + draw
        number = hash32(own, seed=pattern.seed, step=step, layer=layer, head=draw) * (last + 1) // 2**32
        drawn.add(last if number in drawn else number)
    return {own, *drawn}


def _moba_blocks(pattern: Pattern, own: list[int], i: int, query: Tensor, keys: Tensor) -> set[int]:
    size = pattern.block_size
    affinity = {b: float(query @ keys[own[b * size : (b + 1) * size]].mean(0)) for b in range(i // size)}
    best = sorted(affinity, key=affinity.__getitem__, reverse=True)[: pattern.top_k - 1]
    return {i // size, *best}


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern,
    *,
    layer: int = 0,
    step: int = 0,
    causal: bool = True,
    decode: bool = False,
    query_positions: Tensor | None = None,
    documents: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse), query by query, from the keys of N(i) alone; same arguments as the op."""
    batch, heads, queries = q.shape[:3]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    rows = torch.zeros(batch, k.shape[2], dtype=torch.int64) if documents is None else documents
    places = torch.arange(queries) if query_positions is None else query_positions
    places = places.expand(batch, queries)
    outs, lses = [], []
    for b in range(batch):
        for h in range(heads):
            shared = h // (heads // k.shape[1])
            for i in range(queries):
                seen = visible(
                    pattern,
                    rows[b].tolist(),
                    int(places[b, i]),
                    causal=causal,
                    decode=decode,
                    layer=layer,
                    step=step,
                    head=shared,
                    query=q[b, h, i].detach(),
                    keys=k[b, shared].detach(),
                )
                if not seen:
                    outs.append(q.new_zeros(v.shape[-1]))
                    lses.append(q.new_full((), -math.inf))
                    continue
                scores = k[b, shared, list(seen)] @ q[b, h, i] * scale
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                scores = scores + torch.tensor(list(seen.values()), dtype=scores.dtype)
                logits = scores if sink_logits is None else torch.cat([scores, sink_logits[h : h + 1]])
                outs.append(logits.softmax(0)[: len(seen)] @ v[b, shared, list(seen)])
                lses.append(scores.logsumexp(0))
    return torch.stack(outs).view(batch, heads, queries, -1), torch.stack(lses).view(batch, heads, queries)
