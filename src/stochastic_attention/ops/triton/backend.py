"""The backend `triton`: linear-cost attention by fused kernels, forward and backward, on CUDA devices.

It takes the same passes as `blocked` (see `plan`) and cuts them into tiles itself. What runs is an operator of PyTorch
that plans inside: see `operator`.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

from ..call import Call
from ..merge import apply_sink

_WIDEST = 256  # of a head, whose sums are held in registers
_OLDEST = (8, 0)
_MOST_ROWS = 2**31 - 1  # the kernels count rows and slots in 32 bits


def unsupported(call: Call) -> str | None:
    """Whole sequences on a CUDA device, in float32 or below; on a CPU under Triton's interpreter, in any dtype."""
    if call.permutes_each_prefix:
        return 'decode=True with scope "sequence" gives every query a permutation of its own, and passes share one'
    device = call.q.device.type
    if device not in ("cuda", "cpu"):
        return f"on a CUDA device only, got {call.q.device}"
    if call.compute_dtype == torch.float64 and device != "cpu":
        return "float32, bfloat16 and float16 only, got float64"
    if max(call.q.shape[-1], call.v.shape[-1]) > _WIDEST:
        return f"head dimensions up to {_WIDEST}, got {call.q.shape[-1]} and {call.v.shape[-1]}"
    if max(call.q.shape[2], call.k.shape[2]) > _MOST_ROWS:
        return f"at most {_MOST_ROWS} queries and keys"
    return _why_not_here(device)


@torch.compiler.assume_constant_result
def _why_not_here(device: str) -> str | None:
    if find_spec("triton") is None:
        return "triton is not installed"
    if device == "cpu":
        from triton import JITFunction

        from .forward import forward

        compiled = isinstance(forward, JITFunction)
        return "on the CPU only where TRITON_INTERPRET=1 was set before triton was loaded" if compiled else None
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < _OLDEST:
        return f"compute capability {_OLDEST} or later, got {torch.cuda.get_device_capability()}"
    return None


def run(call: Call) -> tuple[Tensor, Tensor]:
    """(out [B, Hq, Nq, Dv], lse [B, Hq, Nq] in the compute dtype); the sink is outside the lse."""
    from .operator import attend  # registering operators loads torch's compiler, which takes seconds

    out, lse = attend(call)
    return (out if call.sink_logits is None else apply_sink(out, lse, call.sink_logits)), lse
