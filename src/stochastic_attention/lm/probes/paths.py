"""Which answers a stack of layers can reach at all, under the very permutations that it runs with.

    in the field   the needed token and its cue are both in the query's receptive field: without that, whatever the
                   weights, an answer of recall is a guess (copying could count positions instead of reading the cue).
                   A ceiling.
    direct         the needed token sees its cue in one layer, and the query sees the needed token in a later one: all
                   that induction takes. A floor for a model that has learnt the task.

Between the two lie answers that other tokens would have to pass on, not knowing for whom.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...analysis.reach import pair_chance
from ...ops.pattern import Pattern


@dataclass(frozen=True)
class Paths:
    """Of one document of N tokens, at one routing step.

    Attributes:
        field: bool [N, N], whether query i has the tokens j and j - 1 in its receptive field.
        direct: bool [N, N], whether i sees j directly in a layer after one in which j sees j - 1.
        keys: float64 [N], keys that a query reads in a layer, summed over its paths, averaged over layers.
    """

    field: Tensor
    direct: Tensor
    keys: Tensor


def paths(patterns: Sequence[Pattern], n: int, layers: int, *, step: int) -> Paths:
    """The paths of a stack whose layers all run `patterns`: one, or two that are gated."""
    field = torch.eye(n, dtype=torch.bool)
    bound = torch.zeros(n, dtype=torch.bool)  # whether j has seen j - 1 in an earlier layer
    direct = torch.zeros(n, n, dtype=torch.bool)
    keys = torch.zeros(n, dtype=torch.float64)
    for layer in range(layers):
        masks = torch.cat([pattern.dense_mask(n, layer=layer, step=step) for pattern in patterns])
        sees = masks.any(0)
        keys += masks.sum((0, 2)).double() / layers
        field = (sees.float() @ field.float()) > 0
        direct |= sees & bound
        bound[1:] |= sees.diagonal(-1)
    field[:, 1:] &= field[:, :-1].clone()
    return Paths(field, direct, keys)


def expected_direct(patterns: Sequence[Pattern], n: int, layers: int) -> Tensor:
    """The chance of `Paths.direct` in closed form, float64 [N, N]: entry [i, j] of query i and needed token j >= 1.

    With a(j) the chance that one layer connects j with j - 1, and b(i, j) that it connects i with j, the sum over the
    first layer k = 1 ... layers that does the former:

        sum of a (1 - a)^(k - 1) (1 - (1 - b)^(layers - k))

    Exact where a or b is 0 or 1. Else the two events of a layer are taken as independent, which leaves out that tokens
    of one permutation do not meet independently.
    """
    place = torch.arange(n)
    meet = torch.zeros(n, n, dtype=torch.float64)
    for pattern in patterns:
        # dense_mask of a pattern without chance is the chance itself.
        one = _chance(pattern, n)[:, None].expand(n, n) if pattern.is_random else pattern.dense_mask(n)[0].double()
        meet = 1 - (1 - meet) * (1 - one)
    meet = meet.where(place[:, None] > place, 1.0).tril()
    a = torch.cat([torch.zeros(1, dtype=torch.float64), meet.diagonal(-1)])
    return sum(
        (a * (1 - a) ** (k - 1) * (1 - (1 - meet) ** (layers - k)) for k in range(1, layers + 1)),
        torch.zeros(n, n, dtype=torch.float64),
    )


def _chance(pattern: Pattern, n: int) -> Tensor:
    """Chance [N] that query i meets a given earlier token."""
    ranks = np.full(n, n)
    if pattern.scope == "prefix":
        ranks = pattern.reach << np.ceil(np.log2(np.arange(1, n + 1) / pattern.reach)).clip(min=0).astype(np.int64)
    return torch.from_numpy(np.where(ranks <= pattern.reach, 1.0, pair_chance(pattern, ranks)))
