"""Swap the attention of a pretrained Hugging Face causal language model, and take it back.

    from stochastic_attention import Pattern
    from stochastic_attention.hf import report, restore, swap

    swap(model, Pattern.stochastic(window=256))
    print(report(model))
    restore(model)

Importing this registers the attention implementation "stochastic_attention" with transformers, for models whose config
says what to swap (see `configure`).
"""

from .plan import configure
from .presets import Preset, load_preset, save_preset
from .registration import register
from .report import LayerReport, Report, report
from .swap import restore, set_step, swap
from .training import RoutingStep

__all__ = [
    "LayerReport",
    "Preset",
    "Report",
    "RoutingStep",
    "configure",
    "load_preset",
    "report",
    "restore",
    "save_preset",
    "set_step",
    "swap",
]

register()
