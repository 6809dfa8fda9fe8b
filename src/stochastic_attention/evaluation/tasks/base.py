"""What a task is: items made from real text, and metrics made from the scores of their requests."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, TypeVar

from ...records import Estimate
from ..requests import Item, Score

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")


@dataclass(frozen=True)
class TaskOptions:
    """Settings that tasks read.

    Attributes:
        length: tokens of a text window.
        text: the user's own text file, for the tasks on running text.
        data: a folder with files of tasks that no wheel carries.
    """

    length: int = 1024
    text: Path | None = None
    data: Path | None = None


class Task(ABC):
    """A task has no state; its name is its key in the registry.

    Attributes:
        headline: the metric that stands for the task in tables.
        higher_is_better: whether more of it is better.
    """

    headline: ClassVar[str]
    higher_is_better: ClassVar[bool]

    @abstractmethod
    def missing(self, options: TaskOptions) -> str | None:
        """In words what has to be installed or given before this task can run, None if nothing."""

    @abstractmethod
    def source(self, options: TaskOptions) -> str:
        """What the items come from, for the record."""

    @abstractmethod
    def items(self, tokenizer: PreTrainedTokenizerBase, options: TaskOptions, limit: int) -> list[Item]:
        """`limit` items, always the same ones. ValueError where there are fewer."""

    @abstractmethod
    def metrics(self, items: Sequence[Item], scores: Sequence[Sequence[Score]]) -> dict[str, Estimate]:
        """Metrics by name from the scores of each item's requests."""


def spread(rows: Sequence[T], limit: int, what: str) -> list[T]:
    """`limit` rows evenly spaced over all, so that sets sorted by subject or source are covered."""
    if limit > len(rows):
        raise ValueError(f"limit asks for {limit} {what}, there are {len(rows)}")
    return [rows[index * len(rows) // limit] for index in range(limit)]


def mean(values: Sequence[float]) -> Estimate:
    """Mean and its standard error."""
    n = len(values)
    average = math.fsum(values) / n
    if n < 2:
        return Estimate(average, None, n)
    variance = math.fsum((value - average) ** 2 for value in values) / (n - 1)
    return Estimate(average, math.sqrt(variance / n), n)


def perplexity(items: Sequence[Item], scores: Sequence[Sequence[Score]]) -> Estimate:
    """exp of the mean negative log likelihood a scored token; see `ratio_perplexity`, an item a row."""
    losses = [-math.fsum(score.loglikelihood for score in row) for row in scores]
    return ratio_perplexity(losses, [sum(request.scored for request in item.requests) for item in items])


def ratio_perplexity(losses: Sequence[float], tokens: Sequence[float]) -> Estimate:
    """exp(sum of losses / sum of tokens), with its standard error over rows by the delta method.

    Args:
        losses: negative log likelihood of each row's tokens together.
        tokens: how many these are, or whatever else is to be divided by.
    """
    n, total = len(losses), math.fsum(tokens)
    rate = math.fsum(losses) / total
    value = math.exp(rate)
    if n < 2:
        return Estimate(value, None, n)
    residuals = math.fsum((loss - rate * count) ** 2 for loss, count in zip(losses, tokens, strict=True)) / (n - 1)
    return Estimate(value, value * math.sqrt(residuals * n) / total, n)


def first_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """What the tokenizer itself puts before a text: its beginning-of-sequence token, or nothing."""
    begin = tokenizer.bos_token_id
    dressed: list[int] = tokenizer("a")["input_ids"]  # type: ignore[assignment]
    return [begin] if isinstance(begin, int) and dressed[0] == begin and encode(tokenizer, "a")[0] != begin else []


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Tokens of a text, nothing added. Long text is no reason to warn: it is cut into windows later."""
    tokens: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]  # type: ignore[assignment]
    return tokens


def encode_pair(tokenizer: PreTrainedTokenizerBase, context: str, continuation: str) -> tuple[list[int], int]:
    """Tokens of context + continuation, and how many of the last are the continuation's.

    The two are tokenised as one text and split where the context alone would end; spaces at the context's end go with
    the continuation, as tokenizers join a space to the word after it.
    """
    bare = context.rstrip()
    continuation = context[len(bare) :] + continuation
    start = len(encode(tokenizer, bare))
    whole = encode(tokenizer, bare + continuation)
    begin = first_tokens(tokenizer)
    return [*begin, *whole], len(whole) - start
