"""Language models with stochastic attention, made to be trained: the model, its data, its training, its probes.

    from stochastic_attention.lm import StochasticLlamaConfig, StochasticLlamaForCausalLM

    model = StochasticLlamaForCausalLM(StochasticLlamaConfig(layer_attention="gated", sa={"window": 256}))

Importing this registers the model with the Auto classes of transformers.
"""

from .config import StochasticLlamaConfig
from .model import StochasticLlamaForCausalLM, StochasticLlamaModel, register

__all__ = ["StochasticLlamaConfig", "StochasticLlamaForCausalLM", "StochasticLlamaModel"]

register()
