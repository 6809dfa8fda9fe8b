"""What the kernels that plan compile to, as JSON: a process of its own, in which triton is not its interpreter.

Arguments are those of launches, which are recorded and not made.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from decode_resources import resources

from stochastic_attention import Pattern
from stochastic_attention.ops.call import Call
from stochastic_attention.ops.layout import make_layout
from stochastic_attention.ops.plan import lower
from stochastic_attention.ops.triton import planning
from stochastic_attention.ops.triton.keys import routing_keys
from stochastic_attention.ops.triton.schedule import cut_by_kernel, schedule


class Recorder:
    """Stands for a kernel, and keeps what it is launched with."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.launches = kernel, []

    def __getitem__(self, _grid: tuple[int]) -> Any:
        return lambda **arguments: self.launches.append(arguments)


def launches() -> list[tuple[Any, dict[str, Any]]]:
    """Kernels and arguments of every kind of launch."""
    recorders = planning.draw, planning.extremes = Recorder(planning.draw), Recorder(planning.extremes)
    for step in (2**40, torch.tensor(3)):
        for head in (0, torch.arange(4)[:, None]):
            routing_keys(torch.arange(2048), seed=2**63 - 1, step=step, layer=2**32 - 1, head=head)
    x = torch.zeros(1, 1, 2048, 16)
    layout = make_layout(None, None, batch=1, queries=2048, keys=2048, device=x.device)
    for shape in ("sliding", "block"):
        call = Call.checked(x, x, x, Pattern.stochastic(256, shape=shape), layout=layout)
        (p,) = lower(call)
        for block_m, block_n in ((128, 64), (16, 16)):
            cut_by_kernel(schedule(call, p), block_m, block_n)
    return [(recorder.kernel, arguments) for recorder in recorders for arguments in recorder.launches]


if __name__ == "__main__":
    print(json.dumps([resources(*launch, capability) for launch in launches() for capability in (80, 90)]))
