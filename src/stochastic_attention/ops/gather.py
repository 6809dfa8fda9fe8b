"""Few queries against many keys, as in decoding: each query gathers its own keys and attends to those alone.

A query's N(i) is found by looking up which positions stand at the ranks near its own, not by sorting the keys: it
reads O(window) keys and values, beside O(Nk) cheap integers where there are documents and in scope "sequence". Column
counts depend on the pattern alone and no tensor is read on the host outside of eager CPU code, so that it compiles
into one graph.

Shapes: B' and H' are 1 where all rows or all heads share; Nq queries, Nk keys, C columns (places for keys) a query.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from operator import index
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import few_queries, products
from .call import Call
from .merge import apply_sink
from .pattern import Pattern
from .plan import correction_bias
from .products import Neighbours
from .rank_tables import rank_table
from .routing import draw_distinct

_MOST_QUERIES = 64  # beyond, queries share enough keys for sorting them once to be cheaper
_WIDEST_ON_GPU = 256  # of a head
_ELEMENTS_AT_ONCE = 1 << 24  # bounds what a slice of the queries gathers


def unsupported(call: Call) -> str | None:
    """Few queries that look back; any number where each has a permutation of its own, which nothing else can share."""
    if 0 in (call.q.shape[0], call.q.shape[2], call.k.shape[2]):
        return "no query or no key"
    if call.pattern.kind == "moba":
        return "MoBA chooses its keys by their content"
    if not call.causal:
        return "causal=True only"
    if call.permutes_each_prefix:
        return None
    if call.layout.queries_are_keys and call.q.shape[2] > 1:
        return "the queries are the keys themselves, and each key is wanted by many"
    if call.q.shape[2] > _MOST_QUERIES:
        return f"at most {_MOST_QUERIES} queries, got {call.q.shape[2]}"
    return None


def run(call: Call) -> tuple[Tensor, Tensor]:
    """(out [B, Hq, Nq, Dv], lse [B, Hq, Nq]) in the call's compute dtype; the sink is outside the lse."""
    k, v = call.k, call.v
    if _can_run_on_gpu(call):
        pass  # it reads what there is
    elif sees_whole_past(call) or (torch.is_grad_enabled() and (k.requires_grad or v.requires_grad)):
        # Gathered rows are cast, few as they are; gradients of a key that many queries gather are summed before.
        k, v = k.to(call.compute_dtype), v.to(call.compute_dtype)
    size = max(1, _ELEMENTS_AT_ONCE // _elements_of_a_query(call))
    parts = [_attend(call, k, v, slice(begin, begin + size)) for begin in range(0, call.q.shape[2], size)]
    out, lse = parts[0] if len(parts) == 1 else (torch.cat(part, dim=2) for part in zip(*parts, strict=True))
    return (out if call.sink_logits is None else apply_sink(out, lse, call.sink_logits)), lse


def _elements_of_a_query(call: Call) -> int:
    batch, kv_heads, keys, width = call.v.shape
    if sees_whole_past(call):
        return batch * call.q.shape[1] * keys
    return batch * kv_heads * max(columns(call) * max(width, call.q.shape[-1]), keys)


def sees_whole_past(call: Call) -> bool:
    """Whether N(i) is all of the document up to i, whatever the length of the document."""
    p = call.pattern
    return max(p.saturation, p.local_window, p.sinks) >= call.k.shape[2]


def columns(call: Call) -> int:
    """Keys that are gathered for each query, the places that stay empty included."""
    p = call.pattern
    if p.kind == "local":
        return p.reach + p.sinks
    if p.kind == "strided":
        return p.local_window + p.sinks + len(_strides(call))
    if p.kind == "bigbird":
        return p.local_window + p.sinks + (1 + p.random_blocks) * p.block_size
    return p.local_window + p.sinks + (2 * p.reach - (p.shape == "sliding"))


def _strides(call: Call) -> range:
    """How far back the strided keys of a query stand, as many as there are keys for."""
    stride, keys = call.pattern.stride, call.k.shape[2]
    return range(0, min(call.pattern.reach, (keys - 1) // stride + 1) * stride, stride)


@dataclass(frozen=True)
class _Places:
    """Where the queries stand, found by counting the tokens of their documents.

    Attributes:
        token: int64 [B', Nq], the key index of each query.
        position: int64 [B', Nq], position in the document; 0 for padding.
        length: int64 [B', Nq], tokens in the document; 0 for padding.
        counted: int32 [B', Nq, Nk], how many tokens of the query's document stand at or before each key; None where
            all keys are one document, so that a position is a key index.
        member: bool [B', Nq, Nk], which keys are in the query's document; None likewise.
    """

    token: Tensor
    position: Tensor
    length: Tensor
    counted: Tensor | None
    member: Tensor | None

    @classmethod
    def of(cls, call: Call, queries: slice) -> _Places:
        documents, token = call.layout.documents, call.layout.query_token[:, queries]
        if documents is None:
            return cls(token, token, torch.full_like(token, call.layout.keys), None, None)
        rows = max(len(documents), len(token))
        documents, token = documents.expand(rows, -1), token.expand(rows, -1)
        own = documents.gather(-1, token)[..., None]
        member = (documents[:, None] == own) & (own >= 0)
        counted = member.cumsum(-1, dtype=torch.int32)
        position = (counted.gather(-1, token[..., None])[..., 0] - 1).clamp(min=0)
        return cls(token, position.long(), counted[..., -1].long(), counted, member)

    def slots(self, position: Tensor) -> Tensor:
        """The key at each position [B', H', Nq, C] of the query's document; for those it has not, any number."""
        if self.counted is None:
            return position
        wanted = (position + 1).to(torch.int32).movedim(2, 1)
        found = torch.searchsorted(self.counted, wanted.flatten(2).contiguous())
        return found.view(wanted.shape).movedim(1, 2)


def neighbours(call: Call, queries: slice) -> Neighbours:
    """N(i) of some of the queries, each key in one column: the local window, the sinks, then the others."""
    places, pattern = _Places.of(call, queries), call.pattern
    i = places.position[:, None, :, None]
    span = pattern.reach if pattern.kind == "local" else pattern.local_window
    offsets = torch.arange(max(span, pattern.sinks), device=i.device)
    local, sinks = i - offsets[:span], offsets[: pattern.sinks].expand(*i.shape[:3], -1)
    position, allowed = [local, sinks], [local >= pattern.sinks, sinks <= i]
    bias = None
    if pattern.kind in ("strided", "bigbird"):
        others = (_strided if pattern.kind == "strided" else _own_and_drawn_blocks)(call, i)
        position.append(others)
        allowed.append((others <= i - span) & (others >= pattern.sinks))
    if pattern.kind == "stochastic":
        sampled, exists, ranks = _sampled(call, places)
        position.append(sampled)
        allowed.append(exists & (sampled <= i - span) & (sampled >= pattern.sinks))
        bias = correction_bias(call, ranks)
        bias = None if bias is None else F.pad(bias.expand(-1, -1, -1, sampled.shape[-1]), (span + pattern.sinks, 0))
    position, allowed = (
        torch.cat([x.expand(-1, parts[-1].shape[1], -1, -1) for x in parts], dim=-1) for parts in (position, allowed)
    )
    allowed = allowed & (places.length > 0)[:, None, :, None]
    slot = torch.where(allowed, places.slots(position), places.token[:, None, :, None])
    return Neighbours(slot, allowed, bias)


def _strided(call: Call, i: Tensor) -> Tensor:
    """Positions at the strides back from queries at i, int64 [B', 1, Nq, C]."""
    back = _strides(call)
    return i - torch.arange(back.start, back.stop, back.step, device=i.device)


def _own_and_drawn_blocks(call: Call, i: Tensor) -> Tensor:
    """Positions in BigBird's blocks of queries at i, int64 [B', 1, Nq, C]; below 0 where there are fewer blocks."""
    pattern, own = call.pattern, i // call.pattern.block_size
    # Numbers, where a compiler may hold symbols, whose hash would be one long expression of them.
    seed, layer = index(pattern.seed), index(call.layer)
    step = call.step if isinstance(call.step, Tensor) else index(call.step)
    drawn = draw_distinct(own[..., 0], pattern.random_blocks, seed=seed, step=step, layer=layer)
    start = torch.cat([own, drawn], dim=-1)[..., None] * pattern.block_size
    return (start + torch.arange(pattern.block_size, device=i.device)).flatten(-2)


def _sampled(call: Call, places: _Places) -> tuple[Tensor, Tensor, Tensor]:
    """Keys by the stochastic rule, later ones and certain ones among them.

    Returns:
        their positions, int64 [B', H', Nq, C]; whether there is one, bool likewise; and the number of ranks that the
        query's permutation has, int64 [B', 1, Nq, 1].
    """
    pattern, w = call.pattern, call.pattern.reach
    rank, ranks, position_at = (_prefix_ranks if pattern.scope == "prefix" else _sequence_ranks)(call, places)
    if pattern.shape == "block":
        near = rank // (2 * w) * (2 * w) + torch.arange(2 * w, device=rank.device)
    else:
        near = rank + torch.arange(1 - w, w, device=rank.device)
    exists = (near >= 0) & (near < ranks)
    return position_at(torch.minimum(near.clamp(min=0), (ranks - 1).clamp(min=0))), exists, ranks


Ranks = tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]


def _prefix_ranks(call: Call, places: _Places) -> Ranks:
    """Scope "prefix": each query's rank [B', H', Nq, 1], its number of ranks [B', 1, Nq, 1], and ranks to positions."""
    w, levels = call.pattern.reach, _levels(call)
    i = places.position[:, None, :, None]
    level = (i >= w << torch.arange(levels - 1, device=i.device)).sum(-1, keepdim=True)
    ranks = w << level
    table, head = _table(call, w, levels)
    begin = ranks - w  # where the table holds the level
    return table[0, head, begin + i].long(), ranks, lambda near: table[1, head, begin + near].long()


def _levels(call: Call) -> int:
    """How many levels the keys of scope "prefix" may need."""
    levels = 1
    while call.pattern.reach << (levels - 1) < call.layout.keys:
        levels += 1
    return levels


def _sequence_ranks(call: Call, places: _Places) -> Ranks:
    """Scope "sequence", likewise. The order of n tokens is that of more, those from n on left out."""
    capacity = 1 << (call.layout.keys - 1).bit_length()
    table, head = _table(call, capacity, 1)
    order = table[1, :, :capacity]
    length = places.position + 1 if call.decode else places.length
    ranks = length[:, None, :, None]
    counted = (order[:, None] < ranks).cumsum(-1, dtype=torch.int32)  # [B', H', Nq, capacity]
    rank = counted.gather(-1, table[0, head, places.position[:, None, :, None]].long()) - 1

    def position_at(near: Tensor) -> Tensor:
        at = torch.searchsorted(counted, (near + 1).to(torch.int32)).clamp(max=capacity - 1)
        return order[head, at].long()

    return rank.long(), ranks, position_at


def _table(call: Call, smallest: int, levels: int) -> tuple[Tensor, Tensor]:
    """The permutations, and the head index [H', 1, 1] that reads them by head."""
    device = call.k.device
    heads = call.k.shape[1] if call.pattern.per_head else 1
    table = rank_table(
        smallest, levels, seed=call.pattern.seed, step=call.step, layer=call.layer, heads=heads, device=device
    )
    return table, torch.arange(heads, device=device)[:, None, None]


def _attend(call: Call, k: Tensor, v: Tensor, queries: slice) -> tuple[Tensor, Tensor]:
    """Attention of some of the queries, sinks left out."""
    q = call.q[:, :, queries]
    options = {"dtype": call.compute_dtype, "scale": call.scale, "softcap": call.softcap}
    on_gpu = _can_run_on_gpu(call)
    if sees_whole_past(call):
        found = _whole_past(call, queries)
    elif on_gpu and call.layout.documents is None and _has_finder(call.pattern):
        found = _find_on_gpu(call, queries)
    else:
        found = neighbours(call, queries)
    # Which code runs depends on what was given, not on whether a gradient had it cast.
    if on_gpu:
        from .triton import queries as kernels

        return kernels.attend(q, k, v, found, scale=call.scale, softcap=call.softcap)
    if found.slot is not None and few_queries.can_attend(call.k, call.v, call.compute_dtype):
        return _Compiled.apply(q, k, v, found, options)
    return products.attend(q, k, v, found, **options)


class _Compiled(torch.autograd.Function):
    """The compiled kernel forward, whether or not a gradient is wanted: a recomputed layer gets the same numbers."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - autograd's context has no public type
        q: Tensor,
        k: Tensor,
        v: Tensor,
        found: Neighbours,
        options: dict[str, Any],
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(q, k, v)
        ctx.found, ctx.options = found, options
        return few_queries.attend(q, k, v, found, **options)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - its own arguments
        ctx: Any,  # noqa: ANN401
        d_out: Tensor,
        d_lse: Tensor,
    ) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad[:3]
        return (*products.gradients(ctx.saved_tensors, ctx.found, d_out, d_lse, wanted, **ctx.options), None, None)


def _has_finder(pattern: Pattern) -> bool:
    """Whether a kernel finds the keys: by the window, or by ranks that a table holds."""
    return pattern.kind == "local" or (pattern.kind == "stochastic" and pattern.scope == "prefix")


def _can_run_on_gpu(call: Call) -> bool:
    """Whether the kernels for CUDA devices take the call: they compute in float32, heads that fit into registers."""
    fits = call.compute_dtype == torch.float32 and max(call.k.shape[-1], call.v.shape[-1]) <= _WIDEST_ON_GPU
    return call.k.device.type == "cuda" and fits and _has_triton()


@torch.compiler.assume_constant_result
def _has_triton() -> bool:
    return find_spec("triton") is not None


def _find_on_gpu(call: Call, queries: slice) -> Neighbours:
    """`neighbours`, where a table alone says who is near."""
    from .triton import queries as kernels

    token, table, levels, heads = call.layout.query_token[:, queries], None, 1, 1
    if call.pattern.kind == "stochastic":
        levels = _levels(call)
        table, _ = _table(call, call.pattern.reach, levels)
        heads = table.shape[1]
    return kernels.find(token, table, call.pattern, levels=levels, heads=heads, keys=call.layout.keys)


def _whole_past(call: Call, queries: slice) -> Neighbours:
    """The keys at or before each query in its document."""
    places = _Places.of(call, queries)
    past = torch.arange(call.layout.keys, device=call.k.device) <= places.token[..., None]
    return Neighbours(None, (past if places.member is None else past & places.member)[:, None], None)
