"""Put patterns into a pretrained model's attention layers, and take them out again."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any, TypeVar

from torch import Tensor
from transformers import Cache, DynamicCache, GenerationMixin, PreTrainedModel

from ..ops.call import checked_step
from ..ops.pattern import Pattern
from .attend import STEP_ARGUMENT
from .caches import keep_all_keys
from .masks import check_values
from .plan import (
    NAME,
    NATIVES,
    LayersSpec,
    SwapPlan,
    check_swappable,
    default_native,
    has_own_plan,
    keeps_plan,
    native_windows,
    plan_layers,
    read,
    sdpa_drops_softcap,
    write,
)
from .registration import check_version, register
from .state import LayerState, ModelState, attach, attention_modules, detach, model_state, native_function

Model = TypeVar("Model", bound=PreTrainedModel)

# Arguments of `generate` with which its first call is a part of the prompt, or the prompt and a guess of what follows.
_OTHER_FIRST_CALLS = (
    "prefill_chunk_size",
    "assistant_model",
    "assistant_early_exit",
    "prompt_lookup_num_tokens",
    "use_mtp",
)


def swap(
    model: Model,
    pattern: Pattern | Mapping[int, Pattern] | None = None,
    layers: LayersSpec = None,
    decode: str | None = None,
    *,
    backend: str | None = None,
) -> Model:
    """Make layers of `model` attend by `pattern`, in place; every other layer keeps its own attention and mask.

    Padding (a 2-D attention mask, either side) and packing (position_ids that restart) are honoured: no token sees
    padding or another document, and a row gives the same logits alone as in any batch. RoPE keeps original positions.
    Heads, scale, softcap and sinks are the model's own. A layer's index feeds its routing keys, so layers differ.

    In a swapped layer the pattern replaces the model's sliding window, if it has one there, and the layer gets a cache
    of all keys. Every cache of transformers works; `decode` says what a query sees that finds cached keys. Scope
    "prefix" gives it what it would see in one pass over everything, however the tokens come.

    Swapping again changes the layers asked for and leaves the rest as it is; the routing step stays. The model gets a
    config object of its own, which keeps the swap: `save_pretrained` writes it, and `swap(model)` applies it again.

    Args:
        model: a transformers model of a supported family (see `FAMILIES`) with sdpa or eager attention.
        pattern: see `Pattern`. A mapping gives layers, by index, patterns of their own. None: what the config keeps.
        layers: which layers to swap: None for those with a sliding window of their own, or all where there are none;
            "all", "sliding", "full", "every 4th" (layers 3, 7, 11, ...; any number), or indices.
        decode: what a query sees that finds cached keys: "full", all of them; "stochastic", its N(i) under the pattern
            as the newest token of its document. None: "full" for scope "sequence", whose permutation of a whole
            text a token at its end cannot know, and "stochastic" for everything else.
        backend: see `attention`.

    Raises:
        ValueError: an argument is out of its domain, or the model is none that can be swapped. The swapped model raises
            it for what it cannot honour: attention dropout, output_attentions, a ready-made mask, causality turned off,
            a cache that dropped keys. Its `generate` raises NotImplementedError for chunked prefill and for assisted
            decoding under scope "sequence", whose permutation is drawn over the whole prompt.
    """
    modules = attention_modules(model)
    state = model_state(model)
    native = _native(model, state)
    kept = read(model.config).layers if state or (_is_built_so(model) and keeps_plan(model.config)) else {}
    if pattern is None:
        if (layers, decode, backend) != (None, None, None):
            raise ValueError("pattern must be given with layers, decode or backend, got None")
        asked = read(model.config).layers
    else:
        check_swappable(model.config)
        asked = plan_layers(model.config, pattern, layers, decode=decode, backend=backend)
    plan = SwapPlan(native, {**kept, **asked})
    changed = set(asked) if state else set(range(len(modules)))
    state = state or _begin(model, native)
    state.windows = {i: window for i, window in enumerate(native_windows(model.config)) if window and i in plan.layers}
    if not has_own_plan(model.config):
        write(model.config, plan)
    for module in modules.values():
        if module.layer_idx in changed:
            layer = plan.layers.get(module.layer_idx)  # type: ignore[call-overload]
            attach(module, LayerState(native_function(module, native), layer, hooked=True))
    _set_implementation(model, NAME)
    return model


def restore(model: Model) -> Model:
    """Undo every `swap` of `model`, in place: the same functions run on the same config, so logits are bit-equal.

    A model that was built as swapped one becomes the plain model that it would have been.
    """
    modules = attention_modules(model)
    check_swappable(model.config)
    state = _adopted_state(model)
    _set_implementation(model, state.native)
    if state.entry is None:
        delattr(model.config, NAME)
    else:
        setattr(model.config, NAME, state.entry)
    for hook in state.hooks:
        hook.remove()
    vars(model).pop("generate", None)
    for module in (model.base_model, *modules.values()):
        detach(module)
    return model


def set_step(model: PreTrainedModel, step: int | Tensor) -> None:
    """Set the step that feeds the routing keys of every swapped layer from the next call on; 0 after a first `swap`.

    Nothing else moves it, in training mode or not: call this once an optimizer step to train under fresh permutations
    (`RoutingStep` does so in a Trainer), and leave it alone to evaluate. A 0-d int64 tensor keeps compiled code from
    specialising on its value.
    """
    state = _adopted_state(model)
    state.step = checked_step(step, model.device)


def _begin(model: PreTrainedModel, native: str) -> ModelState:
    """Check that the model can be swapped, and put the record and the hooks on it, no layer swapped yet."""
    if model.config.output_attentions:
        raise ValueError(
            "config.output_attentions must be False: swapped layers never hold attention weights, got True"
        )
    check_version()
    register()
    shared, own = model.config, copy.deepcopy(model.config)
    for module in model.modules():
        if getattr(module, "config", None) is shared:
            module.config = own  # type: ignore[assignment]
    base = model.base_model
    hooks = [
        base.register_forward_pre_hook(check_values, with_kwargs=True),
        base.register_forward_pre_hook(_prepare_base_model, with_kwargs=True),
    ]
    if base is not model:
        hooks.append(model.register_forward_pre_hook(_prepare_model, with_kwargs=True))
    if isinstance(model, GenerationMixin):
        # A bound method would be pickled by its name, which is that of the class's own.
        model.generate = partial(generate, model)  # type: ignore[method-assign]
    state = ModelState(native, getattr(own, NAME, None), step=0, windows={}, hooks=hooks)
    attach(base, state)
    return state


def _prepare_model(model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward pre-hook of the whole model, which knows how long the static caches are that its `generate` makes."""
    _keep_all_keys(model, args, kwargs, longest=getattr(model, "_previous_max_cache_length", None))


