"""Say what each attention layer of a model runs."""

from __future__ import annotations

from dataclasses import dataclass, fields

from transformers import PreTrainedModel

from .state import attention_modules, layer_state, model_state


@dataclass(frozen=True)
class LayerReport:
    """One attention layer.

    Attributes:
        index: the layer's index in the model.
        name: its module's name.
        attention: "stochastic_attention: " and the pattern, or the native implementation; with the sliding window that
            the layer has, or had before its pattern replaced it.
        backend: the one asked for, "automatic", or "-" for a native layer.
        calls: how often it has run since it was swapped (recomputation counts); None in a model that is not.
    """

    index: int
    name: str
    attention: str
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
    swapped = model_state(model)
    lines = Report()
    for name, module in attention_modules(model).items():
        state = layer_state(module)
        window = getattr(module, "sliding_window", None)
        native = str(model.config._attn_implementation) if swapped is None else swapped.native
        if state is None or state.pattern is None:
            attention, backend = native + (f", sliding_window={window}" if window else ""), "-"
        else:
            replaced = f", in place of sliding_window={window}" if window else ""
            attention, backend = f"stochastic_attention: {state.pattern}{replaced}", state.backend or "automatic"
        lines.append(LayerReport(module.layer_idx, name, attention, backend, None if state is None else state.calls))  # type: ignore[arg-type]
    return lines
