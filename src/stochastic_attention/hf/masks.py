"""What travels as `attention_mask` through a swapped model, and the documents that it stands for.

Shapes: B rows, N tokens; prefill, so that queries and keys are the same N tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from transformers import AttentionMaskInterface

from ..ops.layout import PADDING, documents_from_mask

PREFILL_ONLY = (
    "swapped attention runs whole sequences only: decoding with a cache, chunked prefill and static caches are not "
    "supported; pass use_cache=False"
)


class Masks(NamedTuple):
    """The mask argument of every attention layer, made once a forward pass.

    A tuple, so that whatever moves or saves the arguments of a layer (device hooks, checkpointing) sees the tensors.
    """

    native: Tensor | None  # what the original implementation asks for; read by layers that keep it
    real: Tensor | None  # bool [B, N], False at padding; None: no padding. Read by swapped layers


def build_masks(
    *,
    native: str | None,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    **rest: object,
) -> Masks:
    """A mask function of transformers: all arguments but `native` are what its `AttentionMaskInterface` passes.

    `native` names the implementation of the layers that are not swapped. None: there are none, so no mask of N x N
    entries is made.
    """
    if q_length != kv_length or int(q_offset):
        raise NotImplementedError(f"{PREFILL_ONLY} (got {q_length} queries, {kv_length} keys)")
    if use_vmap:
        raise ValueError("a custom mask function (or_mask_function, and_mask_function) cannot be honoured once swapped")
    real = attention_mask
    if real is not None:
        if real.dim() != 2 or real.shape[1] != kv_length:
            raise ValueError(f"attention_mask must have shape [B, N] with N = {kv_length}, got {list(real.shape)}")
        real = None if bool(real.all()) else real.bool()
    if native is None:
        return Masks(None, real)
    mask = AttentionMaskInterface()[native](
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        attention_mask=attention_mask,
        use_vmap=use_vmap,
        **rest,
    )
    return Masks(mask, real)


def documents_of(real: Tensor | None, position_ids: Tensor | None, *, batch: int, tokens: int) -> Tensor | None:
    """`documents` [B, N] of `attention`, from padding and from positions that restart; None: one document, no padding.

    Only real tokens are compared, each with the real token before it: padding between them does not split a document.
    A position that jumps ahead is a ValueError: transformers reads it as a new document where it has neither cache nor
    mask, and as the same document elsewhere.
    """
    padding = None if real is None else documents_from_mask(real)
    if position_ids is None:
        return padding
    if position_ids.dim() != 2 or position_ids.shape[0] not in (1, batch) or position_ids.shape[1] != tokens:
        raise ValueError(f"position_ids must have shape [{batch}, {tokens}], got {list(position_ids.shape)}")
    follows = position_ids.diff(dim=-1, prepend=position_ids[:, :1] - 1) == 1
    if bool(follows.all()):
        return padding
    if real is None:
        real = torch.ones_like(position_ids, dtype=torch.bool)
    position_ids, follows = (x.expand(batch, -1) for x in (position_ids, follows))
    real = real.expand(batch, -1)

    slots = torch.arange(tokens, device=real.device)
    before = torch.where(real, slots, PADDING).cummax(dim=-1).values.roll(1, dims=-1)
    before[:, 0] = PADDING
    step = position_ids - position_ids.gather(-1, before.clamp(min=0))
    has_one_before = real & (before >= 0)
    jumps = has_one_before & (step > 1) & ~follows
    if bool(jumps.any()):
        row, at = jumps.nonzero()[0].tolist()
        raise ValueError(
            "position_ids must rise by 1 inside a document and restart with the next, got "
            f"{position_ids[row, before[row, at]]} followed by {position_ids[row, at]} in row {row}"
        )
    return (has_one_before & (step <= 0)).cumsum(dim=-1).masked_fill(~real, PADDING)
