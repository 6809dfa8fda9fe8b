"""Checkpoints on disk: complete or absent, whatever kills the run.

A checkpoint is written into a folder aside and renamed when all of it is on disk. Older ones go after that.

    checkpoints/checkpoint-STEP    complete
    checkpoints/unfinished         what is being written; the next run clears it away
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_NAME = re.compile(r"checkpoint-(\d+)")
# Room beyond the tensors' own bytes: configurations, states, the tokenizer.
_SLACK = 16 << 20


class DiskFullError(OSError):
    """A checkpoint, or the model at the end, found no room. The checkpoints before are complete."""

    def __init__(self, what: str, folder: Path, needed: int) -> None:
        """`what` needs about so many bytes; `folder` holds the checkpoints."""
        free = shutil.disk_usage(folder).free
        newest = newest_checkpoint(folder)
        kept = f"the last complete one is {newest}" if newest else "there is none before it"
        super().__init__(
            errno.ENOSPC, f"no room for {what}: {needed} bytes are needed, {free} are free; {kept}", str(folder)
        )


def checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints, oldest first."""
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted((path for path in found if _NAME.fullmatch(path.name)), key=step_of)


def newest_checkpoint(folder: Path) -> Path | None:
    """The complete checkpoint of the latest step."""
    return next(reversed(checkpoints(folder)), None)


def step_of(checkpoint: Path) -> int:
    """Optimizer steps done at a checkpoint."""
    name = _NAME.fullmatch(checkpoint.name)
    assert name is not None
    return int(name[1])


def unfinished(folder: Path) -> Path:
    """Where the next checkpoint is written."""
    return folder / "unfinished"


def clear_unfinished(folder: Path) -> None:
    """Remove what a killed run left half-written."""
    shutil.rmtree(unfinished(folder), ignore_errors=True)


def check_room(folder: Path, tensors: int) -> None:
    """Raise DiskFullError unless there is room for a checkpoint: what the last one took, or else `tensors` bytes."""
    newest = newest_checkpoint(folder)
    taken = tensors if newest is None else sum(path.stat().st_size for path in newest.rglob("*") if path.is_file())
    if shutil.disk_usage(folder).free < taken + _SLACK:
        raise DiskFullError("a checkpoint", folder, taken + _SLACK)


@contextmanager
def telling_of_a_full_disk(what: str, folder: Path, needed: int) -> Iterator[None]:
    """Raise DiskFullError for whatever a library raises within that cannot write `what`."""
    try:
        yield
    except Exception as error:
        if not is_disk_full(error):
            raise
        full = DiskFullError(what, folder, needed)
        clear_unfinished(folder)
        raise full from error


def is_disk_full(error: BaseException) -> bool:
    """Whether an error says so. torch, safetensors and tokenizers raise no OSError, torch no word of the disk."""
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    return any(words in str(error) for words in ("No space left", "file write failed", "unexpected pos"))


def finish(folder: Path, step: int, keep: int) -> Path:
    """Make the checkpoint that was written aside a complete one, and remove all but the newest `keep`."""
    written, target = unfinished(folder) / f"checkpoint-{step}", folder / f"checkpoint-{step}"
    for path in [*written.rglob("*"), written]:
        _sync(path)
    if target.exists():  # a run that went on from an earlier one
        shutil.rmtree(target)
    written.rename(target)
    _sync(folder)
    for old in checkpoints(folder)[:-keep]:
        shutil.rmtree(old)
    return target


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
