"""One stochastic layer as an estimator: its bias and variance over random orders, against what it estimates.

Two things may be meant by its target. Full attention is the softmax over all of the query's past. Uniform-key attention
is the expectation of the softmax over as many keys drawn uniformly, without replacement, from that past. They differ by
the bias of a ratio of two means; the layer also differs from both in that a query always sees its own key.

Shapes: Q queries, R draws, n keys, D = head dimension of queries, keys and values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ..ops.api import attention
from ..ops.pattern import Pattern
from ..ops.validation import check_count, check_real
from ..records import Estimate

_HEADS = 16  # draws a call: heads of equal tensors that route apart


@dataclass(frozen=True)
class Problem:
    """q [Q, D], k [n, D], v [n, D], float64; the queries stand at the last Q positions."""

    q: Tensor
    k: Tensor
    v: Tensor


def synthetic(
    n: int, queries: int, *, head_dim: int, score_std: float, bound: float, memory: float, seed: int = 0
) -> Problem:
    """A made-up problem whose values depend on the keys, and keys on their neighbours.

    Keys are normal of variance 1 and drift along positions, with correlation exp(-d / memory) at distance d (0: none).
    Values are bound * tanh(k W), W normal of variance 1 / D: never beyond `bound`. Queries are normal, independent of
    the keys, scaled so that scores have standard deviation `score_std` (0: equal weights).
    """
    check_count("n", n, minimum=1)
    check_count("queries", queries, minimum=1, maximum=n)
    check_count("head_dim", head_dim, minimum=1)
    for name, value in (("score_std", score_std), ("bound", bound), ("memory", memory)):
        check_real(name, value, minimum=0.0)
    chance = np.random.default_rng(seed)
    fresh = chance.normal(size=(n, head_dim))
    kept = math.exp(-1 / memory) if memory else 0.0
    keys = fresh.copy()
    for position in range(1, n):
        keys[position] = kept * keys[position - 1] + math.sqrt(1 - kept**2) * fresh[position]
    values = bound * np.tanh(keys @ chance.normal(size=(head_dim, head_dim)) / math.sqrt(head_dim))
    return Problem(*(torch.from_numpy(x) for x in (score_std * chance.normal(size=(queries, head_dim)), keys, values)))


def full_attention(problem: Problem) -> Tensor:
    """What every query would get from its whole past: [Q, D]."""
    return _attend(problem, Pattern.full(), heads=1, step=0)[0]


def stochastic_draws(problem: Problem, pattern: Pattern, count: int, *, first_step: int = 0) -> Tensor:
    """`count` independent outputs of the layer, each under its own random order: [R, Q, D]. Runs the op itself."""
    check_count("count", count, minimum=1)
    if not pattern.is_random:
        raise ValueError(f"pattern must be stochastic, got {pattern}")
    apart = replace(pattern, per_head=True)
    steps = range(first_step, first_step + -(-count // _HEADS))
    return torch.cat([_attend(problem, apart, heads=_HEADS, step=step) for step in steps])[:count]


def uniform_key_draws(problem: Problem, keys: int, count: int, *, seed: int = 0) -> Tensor:
    """`count` softmax means over `keys` keys drawn uniformly, without replacement, from each query's past: [R, Q, D].

    A query whose past is no longer than that gets all of it.
    """
    check_count("keys", keys, minimum=1)
    check_count("count", count, minimum=1)
    q, k, v = problem.q, problem.k, problem.v
    n, queries = len(k), len(q)
    chance = torch.Generator().manual_seed(seed)
    future = torch.arange(n) > torch.arange(n - queries, n)[:, None]
    scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(future, -math.inf)
    draws = []
    for _ in range(count):
        order = torch.rand(queries, n, generator=chance).masked_fill(future, -1.0)
        chosen = order.topk(min(keys, n), dim=-1).indices
        weights = scores.gather(-1, chosen).softmax(-1)
        draws.append((weights[..., None, :] @ v[chosen])[..., 0, :])
    return torch.stack(draws)


def variance(draws: Tensor) -> Estimate:
    """The variance of one draw [R, Q, D], mean over queries and dimensions; the standard error is over queries."""
    return _over_queries(draws.var(0).mean(-1))


def squared_bias(draws: Tensor, target: Tensor) -> Estimate:
    """The squared bias of a draw against `target` [Q, D] or draws of it [R', Q, D], mean over queries and dimensions.

    Unbiased: the variance that is left in the means is taken off, so that the estimate may come out negative. The
    standard error is over queries.
    """
    noise = draws.var(0) / len(draws)
    if target.dim() == 3:
        noise = noise + target.var(0) / len(target)
        target = target.mean(0)
    return _over_queries(((draws.mean(0) - target) ** 2 - noise).mean(-1))


def averages(draws: Tensor, count: int) -> Tensor:
    """Means of `count` draws each, of disjoint ones: [R // count, Q, D]."""
    check_count("count", count, minimum=1, maximum=len(draws))
    groups = len(draws) // count
    return draws[: groups * count].unflatten(0, (groups, count)).mean(1)


def fit_slope(x: Sequence[float], y: Sequence[float]) -> Estimate | None:
    """The slope of log y against log x by least squares, with its standard error; None for fewer than three points."""
    if len(x) != len(y) or any(value <= 0 for value in (*x, *y)):
        raise ValueError(f"x and y must be positive and of one length, got {list(x)} and {list(y)}")
    if len(x) < 3:
        return None
    log_x, log_y = np.log(x), np.log(y)
    centred = log_x - log_x.mean()
    slope = float(centred @ log_y / (centred @ centred))
    residual = log_y - log_y.mean() - slope * centred
    return Estimate(slope, float(np.sqrt(residual @ residual / (len(x) - 2) / (centred @ centred))), len(x))


def _attend(problem: Problem, pattern: Pattern, *, heads: int, step: int) -> Tensor:
    """The op on `heads` copies of the problem: [heads, Q, D]."""
    q, k, v = (x.expand(1, heads, *x.shape) for x in (problem.q, problem.k, problem.v))
    places = torch.arange(len(problem.k) - len(problem.q), len(problem.k))
    return attention(q, k, v, pattern, step=step, query_positions=places)[0]


def _over_queries(values: Tensor) -> Estimate:
    """The mean of values [Q]."""
    error = float(values.std() / math.sqrt(len(values))) if len(values) > 1 else None
    return Estimate(float(values.mean()), error, len(values))
