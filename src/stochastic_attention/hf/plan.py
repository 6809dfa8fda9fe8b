"""Which pattern runs in which layer, and how a model's config keeps it.

A config has one entry, plain JSON, that `save_pretrained` writes and `from_pretrained` reads like any other:

    "stochastic_attention": {
        "native": "sdpa",                                the implementation of all that is not swapped
        "layers": [{"layers": [0, 1], "pattern": {"kind": "stochastic", "window": 256}, "decode": "full"}]
    }

Only transformers' own fields say what the untouched model is, so without this package the entry changes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig

from ..ops.backends import backend_names
from ..ops.pattern import Pattern
from ..ops.validation import check_choice

# The config's entry, and the name of the attention implementation in transformers.
NAME = "stochastic_attention"

# Implementations that a model may have before it is swapped.
NATIVES = ("sdpa", "eager")

Config = TypeVar("Config", bound=PreTrainedConfig)
Decode = Literal["full", "stochastic"]

LayersSpec = str | Iterable[int] | None
_EVERY = re.compile(r"every ([1-9]\d*)(st|nd|rd|th)")


@dataclass(frozen=True)
class LayerPlan:
    """What a swapped layer runs.

    Attributes:
        pattern: of a call that finds no cached keys, and of any other with decode "stochastic".
        decode: what a query sees that finds cached keys: every one of them ("full"), or its N(i) as the newest token.
        backend: of the op, None for the automatic choice.
        gated_with: of the second path in a layer that has gates (see `lm`), None elsewhere. With cached keys too, a
            query sees its N(i) there.
    """

    pattern: Pattern
    decode: Decode
    backend: str | None = None
    gated_with: Pattern | None = None

    @property
    def paths(self) -> tuple[Pattern, ...]:
        """The pattern, and in a gated layer the second one."""
        return (self.pattern,) if self.gated_with is None else (self.pattern, self.gated_with)

    def __str__(self) -> str:
        return " gated with ".join(map(str, self.paths))

    @classmethod
    def checked(
        cls,
        pattern: object,
        decode: str | None = None,
        backend: str | None = None,
        gated_with: Pattern | None = None,
    ) -> LayerPlan:
        """Validate, and fill in `decode`: "full" for scope "sequence", as the paper evaluates, else "stochastic"."""
        if not isinstance(pattern, Pattern):
            raise ValueError(f"pattern must be a Pattern, got {type(pattern).__name__}")
        if backend is not None:
            check_choice("backend", backend, backend_names())
        if decode is None:
            decode = "full" if pattern.kind == "stochastic" and pattern.scope == "sequence" else "stochastic"
        check_choice("decode", decode, get_args(Decode))
        return cls(pattern, decode, backend, gated_with)  # type: ignore[arg-type]


@dataclass(frozen=True)
class SwapPlan:
    """The plans of a model's swapped layers, by index, and the implementation `native` of the others."""

    native: str
    layers: Mapping[int, LayerPlan]


def configure(
    config: Config,
    pattern: Pattern | Mapping[int, Pattern],
    layers: LayersSpec = None,
    *,
    decode: str | None = None,
    backend: str | None = None,
) -> Config:
    """Write into `config` what `swap` would, for a model that is then built with attn_implementation NAME. In place.

        import stochastic_attention.hf
        config = configure(AutoConfig.from_pretrained(name), Pattern.stochastic(256, scope="prefix"))
        model = AutoModelForCausalLM.from_pretrained(name, config=config, attn_implementation="stochastic_attention")

    The arguments are those of `swap`. Such a model is a swapped one, but for four things that transformers leaves no
    place for: a cache of its own sliding layers raises once it drops keys, the routing step is 0, and neither a
    `prefill_chunk_size` nor an additive mask is refused. `swap(model)`, or `set_step` or `restore`, puts them in place.
    """
    check_swappable(config)
    plans = plan_layers(config, pattern, layers, decode=decode, backend=backend)
    write(config, SwapPlan(default_native(config), plans))
    return config


def default_native(config: PreTrainedConfig) -> str:
    """The implementation that a model of this config has where nobody asks for one."""
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return "sdpa" if model_class._supports_sdpa and not sdpa_drops_softcap(config) else "eager"


def plan_layers(
    config: PreTrainedConfig,
    pattern: Pattern | Mapping[int, Pattern],
    layers: LayersSpec,
    *,
    decode: str | None,
    backend: str | None,
) -> dict[int, LayerPlan]:
    """The plans that the arguments of `swap` ask for, by index of layer."""
    windows = native_windows(config)
    if not isinstance(pattern, Mapping):
        plan = LayerPlan.checked(pattern, decode, backend)
        return dict.fromkeys(choose_layers(layers, windows), plan)
    if layers is not None:
        raise ValueError(f"layers must be None where pattern is a mapping, whose keys are the layers, got {layers!r}")
    chosen = choose_layers(pattern, windows)
    return {index: LayerPlan.checked(pattern[index], decode, backend) for index in chosen}


