"""The data of a training run: which text, how it is cut into rows, and what is held out.

data = open_data(DataConfig(text="books.txt", validation=0.01), tokenizer=tokenizer, sequence_length=1024, seed=0,
                 cache_dir=Path("run/data"))
data.train[0]["input_ids"]  # int64 [1024], see `rows`
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..ops.validation import check_choice, check_count
from .hub import HubSet, open_set, texts
from .rows import DataExhausted, PackedRows
from .stream import StreamedRows
from .text import EMBEDDED, digest, pieces, size_in_bytes, text_path
from .token_file import Encoder, TokenFile, token_file

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Data", "DataConfig", "DataExhausted", "open_data", "training_pieces"]

DOCUMENTS = ("isolated", "joined")


@dataclass(frozen=True)
class DataConfig:
    """What to train on: `text` or `dataset`.

    Attributes:
        text: UTF-8 files, plain or .gz, in which a line of its own with U+001E ends a document; or "embedded", two
            novels that come with the package.
        dataset: a set of the hub (`HubSet`, or a mapping of its fields).
        validation: held out: a file as in `text`, a share of the text in (0, 1), its last tokens; for `dataset` the
            name of a split. None: nothing.
        validation_rows: at most so many rows of it, evenly spaced, None for all. Of a streamed split, the first.
        documents: "isolated", no document attends to another, or "joined".
        epochs: passes over the data that a run may take; beyond, it stops with `DataExhausted`.
    """

    text: str | tuple[str, ...] | None = None
    dataset: HubSet | None = None
    validation: str | float | None = None
    validation_rows: int | None = None
    documents: str = "isolated"
    epochs: int = 1

    def __post_init__(self) -> None:
        """Check every setting that can be checked without reading data."""
        if isinstance(self.text, list):
            object.__setattr__(self, "text", tuple(self.text))
        if isinstance(self.dataset, Mapping):
            object.__setattr__(self, "dataset", _hub_set(self.dataset))
        if (self.text is None) == (self.dataset is None):
            raise ValueError(
                "data must have either text or dataset, got " + ("neither" if self.text is None else "both")
            )
        check_choice("data.documents", self.documents, DOCUMENTS)
        check_count("data.epochs", self.epochs, minimum=1)
        if self.validation_rows is not None:
            check_count("data.validation_rows", self.validation_rows, minimum=1)
        if self.validation is not None:
            _check_validation(self.validation, self.dataset is not None)
        for path in self.text_paths:
            _check_file("data.text", path)
        if self.dataset is None and isinstance(self.validation, str):
            _check_file("data.validation", text_path(self.validation))

    @property
    def text_paths(self) -> tuple[Path, ...]:
        """The training text's files, none for a set of the hub."""
        names = (self.text,) if isinstance(self.text, str) else () if self.text is None else self.text
        if not isinstance(names, tuple) or not all(isinstance(name, str) and name for name in names):
            raise ValueError(f"data.text must be a path, a list of paths or {EMBEDDED!r}, got {self.text!r}")
        return tuple(text_path(name) for name in names)


@dataclass(frozen=True)
class Data:
    """What `open_data` gives.

    Attributes:
        train: rows in the order of training, in which a loader must take them; its `require(rows)` raises
            `DataExhausted` where there are fewer.
        validation: rows that always stay the same, or None.
        facts: where the tokens came from, how many there are and their digest, as plain data for a record.
    """

    train: PackedRows | StreamedRows
    validation: PackedRows | None
    facts: dict[str, Any]


def open_data(
    config: DataConfig, *, tokenizer: PreTrainedTokenizerBase, sequence_length: int, seed: int, cache_dir: Path
) -> Data:
    """Tokenise what is not tokenised yet, and open it.

    Args:
        config: what to train on.
        tokenizer: has an end-of-sequence token, see `token_file.Encoder`.
        sequence_length: tokens of a row.
        seed: decides the order of the rows, in [0, 2**63); a streamed set keeps its own.
        cache_dir: where tokens are kept, for every run that shares text and tokenizer.

    Raises:
        ValueError: the data is not there, not text, or too little.
        OSError: no room for the tokens.
    """
    check_count("sequence_length", sequence_length, minimum=2)
    check_count("seed", seed, minimum=0, maximum=2**63 - 1)
    encoder = Encoder(tokenizer)
    isolated = config.documents == "isolated"
    shape: dict[str, Any] = {"length": sequence_length, "is_isolated": isolated}
    limit = config.validation_rows

    validation = None
    if isinstance(config.validation, str):
        held = _validation_file(config, encoder, sequence_length, cache_dir)
        validation = PackedRows(held, filler=encoder.end, rows=limit, **shape)

    if config.dataset is not None and config.dataset.streaming:
        source: Any = open_set(config.dataset, config.dataset.split)
        train = StreamedRows(source, config.dataset.column, encoder, epochs=config.epochs, **shape)
        return Data(train, validation, {"source": str(config.dataset), "tokens": None} | _held_out(validation))

    file = (
        _hub_file(config.dataset, config.dataset.split, encoder, cache_dir)
        if config.dataset
        else _text_file("data.text", config.text_paths, encoder, cache_dir)
    )
    tokens = int(file.facts["tokens"])
    kept = tokens
    if isinstance(config.validation, float):
        kept = tokens - math.ceil(config.validation * tokens)
        if min(kept, tokens - kept) < sequence_length:
            raise ValueError(
                f"data.validation must leave a row of {sequence_length} tokens on either side, "
                f"got {config.validation} of {tokens} tokens"
            )
        validation = PackedRows(file, filler=encoder.end, stretch=(kept, tokens), rows=limit, **shape)
    train = PackedRows(file, filler=encoder.end, stretch=(0, kept), seed=seed, epochs=config.epochs, **shape)
    return Data(train, validation, _facts(train) | _held_out(validation))


