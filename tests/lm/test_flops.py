"""The formula of a step's work, held to torch's own count of operations."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from stochastic_attention import Pattern
from stochastic_attention.lm import StochasticLlamaConfig
from stochastic_attention.lm.flops import attended_keys, device_peak, flops_per_token

SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


@pytest.mark.parametrize("tied", [False, True])
def test_torch_counts_the_same(tied):
    """Of dense attention, in which every query meets every key."""
    model = AutoModelForCausalLM.from_config(
        LlamaConfig(**SIZES, tie_word_embeddings=tied), attn_implementation="eager"
    )
    ids = torch.arange(20)[None]
    with FlopCounterMode(display=False) as counter:
        model(ids, labels=ids, use_cache=False).loss.backward()
    assert counter.get_total_flops() == 20 * flops_per_token(model, [20.0] * 3)


def test_a_token_passes_through_few_of_the_experts():
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 10}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", **SIZES, **experts))
    heads, output = 3 * 16 * 8 * (4 + 2 + 2 + 4), 40 * 16
    assert flops_per_token(model, [0.0] * 3) == 6 * (heads + output + 3 * 2 * (3 * 16 * 10))


def test_keys_are_those_of_the_patterns():
    config = StochasticLlamaConfig(
        **(SIZES | {"num_hidden_layers": 4}),
        layer_attention=["full", "swa", "sa", "gated"],
        swa={"window": 4},
        sa={"window": 5, "seed": 3},
    )
    masks = [Pattern.full(), Pattern.local(4), Pattern.stochastic(5, seed=3)]
    full, swa, sa = (mask.dense_mask(30).sum().item() / 30 for mask in masks)
    assert attended_keys(config, 30) == pytest.approx([full, swa, sa, swa + sa])
    assert attended_keys(LlamaConfig(**SIZES), 30) == pytest.approx([full] * 3)


def test_a_peak_says_where_it_comes_from():
    assert device_peak(torch.device("cpu"), "bf16", 5.0).source == "given"
    measured = device_peak(torch.device("cpu"), "fp32", None)
    assert measured.source == "measured by a matmul"
    assert measured.flops > 0
