"""What a Llama with stochastic attention is made of, as its config.json says it."""

from __future__ import annotations

from typing import Any, Literal, get_args

from transformers import LlamaConfig

from ..hf.plan import Decode, LayerPlan, SwapPlan
from ..nn import Gate
from ..ops.pattern import Pattern
from ..ops.validation import check_choice

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
        self.swa = {"window": 256} if self.swa is None else dict(self.swa)
        self.sa = {"window": 256} if self.sa is None else dict(self.sa)
        super().__post_init__(**kwargs)
        check_choice("gate", self.gate, get_args(Gate))
        check_choice("decode", self.decode, get_args(Decode))
        if self.attention_dropout:
            raise ValueError(f"attention_dropout must be 0, which is all that the op has, got {self.attention_dropout}")
        if self.head_dim is not None and self.head_dim % 2:
            raise ValueError(f"head_dim must be even, as rotary embeddings turn pairs, got {self.head_dim}")
        _ = self.attention_plan

    @property
    def kinds(self) -> tuple[LayerAttention, ...]:
        """What each layer runs."""
        kinds, count = self.layer_attention, self.num_hidden_layers
        kinds = (kinds,) * count if isinstance(kinds, str) else tuple(kinds)
        for kind in kinds:
            check_choice("layer_attention", kind, get_args(LayerAttention))
        if len(kinds) != count:
            raise ValueError(f"layer_attention must have one entry for each of {count} layers, got {len(kinds)}")
        return kinds  # type: ignore[return-value]

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
        return SwapPlan("sdpa", {index: plans[kind] for index, kind in enumerate(self.kinds)})


def _pattern(name: str, make: Any, arguments: Any) -> Pattern:  # noqa: ANN401
    try:
        return make(**arguments)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} must be arguments of Pattern.{make.__name__}, got {arguments!r}: {error}") from None
