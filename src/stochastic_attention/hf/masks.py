"""What travels as `attention_mask` through a swapped model, and the documents that it stands for.

Shapes: B rows; N tokens of a call that finds no cached keys. With a cache, N new tokens at the slots
offset .. offset + N - 1 of a key axis of K slots, cached tokens before them and unwritten slots (static caches) behind.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionMaskInterface, PreTrainedConfig

from ..ops.layout import PADDING, check_mask_values, documents_from_mask
from .plan import read


class Masks(NamedTuple):
    """The mask argument of every attention layer, made once a forward pass.

    A tuple, so that whatever moves or saves the arguments of a layer (device hooks, checkpointing) sees the tensors.
    """

    native: Tensor | None  # what the original implementation asks for; read by layers that keep it
    real: Tensor | None  # bool, one entry a token so far, False at padding; None: no padding. Read by swapped layers
    offset: int | Tensor  # slot of the first new token, which is how many tokens are cached

    @property
    def ndim(self) -> int:
        """Dimensions of a finished mask: `generate` makes masks ahead of a call, which then asks this of them."""
        return 4


def check_values(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward pre-hook of a base model: see `check_mask_values`. Later, transformers has made the mask one of bools."""
    mask = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)
    if isinstance(mask, Tensor) and mask.dim() == 2 and not torch.compiler.is_compiling():
        check_mask_values(mask)


def build_masks(
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    attention_mask: Tensor | Masks | None = None,
    use_vmap: bool = False,
    config: PreTrainedConfig,
    **rest: object,
) -> Masks:
    """A mask function of transformers: the arguments are what its `AttentionMaskInterface` passes.

    Where every layer is swapped, no mask of N x N entries is made.
    """
    if isinstance(attention_mask, Masks):
        return attention_mask
    if isinstance(q_offset, Tensor):
        q_offset = q_offset.clone()  # a static cache hands out its own counter, which the first layer moves on
    if use_vmap:
        raise ValueError("a custom mask function (or_mask_function, and_mask_function) cannot be honoured once swapped")
    real = attention_mask
    if real is not None:
        if real.dim() != 2 or real.shape[0] != batch_size:
            raise ValueError(f"attention_mask must have shape [B, N] with B = {batch_size}, got {list(real.shape)}")
        real = real.bool()
        if not torch.compiler.is_compiling():
            so_far = int(q_offset) + q_length
            slots = (
                kv_length if isinstance(q_offset, Tensor) else so_far
            )  # a static cache may have a mask of its length
            if not so_far <= real.shape[1] <= slots:
                raise ValueError(
                    f"attention_mask must have shape [B, N] with N = {so_far}, an entry for every token so far, cached "
                    f"ones too, got {list(real.shape)}"
                )
            real = None if bool(real[:, :so_far].all()) else real
    plan = read(config, may_exit_early=True)
    if plan.layers.keys() >= set(range(config.num_hidden_layers)):
        return Masks(native=None, real=real, offset=q_offset)
    mask = AttentionMaskInterface()[plan.native](
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        attention_mask=attention_mask,
        use_vmap=use_vmap,
        config=config,
        **rest,
    )
    return Masks(mask, real, q_offset)


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


def documents_with_cache(
    real: Tensor | None,
    position_ids: Tensor | None,
    offset: int | Tensor,
    *,
    batch: int,
    tokens: int,
    slots: int,
    device: torch.device,
) -> Tensor | None:
    """`documents` [B, K] of `attention` for N new tokens behind cached ones; None: one document, no padding.

    Documents count their positions from 0. So where the first new token says position p and more than p real tokens are
    cached, the last p of them are its own document, and the older ones belong to documents that have ended.
    """
    slot = torch.arange(slots, device=device)
    new_slots = offset + torch.arange(tokens, device=device)
    is_full = real is None and isinstance(offset, int) and slots == offset + tokens
    if is_full and (position_ids is None or bool((position_ids == new_slots).all())):
        return None
    written = (slot < offset + tokens).expand(batch, -1)
    if real is not None:
        written = written & F.pad(real[:, :slots], (0, max(slots - real.shape[1], 0)))
    new_real = written[:, new_slots]
    new = documents_of(new_real, position_ids, batch=batch, tokens=tokens) if tokens > 1 else new_real.long() - 1
    assert new is not None
    cached = written & (slot < offset)
    if position_ids is not None:
        first = new_real.long().argmax(dim=-1, keepdim=True)
        position = position_ids.expand(batch, -1).gather(-1, first)
        seen = cached.cumsum(dim=-1)
        cached = cached & (seen[:, -1:] - seen < position)
    return (cached.long() - 1).index_copy(1, new_slots, new)
