"""Rows made on the fly from a streamed data set: the rules of `rows`, the order of the stream, exact resuming."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from ..ops.validation import check_count
from .hub import texts
from .rows import DataExhausted, Row, make_row
from .token_file import Encoder

if TYPE_CHECKING:
    import datasets

# Documents tokenised in one call.
_CALL = 64
# A place to resume from is kept about every so many rows, and so many of them: a loader may run ahead by their product.
_EVERY, _KEPT = 64, 64


@dataclass(frozen=True)
class _Place:
    """Where the stream stood before it gave row `row`: what it had read, and which tokens it held ready."""

    row: int = 0
    epoch: int = 0
    source: dict[str, Any] | None = None
    tokens: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)


class StreamedRows(IterableDataset[Row]):
    """The rows of a streamed set, in its order, `epochs` times over.

    Every process that reads it gets all rows in one order, whatever their number; a loader deals them out. It must read
    in its own process (no workers): the place to resume from is kept here.
    """

    def __init__(
        self,
        source: datasets.IterableDataset,
        column: str,
        encoder: Encoder,
        *,
        length: int,
        is_isolated: bool,
        epochs: int = 1,
    ) -> None:
        """Take the column `column` of `source` as text. `length` and `is_isolated` are those of `make_row`."""
        check_count("length", length, minimum=2)
        check_count("epochs", epochs, minimum=1)
        self._source, self._column, self._encoder = source, column, encoder
        self._length, self._is_isolated, self.epochs = length, is_isolated, epochs
        self._loaded: tuple[_Place, int] = (_Place(), 0)
        self._places: deque[_Place] = deque([_Place()], maxlen=_KEPT)
        self._given = self._required = 0

    def require(self, rows: int) -> None:
        """Raise DataExhausted, from the iteration, if the stream ends before it gave so many rows."""
        self._required = rows

    def state_dict(self, rows: int | None = None) -> dict[str, Any]:
        """What `load_state_dict` goes on from: after the first `rows` rows, or after all that were given.

        `rows` is for a loader that has read ahead; counted from the set's beginning, not from the last resumption.
        """
        after = self._given if rows is None else rows
        places = [place for place in self._places if place.row <= after <= self._given]
        if not places:
            known = f"[{self._places[0].row}, {self._given}]"
            raise ValueError(f"rows must be in {known}, the rows that are remembered, got {after}")
        return {"rows": after, **asdict(places[-1])}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration begin there. Later ones begin at the beginning."""
        facts = dict(state)
        rows = facts.pop("rows")
        place = _Place(**copy.deepcopy(facts))
        self._loaded, self._given = (place, rows), rows
        self._places = deque([place], maxlen=_KEPT)

    def __iter__(self) -> Iterator[Row]:
        if get_worker_info() is not None:
            raise ValueError("dataloader_num_workers must be 0 with a streamed data set, got a worker process")
        (place, rows), self._loaded = self._loaded, (_Place(), 0)
        self._places = deque([place], maxlen=_KEPT)
        self._given = place.row
        for row in self._from(place):
            self._given += 1
            if self._given > rows:
                yield row
        if self._given < self._required:
            raise DataExhausted(self._given * self._length, self._required * self._length, self.epochs)

    def _from(self, place: _Place) -> Iterator[Row]:
        for epoch in range(place.epoch, self.epochs):
            yield from self._pass(place if epoch == place.epoch else _Place(self._given, epoch))

    def _pass(self, place: _Place) -> Iterator[Row]:
        source = copy.deepcopy(self._source)  # a stream that was told where to begin begins there ever after
        if place.source is not None:
            source.load_state_dict(place.source)
        elif place.row > self._places[-1].row:
            self._places.append(place)
        tokens, starts = list(place.tokens), list(place.starts)
        documents = iter(source)
        while rows := list(islice(documents, _CALL)):
            for document, _, _ in self._encoder.encode(texts(rows, self._column)):
                starts.append(len(tokens))
                tokens += document
            whole = len(tokens) // self._length * self._length
            for begin in range(0, whole, self._length):
                yield self._row(tokens, starts, begin)
            tokens, starts = tokens[whole:], [start - whole for start in starts if start >= whole]
            if self._given >= self._places[-1].row + _EVERY:
                here = replace(place, row=self._given, source=source.state_dict(), tokens=tokens, starts=starts)
                self._places.append(copy.deepcopy(here))
        if tokens:
            yield self._row(tokens, starts, 0)

    def _row(self, tokens: list[int], starts: list[int], begin: int) -> Row:
        end = begin + self._length
        return make_row(
            np.asarray(tokens[begin:end]),
            np.asarray([start - begin for start in starts if begin <= start < end], dtype=np.int64),
            length=self._length,
            filler=self._encoder.end,
            is_isolated=self._is_isolated,
        )
