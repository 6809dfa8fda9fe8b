"""Routing keys in one launch, where PyTorch takes dozens of operations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..routing import STATES, halves, mix_words

_BLOCK = 512


def routing_keys(positions: Tensor, *, seed: int, step: int | Tensor, layer: int, head: int | Tensor) -> Tensor:
    """What `routing.routing_keys` gives for `positions` [..., 1, N] and a head that is a number or of shape [H, 1].

    Of one dimension, `positions` are those of all heads.
    """
    from .planning import draw

    shape = positions.shape if isinstance(head, int) else torch.broadcast_shapes(positions.shape, head.shape)
    assert isinstance(head, int) or positions.shape[-2:-1] in ((), (1,))
    keys = positions.new_empty(shape)
    if not keys.numel():
        return keys
    words = halves(seed) if isinstance(step, Tensor) else (*halves(seed), *halves(step), layer)
    first, second = (_signed(mix_words(state, words)) for state in STATES)
    kernel: Any = draw
    n = shape[-1]
    kernel[(keys.numel() // n * -(-n // _BLOCK),)](
        position_ptr=positions.contiguous(),
        head_ptr=positions if isinstance(head, int) else head,  # what is not read must still be a pointer
        step_ptr=step if isinstance(step, Tensor) else positions,
        keys_ptr=keys,
        first=first,
        second=second,
        layer=_signed(layer),
        head=_signed(head) if isinstance(head, int) else 0,
        heads=1 if isinstance(head, int) else head.shape[0],
        positions=n,
        STEP=isinstance(step, Tensor),
        HEADS=isinstance(head, Tensor),
        BLOCK=_BLOCK,
        enable_fp_fusion=True,  # there is nothing to fuse, but triton warns where this is left open
    )
    return keys


def _signed(word: int | Tensor) -> int:
    """The 32 bits as an int32, for launches tell types by values: larger numbers would compile another kernel."""
    assert isinstance(word, int)
    return word - 2**32 if word >= 2**31 else word
