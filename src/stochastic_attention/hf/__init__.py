"""Swap the attention of a pretrained Hugging Face causal language model, and take it back.

    from stochastic_attention import Pattern
    from stochastic_attention.hf import report, restore, swap

    swap(model, Pattern.stochastic(window=256))
    print(report(model))
    restore(model)

Prefill: any forward pass over whole sequences, training included. Decoding with a key/value cache raises.
"""

from .report import LayerReport, Report, report
from .swap import restore, set_step, swap
from .training import RoutingStep

__all__ = ["LayerReport", "Report", "RoutingStep", "report", "restore", "set_step", "swap"]
