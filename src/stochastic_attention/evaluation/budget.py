"""Budgets: how many keys a query sees, expected in closed form for the fit, measured for the report.

    w_eff     mean |N(i)| over all real queries
    w_scored  mean |N(i)| over the queries whose logits are scored

Terms are those of `ops.pattern`; a pair of tokens meets through the stochastic rule with the same chance p whatever the
two are, because ranks are uniform permutations, so E|N(i)| = certain + (i + 1 - certain) * p.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..ops.keys_per_query import keys_per_query
from ..ops.pattern import Pattern
from .requests import Profile

Match = Literal["w_scored", "w_eff"]


@dataclass(frozen=True)
class Budget:
    """Mean keys a query, over all queries and over the scored ones."""

    w_eff: float
    w_scored: float


class Queries:
    """Every query of a profile laid flat, so that one vector operation gives the budget of a pattern."""

    def __init__(self, profile: Profile) -> None:
        """Lay out each distinct length once, weighted by how often its queries occur and are scored."""
        if not profile:
            raise ValueError("profile must hold at least one request, got none")
        lengths = sorted({queries for queries, _ in profile})
        self.lengths = lengths
        self.longest = lengths[-1]
        self.position = torch.cat([torch.arange(n) for n in lengths])
        self.length = torch.cat([torch.full((n,), n) for n in lengths])
        occurs = {n: torch.zeros(n, dtype=torch.float64) for n in lengths}
        scored = {n: torch.zeros(n, dtype=torch.float64) for n in lengths}
        for (n, tail), times in profile.items():
            occurs[n] += times
            scored[n][n - tail :] += times
        self._occurs = torch.cat([occurs[n] for n in lengths])
        self._scored = torch.cat([scored[n] for n in lengths])

    def budget(self, keys: Tensor) -> Budget:
        """Means of `keys`, a number for each entry of `position`."""
        return Budget(
            w_eff=float(keys.double() @ self._occurs / self._occurs.sum()),
            w_scored=float(keys.double() @ self._scored / self._scored.sum()),
        )

    def expected(self, pattern: Pattern) -> Budget:
        """The budget in expectation over seeds; exact for patterns without chance."""
        return self.budget(expected_keys(pattern, self.position, self.length))

    def expected_mean(self, pattern: Pattern, match: Match) -> float:
        """One of the means of `expected`, computed on the queries that count towards it alone."""
        weight = self._scored if match == "w_scored" else self._occurs
        counts = weight.nonzero()[:, 0]
        keys = expected_keys(pattern, self.position[counts], self.length[counts])
        return float(keys @ weight[counts] / weight.sum())

    def measured(self, patterns: Sequence[Pattern]) -> Budget:
        """The budget of the very patterns and seeds that a model's layers run, averaged over them."""
        counted = {
            (pattern, layer): self._measured_keys(pattern, layer)
            for pattern, layer in {(pattern, _draw(pattern, layer)) for layer, pattern in enumerate(patterns)}
        }
        keys = torch.stack([counted[pattern, _draw(pattern, layer)] for layer, pattern in enumerate(patterns)])
        return self.budget(keys.mean(0))

    def _measured_keys(self, pattern: Pattern, layer: int) -> Tensor:
        """Mean abs(N(i)) over heads of each query in one layer, float64."""
        if pattern.kind == "stochastic" and pattern.scope == "sequence":
            return torch.cat([keys_per_query(pattern, n, layer=layer).double().mean(0) for n in self.lengths])
        # Elsewhere N(i) does not depend on the tokens that follow i: the longest document tells of all.
        longest = keys_per_query(pattern, self.longest, layer=layer).double().mean(0)
        return torch.cat([longest[:n] for n in self.lengths])


def expected_keys(pattern: Pattern, position: Tensor, length: Tensor) -> Tensor:
    """E|N(i)| of causal queries at `position` of documents of `length` tokens: float64, the shape of `position`."""
    past = position.double() + 1
    if pattern.kind == "full":
        return past
    if pattern.kind == "moba":
        before = position // pattern.block_size
        chosen = before.clamp(max=pattern.top_k - 1) * pattern.block_size
        return (position % pattern.block_size + 1 + chosen).double()
    if pattern.kind == "local":
        return past.clamp(max=pattern.reach + pattern.sinks)
    if pattern.kind == "strided":
        certain = past.clamp(max=pattern.local_window + pattern.sinks)
        last = (position - pattern.sinks).div(pattern.stride, rounding_mode="floor").clamp(max=pattern.reach - 1)
        return certain + (last + 1 - -(-pattern.local_window // pattern.stride)).clamp(min=0)
    if pattern.kind == "bigbird":
        own = position % pattern.block_size + 1
        certain = torch.minimum(past, own.clamp(min=pattern.local_window).double() + pattern.sinks)
        before = (position // pattern.block_size).double().clamp(min=1.0)
        return certain + (past - certain) * (pattern.random_blocks / before).clamp(max=1.0)
    # The query itself is always among its keys.
    certain = past.clamp(max=max(pattern.local_window, 1) + pattern.sinks)
    return certain + (past - certain) * _chance_to_meet(pattern, position, length)


def _chance_to_meet(pattern: Pattern, position: Tensor, length: Tensor) -> Tensor:
    """Chance that two given tokens' ranks are near, float64."""
    w = pattern.reach
    ranks = length
    if pattern.scope == "prefix":
        ranks = torch.full_like(position, w)
        while bool((ranks <= position).any()):
            ranks = torch.where(ranks <= position, 2 * ranks, ranks)
    ranks = ranks.double()
    pairs = (ranks * (ranks - 1)).clamp(min=1)
    if pattern.shape == "block":
        blocks, rest = ranks // (2 * w), ranks % (2 * w)
        near = blocks * 2 * w * (2 * w - 1) + rest * (rest - 1)
    else:
        near = 2 * (w - 1) * ranks - w * (w - 1)
    return torch.where(ranks <= w, 1.0, near / pairs)


def sees_everything(pattern: Pattern, n: int) -> bool:
    """Whether the pattern is full attention on n tokens: every query surely sees its whole past, without a bias."""
    if pattern.correction and max(pattern.reach, pattern.local_window) < n:
        return False
    position = torch.arange(n)
    return bool((expected_keys(pattern, position, torch.full_like(position, n)) == position + 1).all())


def _draw(pattern: Pattern, layer: int) -> int:
    """The layer whose permutation tells what the pattern does in `layer`: any, where there is no chance."""
    return layer if pattern.is_random else 0


# So many candidates in a row beyond twice the budget, and none that follows will be nearer.
_BEYOND = 16


def closest(patterns: Iterable[Pattern], queries: Queries, target: float, match: Match) -> Pattern:
    """The pattern whose expected budget is nearest to `target`; the earliest wins a tie.

    Args:
        patterns: with more keys one after the other, but for a few: on long texts there are many, and those that are
            far beyond the target are not looked at.
        queries, match: what the budget is a mean of.
        target: mean keys a query.
    """
    found, least, beyond = None, math.inf, 0
    for pattern in patterns:
        keys = queries.expected_mean(pattern, match)
        if abs(keys - target) < least:
            found, least = pattern, abs(keys - target)
        beyond = beyond + 1 if keys > 2 * target else 0
        if beyond == _BEYOND:
            break
    if found is None:
        raise ValueError("patterns must hold at least one pattern, got none")
    return found
