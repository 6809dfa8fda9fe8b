"""Presets: what to swap into a model, kept in a JSON file beside the record of how it was found.

swap(model, *load_preset("results/recommend/recommended.json"))
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedConfig

from ..ops.pattern import Pattern
from ..records import Record, write_text
from .plan import LayerPlan, LayersSpec, native_windows, plan_layers


class Preset(NamedTuple):
    """The first arguments of `swap`, which see."""

    pattern: Pattern | Mapping[int, Pattern]
    layers: LayersSpec = None
    decode: str | None = None

    def __str__(self) -> str:
        return "; ".join(f"{pattern}{_where(layers)}" for layers, pattern in self._groups())

    def plans(self, config: PreTrainedConfig) -> dict[int, LayerPlan]:
        """The plan of each layer that it swaps in a model of this config; ValueError where it fits no such model."""
        return plan_layers(config, self.pattern, self.layers, decode=self.decode, backend=None)

    def layer_patterns(self, config: PreTrainedConfig) -> list[Pattern]:
        """What each layer of such a model runs; the sliding window of one that is not swapped is a pattern too."""
        plans = self.plans(config)
        return [plans[i].pattern if i in plans else own for i, own in enumerate(native_patterns(config))]

    @property
    def is_random(self) -> bool:
        """Whether any of its patterns takes a seed."""
        return any(pattern.is_random for _, pattern in self._groups())

    def seeded(self, seed: int) -> Preset:
        """The same preset under another seed."""
        if isinstance(self.pattern, Pattern):
            return self._replace(pattern=self.pattern.seeded(seed))
        return self._replace(pattern={index: pattern.seeded(seed) for index, pattern in self.pattern.items()})

    def to_list(self) -> list[dict[str, Any]]:
        """Its patterns and their layers as JSON holds them."""
        return [{"layers": layers, "pattern": pattern.to_dict()} for layers, pattern in self._groups()]

    def _groups(self) -> list[tuple[Any, Pattern]]:
        """Each pattern with its layers, as `swap` takes them."""
        if isinstance(self.pattern, Pattern):
            layers = self.layers
            return [(layers if layers is None or isinstance(layers, str) else list(layers), self.pattern)]
        groups: dict[Pattern, list[int]] = {}
        for index, pattern in sorted(self.pattern.items()):
            groups.setdefault(pattern, []).append(index)
        return [(indices, pattern) for pattern, indices in groups.items()]


def native_patterns(config: PreTrainedConfig) -> list[Pattern]:
    """What each layer of the untouched model runs."""
    return [Pattern.full() if window is None else Pattern.local(window) for window in native_windows(config)]


def save_preset(path: Path, name: str, preset: Preset, record: Record | None = None) -> None:
    """Write a preset under a name, whole or not at all."""
    facts = {
        "preset": name,
        "patterns": preset.to_list(),
        "decode": preset.decode,
        "record": None if record is None else asdict(record),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(facts, indent=1, allow_nan=False) + "\n")


def load_preset(path: Path | str) -> Preset:
    """Read what `save_preset` wrote; ValueError for anything else."""
    path = Path(path)
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        groups = [(group["layers"], Pattern.from_dict(group["pattern"])) for group in facts["patterns"]]
        preset = Preset(groups[0][1], groups[0][0], facts["decode"])
        if len(groups) > 1:
            preset = preset._replace(pattern=_by_layer(groups), layers=None)
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ValueError(f"preset must be a file that holds one, got {str(path)!r}: {error!r}") from error
    return preset


def _by_layer(groups: list[tuple[Any, Pattern]]) -> dict[int, Pattern]:
    found: dict[int, Pattern] = {}
    for layers, pattern in groups:
        if not isinstance(layers, list) or found.keys() & set(layers):
            raise ValueError(f"several patterns must have lists of layers that do not meet, got {layers!r}")
        found |= dict.fromkeys(layers, pattern)
    return found


def _where(layers: LayersSpec) -> str:
    if layers is None:
        return " in the layers that swap chooses"
    return "" if layers == "all" else f" in layers {layers}"
