"""What a Llama with stochastic attention is made of, as its config.json says it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

from transformers import LlamaConfig

from ..hf.plan import Decode, LayerPlan, SwapPlan
from ..nn import Gate
from ..ops.pattern import Pattern
from ..ops.validation import check_choice, plain_number

LayerAttention = Literal["full", "swa", "sa", "gated"]


class StochasticLlamaConfig(LlamaConfig):
    """A Llama whose layers attend by patterns of this library.

    Args:
        layer_attention: what every layer runs, or a list with one entry a layer: "full", "swa" (sliding window), "sa"
            (stochastic attention), or "gated", both with a learned gate each (arXiv 2604.00754).
        swa: keyword arguments of `Pattern.local`, by default a window of 256.
        sa: keyword arguments of `Pattern.stochastic`, by default a window of 256.
        gate: one gate a "head", or one a "channel" of it.
        decode: what the stochastic path of a token sees that finds cached keys: its N(i) as the newest token
            ("stochastic"), or all of them ("full"). Under scope "prefix", the former equals one pass over everything.
        kwargs: those of `LlamaConfig`.

    Raises:
        ValueError: a value is out of its domain.
    """

    model_type = "stochastic_llama"

    layer_attention: str | list[str] = "gated"
    swa: dict[str, Any] | None = None
    sa: dict[str, Any] | None = None
    gate: str = "head"
    decode: str = "stochastic"

    def __post_init__(self, **kwargs: Any) -> None:  # noqa: ANN401
        """Fill in the windows, and check what is peculiar to this config."""
        self.swa, self.sa = _arguments(self.swa), _arguments(self.sa)
        super().__post_init__(**kwargs)
        check_choice("gate", self.gate, get_args(Gate))
        check_choice("decode", self.decode, get_args(Decode))
        if self.attention_dropout:
            raise ValueError(f"attention_dropout must be 0, which is all that the op has, got {self.attention_dropout}")
        if self.head_dim is not None and self.head_dim % 2:
            raise ValueError(f"head_dim must be even, as rotary embeddings turn pairs, got {self.head_dim}")
        _ = self.kinds, self.attention_plan

    @property
    def kinds(self) -> tuple[LayerAttention, ...]:
        """What each layer runs."""
        kinds, count = self._named_kinds, self.num_hidden_layers
        if len(kinds) != count:
            raise ValueError(f"layer_attention must have one entry for each of {count} layers, got {len(kinds)}")
        return kinds

    @property
    def attention_plan(self) -> SwapPlan:
        """What each layer runs, as the attention function reads it. Nothing runs natively."""
        local, stochastic = _pattern("swa", Pattern.local, self.swa), _pattern("sa", Pattern.stochastic, self.sa)
        plans = {
            "full": LayerPlan.checked(Pattern.full(), "stochastic"),
            "swa": LayerPlan.checked(local, "stochastic"),
            "sa": LayerPlan.checked(stochastic, self.decode),
            "gated": LayerPlan.checked(stochastic, self.decode, gated_with=local),
        }
        return SwapPlan("sdpa", {index: plans[kind] for index, kind in enumerate(self._named_kinds)})

    @property
    def _named_kinds(self) -> tuple[LayerAttention, ...]:
        """`kinds`, or more: `num_hidden_layers` is less while a model drafts with its first layers."""
        kinds = self.layer_attention
        if not isinstance(kinds, str | list | tuple):
            raise ValueError(f"layer_attention must be a kind of attention or a list of them, got {kinds!r}")
        kinds = (kinds,) * self.num_hidden_layers if isinstance(kinds, str) else tuple(kinds)
        for kind in kinds:
            check_choice("layer_attention", kind, get_args(LayerAttention))
        return kinds  # type: ignore[return-value]


def _arguments(given: Any) -> Any:  # noqa: ANN401  # what is no mapping is told by `_pattern`
    """A pattern's arguments of its own, such as JSON holds."""
    if given is None:
        return {"window": 256}
    return {name: plain_number(value) for name, value in given.items()} if isinstance(given, Mapping) else given


def _pattern(name: str, make: Any, arguments: Any) -> Pattern:  # noqa: ANN401
    try:
        return make(**arguments)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} must be arguments of Pattern.{make.__name__}, got {arguments!r}: {error}") from None
