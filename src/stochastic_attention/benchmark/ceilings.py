"""What a CUDA device reaches where nothing holds it back: one large product, one large copy."""

from __future__ import annotations

import torch

from .timing import medians, stopwatch

_SIDE = 8192
_BYTES = 2**30


def measure_ceilings(device: str) -> dict[str, float]:
    """FLOP/s of a product of two bfloat16 matrices, and bytes/s, read and written, of a copy."""
    a, b = torch.randn(2, _SIDE, _SIDE, device=device, dtype=torch.bfloat16)
    source, target = torch.zeros(2, _BYTES, dtype=torch.uint8, device=device)
    ops = {"product": lambda: a @ b, "copy": lambda: target.copy_(source)}
    seconds = medians(ops, stopwatch(device), repeats=5)
    return {"flops": 2 * _SIDE**3 / seconds["product"], "bytes": 2 * _BYTES / seconds["copy"]}
