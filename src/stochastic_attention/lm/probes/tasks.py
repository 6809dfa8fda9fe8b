"""The tasks: rows of tokens, some positions of which ask for a token that stands earlier in the row.

Every number is a stateless hash of (seed, step, row, place), so a row is the same in any batch, and a resumed run
draws what the unbroken one would have drawn. The test stream has a seed of its own, so that its rows are in no training
step but by chance, which short strings to copy alone have.

In both tasks the needed token stands right behind its cue, the token that the query repeats, so that two layers solve
them: one in which the needed token sees its cue, and a later one in which the query finds it ("induction").
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ...ops.routing import routing_keys
from ...ops.validation import check_choice, check_count

Stream = Literal["train", "test"]
Chance = Callable[[int, int], Tensor]


@dataclass(frozen=True)
class Examples:
    """B rows of N tokens, all int64.

    Attributes:
        tokens: [B, N].
        answers: [B, N], the token that position i asks for; -1 where it asks for none.
        source: [B, N], the position of that token, behind its cue; -1 where there is none.
    """

    tokens: Tensor
    answers: Tensor
    source: Tensor

    def to(self, device: str) -> Examples:
        """The same rows on another device."""
        return Examples(self.tokens.to(device), self.answers.to(device), self.source.to(device))


@dataclass(frozen=True)
class TaskSize:
    """How large the examples are.

    Attributes:
        length: N, tokens of a row.
        symbols: keys, and as many values, of recall; letters of copying.
        pairs: key-value pairs of a row of recall; 0 for copying.
    """

    length: int
    symbols: int
    pairs: int = 0


@dataclass(frozen=True)
class Task:
    """A task.

    Attributes:
        draw: (chance, size, rows, stream) -> examples; chance(purpose, n) gives hashed words, int64 [rows, n] in
            [0, 2**32).
        vocabulary: size -> number of tokens.
        check: raises ValueError for a size that the task does not have.
    """

    draw: Callable[[Chance, TaskSize, int, Stream], Examples]
    vocabulary: Callable[[TaskSize], int]
    check: Callable[[TaskSize], None]


def draw(task: str, size: TaskSize, rows: int, *, seed: int, step: int, stream: Stream, first: int = 0) -> Examples:
    """Rows first ... first + rows - 1 of a step.

    Raises:
        ValueError: an argument is out of its domain.
    """
    check_choice("task", task, TASKS)
    check_choice("stream", stream, ("train", "test"))
    check_count("rows", rows, minimum=1)
    check_count("seed", seed, minimum=0, maximum=2**62 - 1)
    check_count("step", step, minimum=0)
    check_count("first", first, minimum=0)
    TASKS[task].check(size)
    row = torch.arange(first, first + rows)[:, None]

    def chance(purpose: int, n: int) -> Tensor:
        return routing_keys(torch.arange(n), seed=2 * seed + (stream == "test"), step=step, layer=purpose, head=row)

    return TASKS[task].draw(chance, size, rows, stream)


def _draw_recall(chance: Chance, size: TaskSize, rows: int, stream: Stream) -> Examples:
    """k1 v1 k2 v2 ... q q q ...: distinct keys, a value each, then queries, each one of the keys at random.

    Test rows have all the pairs. Training rows have the first few of them, as many as chance says, and filler behind:
    with all pairs always, even full attention takes longer to find out what is asked.
    """
    pairs, symbols, queries = size.pairs, size.symbols, size.length - 2 * size.pairs
    shown = 1 + chance(3, 1) % pairs if stream == "train" else torch.full((rows, 1), pairs)
    keys = chance(0, symbols).argsort(dim=1, stable=True)[:, :pairs]
    values = symbols + chance(1, pairs) % symbols
    is_shown = torch.arange(2 * pairs) < 2 * shown
    listed = torch.stack([keys, values], dim=2).flatten(1).where(is_shown, torch.tensor(2 * symbols))
    asked = chance(2, queries) % shown
    none = torch.full((rows, 2 * pairs), -1)
    return Examples(
        tokens=torch.cat([listed, keys.gather(1, asked)], dim=1),
        answers=torch.cat([none, values.gather(1, asked)], dim=1),
        source=torch.cat([none, 2 * asked + 1], dim=1),
    )


def _check_recall(size: TaskSize) -> None:
    check_count("symbols", size.symbols, minimum=2)
    check_count("pairs", size.pairs, minimum=1, maximum=size.symbols)
    check_count("length", size.length, minimum=2 * size.pairs + 1)


def _draw_copy(chance: Chance, size: TaskSize, rows: int, stream: Stream) -> Examples:  # noqa: ARG001
    """| x1 x2 ... xm | x1 x2 ... xm, and filler: distinct letters, as many as the row's distance m, which is random.

    The last letter asks for nothing; the bar before the second string asks for x1.
    """
    letters, longest = size.symbols, (size.length - 2) // 2
    m = 1 + chance(0, 1) % longest
    text = chance(1, letters).argsort(dim=1, stable=True)[:, :longest]
    bar, filler = torch.tensor(letters), torch.tensor(letters + 1)
    place = torch.arange(size.length).expand(rows, -1)
    # Place in "| x1 ... xm": 0 the bar, then the letters.
    inside = torch.where(place <= m, place, place - m - 1)
    letter = text.gather(1, (inside - 1).clamp(0, longest - 1))
    tokens = torch.where(inside == 0, bar, torch.where(place <= 2 * m + 1, letter, filler))
    asks = (place > m) & (place <= 2 * m)
    source = torch.where(asks, place - m, torch.tensor(-1))
    return Examples(tokens, torch.where(asks, tokens.gather(1, source.clamp(min=0)), torch.tensor(-1)), source)


def _check_copy(size: TaskSize) -> None:
    check_count("pairs", size.pairs, minimum=0, maximum=0)
    check_count("length", size.length, minimum=4)
    check_count("symbols", size.symbols, minimum=(size.length - 2) // 2)


TASKS: dict[str, Task] = {
    "mqar": Task(_draw_recall, lambda size: 2 * size.symbols + 1, _check_recall),
    "copy": Task(_draw_copy, lambda size: size.symbols + 2, _check_copy),
}
