"""What the kernels compile to, found without a GPU: registers, spilled bytes and shared memory.

    python -m stochastic_attention.ops.triton.compiled --output results/gpu/compiled.json

compiles every kernel for each compute capability, dtype, head dimension and kind of pass, and prints a line each. It
needs no GPU, and must not be told to interpret.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
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
from .sizes import Kernel, choose

KERNELS: tuple[Kernel, ...] = ("forward", "of_queries", "of_keys")
DTYPES = ("bfloat16", "float16", "float32")
DIMS = (16, 32, 64, 96, 128, 256)
CAPABILITIES = (80, 90)
# What a program may hold of shared memory, in bytes: for all 8.x and 12.x, and for 9.0.
SHARED = {80: 99 * 1024, 90: 227 * 1024}
# The leanest pass, and one with all that a pass may have but a softcap.
PASSES = {
    "block": Pattern.stochastic(64, shape="block"),
    "sliding": Pattern.stochastic(256, local=8, sinks=2, correction=0.5),
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


def compile_kernel(kernel: Kernel, capability: int, dtype: str, dim: int, of: str) -> Compiled:
    """Compile `kernel` for one pass of the pattern `PASSES[of]`, to machine code."""
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function, arguments = _instance(kernel, capability, dtype, dim, of)
    options = {name: arguments.pop(name) for name in ("num_warps", "num_stages", "enable_fp_fusion")}
    signature, constants, attributes = _specialise(function, arguments)
    built = compile(
        ASTSource(function, signature, constants, attributes), target=GPUTarget("cuda", capability, 32), options=options
    )
    registers, spilled = _resources(built.asm["cubin"])
    return Compiled(
        kernel, capability, dtype, dim, of, arguments["BLOCK_M"], arguments["BLOCK_N"], options["num_warps"],
        options["num_stages"], registers, spilled, built.metadata.shared,
    )  # fmt: skip


def _instance(kernel: Kernel, capability: int, dtype: str, dim: int, of: str) -> tuple[Any, dict[str, Any]]:
    """The function, and the arguments that a call of 512 tokens would launch it with."""
    from . import backward, forward

    x = torch.zeros(2, 16, 512, dim, dtype=getattr(torch, dtype))
    layout = make_layout(None, None, batch=2, queries=512, keys=512, device=x.device)
    call = Call.checked(x, x, x, PASSES[of], layout=layout)
    s = schedule(call, lower(call)[-1])
    lse = x.new_zeros(x.shape[:-1], dtype=torch.float32)
    if kernel == "forward":
        results: dict[str, Tensor] = {"out": x, "lse": lse}
    else:
        gradients = {"dq": x} if kernel == "of_queries" else {"dk": x, "dv": x}
        results = {"d_out": x, "lse": lse, "delta": lse, **gradients}
    sizes = choose(kernel, dim, dim, x.dtype.itemsize, divmod(capability, 10))
    _, arguments = launch_arguments(kernel, sizes, call, s, Bad.of(call), results)
    arguments |= {"CHECKED": False, "WIDE": False, "FIRST" if kernel == "of_keys" else "FRESH": s.fresh}
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


def line(c: Compiled) -> str:
    """For people."""
    return (
        f"{c.kernel:<10} {c.capability} {c.dtype:<8} {c.dim:>3} {c.of:<7} {c.block_m:>3} x {c.block_n:<3}"
        f" {c.warps} warps {c.stages} stages {c.registers:>3} registers {c.spilled:>4} B spilled"
        f" {c.shared / 1024:>5.1f} KiB shared"
    )


def main() -> None:
    """Compile, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capabilities", default=",".join(map(str, CAPABILITIES)), help="comma-separated")
    parser.add_argument("--dtypes", default=",".join(DTYPES), help="comma-separated")
    parser.add_argument("--dims", default=",".join(map(str, DIMS)), help="head dimensions, comma-separated")
    parser.add_argument("--passes", default=",".join(PASSES), help="comma-separated")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    args = parser.parse_args()
    kernels = []
    for capability in map(int, args.capabilities.split(",")):
        for kernel in KERNELS:
            for dtype in args.dtypes.split(","):
                for dim in map(int, args.dims.split(",")):
                    for of in args.passes.split(","):
                        kernels.append(compile_kernel(kernel, capability, dtype, dim, of))
                        print(line(kernels[-1]), flush=True)
    if args.output is not None:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps({"results": {"kernels": [asdict(c) for c in kernels]}}, indent=1) + "\n")


if __name__ == "__main__":
    main()
