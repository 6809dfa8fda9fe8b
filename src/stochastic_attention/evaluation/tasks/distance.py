"""Perplexity by distance to the text that foretells a token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...records import Estimate
from ..copies import copy_distances
from ..requests import Item, Request, Score, Span
from .base import TaskOptions
from .spans import perplexities
from .text import TextTask, quarter

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Distances up to this are one group: any window holds them.
_NEAR = 15


class Distance(TextTask):
    """Perplexity of tokens that repeat what followed the same two tokens before, by how far back that was.

    Repeats and their distances are those of `copy_distances`: a token counts where the last time that its cue occurred
    the same token followed, d tokens ago. So a query that sees none but the last d - 1 tokens has not seen what
    foretells it, and distances are the text's own: nothing is put into it. Groups: d up to 15, then 16 to 63, 64 to
    255, and so on by powers of four.

    Scored is the last quarter of a window of `length` tokens, so that every scored token has three quarters behind it
    and patterns that give late tokens more keys gain nothing by it. Tokens that repeat nothing are run, not graded.
    """

    def items(self, tokenizer: PreTrainedTokenizerBase, options: TaskOptions, limit: int) -> list[Item]:
        """`limit` windows, evenly spaced over the text. ValueError where nothing in them repeats."""
        items = super().items(tokenizer, options, limit)
        if not any(item.spans for item in items):
            raise ValueError(
                "distance needs text that repeats three tokens in a row, the third in the last quarter of a window; "
                f"none of the {limit} windows of {options.length} tokens does"
            )
        return items

    def metrics(self, items: Sequence[Item], scores: Sequence[Sequence[Score]]) -> dict[str, Estimate]:
        """Perplexity of all tokens that repeat, and by distance."""
        return perplexities(items, scores)

    def _window(self, length: int) -> int:
        return length

    def _item(self, begin: list[int], text: list[int], length: int) -> Item:
        window = begin + text
        scored = quarter(length)
        first = length - scored
        spans = tuple(
            Span(place - first, place - first + 1, _group(distance))
            for place, distance in enumerate(copy_distances(window))
            if place >= first and distance > 0
        )
        return Item((Request(tuple(window), scored),), spans=spans)


def _group(distance: int) -> str:
    if distance <= _NEAR:
        return f"distance=1-{_NEAR}"
    low = _NEAR + 1
    while distance >= 4 * low:
        low *= 4
    return f"distance={low}-{4 * low - 1}"
