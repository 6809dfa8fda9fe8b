"""The kernels of few queries compile for each card, without a GPU, and fit: registers, spills, shared memory."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile

import pytest
import torch

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402 - after the skips
from triton.compiler import ASTSource  # noqa: E402

from stochastic_attention.ops.triton import decode, queries  # noqa: E402

SHARED = {80: 163 * 1024, 90: 227 * 1024}
TYPES = {
    **{torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"},
    **{torch.int64: "i64", torch.int32: "i32", torch.uint8: "u8"},
}

# Newer versions of triton tell of a default to come.
pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION:UserWarning")


def compiled(kernel, arguments: dict, capability: int) -> tuple[int, int, int]:
    """(registers, bytes spilled, bytes of shared memory) of `kernel`, specialised as a launch would."""
    signature, constants, aligned = {}, {}, {}
    for place, parameter in enumerate(kernel.params):
        value = arguments[parameter.name]
        if parameter.is_constexpr or value is None or (type(value) is int and value == 1):
            signature[parameter.name], constants[(place,)] = "constexpr", value
            continue
        tensor = isinstance(value, torch.Tensor)
        signature[parameter.name] = f"*{TYPES[value.dtype]}" if tensor else "fp32" if type(value) is float else "i32"
        if tensor or value % 16 == 0:
            aligned[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, aligned)
    built = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    numbers = re.search(r"REG:(\d+) STACK:(\d+)", found)
    return int(numbers[1]), int(numbers[2]), built.metadata.shared


CASES = [
    pytest.param(
        capability, dtype, dim, shared,
        marks=() if (capability, dtype, dim) in {(90, "bfloat16", 128), (80, "float16", 64)} else pytest.mark.slow,
    )
    for capability in SHARED
    for dtype in ("bfloat16", "float16", "float32")
    for dim in (16, 64, 96, 128, 256)
    for shared in (False, True)
]  # fmt: skip


@pytest.mark.parametrize(("capability", "dtype", "dim", "shared"), CASES)
def test_attention_fits(capability, dtype, dim, shared):
    q, k = torch.zeros(2, 8, 1, dim), torch.zeros(2, 2, 4096, dim)
    q, k = (x.to(getattr(torch, dtype)) for x in (q, k))
    columns = 4096 if shared else 512
    slot = None if shared else torch.zeros(2, 1, 1, columns, dtype=torch.int64)
    allowed = torch.ones(2, 1, 1, columns, dtype=torch.bool)
    bias = torch.zeros(2, 1, 1, columns)
    _, arguments = queries.part_arguments(q, k, k, slot, allowed, bias, 0.1, 30.0)
    registers, spilled, memory = compiled(decode.attend_part, arguments, capability)
    print(f"{capability} {dtype} {dim}: {registers} registers, {spilled} B spilled, {memory / 1024:.1f} KiB")
    assert registers <= 255
    assert spilled <= (0 if dim <= 128 else 256)
    assert memory <= SHARED[capability]


@pytest.mark.parametrize("capability", SHARED)
def test_looking_up_and_merging_fit(capability):
    x = torch.zeros(2, 8, 1, 128)
    table = torch.zeros(2, 1, 4096, dtype=torch.int32)
    found = {
        decode.merge_parts: {
            "part_out": x, "part_lse": x, "out": x, "lse": x, "parts": 128, "DIM_V": 256, "BLOCK_P": 128, "BLOCK_V": 64,
        },
        decode.find_columns: {
            "token": x.long(), "table": table, "slot": x.long(), "allowed": x.byte(), "bias": x,
            "token_batch": 1, "token_query": 1, "table_half": 4096, "table_head": 4096, "heads": 2, "queries": 1,
            "keys": 4096, "columns": 767, "window": 256, "span": 256, "sinks": 4, "correction": 0.5,
            "RANDOM": True, "IN_BLOCKS": False, "HAS_BIAS": True, "LEVELS": 12, "BLOCK_C": 128,
        },
    }  # fmt: skip
    for kernel, arguments in found.items():
        registers, spilled, memory = compiled(kernel, arguments, capability)
        assert (registers <= 128, spilled, memory <= 48 * 1024) == (True, 0, True)
