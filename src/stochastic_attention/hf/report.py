"""Say what each attention layer of a model runs."""

from __future__ import annotations

from dataclasses import dataclass, fields

from transformers import PreTrainedModel

from .plan import NAME, SwapPlan, native_windows, read
from .state import attention_modules, layer_state


@dataclass(frozen=True)
class LayerReport:
    """One attention layer.

    Attributes:
        index: the layer's index in the model.
        name: its module's name.
        attention: "stochastic_attention: " and the pattern, or the native implementation; with the sliding window that
            the layer has, or had before its pattern replaced it.
        decode: what a query sees that finds cached keys, "full" or "stochastic"; "-" for a native layer.
        backend: the one asked for, "automatic", or "-" for a native layer.
        calls: how often it has run since it was swapped (recomputation counts); None in a model that is not.
    """

    index: int
    name: str
    attention: str
    decode: str
    backend: str
    calls: int | None


class Report(list[LayerReport]):
    """A line a layer; printed as a table."""

    def __str__(self) -> str:
        """Aligned columns under the names of the fields."""
        names = [field.name for field in fields(LayerReport)]
        rows = [["-" if (x := getattr(line, name)) is None else str(x) for name in names] for line in self]
        widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
        padded = ([cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in (names, *rows))
        return "\n".join("  ".join(row).rstrip() for row in padded)


def report(model: PreTrainedModel) -> Report:
    """What runs where in `model`, swapped or not; a swapped layer whose calls stay 0 is never reached."""
    modules = attention_modules(model)
    swapped = model.config._attn_implementation == NAME
    plan = read(model.config) if swapped else SwapPlan(str(model.config._attn_implementation), {})
    windows = native_windows(model.config)
    lines = Report()
    for (name, module), window in zip(modules.items(), windows, strict=True):
        index: int = module.layer_idx  # type: ignore[assignment]
        state, layer = layer_state(module), plan.layers.get(index)
        if layer is None:
            attention, decode, backend = plan.native + (f", sliding_window={window}" if window else ""), "-", "-"
        else:
            replaced = f", in place of sliding_window={window}" if window else ""
            attention = f"{NAME}: {layer}{replaced}"
            decode, backend = layer.decode, layer.backend or "automatic"
        calls = state.calls if state else 0 if swapped else None
        lines.append(LayerReport(index, name, attention, decode, backend, calls))
    return lines