def _prepare_base_model(
    base: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Forward pre-hook of the base model. It also catches a swap that something else has switched off."""
    state = model_state(base)
    assert state is not None
    if base.config._attn_implementation != NAME:
        raise RuntimeError(
            "the attention implementation of a swapped model was set to "
            f"{base.config._attn_implementation!r}, so no swapped layer would run: restore the model first"
        )
    # A tensor may be moved on in place before a layer is recomputed.
    step = state.step.clone() if isinstance(state.step, Tensor) else state.step
    kwargs = {**kwargs, STEP_ARGUMENT: step}
    use_cache = kwargs.get("use_cache")
    if use_cache is None:
        use_cache = base.config.use_cache
    if not _keep_all_keys(base, args, kwargs) and state.windows and use_cache and not base.training:
        # The cache that the model would make here would keep its own windows.
        kwargs[_cache_argument(base)] = cache = DynamicCache(config=base.config)
        keep_all_keys(cache, state.windows)
    return args, kwargs


def _keep_all_keys(
    module: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any], longest: int | None = None
) -> bool:
    """Make a cache among the arguments keep all keys of swapped layers; whether there is one."""
    cache = next((x for x in (*args, *kwargs.values()) if isinstance(x, Cache)), None)
    state = model_state(module)
    if cache is None or state is None:
        return cache is not None
    keep_all_keys(cache, state.windows, longest)
    return True


def _cache_argument(base: PreTrainedModel) -> str:
    """How the forward method calls its cache: it was renamed inside the range of supported versions."""
    return "cache" if "cache" in inspect.signature(base.forward).parameters else "past_key_values"


def generate(model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
    """`generate` of a swapped model: its class's own, after a check that nothing is asked of it that it cannot do."""
    check_generate(model, kwargs)
    return type(model).generate(model, *args, **kwargs)  # type: ignore[attr-defined]


def check_generate(model: PreTrainedModel, kwargs: Mapping[str, Any]) -> None:
    """Raise NotImplementedError where `generate` would split the prompt and a layer permutes the whole of it."""
    config = kwargs.get("generation_config") or model.generation_config
    patterns = [layer.pattern for layer in read(model.config, may_exit_early=True).layers.values()]
    if any(pattern.kind == "stochastic" and pattern.scope == "sequence" for pattern in patterns):
        for name in _OTHER_FIRST_CALLS:
            if kwargs.get(name, getattr(config, name, None)):
                raise NotImplementedError(
                    f'{name} must not be used under scope "sequence": the first call would not be the prompt, over '
                    'which the permutation is drawn; under scope "prefix" it changes nothing'
                )


def _native(model: PreTrainedModel, state: ModelState | None) -> str:
    """The implementation that a model has, or would have if it were not swapped."""
    native = state.native if state else model.config._attn_implementation
    if native == NAME:
        native = read(model.config).native if keeps_plan(model.config) else default_native(model.config)
    if native not in NATIVES:
        raise ValueError(f"model must have attn_implementation {' or '.join(NATIVES)} to be swapped, got {native!r}")
    if native == "sdpa" and sdpa_drops_softcap(model.config):
        raise ValueError(
            'a model with attn_logit_softcapping must have attn_implementation="eager" to be swapped, as sdpa leaves '
            "the softcap out, got 'sdpa'"
        )
    return native


def _is_built_so(model: PreTrainedModel) -> bool:
    """Whether the model was built with this attention implementation and the plan in its config."""
    return isinstance(model, PreTrainedModel) and model.config._attn_implementation == NAME


def _set_implementation(model: PreTrainedModel, name: str) -> None:
    model.set_attn_implementation(name)
    if model.config._attn_implementation != name:
        raise RuntimeError(
            f"transformers did not take attention implementation {name!r} for {type(model).__name__} and runs "
            f"{model.config._attn_implementation!r}"
        )


def _adopted_state(model: PreTrainedModel) -> ModelState:
    """The record of a swapped model; one that was built so is given its record here."""
    if model_state(model) is None:
        if not _is_built_so(model):
            raise ValueError("model must have been swapped first: it runs its own attention")
        swap(model)
    state = model_state(model)
    assert state is not None
    return state
