"""Work shared by processes that torchrun or `accelerate launch` started: the first alone writes and tells.

Every process does the same with the same settings; only what runs on the model is divided. Answers are exchanged over
gloo, as Python objects, whatever device the models are on. Outside of `group` nothing is shared, whatever process group
a caller may have: one that evaluates during training, or has the harness divide the rows itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch.distributed as dist

from ..journal import Journal

Item = TypeVar("Item")
Answer = TypeVar("Answer")

_in_group = False


@contextmanager
def group() -> Iterator[None]:
    """Meet the other processes, where there are some, and part from them at the end."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield
        return
    global _in_group  # as a process group is one a process
    dist.init_process_group("gloo")
    _in_group = True
    try:
        yield
    finally:
        _in_group = False
        dist.destroy_process_group()


def is_first() -> bool:
    """Whether this process is the one that writes."""
    return not _in_group or dist.get_rank() == 0


def own_device(device: str) -> str:
    """`device`, or where it is "cuda" without a number, this process's."""
    return f"cuda:{os.environ['LOCAL_RANK']}" if device == "cuda" and _in_group else device


def on_first(run: Callable[[], Item]) -> Item:
    """What `run` gives on the first process. A ValueError there is raised on all."""
    if not _in_group:
        return run()
    holder: list[Any] = [None]
    if is_first():
        try:
            holder = [run()]
        except ValueError as error:
            holder = [error]
    dist.broadcast_object_list(holder)
    if isinstance(holder[0], ValueError):
        raise holder[0]
    return holder[0]


def shared(
    run: Callable[[Sequence[Item]], list[Answer]],
    items: Sequence[Item],
    together: Callable[[Item], Hashable] = id,
) -> list[Answer]:
    """`run(items)`, of which each process runs its share. All processes get all answers.

    Items of one `together` go to one process, which may do them at once; what is told apart is dealt out in turn.
    """
    if not _in_group:
        return run(items)
    count = dist.get_world_size()
    turns: dict[Hashable, int] = {}
    owners = [turns.setdefault(together(item), len(turns)) % count for item in items]
    parts: list[Any] = [None] * count
    dist.all_gather_object(
        parts, run([item for item, owner in zip(items, owners, strict=True) if owner == dist.get_rank()])
    )
    answers = [iter(part) for part in parts]
    return [next(answers[owner]) for owner in owners]


class Pieces(Protocol):
    """What `Journal` is to those who use it."""

    done: dict[str, Any]

    def add(self, key: str, value: object) -> None: ...  # noqa: D102


class _Following:
    """The journal of the first process, as the others know it."""

    def __init__(self, done: dict[str, Any]) -> None:
        self.done = done

    def add(self, key: str, value: object) -> None:
        self.done[key] = value


def open_journal(path: Path, config: dict[str, Any], facts: Mapping[str, object]) -> Pieces:
    """The journal at `path` with `facts` agreed on, which the first process alone reads and writes."""
    opened: list[Journal] = []

    def read() -> dict[str, Any]:
        opened.append(Journal(path, config))
        for key, fact in facts.items():
            opened[0].agree(key, fact)
        return opened[0].done

    done = on_first(read)
    return opened[0] if opened else _Following(done)
