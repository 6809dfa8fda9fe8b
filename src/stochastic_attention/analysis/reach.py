"""Receptive fields: which source tokens can influence a query through k layers, measured and in closed form.

The field of query i through k layers is what i sees in the last layer of the stack, what those keys see in the layer
before, and so on through k layers, each with its own edges. Coverage is the share of its possible sources that a field
holds: of all j <= i if causal, of all n tokens otherwise.

Going back a layer needs no search over pairs. Say that query i, already in the field, marks all keys of its interval
with its position, and that every key keeps the largest mark it gets. A key j joins the field if that mark is >= j: some
query of the field has j in its interval, and comes no earlier. Intervals are marked as two overlapping runs of a power
of two of keys, and runs are halved until they are single keys: O(n log window) for a field and layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..ops.pattern import Pattern
from ..ops.validation import check_count
from .edges import Edges, Interval, layer_edges

_FIELDS_AT_ONCE = 16  # rows of a working table: long enough for vector units, short enough for a processor's cache


@dataclass(frozen=True)
class Fields:
    """Sizes of receptive fields.

    Attributes:
        queries: int64 [Q], positions.
        possible: int64 [Q], the tokens that each could see.
        sizes: int64 [layers, Q], tokens in the field through 1, 2, ... layers, the query among them.
    """

    queries: NDArray[np.int64]
    possible: NDArray[np.int64]
    sizes: NDArray[np.int64]

    @property
    def coverage(self) -> NDArray[np.float64]:
        """float64 [layers, Q]."""
        return self.sizes / self.possible


def sample_queries(n: int, count: int, *, seed: int = 0) -> NDArray[np.int64]:
    """`count` positions in [0, n), one uniform in each of `count` equal stretches, ascending; all where count = n.

    Each position is as likely as any other, so means over the sample are unbiased; two neighbours may coincide.
    """
    check_count("n", n, minimum=1)
    check_count("count", count, minimum=1, maximum=n)
    if count == n:
        return np.arange(n)
    inside = np.random.default_rng(seed).random(count)
    return ((np.arange(count) + inside) * n / count).astype(np.int64).clip(max=n - 1)


def standard_error(values: NDArray[np.float64], n: int) -> float | None:
    """Standard error over the sampling of the mean of `values` [Q] at positions from `sample_queries`.

    From second differences between neighbours, so that a trend along positions does not count as noise. 0 where the
    sample is everything, None for fewer than three queries.
    """
    if len(values) == n:
        return 0.0
    if len(values) < 3:
        return None
    variance = (np.diff(values, 2) ** 2).mean() / 6  # of independent values, 1 + 4 + 1 times theirs
    return float(np.sqrt(variance / len(values)))


def receptive_fields(
    pattern: Pattern,
    n: int,
    layers: int,
    queries: NDArray[np.int64],
    *,
    causal: bool = True,
    seed: int = 0,
    progress: Callable[[int], object] = lambda _: None,
) -> Fields:
    """Measure the fields of `queries` [Q] in a document of n tokens through the last 1, 2, ... of `layers` layers.

    Exact for each query, whatever their number. Time O(Q * layers * n log window), memory O(n + Q * n / 8) bytes.

    Args:
        pattern: of every layer; its seed is the routing's.
        n, layers: at least 1. Through all the layers the field is that of the whole stack.
        queries: positions in [0, n).
        causal: as in `attention`.
        seed: of MoBA's random blocks (see `layer_edges`).
        progress: told the fields x layers done since it was last called.
    """
    _check(n, layers, queries)
    possible = queries + 1 if causal else np.full_like(queries, n)
    sizes = np.empty((layers, len(queries)), dtype=np.int64)
    parts = [slice(begin, begin + _FIELDS_AT_ONCE) for begin in range(0, len(queries), _FIELDS_AT_ONCE)]
    fields = {}
    for at, part in enumerate(parts):
        start = np.zeros((n, len(queries[part])), dtype=bool)
        start[queries[part], np.arange(start.shape[1])] = True
        fields[at] = np.packbits(start, axis=1)
    for depth, layer in enumerate(reversed(range(layers))):
        back = _Back(layer_edges(pattern, n, layer=layer, causal=causal, seed=seed))
        for at, part in enumerate(parts):
            width = len(queries[part])
            if at in fields:
                field = back(np.unpackbits(fields[at], axis=1, count=width).view(bool))
                sizes[depth, part] = field.sum(0)
                fields[at] = np.packbits(field, axis=1)
                if (sizes[depth, part] == possible[part]).all():
                    del fields[at]  # nothing can be added any more
            else:
                sizes[depth, part] = possible[part]
            progress(width)
    return Fields(queries, possible, sizes)


def direct_fields(
    pattern: Pattern, n: int, layers: int, queries: NDArray[np.int64], *, causal: bool = True, seed: int = 0
) -> Fields:
    """As `receptive_fields`, of the tokens that one of the layers connects with the query directly, in one hop."""
    _check(n, layers, queries)
    sizes = np.empty((layers, len(queries)), dtype=np.int64)
    seen = [np.empty(0, dtype=np.int64) for _ in queries]
    for depth, layer in enumerate(reversed(range(layers))):
        edges = layer_edges(pattern, n, layer=layer, causal=causal, seed=seed)
        for part in edges.intervals:
            row = np.full(n, -1)
            row[part.query] = np.arange(len(part.query))
            for at, (query, m) in enumerate(zip(queries, row[queries], strict=True)):
                if m >= 0:
                    keys = part.order[part.start[m] : part.stop[m]]
                    seen[at] = np.union1d(seen[at], keys[keys <= query] if causal else keys)
        sizes[depth] = [len(keys) for keys in seen]
    return Fields(queries, queries + 1 if causal else np.full_like(queries, n), sizes)


def pair_chance(pattern: Pattern, ranks: NDArray[np.int64], *, causal: bool = True) -> NDArray[np.float64]:
    """The chance that one layer's stochastic rule connects two given tokens, if the permutation has `ranks` ranks.

    Exact: the share of pairs of different ranks that are near. About 2 * window / ranks.
    """
    if pattern.kind != "stochastic":
        raise ValueError(f"pattern must be stochastic, got {pattern}")
    ranks = np.maximum(ranks, 2)
    if pattern.shape == "block":
        width = np.minimum(2 * pattern.reach, ranks)
        whole, rest = ranks // width, ranks % width
        near = whole * width * (width - 1) + rest * (rest - 1)
    else:
        reach = np.minimum(pattern.reach - 1 if causal else pattern.reach, ranks - 1)
        near = reach * (2 * ranks - reach - 1)
    return near / (ranks * (ranks - 1))


def predicted_coverage(
    pattern: Pattern, n: int, layers: int, queries: NDArray[np.int64], *, causal: bool = True
) -> NDArray[np.float64] | None:
    """Coverage [layers, Q] in closed form; None where there is none (unions with a local window or sinks, MoBA).

    Full attention and a sliding window: exact. Stochastic attention: mean field. If a layer connects a pair with chance
    p, and f(q) is the chance that token q is in the field, then a layer further back

        f'(j) = 1 - (1 - f(j)) * product over q (q >= j if causal) of (1 - p(q))^f(q)

    which would be exact if tokens joined the field independently of each other.
    """
    _check(n, layers, queries)
    if pattern.kind == "full" or (pattern.kind in ("local", "stochastic") and pattern.reach >= n):
        return np.ones((layers, len(queries)))
    if pattern.kind == "local" and not pattern.sinks:
        step = np.arange(1, layers + 1)[:, None] * (pattern.reach - 1 if causal else pattern.reach)
        back = np.minimum(queries, step)
        ahead = 0 if causal else np.minimum(n - 1 - queries, step)
        return (back + ahead + 1) / (queries + 1 if causal else n)
    if not _is_stochastic_alone(pattern):
        return None
    chance = pair_chance(pattern, _ranks(pattern, n), causal=causal)
    log_miss = np.log1p(-chance.clip(max=1 - 1e-15))[:, None]
    coverage = np.empty((layers, len(queries)))
    for begin in range(0, len(queries), _FIELDS_AT_ONCE):
        part = slice(begin, begin + _FIELDS_AT_ONCE)
        field = np.zeros((n, len(queries[part])))
        field[queries[part], np.arange(field.shape[1])] = 1.0
        for depth in range(layers):
            missed = field * log_miss
            missed = missed[::-1].cumsum(0)[::-1] if causal else missed.sum(0)
            field = 1 - (1 - field) * np.exp(missed)
            coverage[depth, part] = field.sum(0)
    return coverage / (queries + 1 if causal else n)


def predicted_direct(
    pattern: Pattern, n: int, layers: int, queries: NDArray[np.int64], *, causal: bool = True
) -> NDArray[np.float64] | None:
    """The share of its possible sources that `layers` layers connect with a query in one hop, 1 - (1 - p)^k of each.

    Exact in expectation, [layers, Q]; None for patterns without chance and for unions.
    """
    _check(n, layers, queries)
    if not _is_stochastic_alone(pattern):
        return None
    chance = pair_chance(pattern, _ranks(pattern, n)[queries], causal=causal) if pattern.reach < n else np.ones(1)
    others = queries if causal else n - 1
    met = 1 - (1 - chance) ** np.arange(1, layers + 1)[:, None]
    return (1 + others * met) / (others + 1)


def predicted_layers(pattern: Pattern, n: int, *, causal: bool = True) -> float | None:
    """Layers until every query sees all it could, by the closed forms; None where there is none.

    A sliding window: exactly the last token's distance over the window's steps. Stochastic attention both ways:
    `growth_layers`. Stochastic and causal: every path goes back in position, so the token before the query can only be
    met in one hop. The smallest k at which fewer than one of these n - 1 pairs is expected to be still missing: about
    n / (2 * window) * log(n) for scope "sequence".
    """
    check_count("n", n, minimum=1)
    if pattern.kind == "full" or (pattern.kind in ("local", "stochastic") and pattern.reach >= n):
        return 1.0
    if pattern.kind == "local" and not pattern.sinks:
        step = pattern.reach - 1 if causal else pattern.reach
        return math.ceil((n - 1) / step) if step else None
    if not _is_stochastic_alone(pattern):
        return None
    if not causal:
        return growth_layers(pattern, n)
    missed = 1 - pair_chance(pattern, _ranks(pattern, n)[1:])
    if missed.max() == 1:
        return None
    few, many = 0, 1
    while (missed**many).sum() >= 1:
        few, many = many, 2 * many
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (middle, many) if (missed**middle).sum() >= 1 else (few, middle)
    return many


def growth_layers(pattern: Pattern, n: int) -> float | None:
    """log(n) / log(2 * window), where fields that multiply by 2 * window a layer reach n: the paper's O(log_window n).

    None for patterns that are not stochastic alone.
    """
    check_count("n", n, minimum=1)
    return math.log(n) / math.log(2 * pattern.reach) if _is_stochastic_alone(pattern) else None


def _is_stochastic_alone(pattern: Pattern) -> bool:
    return pattern.kind == "stochastic" and not pattern.local_window and not pattern.sinks


class _Back:
    """One layer, ready to take fields a layer back."""

    def __init__(self, edges: Edges) -> None:
        self._position = np.arange(edges.n, dtype=np.int32)[:, None]
        self._causal = edges.causal
        self._runs = [(part.order, _runs(part)) for part in edges.intervals]

    def __call__(self, field: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Fields [n, F] joined with the keys that their tokens see."""
        # Without causality the order of tokens does not matter: all marks are 0.
        mark = np.where(field, self._position, np.int32(-1)) if self._causal else field.astype(np.int8) - np.int8(1)
        joined = field.copy()
        for order, runs in self._runs:
            largest = _largest_mark(mark, len(order), runs)
            joined[order] |= largest >= (self._position[order] if self._causal else 0)
        return joined


