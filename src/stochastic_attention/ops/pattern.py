"""What a query attends to: the immutable description every backend lowers.

A `Pattern` says which keys N(i) query i sees; it holds no tensor and no state. Terms used throughout:

    position   index of a token in its own document (padding has none)
    rank       place of a token in a random permutation of positions (see `routing`)
    level      scope "prefix": L = window * 2**m, the smallest such >= i + 1, whose permutation query i uses
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

from .validation import check_choice, check_count, check_flag, check_real, plain_number

if TYPE_CHECKING:
    from torch import Tensor

Kind = Literal["full", "local", "strided", "stochastic", "bigbird", "moba"]
Scope = Literal["sequence", "prefix"]
Shape = Literal["sliding", "block"]

_MOST = 2**31 - 1  # positions and slots are int32 in the backends


@dataclass(frozen=True)
class Pattern:
    """A rule for N(i). Build one with `full`, `local`, `strided`, `stochastic`, `bigbird` or `moba`.

    Fields of other kinds stay at rest. Patterns compare and hash by value, so they can key caches; `to_dict` and
    `from_dict` store them in configs.
    """

    kind: Kind
    window: int | None = None
    scope: Scope = "sequence"
    shape: Shape = "sliding"
    local_window: int = 0
    sinks: int = 0
    correction: float = 0.0
    seed: int = 0
    per_head: bool = False
    block_size: int = 0
    top_k: int = 0
    stride: int = 0
    random_blocks: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            object.__setattr__(self, field.name, plain_number(getattr(self, field.name)))
        check_choice("kind", self.kind, get_args(Kind))
        check_choice("scope", self.scope, get_args(Scope))
        check_choice("shape", self.shape, get_args(Shape))
        check_flag("per_head", self.per_head)
        check_count("local", self.local_window, minimum=0, maximum=_MOST)
        check_count("sinks", self.sinks, minimum=0, maximum=_MOST)
        check_count("seed", self.seed, minimum=0, maximum=2**63 - 1)
        check_real("correction", self.correction, minimum=0.0)
        if self.kind in ("local", "strided", "stochastic") and self.window is not None:
            check_count("window", self.window, minimum=1, maximum=_MOST)
        if self.kind in ("bigbird", "moba"):
            check_count("block_size", self.block_size, minimum=1, maximum=_MOST)
        if self.kind == "bigbird":
            check_count("random_blocks", self.random_blocks, minimum=1, maximum=_MOST)
        if self.kind == "moba":
            check_count("top_k", self.top_k, minimum=1, maximum=_MOST)
        if self.kind == "strided":
            check_count("stride", self.stride, minimum=1, maximum=_MOST)
        foreign = self._fields_of_other_kinds()
        if foreign:
            raise ValueError(f"{foreign[0]} does not apply to a pattern of kind {self.kind!r}")

    def _fields_of_other_kinds(self) -> list[str]:
        own = {
            "full": (),
            "local": ("window", "sinks"),
            "strided": ("window", "stride", "local_window", "sinks"),
            "stochastic": (
                "window",
                "scope",
                "shape",
                "local_window",
                "sinks",
                "correction",
                "seed",
                "per_head",
            ),
            "bigbird": ("block_size", "random_blocks", "local_window", "sinks", "seed"),
            "moba": ("block_size", "top_k"),
        }[self.kind]
        fields = type(self).__dataclass_fields__
        return [f for f in fields if f not in ("kind", *own) and getattr(self, f) != fields[f].default]

    @classmethod
    def full(cls) -> Pattern:
        """Every key of the document (causal: j <= i)."""
        return cls("full")

    @classmethod
    def local(cls, window: int | None, sinks: int = 0) -> Pattern:
        """Sliding-window attention, causal 0 <= i - j < window, plus the first `sinks` positions.

        Without sinks this is Hugging Face's `sliding_window = window` and flash-attn's `(window - 1, 0)`. Not causal:
        abs(i - j) <= window, which is what Hugging Face's bidirectional sliding window does at the same number. None is
        unlimited: full attention.
        """
        return cls("local", window=window, sinks=sinks)

    @classmethod
    def strided(cls, window: int | None, stride: int, *, local: int = 0, sinks: int = 0) -> Pattern:
        """The last `window` of every `stride`-th position, i, i - stride, i - 2 * stride, ...: a baseline.

        With window None and a local window of `stride` it is the strided pattern of Sparse Transformers
        (arXiv 1904.10509), both of its parts in one softmax; with a window, the dilated one of Longformer
        (arXiv 2004.05150). Not causal: `window` of them to either side.

        Args:
            window: how many, the query itself included; None is unlimited, and then costs O(n * n / stride).
            stride: steps from one to the next.
            local: also attend the last `local` positions, the query included (0: none).
            sinks: also attend the first `sinks` positions.
        """
        return cls("strided", window=window, stride=stride, local_window=local, sinks=sinks)

    @classmethod
    def stochastic(
        cls,
        window: int | None,
        *,
        scope: Scope = "sequence",
        shape: Shape = "sliding",
        local: int = 0,
        sinks: int = 0,
        correction: float = 0.0,
        seed: int = 0,
        per_head: bool = False,
    ) -> Pattern:
        """Stochastic attention (arXiv 2604.00754), alone or in one softmax with a local window and sinks.

        Args:
            window: reach in ranks, the query itself included. Sliding: abs(rank(i) - rank(j)) < window (not causal:
                <= window); block: equal rank // (2 * window). window >= n is full attention, and so is None.
            scope: "sequence" permutes the document's n tokens (the paper); "prefix" permutes [0, L) with
                L = window * 2**m the smallest such >= i + 1, so that N(i) never depends on later tokens. Causal only.
            shape: "sliding" (the paper) or "block", which costs less for the same mean number of keys.
            local: also attend the last `local` positions, the query included (0: none).
            sinks: also attend the first `sinks` positions.
            correction: keys met through the stochastic rule alone get the logit bias
                correction * log(1 / p), p = min(1, (2 * window - 1) / L), L = n for scope "sequence".
            seed: root of the routing keys, 0 <= seed < 2**63.
            per_head: one permutation a key/value head instead of one a layer.
        """
        return cls(
            "stochastic",
            window=window,
            scope=scope,
            shape=shape,
            local_window=local,
            sinks=sinks,
            correction=correction,
            seed=seed,
            per_head=per_head,
        )

    @classmethod
    def bigbird(cls, block_size: int, random_blocks: int, *, local: int = 0, sinks: int = 0, seed: int = 0) -> Pattern:
        """The query's own block of positions, and past blocks drawn at random for all its queries alike: a baseline.

        BigBird (arXiv 2007.14062) made causal: its window is `local`, and of its global tokens, which see and are seen
        by all, what is left is that all see the first ones, `sinks`. Blocks are drawn without replacement among those
        before the query's own; where there are no more than `random_blocks`, all are taken. They may overlap with the
        local window and the sinks, and a key counts once. A layer's heads share the draw, which depends on the number
        of the query's block alone, so N(i) depends on no later token. Causal only.

        Args:
            block_size: positions in a block; block b holds those from b * block_size on.
            random_blocks: how many blocks before the query's own are drawn.
            local: also attend the last `local` positions, the query included (0: none).
            sinks: also attend the first `sinks` positions.
            seed: root of the routing keys, 0 <= seed < 2**63.
        """
        return cls(
            "bigbird",
            block_size=block_size,
            random_blocks=random_blocks,
            local_window=local,
            sinks=sinks,
            seed=seed,
        )

    @classmethod
    def moba(cls, block_size: int = 64, top_k: int = 3) -> Pattern:
        """Mixture of block attention: the `top_k` key blocks of largest q . mean(k), the query's own always among them.

        Causal only; a query chooses among the blocks that ended before its own. N(i) depends on q and k.
        """
        return cls("moba", block_size=block_size, top_k=top_k)

    @property
    def reach(self) -> int:
        """`window` as a number; the largest there is for an unlimited one."""
        return _MOST if self.window is None else self.window

    @property
    def saturation(self) -> int:
        """A document of at most so many tokens is attended in full, whatever is drawn or chosen."""
        if self.kind == "strided" and self.stride > 1:
            return 1
        if self.kind == "bigbird":
            return (self.random_blocks + 1) * self.block_size
        return self.top_k * self.block_size if self.kind == "moba" else self.reach

    @property
    def is_random(self) -> bool:
        """Whether N(i) depends on the routing keys."""
        return self.kind in ("stochastic", "bigbird")

    def seeded(self, seed: int) -> Pattern:
        """The same pattern under another seed; itself where it has none."""
        return replace(self, seed=seed) if self.is_random else self

    def check_causal(self, causal: bool) -> None:
        """Raise ValueError where the pattern has no meaning without causality."""
        if not causal and self.kind in ("bigbird", "moba"):
            name = {"bigbird": "BigBird", "moba": "MoBA"}[self.kind]
            raise ValueError(
                f"causal=False has no meaning for {name}, whose queries choose among past blocks; got False"
            )
        if not causal and self.kind == "stochastic" and self.scope == "prefix":
            raise ValueError('causal=False needs scope="sequence": scope "prefix" is defined by the past; got False')

    def dense_mask(self, n: int, *, layer: int = 0, step: int = 0, causal: bool = True, heads: int = 1) -> Tensor:
        """N(i) of one document of n tokens, for people and tests: bool [1, n, n], [heads, n, n] with per_head.

        Entry [h, i, j] is True where query i sees key j. MoBA has no such mask (it depends on q and k): ValueError.
        `heads` is the number of key/value heads, used with per_head only.
        """
        from .reference import dense_mask  # the oracle knows the rules; a pattern only describes them

        check_count("n", n, minimum=0)
        check_count("heads", heads, minimum=1)
        return dense_mask(self, n, layer=layer, step=step, causal=causal, heads=heads)

    def to_dict(self) -> dict[str, Any]:
        """The kind and every field that differs from its default, as JSON holds them; `from_dict` reads it back."""
        fields = type(self).__dataclass_fields__
        return {f: getattr(self, f) for f in fields if f == "kind" or getattr(self, f) != fields[f].default}

    @classmethod
    def from_dict(cls, description: Mapping[str, Any]) -> Pattern:
        """The pattern that `to_dict` described; ValueError for anything else."""
        if not isinstance(description, Mapping) or "kind" not in description:
            raise ValueError(f'a pattern must be described by a mapping with a "kind", got {description!r}')
        unknown = sorted(set(description) - set(cls.__dataclass_fields__))
        if unknown:
            raise ValueError(f"a pattern must be described by its fields, got {unknown[0]!r}")
        return cls(**description)

    def __str__(self) -> str:
        names = {"local_window": "local"}
        shown = {names.get(name, name): value for name, value in self.to_dict().items() if name != "kind"}
        return f"{self.kind}({', '.join(f'{name}={value}' for name, value in shown.items())})"
