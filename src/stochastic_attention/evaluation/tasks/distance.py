"""Perplexity by distance to the text that foretells a token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...records import Estimate
from ..requests import Item, Request, Score, Span
from .base import TaskOptions
from .spans import perplexities
from .text import TextTask, quarter

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Distances up to this are one group: any window holds them.
_NEAR = 15


class Distance(TextTask):
    """Perplexity of tokens that complete a repeated sequence of three, by how far back it last stood.

    Token t_i repeats at distance d if (t_{i-2}, t_{i-1}, t_i) = (t_{j-2}, t_{j-1}, t_j) for j = i - d and no later
    j < i. So a query that sees none but the last d - 2 tokens has not seen what foretells it, and distances are the
    text's own: nothing is put into it. Groups: d up to 15, then 16 to 63, 64 to 255, and so on by powers of four.

    Scored is the last quarter of a window of `length` tokens, so that every scored token has three quarters behind it
    and patterns that give late tokens more keys gain nothing by it. Tokens that repeat nothing are run, not graded.
    """

    def items(self, tokenizer: PreTrainedTokenizerBase, options: TaskOptions, limit: int) -> list[Item]:
        """`limit` windows, evenly spaced over the text. ValueError where nothing in them repeats."""
        items = super().items(tokenizer, options, limit)
        if not any(item.spans for item in items):
            raise ValueError(
                "distance needs text that repeats a sequence of three tokens in the last quarter of a window; "
                f"none of the {limit} windows of {options.length} tokens does"
            )
        return items

    def metrics(self, items: Sequence[Item], scores: Sequence[Sequence[Score]]) -> dict[str, Estimate]:
        """Perplexity of all tokens that repeat, and by distance."""
        return perplexities(items, scores)

    def _window(self, length: int) -> int:
        return length

    def _item(self, window: list[int], length: int) -> Item:
        scored = quarter(length)
        first = length - scored
        spans = tuple(
            Span(place - first, place - first + 1, _group(distance))
            for place, distance in repeats(window).items()
            if place >= first
        )
        return Item((Request(tuple(window), scored),), spans=spans)


def repeats(tokens: Sequence[int]) -> dict[int, int]:
    """The place of each token that completes a sequence of three seen before -> its distance to the last such place."""
    last: dict[tuple[int, ...], int] = {}
    found = {}
    for place in range(2, len(tokens)):
        three = tuple(tokens[place - 2 : place + 1])
        if three in last:
            found[place] = place - last[three]
        last[three] = place
    return found


def _group(distance: int) -> str:
    if distance <= _NEAR:
        return f"distance=1-{_NEAR}"
    low = _NEAR + 1
    while distance >= 4 * low:
        low *= 4
    return f"distance={low}-{4 * low - 1}"
