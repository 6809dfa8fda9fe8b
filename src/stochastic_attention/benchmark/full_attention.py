"""Full causal attention by each kernel that PyTorch has: the baselines, of which the fastest is the one to beat."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

Full = Callable[[Tensor, Tensor, Tensor], Tensor]

_SDPA = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
# "auto" is what torch.nn.functional.scaled_dot_product_attention chooses by itself.
FULL_KERNELS = ("auto", *_SDPA, "flex")
FLEX_LENGTH = 8192  # the only one it is compiled for: a shape takes tens of seconds


def full_attention(kernel: str, *, length: int, decodes: bool) -> Full:
    """`kernel` of FULL_KERNELS for q [B, H, Nq, D], k and v [B, H, N, D]; ValueError where it is not for such a call.

    Not every device and dtype has every kernel: then the call raises RuntimeError.
    """
    if kernel == "flex":
        if decodes or length != FLEX_LENGTH:
            raise ValueError(f"flex is compiled for whole sequences of {FLEX_LENGTH} tokens alone")
        return _flex()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if kernel == "auto":
            return F.scaled_dot_product_attention(q, k, v, is_causal=not decodes)
        with sdpa_kernel(_SDPA[kernel]):
            return F.scaled_dot_product_attention(q, k, v, is_causal=not decodes)

    return attend


@cache
def _flex() -> Full:
    from torch.nn.attention.flex_attention import flex_attention

    compiled: Any = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v: compiled(q, k, v, block_mask=_causal_mask(q.shape[2], q.device))


@cache
def _causal_mask(n: int, device: torch.device) -> BlockMask:
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(lambda _b, _h, i, j: i >= j, None, None, n, n, device=str(device))
