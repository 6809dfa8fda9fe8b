"""Attention modules for anyone's model: stochastic attention, and its gated sum with a sliding window.

Shapes: B rows, N tokens, E hidden size, H query heads, Hkv key/value heads (Hkv divides H), D head dimension.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor, nn

from .ops.api import attention
from .ops.backends import backend_names
from .ops.pattern import Pattern
from .ops.validation import check_choice, check_count, check_flag

Gate = Literal["head", "channel"]

# sigmoid(1) = 0.73: both paths start open, and the sigmoid is still steep enough to learn.
GATE_BIAS = 1.0


class GateProjection(nn.Linear):
    """The linear map under a gate's sigmoid. Its bias starts at `GATE_BIAS`."""

    def reset_parameters(self) -> None:
        """As any linear map, but for the bias."""
        super().reset_parameters()
        nn.init.constant_(self.bias, GATE_BIAS)


class PathGates(nn.Module):
    """The two gates of the dual path, each a sigmoid of its own linear map of x (arXiv 2604.00754).

        g_sa = sigmoid(x W_sa + b_sa),  g_swa = sigmoid(x W_swa + b_swa)

    They are independent: both may be open, both closed.
    """

    def __init__(self, hidden_size: int, num_heads: int, head_dim: int, gate: Gate = "head", **factory: object) -> None:
        """`gate`: one gate a "head", or one a "channel" of it. `factory`: device and dtype."""
        super().__init__()
        check_choice("gate", gate, get_args(Gate))
        self.num_heads = num_heads
        size = num_heads * (head_dim if gate == "channel" else 1)
        self.sa = GateProjection(hidden_size, size, **factory)  # type: ignore[arg-type]
        self.swa = GateProjection(hidden_size, size, **factory)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [B, N, E] -> g_sa and g_swa, each [B, H, N, 1] or [B, H, N, D], to be multiplied with a path's output."""
        return tuple(  # type: ignore[return-value]
            torch.sigmoid(projection(x)).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for projection in (self.sa, self.swa)
        )


class KeyValueCache:
    """The keys and values that one attention module has seen; pass it to every call of `StochasticAttention`.

    It grows with each call, and holds every token: scope "prefix" reads few of them, but any of them. Every layer of a
    model needs its own. A call that raises leaves it as it was.
    """

    def __init__(self) -> None:
        """Empty."""
        self.layer: int | None = None
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def __len__(self) -> int:
        return 0 if self.keys is None else self.keys.shape[2]

    def followed_by(self, keys: Tensor, values: Tensor, *, layer: int) -> tuple[Tensor, Tensor]:
        """All keys and values in it, and these of `layer` [B, Hkv, N, D] behind them; ValueError unless they fit."""
        if self.keys is None or self.values is None:
            return keys, values
        if layer != self.layer:
            raise ValueError(f"cache must be the layer's own, got that of layer {self.layer} in layer {layer}")
        if keys.shape[0] != self.keys.shape[0]:
            raise ValueError(f"x must have as many rows as the cache, {self.keys.shape[0]}, got {keys.shape[0]}")
        return torch.cat([self.keys, keys], dim=2), torch.cat([self.values, values], dim=2)