def training_pieces(config: DataConfig) -> Iterator[tuple[str, bool]]:
    """The training text in order, as (piece, whether it ends its document), for a tokenizer to learn from.

    A held-out share of `text` is cut from tokens, so that it is part of it; a held-out file or split is not.
    """
    if config.dataset is not None:
        return texts(open_set(config.dataset, config.dataset.split), config.dataset.column)  # type: ignore[arg-type]
    return (piece for path in config.text_paths for piece in pieces(path))


def _text_file(name: str, paths: tuple[Path, ...], encoder: Encoder, cache_dir: Path) -> TokenFile:
    source = ", ".join(path.name for path in paths)
    text = (piece for path in paths for piece in pieces(path))
    file = token_file(text, encoder, key=digest(paths), source=source, size=size_in_bytes(paths), cache_dir=cache_dir)
    return _filled(name, file)


def _hub_file(wanted: HubSet, split: str, encoder: Encoder, cache_dir: Path, at_least: int | None = None) -> TokenFile:
    """Tokens of a split; of a stream the first `at_least` and what completes their last document."""
    rows: Any = open_set(wanted, split)
    # A set on disk knows its contents' fingerprint; of a stream nothing is known but what was asked for.
    facts = [getattr(rows, "_fingerprint", None), *dataclasses.astuple(wanted), split, at_least]
    text = texts(rows, wanted.column)
    if at_least is not None:
        text = _enough(text, encoder, at_least)
    source = f"{wanted} {split}"
    return _filled(
        "data.dataset", token_file(text, encoder, key=repr(facts), source=source, size=None, cache_dir=cache_dir)
    )


def _enough(text: Iterator[tuple[str, bool]], encoder: Encoder, tokens: int) -> Iterator[tuple[str, bool]]:
    held = 0
    for piece in text:
        yield piece
        held += sum(len(found) for found, _, _ in encoder.encode([piece]))
        if held >= tokens:
            return


def _validation_file(config: DataConfig, encoder: Encoder, length: int, cache_dir: Path) -> TokenFile:
    assert isinstance(config.validation, str)
    if config.dataset is None:
        return _text_file("data.validation", (text_path(config.validation),), encoder, cache_dir)
    limited = config.dataset.streaming and config.validation_rows is not None
    at_least = config.validation_rows * length if limited and config.validation_rows else None
    return _hub_file(config.dataset, config.validation, encoder, cache_dir, at_least)


def _filled(name: str, file: TokenFile) -> TokenFile:
    if not file.facts["documents"]:
        raise ValueError(f"{name} must hold text, got none in {file.facts['source']}")
    return file


def _facts(rows: PackedRows) -> dict[str, Any]:
    return {"source": rows.source, "tokens": rows.tokens, "sha256": rows.digest}


def _held_out(rows: PackedRows | None) -> dict[str, Any]:
    return {"validation": None if rows is None else _facts(rows)}


def _hub_set(fields: Mapping[str, Any]) -> HubSet:
    known = [field.name for field in dataclasses.fields(HubSet)]
    unknown = [name for name in fields if name not in known]
    if unknown or "name" not in fields:
        told = f"got {', '.join(map(str, unknown))}" if unknown else "got no name"
        raise ValueError(f"data.dataset must have a name and may have {', '.join(known[1:])}, {told}")
    return HubSet(**fields)


def _check_validation(value: object, is_hub: bool) -> None:
    share = isinstance(value, float) and 0 < value < 1 and not is_hub
    if not share and not (isinstance(value, str) and value):
        expected = "the name of a split" if is_hub else "a path or a share in (0, 1)"
        raise ValueError(f"data.validation must be {expected}, got {value!r}")


def _check_file(name: str, path: Path) -> None:
    if not path.is_file():
        raise ValueError(f"{name} must be a file, got {str(path)!r}, which is none")
