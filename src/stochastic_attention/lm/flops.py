"""Work of a training step by formula, and what a device could do: their quotient is the utilisation (MFU)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..hf.plan import SwapPlan, native_windows
from ..ops.keys_per_query import keys_per_query
from ..ops.pattern import Pattern

# Dense peak FLOP/s by the makers' data sheets, in (bfloat16 with float32 sums, float32 without TF32).
_CARDS = {
    "H200": (989e12, 67e12),
    "H100 80GB HBM3": (989e12, 67e12),
    "H100 PCIe": (756e12, 51e12),
    "A100": (312e12, 19.5e12),
}


@dataclass(frozen=True)
class Peak:
    """FLOP/s of one device, and where the figure comes from."""

    flops: float
    source: str


def flops_per_token(model: PreTrainedModel, keys: Sequence[float]) -> float:
    """FLOPs of a forward and a backward pass for one token, recomputation not counted.

    6 for every weight of a matrix product (2 forward, 4 backward), the output layer among them, the input embedding and
    the experts that a token passes by not; and 12 * heads * head dimension for every pair of query and key (4 forward,
    8 backward).

    Args:
        model: a causal language model.
        keys: that a token attends to, in each layer.
    """
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    # Of a tied pair the output's product counts, which the embedding's lookup does not.
    weights = sum(layer.weight.numel() for layer in model.modules() if isinstance(layer, nn.Linear))
    # Experts are stacked, and are the only parameters of three dimensions.
    expert = sum(parameter[0].numel() for parameter in model.parameters() if parameter.dim() == 3)
    weights += getattr(config, "num_experts_per_tok", 0) * expert
    return 6.0 * weights + 12.0 * config.num_attention_heads * head_dim * sum(keys)


def attended_keys(config: PreTrainedConfig, length: int) -> list[float]:
    """Mean number of keys of a token in each layer, over both paths of a gated one; a row being one document."""
    plan: SwapPlan | None = getattr(config, "attention_plan", None)
    if plan is None:
        paths = [[Pattern.local(window)] for window in native_windows(config)]
    else:
        layers = [plan.layers[index] for index in range(config.num_hidden_layers)]
        paths = [[path for path in (layer.pattern, layer.gated_with) if path is not None] for layer in layers]
    means = {p: keys_per_query(p, length).double().mean().item() for p in {p for layer in paths for p in layer}}
    return [sum(means[path] for path in layer) for layer in paths]


def device_peak(device: torch.device, precision: str, given: float | None) -> Peak:
    """The peak of a device: as given, by the table of cards, or measured on one large matrix product."""
    if given is not None:
        return Peak(given, "given")
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        for card, (bf16, fp32) in _CARDS.items():
            if card in name:
                return Peak(bf16 if precision == "bf16" else fp32, f"data sheet of {card}")
    return Peak(_matmul_speed(device, torch.bfloat16 if precision == "bf16" else torch.float32), "measured by a matmul")


def _matmul_speed(device: torch.device, dtype: torch.dtype) -> float:
    size = 1024 if device.type == "cpu" else 8192
    a = torch.ones(size, size, device=device, dtype=dtype)
    fastest = float("inf")
    for _ in range(10):
        start = time.perf_counter()
        (a @ a)[0, 0].item()
        fastest = min(fastest, time.perf_counter() - start)
    return 2 * size**3 / fastest