@dataclass(frozen=True)
class _Runs:
    """Runs of 2**level keys: queries query[opens[r] : opens[r + 1]] mark the run that begins at slot first[r]."""

    level: int
    query: NDArray[np.int64]
    opens: NDArray[np.int64]
    first: NDArray[np.int64]


def _runs(part: Interval) -> list[_Runs]:
    """Every interval as two runs, longest first; every level down to 0 is there, so that runs can be halved."""
    level = np.frexp(part.stop - part.start)[1] - 1
    runs = []
    for p in reversed(range(int(level.max()) + 1)):
        at = np.flatnonzero(level == p)
        first = np.concatenate([part.start[at], part.stop[at] - (1 << p)])
        by_first = first.argsort(kind="stable")
        first = first[by_first]
        opens = np.flatnonzero(np.diff(first, prepend=-1))
        runs.append(_Runs(p, np.tile(part.query[at], 2)[by_first], opens, first[opens]))
    return runs


def _largest_mark(mark: NDArray, slots: int, runs: list[_Runs]) -> NDArray:
    """The largest mark [n, F] that each of `slots` keys gets, -1 for none: [slots, F]."""
    table = np.full((slots, mark.shape[1]), -1, dtype=mark.dtype)
    for same in runs:
        half = 1 << same.level
        if same is not runs[0]:  # a run of the level above is two of this one
            np.maximum(table[half:], table[:-half], out=table[half:])
        if len(same.query):
            marks = mark[same.query]
            if len(same.opens) < len(marks):
                marks = np.maximum.reduceat(marks, same.opens, axis=0)
            table[same.first] = np.maximum(table[same.first], marks)
    return table


def _ranks(pattern: Pattern, n: int) -> NDArray[np.int64]:
    """Ranks [n] of the permutation that each query uses."""
    if pattern.scope == "sequence":
        return np.full(n, n)
    level = np.ceil(np.log2(np.arange(1, n + 1) / pattern.reach)).clip(min=0).astype(np.int64)
    return pattern.reach << level


def _check(n: int, layers: int, queries: NDArray[np.int64]) -> None:
    check_count("n", n, minimum=1)
    check_count("layers", layers, minimum=1)
    if not len(queries) or queries.min() < 0 or queries.max() >= n:
        raise ValueError(f"queries must be positions in [0, {n}), at least one, got {queries}")
