"""Metrics of the graded spans of items: over all of them, and group by group under names like "exact@depth=0.50"."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from ...records import Estimate
from ..requests import Item, Score
from .base import ratio, ratio_perplexity

# Of a span: its group, an amount, and the number of what the amount is a sum over.
Graded = tuple[str, float, int]


def exactness(items: Sequence[Item], scores: Sequence[Sequence[Score]]) -> dict[str, Estimate]:
    """Share of spans whose every token greedy decoding gives."""
    graded = [
        [(span.group, float(all(row[item.answer].greedy[span.start : span.stop])), 1) for span in item.spans]
        for item, row in zip(items, scores, strict=True)
    ]
    return _estimates("exact", graded, ratio)


def accuracy(items: Sequence[Item], scores: Sequence[Sequence[Score]]) -> dict[str, Estimate]:
    """Share of items, of one span each, whose right alternative is the likeliest."""
    graded = []
    for item, row in zip(items, scores, strict=True):
        (span,) = item.spans
        likelihoods = [score.loglikelihood for score in row]
        graded.append([(span.group, float(likelihoods.index(max(likelihoods)) == item.answer), 1)])
    return _estimates("acc", graded, ratio)


def perplexities(items: Sequence[Item], scores: Sequence[Sequence[Score]]) -> dict[str, Estimate]:
    """Perplexity a token of the spans."""
    graded = [
        [
            (span.group, -math.fsum(row[item.answer].loglikelihoods[span.start : span.stop]), span.stop - span.start)
            for span in item.spans
        ]
        for item, row in zip(items, scores, strict=True)
    ]
    return _estimates("perplexity", graded, ratio_perplexity)


def _estimates(
    name: str,
    graded: Sequence[Sequence[Graded]],
    estimate: Callable[[list[float], list[int]], Estimate],
) -> dict[str, Estimate]:
    groups = sorted({group for item in graded for group, _, _ in item}, key=lambda group: (len(group), group))
    found = {}
    for label, wanted in [(name, groups), *((f"{name}@{group}", [group]) for group in groups)]:
        rows = [[(amount, count) for group, amount, count in item if group in wanted] for item in graded]
        rows = [row for row in rows if row]
        found[label] = estimate(
            [math.fsum(amount for amount, _ in row) for row in rows], [sum(count for _, count in row) for row in rows]
        )
    return found
