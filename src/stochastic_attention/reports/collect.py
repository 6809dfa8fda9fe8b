"""What a folder of results holds: records with the files that belong to them, and whatever could not be read."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# In the order of the page. A command that is not listed here makes a record of the last kind.
KINDS: dict[str, tuple[str, ...]] = {
    "Comparisons": ("compare", "recommend", "eval", "perplexity", "generate"),
    "Training": ("train",),
    "Probes": ("probe",),
    "Speed and memory": ("bench",),
    "GPU": ("predict",),
    "Theory": ("reach", "mixing", "estimator"),
    "Graphs": ("graph", "compare-graphs"),
    "Other": (),
}
OTHER = "Other"
_SHOWN = (".md", ".png", ".txt")
# What `sattn recommend` writes: see `hf.presets`.
_PRESET = {"preset", "patterns", "decode", "record"}
_FIELDS = {"command": str, "config": dict, "environment": dict, "results": dict}


@dataclass(frozen=True)
class Entry:
    """A record and its files, or the files of a folder that belong to no record.

    Attributes:
        path: of the record, or of the folder where there is none, relative to the folder that was searched.
        record: the parsed JSON, None for files alone.
        files: tables, plots and printed output, sorted.
    """

    path: str
    record: Mapping[str, Any] | None
    files: list[Path] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The path without what most records' paths have in common."""
        folder, _, file = self.path.rpartition("/")
        return folder if folder and file == "record.json" else self.path.removesuffix(".json")

    @property
    def is_introduction(self) -> bool:
        """Whether these are files alone that tell what their folder holds."""
        return self.record is None and any(path.name == "README.md" for path in self.files)

    @property
    def command(self) -> str | None:
        """The word after `sattn` in the record's command line."""
        if self.record is None:
            return None
        found = re.search(r"(?:^|[\s/])(?:sattn|stochastic_attention)\s+([\w-]+)", self.record["command"])
        return found and found[1]

    @property
    def kind(self) -> str:
        """One of `KINDS`. What ran on a CUDA device is of the kind GPU, whatever it measured the speed of."""
        kind = next((kind for kind, commands in KINDS.items() if self.command in commands), OTHER)
        on_gpu = self.record is not None and str(self.record["config"].get("device", "")).startswith("cuda")
        return "GPU" if kind == "Speed and memory" and on_gpu else kind


@dataclass(frozen=True)
class Findings:
    """Everything under a folder; paths relative to it.

    Attributes:
        entries: sorted by path; files alone come last, but for introductions.
        faults: by path, why a file that should be shown cannot be.
        foreign: JSON files that are something else than a record.
        rest: files of other kinds, and linked folders, which are not followed.
    """

    folder: Path
    entries: list[Entry]
    faults: dict[str, str]
    foreign: list[str]
    rest: list[str]

    def kind(self, entry: Entry) -> str:
        """One of `KINDS`, a record's own. Files alone are of the kind of the records below their folder.

        Where these are of several kinds, an introduction is of the first of them, other files of the last kind of all.
        """
        if entry.record is not None:
            return entry.kind
        prefix = "" if entry.path == "." else f"{entry.path}/"
        below = {one.kind for one in self.entries if one.record is not None and one.path.startswith(prefix)}
        kinds = [kind for kind in KINDS if kind in below]
        return kinds[0] if kinds and (entry.is_introduction or len(kinds) == 1) else OTHER

    def blame(self, path: Path, reason: str) -> None:
        """Note why a file cannot be shown."""
        self.faults[self.relative(path)] = reason

    def relative(self, path: Path) -> str:
        """A path under the folder, as it is shown."""
        return path.relative_to(self.folder).as_posix()


def collect(folder: Path, *, leave_out: Path | None = None) -> Findings:
    """Read every record under `folder`; names that begin with a dot are unfinished files, and passed over.

    Args:
        folder: searched with all its subfolders.
        leave_out: a file that is not looked at: the page itself.

    Raises:
        ValueError: `folder` is none, or holds nothing to show and nothing at fault.
    """
    if not folder.is_dir():
        raise ValueError(f"folder must be an existing folder, got {folder}")
    findings = Findings(folder, [], {}, [], [])

    def unreadable(error: OSError) -> None:
        findings.blame(Path(error.filename), f"cannot be read: {error.strerror}")

    page = None if leave_out is None else os.path.realpath(leave_out)
    for here, folders, names in os.walk(folder, onerror=unreadable):
        folders[:] = [name for name in folders if not name.startswith(".")]
        paths = [Path(here, name) for name in sorted(names) if not name.startswith(".")]
        _collect_one(findings, [path for path in paths if os.path.realpath(path) != page])
        findings.rest.extend(findings.relative(Path(here, name)) for name in folders if Path(here, name).is_symlink())
    if not findings.entries and not findings.faults:
        raise ValueError(f"folder must hold records (record.json and the like), tables or plots, got none in {folder}")
    findings.entries.sort(key=lambda entry: (entry.record is None and not entry.is_introduction, entry.path))
    findings.foreign.sort()
    findings.rest.sort()
    return findings


def _collect_one(findings: Findings, paths: Iterable[Path]) -> None:
    """Add the files of one folder."""
    records: dict[str, Entry] = {}
    waiting = []
    for path in paths:
        if path.suffix == ".json":
            try:
                facts = _read(path)
            except ValueError as error:
                findings.blame(path, str(error))
                continue
            if facts is None:
                findings.foreign.append(findings.relative(path))
            elif not facts:
                findings.rest.append(findings.relative(path))
            else:
                records[path.stem] = Entry(findings.relative(path), facts)
        elif path.suffix in _SHOWN:
            waiting.append(path)
        else:
            findings.rest.append(findings.relative(path))
    presets = (entry for entry in records.values() if entry.command == "recommend")
    common = records.get("record") or next(presets, None)
    for path in waiting:
        owner = records.get(path.stem) or common
        if owner is None:
            owner = records.setdefault("", Entry(findings.relative(path.parent), None))
        owner.files.append(path)
    findings.entries.extend(records.values())


def _read(path: Path) -> Mapping[str, Any] | None:
    """The record, which may stand in a preset; {} for a preset without one, None for anything else.

    Raises:
        ValueError: in words, why a record cannot be shown.
    """
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not JSON: {error}") from None
    if isinstance(facts, dict) and set(facts) == _PRESET:
        facts = facts["record"]
        if facts is None:
            return {}
    # Data that do not say how they were made are no record, whatever else they hold.
    if not isinstance(facts, dict) or "command" not in facts:
        return None
    wrong = [name for name, kind in _FIELDS.items() if not isinstance(facts.get(name), kind)]
    if wrong:
        raise ValueError(f"is no whole record: {', '.join(wrong)} missing or of another type")
    return facts
