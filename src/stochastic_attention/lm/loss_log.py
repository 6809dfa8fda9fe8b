"""What a run tells as it goes: a line of JSON a step, and a curve of them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ..records import write_text


class LossLog:
    """A file of JSON lines, each with its `step`, ascending.

    A killed run may have written past its last checkpoint; `truncate` takes a resumed one back there, so that no step
    is told twice.
    """

    def __init__(self, path: Path) -> None:
        """`path`: the file; made at the first line."""
        self.path = path

    def truncate(self, step: int) -> None:
        """Drop the lines after `step`, and what a crash left of a last one."""
        if self.path.exists():
            kept = [line for line in self._whole_lines() if json.loads(line)["step"] <= step]
            write_text(self.path, "".join(f"{line}\n" for line in kept))

    def append(self, **entry: Any) -> None:  # noqa: ANN401  # JSON
        """Write a line, at once."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry, allow_nan=False) + "\n")

    def sync(self) -> None:
        """Have the lines on disk, not in a cache only."""
        if self.path.exists():
            with self.path.open("a", encoding="utf-8") as file:
                os.fsync(file.fileno())

    def entries(self) -> list[dict[str, Any]]:
        """The lines so far."""
        return [json.loads(line) for line in self._whole_lines()] if self.path.exists() else []

    def _whole_lines(self) -> list[str]:
        return self.path.read_text(encoding="utf-8").split("\n")[:-1]
