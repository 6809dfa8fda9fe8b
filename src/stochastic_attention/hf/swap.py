"""Put a pattern into a pretrained model's attention layers, and take it out again."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, TypeVar

from torch import Tensor, nn
from transformers import PreTrainedModel

from ..ops.backends import backend_names
from ..ops.call import check_step
from ..ops.pattern import Pattern
from ..ops.validation import check_choice
from .attend import STEP_ARGUMENT
from .register import NATIVES, implementation_name, native_function, register
from .state import LayerState, ModelState, attach, attention_modules, detach, family_class, layer_state, model_state

Model = TypeVar("Model", bound=PreTrainedModel)


def swap(model: Model, pattern: Pattern, layers: Iterable[int] | None = None, backend: str | None = None) -> Model:
    """Make layers of `model` attend by `pattern`, in place; every other layer keeps its own attention and mask.

    Padding (a 2-D attention mask, either side) and packing (position_ids that restart) are honoured: no token sees
    padding or another document, and a row gives the same logits alone as in any batch. RoPE keeps original positions.
    Heads, scale, softcap and sinks are the model's own. A layer's index feeds its routing keys, so layers differ.

    Swapping again changes the layers asked for and leaves the rest as it is, so layers can have patterns of their own;
    the routing step stays. The model gets a config object of its own: models that shared it are not touched. A swap is
    not saved: `save_pretrained` writes the plain model.

    Args:
        model: a transformers model of a supported family (llama, qwen2, qwen3) with sdpa or eager attention.
        pattern: see `Pattern`.
        layers: indices of the layers to swap; None: every layer. In a swapped layer the pattern replaces the model's
            sliding window, if it has one there (`report` names it).
        backend: see `attention`.

    Raises:
        ValueError: an argument is out of its domain, or the model is none that can be swapped. The swapped model raises
            it for what it cannot honour (attention dropout, output_attentions, a ready-made mask, causality turned
            off), and NotImplementedError where queries and keys differ, that is for any use of a filled cache.
    """
    modules = attention_modules(model)
    if not isinstance(pattern, Pattern):
        raise ValueError(f"pattern must be a Pattern, got {type(pattern).__name__}")
    if backend is not None:
        check_choice("backend", backend, backend_names())
    chosen = _check_layers(layers, len(modules))
    state = model_state(model) or _begin(model, modules)
    for module in modules.values():
        if module.layer_idx in chosen:
            attach(module, LayerState(_state_of(module).native, pattern, backend))
    swapped_all = all(_state_of(module).pattern is not None for module in modules.values())
    state.current = implementation_name(None if swapped_all else state.native)
    _set_implementation(model, state.current)
    return model


def restore(model: Model) -> Model:
    """Undo every `swap` of `model`, in place: the same functions run on the same config, so logits are bit-equal."""
    modules = attention_modules(model)
    state = _swapped_state(model)
    _set_implementation(model, state.native)
    state.hook.remove()
    for module in (model.base_model, *modules.values()):
        detach(module)
    return model


def set_step(model: PreTrainedModel, step: int | Tensor) -> None:
    """Set the step that feeds the routing keys of every swapped layer from the next call on; 0 after a first `swap`.

    Nothing else moves it, in training mode or not: call this once an optimizer step to train under fresh permutations,
    and leave it alone to evaluate. A 0-d int64 tensor keeps compiled code from specialising on its value.
    """
    state = _swapped_state(model)
    check_step(step, model.device)
    state.step = step


def _begin(model: PreTrainedModel, modules: dict[str, nn.Module]) -> ModelState:
    """Check that the model can be swapped, and put the records and the hook on it, no layer swapped yet."""
    native = model.config._attn_implementation
    if native not in NATIVES:
        raise ValueError(f"model must have attn_implementation {' or '.join(NATIVES)} to be swapped, got {native!r}")
    if model.config.output_attentions:
        raise ValueError(
            "config.output_attentions must be False: swapped layers never hold attention weights, got True"
        )
    functions = {
        name: native_function(family_class(module, model.config.model_type), native)  # type: ignore[arg-type]
        for name, module in modules.items()
    }
    register()
    shared, own = model.config, copy.deepcopy(model.config)
    for module in model.modules():
        if getattr(module, "config", None) is shared:
            module.config = own  # type: ignore[assignment]
    for name, module in modules.items():
        attach(module, LayerState(functions[name]))
    hook = model.base_model.register_forward_pre_hook(_pass_step, with_kwargs=True)
    state = ModelState(native, current=native, step=0, hook=hook)
    attach(model.base_model, state)
    return state


def _pass_step(
    base_model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Forward pre-hook of the base model. It also catches a swap that something else has switched off."""
    state = _swapped_state(base_model)
    if base_model.config._attn_implementation != state.current:
        raise RuntimeError(
            "the attention implementation of a swapped model was set to "
            f"{base_model.config._attn_implementation!r}, so no swapped layer would run: restore the model first"
        )
    return args, {**kwargs, STEP_ARGUMENT: state.step}


def _set_implementation(model: PreTrainedModel, name: str) -> None:
    model.set_attn_implementation(name)
    if model.config._attn_implementation != name:
        raise RuntimeError(
            f"transformers did not take attention implementation {name!r} for {type(model).__name__} and runs "
            f"{model.config._attn_implementation!r}"
        )


def _swapped_state(model: PreTrainedModel) -> ModelState:
    state = model_state(model)
    if state is None:
        raise ValueError("model must have been swapped first: it runs its own attention")
    return state


def _state_of(module: nn.Module) -> LayerState:
    state = layer_state(module)
    assert state is not None
    return state


def _check_layers(layers: Iterable[int] | None, count: int) -> set[int]:
    if layers is None:
        return set(range(count))
    if not isinstance(layers, Iterable):
        raise ValueError(f"layers must be None or an iterable of indices, got {layers!r}")
    wanted = list(layers)
    wrong = [i for i in wanted if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < count]
    if wrong or not wanted or len(set(wanted)) < len(wanted):
        raise ValueError(f"layers must be None or distinct indices in [0, {count}), at least one, got {wanted!r}")
    return set(wanted)