class StochasticAttention(nn.Module):
    """Self-attention under a `Pattern`: projections, a rotary embedding if given, attention, the output projection.

    Any pattern will do, a local window or full attention too.

        layer = StochasticAttention(512, 8, Pattern.stochastic(256), layer=3, num_kv_heads=2)
        y = layer(x, rotary=(cos, sin), step=step)
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        pattern: Pattern,
        *,
        layer: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = False,
        causal: bool = True,
        backend: str | None = None,
        **factory: object,
    ) -> None:
        """Build the projections.

        Args:
            hidden_size: E, the size of x and of the result.
            num_heads: query heads.
            pattern: see `Pattern`.
            layer: the module's place in its model; layers of different index draw different permutations.
            num_kv_heads: key/value heads, by default as many as query heads.
            head_dim: by default hidden_size / num_heads.
            bias: whether the projections have one.
            causal, backend: see `attention`.
            factory: device and dtype of the parameters.

        Raises:
            ValueError: an argument is out of its domain.
        """
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        for name, count in (("hidden_size", hidden_size), ("num_heads", num_heads), ("num_kv_heads", num_kv_heads)):
            check_count(name, count, minimum=1)
        check_count("layer", layer, minimum=0)
        check_flag("causal", causal)
        if not isinstance(pattern, Pattern):
            raise ValueError(f"pattern must be a Pattern, got {type(pattern).__name__}")
        pattern.check_causal(causal)
        if num_heads % num_kv_heads:
            raise ValueError(f"num_kv_heads must divide num_heads = {num_heads}, got {num_kv_heads}")
        if head_dim is None:
            if hidden_size % num_heads:
                raise ValueError(
                    f"num_heads must divide hidden_size = {hidden_size} where head_dim is not given, got {num_heads}"
                )
            head_dim = hidden_size // num_heads
        check_count("head_dim", head_dim, minimum=1)
        if backend is not None:
            check_choice("backend", backend, backend_names())
        self.pattern, self.layer, self.causal, self.backend = pattern, layer, causal, backend
        self.head_dim = head_dim
        self.q_proj = nn.Linear(hidden_size, num_heads * head_dim, bias=bias, **factory)  # type: ignore[arg-type]
        self.k_proj = nn.Linear(hidden_size, num_kv_heads * head_dim, bias=bias, **factory)  # type: ignore[arg-type]
        self.v_proj = nn.Linear(hidden_size, num_kv_heads * head_dim, bias=bias, **factory)  # type: ignore[arg-type]
        self.o_proj = nn.Linear(num_heads * head_dim, hidden_size, bias=bias, **factory)  # type: ignore[arg-type]

    def forward(
        self,
        x: Tensor,
        *,
        rotary: tuple[Tensor, Tensor] | None = None,
        documents: Tensor | None = None,
        step: int | Tensor = 0,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """x [B, N, E] -> [B, N, E].

        Args:
            x: hidden states.
            rotary: cos and sin, [N, R] or [B, N, R] with an even R <= D, of the tokens' own positions. The first R
                channels are rotated, channel c with channel c + R/2 (the half-split convention of Llama).
            documents: integer [B, K], see `attention`; with a cache it covers the cached keys too.
            step: the optimizer step, in training; see `attention`.
            cache: x follows the tokens in it, and is added to it. Each token then attends as the newest one: under
                scope "prefix" and every pattern without chance, exactly as in one pass over everything.
        """
        if x.dim() != 3 or x.shape[-1] != self.q_proj.in_features:
            raise ValueError(f"x must have shape [B, N, {self.q_proj.in_features}], got {list(x.shape)}")
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if rotary is not None:
            cos, sin = _checked_rotary(rotary, x, self.head_dim)
            q, k = (_rotate(heads, cos, sin) for heads in (q, k))
        query_positions = None
        if cache is not None:
            if not isinstance(cache, KeyValueCache):
                raise ValueError(f"cache must be a KeyValueCache, got {type(cache).__name__}")
            if not self.causal:
                raise ValueError("cache must be None where causal=False: earlier tokens would have to see later ones")
            query_positions = len(cache) + torch.arange(x.shape[1], device=x.device)
            k, v = cache.followed_by(k, v, layer=self.layer)
        y = self._attend(x, q, k, v, documents=documents, step=step, query_positions=query_positions)
        if cache is not None:
            cache.layer, cache.keys, cache.values = self.layer, k, v
        return self.o_proj(y.transpose(1, 2).flatten(-2))

    def _attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, **where: object) -> Tensor:  # noqa: ARG002 - gates read x
        return self._attend_by(self.pattern, q, k, v, **where)

    def _attend_by(self, pattern: Pattern, q: Tensor, k: Tensor, v: Tensor, **where: object) -> Tensor:
        return attention(
            q,
            k,
            v,
            pattern,
            layer=self.layer,
            causal=self.causal,
            decode=where["query_positions"] is not None,
            backend=self.backend,
            **where,  # type: ignore[arg-type]
        )

    def extra_repr(self) -> str:
        """The pattern and the layer."""
        return f"{self.pattern}, layer={self.layer}"


class GatedStochasticAttention(StochasticAttention):
    """The paper's trained layer: Y = g_sa * Y_sa + g_swa * Y_swa, then the output projection (arXiv 2604.00754).

    Two softmaxes over the same q, k and v, one under `pattern` and one under `local`, and the gates of `PathGates`.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        pattern: Pattern,
        local: Pattern,
        *,
        layer: int,
        gate: Gate = "head",
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = False,
        causal: bool = True,
        backend: str | None = None,
        **factory: object,
    ) -> None:
        """`local`: the pattern of the second path. `gate`: see `PathGates`. The rest: see `StochasticAttention`."""
        super().__init__(
            hidden_size,
            num_heads,
            pattern,
            layer=layer,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            bias=bias,
            causal=causal,
            backend=backend,
            **factory,
        )
        if not isinstance(local, Pattern):
            raise ValueError(f"local must be a Pattern, got {type(local).__name__}")
        local.check_causal(causal)
        self.local = local
        self.gates = PathGates(hidden_size, num_heads, self.head_dim, gate, **factory)

    def _attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, **where: object) -> Tensor:
        g_sa, g_swa = self.gates(x)
        return g_sa * self._attend_by(self.pattern, q, k, v, **where) + g_swa * self._attend_by(
            self.local, q, k, v, **where
        )

    def extra_repr(self) -> str:
        """Both patterns and the layer."""
        return f"{self.pattern} + {self.local}, layer={self.layer}"


def _checked_rotary(rotary: tuple[Tensor, Tensor], x: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Cos and sin that fit x [B, N, E]."""
    rows, tokens = x.shape[:2]
    is_pair = isinstance(rotary, tuple | list) and len(rotary) == 2 and all(isinstance(r, Tensor) for r in rotary)
    shapes = [list(r.shape) for r in rotary] if is_pair else []
    if (
        not is_pair
        or shapes[0] != shapes[1]
        or shapes[0][:-1] not in ([tokens], [1, tokens], [rows, tokens])
        or shapes[0][-1] % 2
        or shapes[0][-1] > head_dim
    ):
        raise ValueError(
            f"rotary must be cos and sin of one shape [N, R] or [B, N, R] with B = {rows}, N = {tokens} and an even "
            f"R <= {head_dim}, got {shapes or type(rotary).__name__}"
        )
    return rotary


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding (arXiv 2104.09864) of heads [B, H, N, D]."""
    size = cos.shape[-1]
    cos, sin = (x.unsqueeze(-3).to(heads.dtype) for x in (cos, sin))
    turned, kept = heads[..., :size], heads[..., size:]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat([-second, first], dim=-1) * sin
    return torch.cat([turned, kept], dim=-1)
