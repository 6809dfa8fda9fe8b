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


def ratio(amounts: Sequence[float], counts: Sequence[float]) -> Estimate:
    """Sum of `amounts` over sum of `counts`, one of each a row; standard error over rows by the delta method."""
    n, total = len(amounts), math.fsum(counts)
    value = math.fsum(amounts) / total
    if n < 2:
        return Estimate(value, None, n)
    residuals = math.fsum((amount - value * count) ** 2 for amount, count in zip(amounts, counts, strict=True))
    return Estimate(value, math.sqrt(residuals / (n - 1) * n) / total, n)


def ratio_perplexity(losses: Sequence[float], tokens: Sequence[float]) -> Estimate:
    """exp of `ratio`.

    Args:
        losses: negative log likelihood of each row's tokens together.
        tokens: how many these are, or whatever else is to be divided by.
    """
    rate = ratio(losses, tokens)
    value = math.exp(rate.value)
    return Estimate(value, None if rate.stderr is None else value * rate.stderr, rate.n)


def perplexity(items: Sequence[Item], scores: Sequence[Sequence[Score]]) -> Estimate:
    """exp of the mean negative log likelihood a scored token; see `ratio_perplexity`, an item a row."""
    losses = [-math.fsum(score.loglikelihood for score in row) for row in scores]
    return ratio_perplexity(losses, [sum(request.scored for request in item.requests) for item in items])


def first_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """What the tokenizer itself puts before a text: its beginning-of-sequence token, or nothing."""
    begin = tokenizer.bos_token_id
    dressed: list[int] = tokenizer("a")["input_ids"]  # type: ignore[assignment]
    return [begin] if isinstance(begin, int) and dressed[0] == begin and encode(tokenizer, "a")[0] != begin else []


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Tokens of a text, nothing added. Long text is no reason to warn: it is cut into windows later."""
    tokens: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]  # type: ignore[assignment]
    return tokens


def encode_parts(tokenizer: PreTrainedTokenizerBase, parts: Sequence[str]) -> tuple[list[int], list[int]]:
    """Tokens of the parts as one text, and where each part ends among them.

    A part ends where the text up to its end alone would; spaces at its end go with the next part, as tokenizers join a
    space to the word after it.
    """
    text, lengths = "", []
    for part in parts[:-1]:
        text += part
        lengths.append(len(encode(tokenizer, text.rstrip())))
    begin = first_tokens(tokenizer)
    whole = [*begin, *encode(tokenizer, text + parts[-1])]
    return whole, [*(len(begin) + length for length in lengths), len(whole)]


def encode_pair(tokenizer: PreTrainedTokenizerBase, context: str, continuation: str) -> tuple[list[int], int]:
    """Tokens of context + continuation, and how many of the last are the continuation's; see `encode_parts`."""
    whole, (start, stop) = encode_parts(tokenizer, (context, continuation))
    return whole, stop - start
