"""Rows of a task from a file of the user's, an object of JSON a line."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def json_lines(path: Path, *columns: str) -> Iterator[dict[str, Any]]:
    """The rows of a file, gzipped where its name says so; blank lines and a byte order mark are passed over.

    Raises:
        ValueError: a line is no object that has these columns; it is named.
    """
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
        # By bytes: a JSON string may hold characters that end a line of text.
        for number, line in enumerate(file, start=1):
            if not line.strip(b"\xef\xbb\xbf\r\n\t "):
                continue
            try:
                row = json.loads(line.decode("utf-8-sig"))
            except ValueError as error:
                raise ValueError(f"{path}: line {number} is no JSON in UTF-8: {error}") from error
            missing = [name for name in columns if not isinstance(row, dict) or name not in row]
            if missing:
                raise ValueError(f"{path}: line {number} has no {', '.join(missing)}")
            yield row
