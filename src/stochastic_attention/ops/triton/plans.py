"""Schedules kept from call to call: making one takes dozens of small operations, which can outlast the attention.

The backward of a call finds what its forward made; in evaluation, and where a pattern is not random, so does the next
call of a layer. A schedule is a pure function of its key, so keeping it is not state.
"""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock
from typing import Any

import torch

from ..call import Call
from ..plan import lower
from .schedule import Schedule, schedule

# Some dozen MiB for a layer at 131,072 tokens. With less room than all layers of a model need, every call would miss.
_MOST_BYTES = 2**30

_Key = tuple[Any, ...]


def schedules(call: Call) -> list[Schedule]:
    """The schedules of the passes of a call, in order."""
    if 0 in (call.q.shape[0], call.q.shape[2], call.k.shape[2]):
        return []
    key = _key(call)
    return _make(call) if key is None else _KEPT.get(key, call)


def _make(call: Call) -> list[Schedule]:
    return [schedule(call, p) for p in lower(call)]


def _key(call: Call) -> _Key | None:
    """What the schedules depend on, where that is known without reading a tensor; None elsewhere."""
    pattern, layout, step = call.pattern, call.layout, call.step
    if not layout.is_single or isinstance(step, torch.Tensor) or pattern.kind == "moba":
        return None
    heads = call.k.shape[1] if pattern.per_head else 1
    drawn = (call.layer, step, heads) if pattern.is_random else ()
    return pattern, layout.keys, call.causal, call.compute_dtype, call.k.device, *drawn


class _Kept:
    """What was used last, up to a number of bytes in all."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._schedules: OrderedDict[_Key, list[Schedule]] = OrderedDict()
        self._lock = Lock()

    def get(self, key: _Key, call: Call) -> list[Schedule]:
        with self._lock:
            if key in self._schedules:
                self._schedules.move_to_end(key)
                return self._schedules[key]
        made = _make(call)
        if call.k.is_cuda and torch.cuda.is_current_stream_capturing():
            return made  # its memory belongs to the graph
        with self._lock:
            self._schedules[key] = made
            while sum(s.nbytes for kept in self._schedules.values() for s in kept) > self._most_bytes:
                self._schedules.popitem(last=False)
        return made


_KEPT = _Kept(_MOST_BYTES)
