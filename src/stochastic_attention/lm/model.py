"""A causal language model with stochastic attention, in Hugging Face form, built on transformers' own Llama.

Only the attention of a layer differs: its function is that of a swapped model (see `hf`), so padding, packing, every
cache, gradient checkpointing and compilation work as there, and a gated layer has two gates more.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    LlamaForCausalLM,
    LlamaModel,
    LlamaPreTrainedModel,
)
from transformers import initialization as init
from transformers.models.llama.modeling_llama import LlamaAttention

from ..hf.attend import GATES_ARGUMENT
from ..hf.masks import check_values
from ..hf.plan import NAME
from ..hf.registration import register as register_attention
from ..hf.state import layer_state
from ..hf.swap import check_generate
from ..nn import GATE_BIAS, GateProjection, PathGates
from .config import StochasticLlamaConfig


class StochasticLlamaAttention(LlamaAttention):
    """Llama's attention; in a gated layer, with two gates, which read the hidden states that q, k and v are made of."""

    def __init__(self, config: StochasticLlamaConfig, layer_idx: int) -> None:
        """As in Llama."""
        super().__init__(config, layer_idx)
        self.gates = (
            PathGates(config.hidden_size, config.num_attention_heads, self.head_dim, config.gate)  # type: ignore[arg-type]
            if config.kinds[layer_idx] == "gated"
            else None
        )

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:  # noqa: ANN401  # pyright: ignore[reportIncompatibleMethodOverride]
        """As in Llama."""
        if self.gates is not None:
            kwargs[GATES_ARGUMENT] = self.gates(hidden_states)
        return super().forward(hidden_states, **kwargs)


class StochasticLlamaPreTrainedModel(LlamaPreTrainedModel):
    """What the models below share."""

    config_class = StochasticLlamaConfig
    _supports_flash_attn = False
    _supports_flex_attn = False

    def _check_and_adjust_attn_implementation(self, attn_implementation: str | None, *args: Any, **kwargs: Any) -> str:  # noqa: ANN401
        """The one implementation there is."""
        if attn_implementation not in (None, NAME):
            raise ValueError(
                f"attn_implementation must be None or {NAME!r}: what a layer runs is in layer_attention, swa and sa of "
                f"the config, got {attn_implementation!r}"
            )
        register_attention()
        return super()._check_and_adjust_attn_implementation(NAME, *args, **kwargs)

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, GateProjection):
            init.constant_(module.bias, GATE_BIAS)


class StochasticLlamaModel(StochasticLlamaPreTrainedModel, LlamaModel):
    """The base model: hidden states."""

    def __init__(self, config: StochasticLlamaConfig) -> None:
        """Random weights; `from_pretrained` loads others."""
        super().__init__(config)
        for index, layer in enumerate(self.layers):
            layer.self_attn = StochasticLlamaAttention(config, index)
        self.register_forward_pre_hook(check_values, with_kwargs=True)
        self.register_forward_pre_hook(_follow_config)
        self.post_init()


def _follow_config(model: StochasticLlamaModel, _args: tuple[Any, ...]) -> None:
    """Forward pre-hook: layers keep their plan, and the config may have been changed since."""
    if torch.compiler.is_compiling():
        return
    for index, plan in model.config.attention_plan.layers.items():
        state = layer_state(model.layers[index].self_attn)  # type: ignore[arg-type]
        if state is not None:
            state.plan = plan


class StochasticLlamaForCausalLM(StochasticLlamaPreTrainedModel, LlamaForCausalLM):
    """The language model: logits, loss, `generate`.

    Arguments of a call are those of `LlamaForCausalLM`. Packed documents are given by `position_ids` that restart,
    without a mask. `routing_step` (an int, or a 0-d int64 tensor) feeds the routing keys of the call; `hf.set_step` and
    `hf.RoutingStep` set it for all calls to come.
    """

    def __init__(self, config: StochasticLlamaConfig) -> None:
        """Random weights; `from_pretrained` loads others."""
        # Past Llama's own, which would build a Llama for nothing, and initialise the gates as it sees fit.
        super(LlamaForCausalLM, self).__init__(config)
        self.model = StochasticLlamaModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def generate(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """As in transformers; NotImplementedError where it would split a prompt whose whole a layer permutes."""
        check_generate(self, kwargs)
        return super().generate(*args, **kwargs)  # type: ignore[misc]


def register() -> None:
    """Register the model with transformers' Auto classes. Calling it again changes nothing."""
    AutoConfig.register(StochasticLlamaConfig.model_type, StochasticLlamaConfig, exist_ok=True)
    AutoModel.register(StochasticLlamaConfig, StochasticLlamaModel, exist_ok=True)
    AutoModelForCausalLM.register(StochasticLlamaConfig, StochasticLlamaForCausalLM, exist_ok=True)
