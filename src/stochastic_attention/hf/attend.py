"""The attention function that transformers calls in every layer of a swapped model.

Shapes: B rows, Hq query heads, Hkv key/value heads, N new tokens, K key slots (K = N without cached keys), D.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops.api import attention
from ..ops.layout import PADDING
from ..ops.pattern import Pattern
from .masks import Masks, documents_of, documents_with_cache
from .plan import LayerPlan, read
from .state import LayerState, attach, layer_state, native_function

# Passed with each call of the base model, because a recomputed layer (gradient checkpointing) must see the step of
# its own forward pass, whatever has been set since.
STEP_ARGUMENT = "routing_step"

# Passed by a layer with two paths to its own attention function: the factors of their outputs (see `nn.PathGates`).
GATES_ARGUMENT = "path_gates"

# Arguments that transformers hands to every attention function and that change nothing here. `sliding_window` is a
# swapped layer's own native window, which its pattern replaces.
_WITHOUT_EFFECT = frozenset(
    {
        "cache_position",
        "logits_to_keep",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
        "sliding_window",
        "use_cache",
    }
)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object,
    **arguments: Any,  # noqa: ANN401  # whatever a model hands to its attention function
) -> tuple[Tensor, Tensor | None]:
    """An attention function of transformers: the layer's pattern, or its native function where it has none.

    query [B, Hq, N, D], key and value [B, Hkv, K, D]; returns ([B, N, Hq, D], attention weights or None).
    """
    state = layer_state(module) or _state_from_config(module)
    if not torch.compiler.is_compiling():  # a counter in a graph would be recompiled for every value
        state.calls += 1
    step = arguments.pop(STEP_ARGUMENT, None)
    if state.plan is None:
        if isinstance(attention_mask, Masks):
            attention_mask = _native_mask(module, query, key, attention_mask, arguments)
        return state.native(module, query, key, value, attention_mask, **arguments)
    if not isinstance(attention_mask, Masks):
        got = list(attention_mask.shape) if isinstance(attention_mask, Tensor) else type(attention_mask).__name__
        raise ValueError(
            "attention_mask must be None or a padding mask [B, N] given to the whole model: a swapped layer cannot "
            f"honour a ready-made one, got {got}"
        )
    if step is None and state.hooked:
        raise ValueError(f"{STEP_ARGUMENT} is missing: a swapped layer runs inside a call of its model only")
    gates = arguments.pop(GATES_ARGUMENT, None)
    if (gates is None) != (state.plan.gated_with is None):
        raise ValueError(
            f"{GATES_ARGUMENT} must be given where a layer has two paths, and only there: layer {module.layer_idx} "
            f"runs {state.plan}"
        )
    _check(module, arguments)
    new = _new_tokens(module, query, key, attention_mask, arguments)
    options = _op_arguments(module, state.plan, step or 0, arguments)
    if new.slots is None or state.plan.decode == "stochastic":
        out = _attend_by(state.plan.pattern, query, key, value, new, options)
    else:
        mask = _full_mask(new.documents, new.slots, key.shape[2], query)
        out = state.native(module, query, key, value, mask, **arguments)[0].transpose(1, 2)
    if gates is not None:
        assert state.plan.gated_with is not None
        g_sa, g_swa = gates
        out = g_sa * out + g_swa * _attend_by(state.plan.gated_with, query, key, value, new, options)
    return out.transpose(1, 2).contiguous(), None


def _state_from_config(module: nn.Module) -> LayerState:
    """The record of a layer whose model was built with this implementation, from its config; kept for later calls."""
    plan = read(module.config)  # type: ignore[arg-type]
    state = LayerState(native_function(module, plan.native), plan.layers.get(module.layer_idx), hooked=False)  # type: ignore[call-overload]
    attach(module, state)
    return state


def _check(module: nn.Module, arguments: dict[str, Any]) -> None:
    """Raise ValueError for what a swapped layer cannot honour."""
    if arguments.get("dropout"):
        raise ValueError(
            f"attention dropout must be 0 in a swapped layer, got {arguments['dropout']}: set config.attention_dropout"
        )
    if arguments.get("output_attentions") or getattr(module.config, "output_attentions", None):
        raise ValueError("output_attentions must be False: a swapped layer never holds attention weights, got True")
    is_causal = (
        arguments.get("is_causal"),
        getattr(module, "is_causal", None),
        getattr(module.config, "is_causal", None),
    )
    if False in is_causal:
        raise ValueError("is_causal must be True: a swapped layer is causal, got False")
    known = {"scaling", "dropout", "softcap", "s_aux", "position_ids", "is_causal", "output_attentions"}
    unknown = sorted(n for n, given in arguments.items() if given is not None and n not in known | _WITHOUT_EFFECT)
    if unknown:
        raise ValueError(f"a swapped layer does not know the argument {unknown[0]!r}, and will not ignore it")


def _finds_cached_keys(offset: int | Tensor, tokens: int) -> bool:
    """Whether tokens are cached. A lone token without any sees itself either way, so that no tensor need be read."""
    return (isinstance(offset, Tensor) and tokens == 1) or int(offset) > 0


class _NewTokens(NamedTuple):
    """Where the tokens of a call stand."""

    documents: Tensor | None  # of `attention`, for the keys in use
    slots: Tensor | None  # [N], their places on the key axis; None: there are no cached keys, and query i is key i


def _new_tokens(module: nn.Module, query: Tensor, key: Tensor, masks: Masks, arguments: dict[str, Any]) -> _NewTokens:
    batch, tokens, slots = query.shape[0], query.shape[2], key.shape[2]
    position_ids = arguments.get("position_ids")
    if not _finds_cached_keys(masks.offset, tokens):
        real = None if masks.real is None else masks.real[:, :tokens]
        return _NewTokens(documents_of(real, position_ids, batch=batch, tokens=tokens), None)
    offset = masks.offset if tokens == 1 else int(masks.offset)
    if isinstance(offset, int) and slots < offset + tokens:
        raise ValueError(
            f"the cache of layer {module.layer_idx} must hold all {offset + tokens} tokens, got {slots}: it keeps the "
            "model's own sliding window only. swap(model) reads the same config and keeps full caches"
        )
    documents = documents_with_cache(
        masks.real, position_ids, offset, batch=batch, tokens=tokens, slots=slots, device=query.device
    )
    return _NewTokens(documents, offset + torch.arange(tokens, device=query.device))


def _attend_by(
    pattern: Pattern, query: Tensor, key: Tensor, value: Tensor, new: _NewTokens, options: dict[str, Any]
) -> Tensor:
    """[B, Hq, N, D]. Without cached keys, whole sequences: a static cache has unwritten slots behind them."""
    if new.slots is None:
        key, value = (x[:, :, : query.shape[2]] for x in (key, value))
        return attention(query, key, value, pattern, documents=new.documents, **options)
    return attention(
        query, key, value, pattern, decode=True, query_positions=new.slots, documents=new.documents, **options
    )


def _native_mask(
    module: nn.Module, query: Tensor, key: Tensor, masks: Masks, arguments: dict[str, Any]
) -> Tensor | None:
    """The mask of a layer left alone, in which packed documents do not see each other either.

    transformers keeps them apart in calls without a cache and a mask only, and in gpt-oss in none.
    """
    tokens = query.shape[2]
    if arguments.get("position_ids") is None or _finds_cached_keys(masks.offset, tokens):
        return masks.native
    documents = _new_tokens(module, query, key, masks, arguments).documents
    if documents is None or not bool((documents > 0).any()):
        return masks.native
    slots = key.shape[2]  # a static cache has unwritten ones behind the tokens
    documents = F.pad(documents, (0, slots - tokens), value=PADDING)
    own = _full_mask(documents, torch.arange(tokens, device=query.device), slots, query)
    if masks.native is None or own is None:
        return own
    return masks.native & (own == 0) if masks.native.dtype == torch.bool else torch.minimum(masks.native, own)


def _op_arguments(module: nn.Module, plan: LayerPlan, step: int | Tensor, arguments: dict[str, Any]) -> dict[str, Any]:
    return {
        "layer": module.layer_idx,
        "step": step,
        "scale": arguments.get("scaling"),
        "softcap": arguments.get("softcap"),
        "sink_logits": arguments.get("s_aux"),
        "backend": plan.backend,
    }


def _full_mask(documents: Tensor | None, query_slots: Tensor, slots: int, query: Tensor) -> Tensor | None:
    """The mask [B or 1, 1, N, K] with which a query sees every cached key of its document; None: all there are.

    Additive, because that is what every native function reads.
    """
    if documents is None and len(query_slots) == 1:
        return None
    allowed = (torch.arange(slots, device=query.device) <= query_slots[:, None])[None]
    if documents is not None:
        own = documents[:, query_slots, None]
        allowed = allowed & (documents[:, None, :] == own) & (own >= 0)
    hidden = torch.finfo(query.dtype).min
    return torch.zeros(1, dtype=query.dtype, device=query.device).where(allowed, hidden)[:, None]
