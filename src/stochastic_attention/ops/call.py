"""One checked call of the op, as every backend receives it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .layout import Layout
from .pattern import Pattern
from .validation import can_read, check_count, check_flag, check_real, plain_number


@dataclass(frozen=True)
class Call:
    """Inputs that agree with each other, and the dtype to compute in.

    Shapes: q [B, Hq, Nq, D], k [B, Hkv, Nk, D], v [B, Hkv, Nk, Dv], sink_logits [Hq]; Hkv divides Hq. Backends return
    (out [B, Hq, Nq, Dv], lse [B, Hq, Nq]) in `compute_dtype`; `attention` casts the output.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    pattern: Pattern
    layout: Layout
    layer: int
    step: int | Tensor
    causal: bool
    decode: bool
    scale: float
    softcap: float | None
    sink_logits: Tensor | None

    @property
    def compute_dtype(self) -> torch.dtype:
        """float64 where any input is, else float32: half precision is for storage."""
        return torch.float64 if torch.float64 in (self.q.dtype, self.k.dtype, self.v.dtype) else torch.float32

    @property
    def permutes_each_prefix(self) -> bool:
        """Whether every query has a permutation of its own: decoding in scope "sequence", unless all keys are near."""
        p = self.pattern
        return self.decode and p.kind == "stochastic" and p.scope == "sequence" and p.reach < self.k.shape[2]

    @classmethod
    def checked(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        pattern: Pattern,
        *,
        layout: Layout,
        layer: int = 0,
        step: int | Tensor = 0,
        causal: bool = True,
        decode: bool = False,
        scale: float | None = None,
        softcap: float | None = None,
        sink_logits: Tensor | None = None,
    ) -> Call:
        """Validate everything that the layout has not, and fill in the default scale, D ** -0.5."""
        layer = plain_number(layer)
        check_count("layer", layer, minimum=0, maximum=2**32 - 1)
        step = checked_step(step, q.device)
        check_flag("causal", causal)
        check_flag("decode", decode)
        if decode and not causal:
            raise ValueError(
                "decode=True needs causal=True: the newest token has no later ones to see; got causal=False"
            )
        pattern.check_causal(causal)
        scale = math.pow(q.shape[-1], -0.5) if scale is None else scale
        check_real("scale", scale)
        if softcap is not None:
            check_real("softcap", softcap, above=0.0)
        if sink_logits is not None:
            _check_sink_logits(sink_logits, q)
        return cls(q, k, v, pattern, layout, layer, step, causal, decode, scale, softcap, sink_logits)


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise ValueError unless q, k and v fit together as in torch's scaled_dot_product_attention."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if isinstance(x, Tensor) and (x.is_nested or x.layout != torch.strided or x.device.type == "meta"):
            got = "a nested one (see documents)" if x.is_nested else f"{x.layout} on {x.device}"
            raise ValueError(f"{name} must be a dense tensor that holds values, got {got}")
        if not isinstance(x, Tensor) or x.dim() != 4:
            got = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"{name} must be a 4-D tensor [B, H, N, D], got {got}")
        if x.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(f"{name} must be float64, float32, bfloat16 or float16, got {x.dtype}")
        if x.device != q.device:
            raise ValueError(f"{name} must be on the device of q, {q.device}, got {x.device}")
    if k.shape[0] != q.shape[0] or k.shape[-1] != q.shape[-1]:
        raise ValueError(f"k must share B and D with q {list(q.shape)}, got {list(k.shape)}")
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(f"v must share B, Hkv and Nk with k {list(k.shape)}, got {list(v.shape)}")
    if q.shape[-1] < 1 or v.shape[-1] < 1:
        raise ValueError(f"q and v must have head dimensions >= 1, got {q.shape[-1]} and {v.shape[-1]}")
    if k.shape[1] < 1 or q.shape[1] % k.shape[1]:
        raise ValueError(f"q must have a multiple of k's {k.shape[1]} heads, got {q.shape[1]}")


def checked_step(step: Any, device: torch.device) -> int | Tensor:  # noqa: ANN401  # of any type
    """`step`; ValueError unless it is an integer in [0, 2**63) or a 0-d int64 tensor on `device`."""
    if isinstance(step, Tensor):
        if step.dim() != 0 or step.dtype != torch.int64 or step.device != device:
            raise ValueError(
                f"a step tensor must be 0-d int64 on {device}, got {step.dtype} {list(step.shape)} on {step.device}"
            )
        if can_read(step.device):
            check_count("step", int(step), minimum=0, maximum=2**63 - 1)
        return step
    step = plain_number(step)
    check_count("step", step, minimum=0, maximum=2**63 - 1)
    return step


def _check_sink_logits(sink_logits: Tensor, q: Tensor) -> None:
    if not isinstance(sink_logits, Tensor) or sink_logits.shape != (q.shape[1],) or not sink_logits.is_floating_point():
        got = f"{sink_logits.dtype} {list(sink_logits.shape)}" if isinstance(sink_logits, Tensor) else sink_logits
        raise ValueError(f"sink_logits must be a floating tensor [Hq] = [{q.shape[1]}], got {got}")
    if sink_logits.device != q.device:
        raise ValueError(f"sink_logits must be on the device of q, {q.device}, got {sink_logits.device}")
