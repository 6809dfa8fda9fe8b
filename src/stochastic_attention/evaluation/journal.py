"""What a long job has finished so far: a line of JSON a piece, each on disk before the next begins."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ..records import write_text


class Journal:
    """An append-only file: the configuration first, then a line {"key", "value"} for each finished piece.

    Opening it again with the same configuration gives back what is done. A last line torn by a crash is dropped; the
    piece it told of is simply done again. A whole file is only ever appended to, so that another process which adds to
    it meanwhile loses nothing.

    Attributes:
        done: value by key.
    """

    def __init__(self, path: Path, config: dict[str, Any]) -> None:
        """Open or begin. ValueError where the file is of another configuration, or no journal."""
        self._path = path
        self.done: dict[str, Any] = {}
        lines, torn = _read(path)
        if not lines:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, json.dumps({"config": config}, allow_nan=False) + "\n")
            return
        entries = [_parse(path, number, line) for number, line in enumerate(lines, start=1)]
        way_out = "choose another output"
        if len(entries) == 1:  # it failed, or another process has just begun it
            way_out = f"nothing of it is finished: delete {path}, or {way_out}"
        _check_config(path, entries[0].get("config"), json.loads(json.dumps(config)), way_out)
        self.done = {entry["key"]: entry["value"] for entry in entries[1:]}
        if torn:
            write_text(path, "\n".join(lines) + "\n")

    def add(self, key: str, value: object) -> None:
        """Keep a finished piece."""
        try:
            line = json.dumps({"key": key, "value": value}, allow_nan=False) + "\n"
        except ValueError as error:
            raise ValueError(f"{key}: a figure is infinite or NaN, and cannot be kept") from error
        with self._path.open("a", encoding="utf-8") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        self.done[key] = json.loads(line)["value"]

    def agree(self, key: str, fact: object) -> None:
        """Keep a fact on which finished pieces rest. ValueError where another one is kept."""
        if key not in self.done:
            self.add(key, fact)
        elif self.done[key] != fact:
            raise ValueError(
                f"output {self._path.parent} holds a run with other {key}: {self.done[key]!r}, now {fact!r}; "
                "choose another output"
            )


def _read(path: Path) -> tuple[list[str], bool]:
    """The whole lines, and whether more follows the last line end: that was being written when a process died."""
    if not path.exists():
        return [], False
    *lines, rest = path.read_text(encoding="utf-8", errors="replace").split("\n")
    return lines, bool(rest)


def _parse(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{path} is damaged at line {number}: {error}; move it away to begin anew") from error
    if not isinstance(entry, dict) or set(entry) != ({"config"} if number == 1 else {"key", "value"}):
        raise ValueError(f"{path} is no journal of a comparison (line {number}); choose another output")
    return entry


def _check_config(path: Path, old: Any, new: dict[str, Any], way_out: str) -> None:  # noqa: ANN401  # JSON
    changed = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    if changed:
        told = "; ".join(f"{name} was {old.get(name)!r}, now {new.get(name)!r}" for name in changed)
        raise ValueError(f"output {path.parent} holds a run of another configuration ({told}); {way_out}")
