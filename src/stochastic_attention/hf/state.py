"""What a swapped model carries, and where: one record on the base model, one on each attention module.

The records are plain attributes of the modules, so a deep copy of a swapped model is a swapped model of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import AttentionInterface, PreTrainedModel

from .plan import LayerPlan

# Family (`config.model_type`) -> the class of its attention modules. Supporting one more starts here.
FAMILIES = {
    "llama": "LlamaAttention",
    "qwen2": "Qwen2Attention",
    "qwen3": "Qwen3Attention",
    "qwen3_moe": "Qwen3MoeAttention",
    "mistral": "MistralAttention",
    "mixtral": "MixtralAttention",
    "gemma2": "Gemma2Attention",
    "gemma3_text": "Gemma3Attention",
    "gpt_oss": "GptOssAttention",
    "smollm3": "SmolLM3Attention",
    "olmo2": "Olmo2Attention",
    "phi3": "Phi3Attention",
}

# With those of models made with these layers (see `lm`), which need no swap, but report and take steps alike.
_ATTENTION_CLASSES = FAMILIES | {"stochastic_llama": "StochasticLlamaAttention"}

_ATTRIBUTE = "_stochastic_attention"


@dataclass
class LayerState:
    """One attention layer of a swapped model. `plan` None: the layer runs `native`, the function it had before.

    `hooked`: a hook of the model passes the step with each call; elsewhere it is 0.
    """

    native: Callable[..., tuple[Tensor, Tensor | None]]
    plan: LayerPlan | None
    hooked: bool
    calls: int = 0


@dataclass
class ModelState:
    """A swapped model.

    Attributes:
        native: name of the attention implementation it had.
        entry: what its config said of a swap before, None for nothing.
        step: feeds the routing keys of every swapped layer.
        windows: the sliding windows that swapped layers had, by index.
        hooks: what prepares each call of the model.
    """

    native: str
    entry: object
    step: int | Tensor
    windows: dict[int, int]
    hooks: list[RemovableHandle]


def model_state(model: PreTrainedModel) -> ModelState | None:
    """The record of a swapped model, None where the model is not swapped."""
    return getattr(getattr(model, "base_model", model), _ATTRIBUTE, None)


def layer_state(module: nn.Module) -> LayerState | None:
    """The record of an attention module of a swapped model, None elsewhere."""
    return getattr(module, _ATTRIBUTE, None)


def attach(module: nn.Module, state: LayerState | ModelState) -> None:
    """Put a record on a module."""
    setattr(module, _ATTRIBUTE, state)


def detach(module: nn.Module) -> None:
    """Take the record off a module."""
    delattr(module, _ATTRIBUTE)


def family_class(module: nn.Module, family: str) -> type | None:
    """The family's attention class among the bases of `module` (wrappers subclass it), None for other modules."""
    return next((c for c in type(module).__mro__ if c.__name__ == _ATTENTION_CLASSES[family]), None)


def native_function(module: nn.Module, native: str) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The attention function that an attention module runs under the implementation `native`."""
    if native != "eager":
        return AttentionInterface()[native]
    # transformers keeps no registry of eager functions: each modeling file has its own, under this name.
    modeling = family_class(module, module.config.model_type)  # type: ignore[union-attr]
    assert modeling is not None
    return sys.modules[modeling.__module__].eager_attention_forward


def attention_modules(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The attention modules by name, in order of layer; ValueError unless `model` is of a supported family."""
    if not isinstance(model, PreTrainedModel):
        wrapped = model.modules() if isinstance(model, nn.Module) else ()
        inner = next((type(module).__name__ for module in wrapped if isinstance(module, PreTrainedModel)), None)
        more = f" around a {inner}: pass that one, which is changed in place" if inner else ""
        raise ValueError(f"model must be a transformers PreTrainedModel, got {type(model).__name__}{more}")
    family = model.config.model_type
    if family not in _ATTENTION_CLASSES:
        raise ValueError(f"model must be of a supported family ({', '.join(FAMILIES)}), got {family!r}")
    modules: dict[str, nn.Module] = {
        name: module for name, module in model.named_modules() if family_class(module, family) is not None
    }
    found, count = [module.layer_idx for module in modules.values()], model.config.num_hidden_layers
    if found != list(range(count)):
        raise ValueError(
            f"model must have one {_ATTENTION_CLASSES[family]} for each of its {count} layers, found layers {found}"
        )
    return modules
