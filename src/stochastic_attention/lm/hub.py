"""Sets of the Hugging Face hub, or files in one of its formats: `datasets.load_dataset`, with its errors told plainly.

No code of a data set is ever run: `datasets` refuses sets that are scripts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..ops.validation import check_flag

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset


@dataclass(frozen=True)
class HubSet:
    """Which set, and which column of it is text; a row is a document.

    Attributes:
        name: of the set on the hub, or a format ("json", "parquet", "text") with `files`.
        subset: the set's configuration.
        split: its part for training.
        column: of the text.
        streaming: read as it comes, in the order of the set, or fetch it whole, tokenise it once and shuffle its rows.
        revision: commit or tag of the set, without which a changed set on the hub changes the run.
        files: paths or URLs, for a format.
    """

    name: str
    subset: str | None = None
    split: str = "train"
    column: str = "text"
    streaming: bool = True
    revision: str | None = None
    files: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check the types: settings come from files."""
        check_flag("data.dataset.streaming", self.streaming)
        files = (self.files,) if isinstance(self.files, str) else self.files
        if not isinstance(files, (list, tuple)) or not all(isinstance(file, str) for file in files):
            raise ValueError(f"data.dataset.files must be a path or a list of paths, got {files!r}")
        object.__setattr__(self, "files", tuple(files))
        for name in ("name", "subset", "split", "column", "revision"):
            value = getattr(self, name)
            is_optional = name in ("subset", "revision")
            if not (isinstance(value, str) and value) and not (is_optional and value is None):
                raise ValueError(f"data.dataset.{name} must be text, got {value!r}")

    def __str__(self) -> str:
        """The set in words."""
        parts = [self.name, self.subset, *self.files]
        return " ".join(part for part in parts if part)


def open_set(wanted: HubSet, split: str) -> Dataset | IterableDataset:
    """A split of the set, checked to have the column.

    Raises:
        ValueError: there is no such set, split or column, or the hub is out of reach.
    """
    from datasets import load_dataset

    options: dict[str, Any] = {"revision": wanted.revision} if wanted.revision else {}
    files: Any = {split: list(wanted.files)} if wanted.files else None
    try:
        found = load_dataset(
            wanted.name, wanted.subset, split=split, streaming=wanted.streaming, data_files=files, **options
        )
    except Exception as error:  # its kinds are many: no such set, none online, gated, a script, a bad file
        told = " ".join(str(error).split())
        raise ValueError(f"data.dataset cannot be opened, {wanted}, split {split!r}: {told}") from error
    columns = found.column_names
    if columns is None:  # a stream may have to be begun to tell
        columns = list(next(iter(found), {}))
    if wanted.column not in columns:
        raise ValueError(
            f"data.dataset.column must be a column of {wanted}, which has {', '.join(columns)}, got {wanted.column!r}"
        )
    return found  # type: ignore[return-value]


def texts(rows: Iterable[Mapping[str, Any]], column: str) -> Iterator[tuple[str, bool]]:
    """(document, True) of each row. Documents of nothing but white space are left out.

    Raises:
        ValueError: a row holds something else than text.
    """
    for row in rows:
        text = row[column]
        if not isinstance(text, str):
            raise ValueError(f"data.dataset.column must hold text, got {text!r} in column {column!r}")
        if text.strip():
            yield text, True
