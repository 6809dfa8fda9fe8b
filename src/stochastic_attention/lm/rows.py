"""Rows of tokens to train on: documents back to back, every token once a pass, in an order that the seed decides.

A row is a mapping of three int64 tensors [N]:

    input_ids     the tokens
    labels        the same, -100 where nothing is to be predicted; the model shifts them, as Hugging Face's do
    position_ids  each token's place in its document, by which attention keeps documents apart

Rows are cut from the tokens as they come: a document longer than what is left of a row goes on in the next one,
where its positions begin at 0 again and its first token is not predicted. What is left of the last row of a pass is
filled with end-of-sequence tokens, a document of their own that is not predicted either. With "joined" documents
positions run through the row, and a document's first token is predicted from the one before it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from ..ops.routing import routing_keys
from ..ops.validation import check_count
from .token_file import TokenFile

IGNORED = -100
# Not a layer that a model has: the order of rows and the model's own permutations are then unrelated draws.
_ORDER = 2**32 - 1

Row = dict[str, Tensor]


class DataExhausted(RuntimeError):  # noqa: N818  # a state of the data, no fault
    """A data set holds fewer tokens than were asked for."""

    def __init__(self, tokens: int, asked: int, epochs: int) -> None:
        """`tokens`: what `epochs` passes hold."""
        passes = "one pass" if epochs == 1 else f"{epochs} passes"
        super().__init__(
            f"the data set holds {tokens} tokens in {passes}, {asked} were asked for: raise data.epochs or ask for less"
        )


def make_row(tokens: np.ndarray, starts: np.ndarray, *, length: int, filler: int, is_isolated: bool) -> Row:
    """A row of `length`.

    Args:
        tokens: integers [at most length].
        starts: indices into `tokens` at which documents begin, ascending.
        length: tokens of the row.
        filler: stands where `tokens` end early.
        is_isolated: whether positions begin anew with each document.
    """
    count = len(tokens)
    ids = torch.full((length,), filler)
    ids[:count] = torch.from_numpy(np.asarray(tokens, dtype=np.int64))
    labels = ids.clone()
    labels[0] = IGNORED
    labels[count:] = IGNORED
    positions = torch.arange(length)
    if is_isolated:
        firsts = torch.zeros(length, dtype=torch.int64)
        begins = torch.tensor([*starts, *([count] if count < length else [])], dtype=torch.int64)
        firsts[begins] = begins
        labels[begins] = IGNORED
        positions = positions - firsts.cummax(0).values
    return {"input_ids": ids, "labels": labels, "position_ids": positions}


class PackedRows(Dataset[Row]):
    """The rows of a token file, or of a stretch of it, `epochs` times over, each time in another order.

    Item i is a pure function of (seed, i): of no process's rank or number. A loader must take the items in their order,
    as the shuffling is done here. Without a seed the rows stay in the order of the text.
    """

    def __init__(
        self,
        file: TokenFile,
        *,
        length: int,
        filler: int,
        is_isolated: bool,
        stretch: tuple[int, int] | None = None,
        seed: int | None = None,
        epochs: int = 1,
        rows: int | None = None,
    ) -> None:
        """Take the tokens of `stretch`, a pair (begin, end), or all; `rows` of them evenly spaced, or all.

        `length`, `filler` and `is_isolated` are those of `make_row`.
        """
        check_count("length", length, minimum=2)
        check_count("epochs", epochs, minimum=1)
        self._file, self._length, self._filler, self._is_isolated = file, length, filler, is_isolated
        self._begin, self._end = stretch or (0, int(file.facts["tokens"]))
        self._seed, self.epochs = seed, epochs
        self._whole = -(-(self._end - self._begin) // length)
        self.rows = self._whole if rows is None else min(rows, self._whole)
        self._order: tuple[int, Tensor] | None = None

    @property
    def source(self) -> str:
        """What was tokenised, in words."""
        return self._file.facts["source"]

    @property
    def digest(self) -> str:
        """SHA-256 of all tokens and documents' ends in the file."""
        return self._file.facts["sha256"]

    @property
    def tokens(self) -> int:
        """Tokens of the text that one pass goes through."""
        return self._end - self._begin if self.rows == self._whole else self.rows * self._length

    def __len__(self) -> int:
        return self.rows * self.epochs

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < len(self):
            raise IndexError(f"row must be in [0, {len(self)}), got {index}")
        epoch, place = divmod(int(index), self.rows)
        row = self._place(epoch, place) * self._whole // self.rows
        begin = self._begin + row * self._length
        end = min(begin + self._length, self._end)
        ends = self._file.ends
        starts = ends[slice(*np.searchsorted(ends, [begin, end]))] - begin
        return make_row(
            self._file.tokens[begin:end],
            starts,
            length=self._length,
            filler=self._filler,
            is_isolated=self._is_isolated,
        )

    def require(self, rows: int) -> None:
        """Raise DataExhausted unless there are so many rows."""
        if rows > len(self):
            raise DataExhausted(self.tokens * self.epochs, rows * self._length, self.epochs)

    def _place(self, epoch: int, place: int) -> int:
        if self._seed is None:
            return place
        if self._order is None or self._order[0] != epoch:
            keys = routing_keys(torch.arange(self.rows), seed=self._seed, step=epoch, layer=_ORDER)
            self._order = epoch, keys.argsort(stable=True)
        return int(self._order[1][place])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_order": None}
