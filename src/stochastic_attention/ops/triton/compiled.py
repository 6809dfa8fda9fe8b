"""What the kernels compile to, found without a GPU: registers, spilled bytes and shared memory.

    python -m stochastic_attention.ops.triton.compiled --output results/gpu/compiled.json

compiles every kernel for each compute capability, dtype and head dimension, and prints a line each.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..call import Call
from ..layout import make_layout
from ..pattern import Pattern
from ..plan import lower
from .launch import Bad, launch_arguments
from .schedule import schedule
from .sizes import Kernel

KERNELS: tuple[Kernel, ...] = ("forward", "of_queries", "of_keys")
DTYPES = ("bfloat16", "float16", "float32")
DIMS = (16, 32, 64, 96, 128, 256)
CAPABILITIES = (80, 90)
# What a program may hold of shared memory, in bytes.
SHARED = {80: 163 * 1024, 90: 227 * 1024}
# The leanest pass, and one with all that a pass may have but a softcap.
PASSES = {
    "block": Pattern.stochastic(64, shape="block"),
    "sliding": Pattern.stochastic(64, local=8, sinks=2, correction=0.5),
}


@dataclass(frozen=True)
class Compiled:
    """One kernel: `spilled` and `shared` in bytes, of a thread and of a program."""

    kernel: str
    capability: int
    dtype: str
    dim: int
    of: str
    block_m: int
    block_n: int
    warps: int
    stages: int
    registers: int
    spilled: int
    shared: int


def compile_kernel(
    kernel: Kernel, capability: int, dtype: str, dim: int, of: str, *, checked: bool = False
) -> Compiled:
    """Compile `kernel` for one pass of the pattern `PASSES[of]`, to machine code."""
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function, arguments = _instance(kernel, dtype, dim, of, checked)
    options = {name: arguments.pop(name) for name in ("num_warps", "num_stages")}
    signature, constants, attributes = _specialise(function, arguments)
    built = compile(
        ASTSource(function, signature, constants, attributes), target=GPUTarget("cuda", capability, 32), options=options
    )
    registers, spilled = _resources(built.asm["cubin"])
    return Compiled(
        kernel, capability, dtype, dim, of, arguments["BLOCK_M"], arguments["BLOCK_N"], options["num_warps"],
        options["num_stages"], registers, spilled, built.metadata.shared,
    )  # fmt: skip


def _instance(kernel: Kernel, dtype: str, dim: int, of: str, checked: bool) -> tuple[Any, dict[str, Any]]:
    """The function, and the arguments that a call of 256 tokens would launch it with."""
    from . import backward, forward

    x = torch.zeros(2, 16, 256, dim, dtype=getattr(torch, dtype))
    layout = make_layout(None, None, batch=2, queries=256, keys=256, device=x.device)
    call = Call.checked(x, x, x, PASSES[of], layout=layout)
    s = schedule(call, lower(call)[-1])
    lse = x.new_zeros(x.shape[:-1], dtype=torch.float32)
    if kernel == "forward":
        results: dict[str, Tensor] = {"out": x, "lse": lse}
    else:
        gradients = {"dq": x} if kernel == "of_queries" else {"dk": x, "dv": x}
        results = {"d_out": x, "lse": lse, "delta": lse, **gradients}
    _, arguments = launch_arguments(kernel, call, s, Bad.of(call), results)
    arguments |= {"CHECKED": checked, "FIRST" if kernel == "of_keys" else "FRESH": s.fresh}
    return getattr(forward if kernel == "forward" else backward, kernel), arguments


_TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int32: "i32", torch.bool: "i1"}


def _specialise(function: Any, arguments: dict[str, Any]) -> tuple[dict[str, str], dict[str, Any], dict[Any, Any]]:  # noqa: ANN401
    """(type, constants, multiples of 16) of the arguments, as a launch would find them."""
    signature, constants, attributes = {}, {}, {}
    for place, parameter in enumerate(function.params):
        value = arguments[parameter.name]
        fixed = parameter.is_constexpr or (isinstance(value, int) and value == 1 and not parameter.do_not_specialize)
        if fixed:
            signature[parameter.name], constants[(place,)] = "constexpr", value
        elif isinstance(value, Tensor):
            signature[parameter.name] = f"*{_TYPES[value.dtype]}"
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
        aligned = isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0)
        if aligned and not fixed and not parameter.do_not_specialize:
            attributes[(place,)] = [["tt.divisibility", 16]]
    return signature, constants, attributes


def _resources(cubin: bytes) -> tuple[int, int]:
    """(registers, bytes of stack) of a thread."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    numbers = re.search(r"REG:(\d+) STACK:(\d+)", found)
    assert numbers is not None, found
    return int(numbers[1]), int(numbers[2])


def every() -> Iterator[Compiled]:
    """The whole product, one after the other: some minutes."""
    for capability in CAPABILITIES:
        for kernel in KERNELS:
            for dtype in DTYPES:
                for dim in DIMS:
                    for of in PASSES:
                        yield compile_kernel(kernel, capability, dtype, dim, of)


def line(c: Compiled) -> str:
    """For people."""
    return (
        f"{c.kernel:<10} {c.capability:>3} {c.dtype:<8} {c.dim:>4} {c.of:<8} {c.block_m:>4} x {c.block_n:<4}"
        f"{c.warps:>2} warps {c.stages} stages {c.registers:>4} registers {c.spilled:>5} B spilled {c.shared / 1024:>6.1f} KiB"
    )


if __name__ == "__main__":
    import sys

    k, cap, dt, dim, of = sys.argv[1:6]
    for kk in KERNELS if k == "all" else [k]:
        for d in map(int, dim.split(",")):
            for o in of.split(","):
                for c in map(int, cap.split(",")):
                    print(line(compile_kernel(kk, c, dt, d, o)), flush=True)
