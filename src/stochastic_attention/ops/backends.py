"""Which backends there are, and which one takes a call.

A backend is a module of this package with two functions: `unsupported(call) -> str | None` says in words why it cannot
take a call (None: it can), and `run(call) -> (out, lse)` takes it. That one predicate makes the automatic choice, the
error of an explicit one, and the listing of `sattn backends`.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from . import blocked, cpp, gather, reference
from .call import Call
from .triton import backend as triton

Run = Callable[[Call], tuple[Tensor, Tensor]]

# Fastest first: the automatic choice is the first that can.
_MODULES = {
    "gather": gather,
    "cpp": cpp,
    "triton": triton,
    "blocked": blocked,
    "reference": reference,
}


def backend_names() -> tuple[str, ...]:
    """Every backend, in the order of automatic choice."""
    return tuple(_MODULES)


def unsupported(call: Call, backend: str) -> str | None:
    """Why `backend` cannot take `call`, or None where it can."""
    return _MODULES[backend].unsupported(call)


def choose(call: Call, backend: str | None) -> Run:
    """The `run` of the named backend, or of the first that supports the call; ValueError where there is none."""
    if backend is not None and backend not in backend_names():
        raise ValueError(f"backend must be None or one of {', '.join(map(repr, _MODULES))}, got {backend!r}")
    reasons = {}
    for name in _automatic(call) if backend is None else (backend,):
        reason = unsupported(call, name)
        if reason is None:
            return _MODULES[name].run
        reasons[name] = reason
    raise ValueError("no backend takes this call: " + "; ".join(f"{name}: {why}" for name, why in reasons.items()))


def _automatic(call: Call) -> list[str]:
    """On a CPU, the kernels for GPUs run in an interpreter, for those who ask for it."""
    return [name for name in _MODULES if name != "triton" or call.q.device.type != "cpu"]