def read(config: PreTrainedConfig, *, may_exit_early: bool = False) -> SwapPlan:
    """The plan that a config keeps; ValueError where it keeps none, or none that can be.

    `may_exit_early`: `num_hidden_layers` may be less than the model has, as it is while a model drafts with its first
    layers in assisted decoding.
    """
    if has_own_plan(config):
        return config.attention_plan  # type: ignore[attr-defined]
    entry = getattr(config, NAME, None)
    if entry is None:
        raise ValueError(
            f"config must say what to swap: it has no {NAME!r}; use swap(model, pattern), or "
            "configure(config, pattern) before the model is built"
        )
    _check_keys(f"config.{NAME}", entry, {"native", "layers"})
    check_choice(f"config.{NAME}['native']", entry["native"], NATIVES)
    layers: dict[int, LayerPlan] = {}
    for group in entry["layers"]:
        _check_keys(f"config.{NAME}['layers']", group, {"layers", "pattern"}, {"decode", "backend"})
        plan = LayerPlan.checked(Pattern.from_dict(group["pattern"]), group.get("decode"), group.get("backend"))
        indices = group["layers"]
        if not (may_exit_early and isinstance(indices, list)):
            indices = choose_layers(indices, [None] * config.num_hidden_layers)
        twice = sorted(set(layers).intersection(indices))
        if twice:
            raise ValueError(f"config.{NAME}['layers'] must name a layer once, got layer {twice[0]} twice")
        layers |= dict.fromkeys(indices, plan)
    return SwapPlan(entry["native"], layers)


def keeps_plan(config: PreTrainedConfig) -> bool:
    """Whether `read` finds a plan in the config, be it one that cannot be."""
    return has_own_plan(config) or getattr(config, NAME, None) is not None


def has_own_plan(config: PreTrainedConfig) -> bool:
    """Whether the config is of a model made with these layers (see `lm`), whose other fields say what each runs."""
    return hasattr(type(config), "attention_plan")


def check_swappable(config: PreTrainedConfig) -> None:
    """Raise ValueError where `has_own_plan`: there is no other attention to swap it for."""
    if has_own_plan(config):
        raise ValueError(
            f"the layers of a {config.model_type} model are what its config says, and cannot be swapped or restored; "
            "to try patterns without training, train or load a plain model"
        )


def write(config: PreTrainedConfig, plan: SwapPlan) -> None:
    """Keep a plan in a config, layers of equal plans together."""
    groups: dict[LayerPlan, list[int]] = {}
    for index, layer in sorted(plan.layers.items()):
        groups.setdefault(layer, []).append(index)
    entry = [
        {"layers": indices, "pattern": layer.pattern.to_dict(), "decode": layer.decode, "backend": layer.backend}
        for layer, indices in groups.items()
    ]
    setattr(config, NAME, {"native": plan.native, "layers": entry})


def sdpa_drops_softcap(config: PreTrainedConfig) -> bool:
    """Whether models of this config softcap their scores, which sdpa leaves out, in old versions without a word."""
    return config.model_type == "gemma2" and config.attn_logit_softcapping is not None


def native_windows(config: PreTrainedConfig) -> list[int | None]:
    """The sliding window that each layer of the untouched model has, None for full attention."""
    count, window = config.num_hidden_layers, getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * count
    return [window if kind == "sliding_attention" else None for kind in kinds]


def choose_layers(layers: LayersSpec, windows: list[int | None]) -> list[int]:
    """The indices that `layers` stands for (see `swap`) in a model whose layers have these native windows."""
    count = len(windows)
    sliding = [i for i, window in enumerate(windows) if window]
    if layers is None:
        return sliding or list(range(count))
    if isinstance(layers, str):
        every = _EVERY.fullmatch(layers)
        if every:
            chosen = list(range(int(every[1]) - 1, count, int(every[1])))
        elif layers in ("all", "sliding", "full"):
            chosen = {"all": list(range(count)), "sliding": sliding}.get(
                layers, [i for i in range(count) if i not in sliding]
            )
        else:
            raise ValueError(
                f"layers must be None, 'all', 'sliding', 'full', 'every 4th' (any number) or indices, got {layers!r}"
            )
        if not chosen:
            raise ValueError(f"layers must choose at least one of the model's {count} layers, got {layers!r}")
        return chosen
    if not isinstance(layers, Iterable):
        raise ValueError(f"layers must be None, a string or an iterable of indices, got {layers!r}")
    wanted = list(layers)
    wrong = [i for i in wanted if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < count]
    if wrong or not wanted or len(set(wanted)) < len(wanted):
        raise ValueError(f"layers must be distinct indices in [0, {count}), at least one, got {wanted!r}")
    return wanted


def _check_keys(name: str, entry: Any, needed: set[str], optional: frozenset[str] | set[str] = frozenset()) -> None:  # noqa: ANN401
    if not isinstance(entry, Mapping) or not needed <= set(entry) <= needed | optional:
        got = sorted(entry) if isinstance(entry, Mapping) else type(entry).__name__
        raise ValueError(f"{name} must have the keys {', '.join(sorted(needed))}, got {got}")
