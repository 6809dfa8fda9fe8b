"""Print how many tiles the fused kernels compute for each pattern, against the pairs that it needs.

    python benchmarks/count_work.py > results/gpu/work.md

Counted from the plan, on the CPU; nothing is timed. Batch 1, one head, window 256.
"""

from __future__ import annotations

import torch

from stochastic_attention import Pattern
from stochastic_attention.benchmark.workloads import PATTERNS
from stochastic_attention.ops.call import Call
from stochastic_attention.ops.layout import make_layout
from stochastic_attention.ops.triton.work import count_work

BLOCKS = ((128, 64), (64, 64))

print("| pattern | n | " + " | ".join(f"tiles {m} x {n} | with a mask | computed / needed" for m, n in BLOCKS) + " |")
print("|---|---:|" + "---:|" * 3 * len(BLOCKS))
for length in (2048, 8192, 32768, 131072):
    x = torch.randn(1, 1, length, 1, generator=torch.Generator().manual_seed(0))
    layout = make_layout(None, None, batch=1, queries=length, keys=length, device=x.device)
    for name, make in {"full": lambda _: Pattern.full(), **PATTERNS}.items():
        call = Call.checked(x, x, x, make(256), layout=layout)
        cells = []
        for block_m, block_n in BLOCKS:
            work = count_work(call, block_m, block_n)
            ratio = work.pairs_computed / work.pairs_needed
            cells += [f"{work.tiles:,}", f"{work.masked_tiles / work.tiles:.0%}", f"{ratio:.2f}"]
        print(f"| {name} | {length:,} | " + " | ".join(cells) + " |", flush=True)
