"""The attention function that transformers calls in every layer of a swapped model.

Shapes: B rows, Hq query heads, Hkv key/value heads, N tokens, D.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..ops.api import attention
from ..ops.pattern import Pattern
from .masks import PREFILL_ONLY, Masks, documents_of
from .state import layer_state

# Passed with each call of the base model, because a recomputed layer (gradient checkpointing) must see the step of
# its own forward pass, whatever has been set since.
STEP_ARGUMENT = "routing_step"

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

    query [B, Hq, N, D], key and value [B, Hkv, N, D]; returns ([B, N, Hq, D], attention weights or None).
    """
    state = layer_state(module)
    if state is None:
        raise ValueError(
            "the model's config names an attention implementation that belongs to a swapped model, but this model is "
            'not swapped: build it with attn_implementation="sdpa", then swap it'
        )
    state.calls += 1
    step = arguments.pop(STEP_ARGUMENT, None)
    if state.pattern is None:
        native_mask = attention_mask.native if isinstance(attention_mask, Masks) else attention_mask
        return state.native(module, query, key, value, native_mask, **arguments)
    if not isinstance(attention_mask, Masks):
        got = list(attention_mask.shape) if isinstance(attention_mask, Tensor) else type(attention_mask).__name__
        raise ValueError(
            "attention_mask must be None or a padding mask [B, N] given to the whole model: a swapped layer cannot "
            f"honour a ready-made one, got {got}"
        )
    if step is None:
        raise ValueError(f"{STEP_ARGUMENT} is missing: a swapped layer runs inside a call of its model only")
    out = _attend_by_pattern(module, query, key, value, state.pattern, state.backend, step, attention_mask, **arguments)
    return out, None


def _attend_by_pattern(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern,
    backend: str | None,
    step: int | Tensor,
    masks: Masks,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_ids: Tensor | None = None,
    is_causal: bool | None = None,
    output_attentions: bool | None = None,
    **rest: object,
) -> Tensor:
    if dropout:
        raise ValueError(f"attention dropout must be 0 in a swapped layer, got {dropout}: set config.attention_dropout")
    if output_attentions:
        raise ValueError("output_attentions must be False: a swapped layer never holds attention weights, got True")
    if False in (is_causal, module.is_causal, getattr(module.config, "is_causal", None)):
        raise ValueError("is_causal must be True: a swapped layer is causal, got False")
    unknown = sorted(name for name, given in rest.items() if given is not None and name not in _WITHOUT_EFFECT)
    if unknown:
        raise ValueError(f"a swapped layer does not know the argument {unknown[0]!r}, and will not ignore it")
    if query.shape[2] != key.shape[2]:
        raise NotImplementedError(f"{PREFILL_ONLY} (got {query.shape[2]} queries, {key.shape[2]} keys)")
    out = attention(
        query,
        key,
        value,
        pattern,
        layer=module.layer_idx,  # type: ignore[arg-type]
        step=step,
        causal=True,
        documents=documents_of(masks.real, position_ids, batch=query.shape[0], tokens=query.shape[2]),
        scale=scaling,
        softcap=softcap,
        sink_logits=s_aux,
        backend=backend,
    )
    return out.transpose(1, 2).contiguous()
