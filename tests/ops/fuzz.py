"""Random calls of one backend against the oracle, as a program: `python tests/ops/fuzz.py cpp 200 0`.

A program of its own so that it can run under sanitizers: see test_cpp.py.
"""

from __future__ import annotations

import random
import sys

import torch

from stochastic_attention import Pattern, attention

DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def random_pattern(draw: random.Random) -> Pattern:
    window = draw.choice((1, 3, 17, 40, 100))
    certain = {"local": draw.choice((0, 2, 30)), "sinks": draw.choice((0, 3))}
    shape = draw.choice(("sliding", "block"))
    per_head = draw.random() < 0.5
    return draw.choice(
        (
            Pattern.full(),
            Pattern.local(window, sinks=certain["sinks"]),
            Pattern.strided(draw.choice((window, None)), draw.choice((1, 7, 50)), **certain),
            Pattern.bigbird(window, draw.choice((1, 2, 5)), seed=draw.choice((0, 2**40)), **certain),
            Pattern.moba(window, draw.choice((1, 2, 5))),
            Pattern.stochastic(window, shape=shape, per_head=per_head),
            Pattern.stochastic(window, shape=shape, per_head=per_head, correction=0.5, **certain),
            Pattern.stochastic(window, shape=shape, scope="prefix", correction=0.5, **certain),
        )
    )


def random_tensor(draw: random.Random, shape: tuple[int, ...]) -> torch.Tensor:
    """Normal values in one of the layouts in memory that callers have, of one of the dtypes."""
    dtype = draw.choice(DTYPES)
    b, h, n, d = shape
    layouts = (
        lambda: torch.randn(shape),
        lambda: torch.randn(b, n, h, d).transpose(1, 2),
        lambda: torch.randn(b, h, d, n).mT,
        lambda: torch.randn(b, h, n, 3 * d)[..., d : 2 * d],
        lambda: torch.randn(b, h, n + 5, d)[:, :, 2 : n + 2],
        lambda: torch.randn(b, 1, n, d).expand(shape),
    )
    return draw.choice(layouts)().to(dtype)


def check_random_call(backend: str, seed: int) -> None:
    """Raise where output, log-sum-exp or a gradient is further from the oracle than rounding explains."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    batch, kv_heads, group = draw.choice((1, 2)), draw.choice((1, 2, 3)), draw.choice((1, 2, 3))
    keys = draw.choice((1, 2, 63, 64, 65, 130, 200, 333))
    dim, dim_v = draw.choice((1, 8, 31, 64, 80)), draw.choice((1, 8, 31, 64, 80))
    pattern = random_pattern(draw)
    options = {}
    queries = keys
    if draw.random() < 0.3:
        queries = draw.choice((1, 5, 70))
        options["query_positions"] = torch.randint(keys, (batch, queries))
    if draw.random() < 0.5:
        options["documents"] = torch.randint(-1, draw.choice((1, 4)), (batch, keys)).sort(-1).values
    if draw.random() < 0.2:
        options["softcap"] = 3.0
    if pattern.kind in ("local", "strided") and draw.random() < 0.3:
        options["causal"] = False
    q = random_tensor(draw, (batch, kv_heads * group, queries, dim))
    k, v = (random_tensor(draw, (batch, kv_heads, keys, width)) for width in (dim, dim_v))

    results = {}
    for name in (backend, "reference"):
        torch.manual_seed(seed)
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out, lse = attention(*leaves, pattern, layer=seed, backend=name, return_lse=True, **options)
        total = (out * torch.randn_like(out)).sum() + lse.masked_fill(lse.isinf(), 0.0).sum()
        results[name] = [out, lse, *torch.autograd.grad(total, leaves)]
    for what, got, expected in zip(("out", "lse", "dq", "dk", "dv"), *results.values(), strict=True):
        size = float(expected.detach().double().nan_to_num(neginf=0.0).abs().max())
        rounding = 2 * torch.finfo(got.dtype).eps + 100 * torch.finfo(lse.dtype).eps
        close = {"rtol": 0, "atol": rounding * max(1.0, size)}
        torch.testing.assert_close(got, expected, **close, msg=lambda m, w=what: f"seed {seed}, {w}: {m}")


if __name__ == "__main__":
    backend, count, first = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    for seed in range(first, first + count):
        check_random_call(backend, seed)
    print(f"{count} calls of {backend} agree with the oracle")
