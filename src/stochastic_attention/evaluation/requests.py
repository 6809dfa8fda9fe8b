"""The unit of evaluation: tokens to run through a model, the last few of which are scored."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Request:
    """A token sequence whose last `scored` tokens are scored, each given all before it.

    The last token predicts nothing that is scored, so it is not run: a request has len(tokens) - 1 queries, and the
    scored ones are the last `scored` of them.
    """

    tokens: tuple[int, ...]
    scored: int

    def __post_init__(self) -> None:
        """Check that each scored token has one before it."""
        if not 1 <= self.scored < len(self.tokens):
            raise ValueError(
                f"scored must be in [1, {len(self.tokens) - 1}], one token at least coming first, got {self.scored}"
            )

    @property
    def queries(self) -> int:
        """Tokens that are run."""
        return len(self.tokens) - 1


@dataclass(frozen=True)
class Score:
    """What the model says of a request, a value for each scored token.

    Attributes:
        loglikelihoods: log probabilities (natural log).
        greedy: whether greedy decoding gives the token.
    """

    loglikelihoods: tuple[float, ...]
    greedy: tuple[bool, ...]

    @property
    def loglikelihood(self) -> float:
        """Of all scored tokens together."""
        return math.fsum(self.loglikelihoods)

    @property
    def is_greedy(self) -> bool:
        """Whether greedy decoding gives all of them."""
        return all(self.greedy)


@dataclass(frozen=True)
class Span:
    """A part of the scored tokens that is graded by itself.

    Attributes:
        start, stop: its tokens, counted from the first scored one.
        group: what it is reported under beside the total, such as "depth=0.50".
    """

    start: int
    stop: int
    group: str


@dataclass(frozen=True)
class Item:
    """One question of a task: its requests, and what the task needs to grade their scores.

    Attributes:
        requests: one an alternative for multiple choice, else a single one.
        answer: index of the right alternative.
        lengths: characters of each alternative, which length-normalised accuracy divides by.
        spans: what is graded of the right alternative, where that is not simply all of it.
    """

    requests: tuple[Request, ...]
    answer: int = 0
    lengths: tuple[int, ...] = ()
    spans: tuple[Span, ...] = ()


# (queries, scored) of each request -> how many requests have these: all that a budget depends on.
Profile = Counter[tuple[int, int]]


def profile(requests: Iterable[Request]) -> Profile:
    """Count requests by their number of queries and of scored queries."""
    return Counter((request.queries, request.scored) for request in requests)
