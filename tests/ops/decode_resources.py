"""What the kernels of few queries compile to, as JSON: a process of its own, in which triton is not its interpreter.

    python tests/ops/decode_resources.py '[[90, "bfloat16", 128, true]]'

takes compute capability, dtype, head dimension, and whether queries share their keys; without a list, looks at the
kernels that know neither dtype nor dimension.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import warnings

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from stochastic_attention.ops.triton import decode, queries

TYPES = {
    **{torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"},
    **{torch.int64: "i64", torch.int32: "i32", torch.uint8: "u8"},
}


def resources(kernel, arguments: dict, capability: int) -> dict[str, int]:
    """Registers, bytes of stack (what is spilled is there) and of shared memory, specialised as a launch would."""
    arguments = dict(arguments)
    options = {name: arguments.pop(name) for name in ("enable_fp_fusion", "num_stages") if name in arguments}
    signature, constants, aligned = {}, {}, {}
    for place, parameter in enumerate(kernel.params):
        value = arguments[parameter.name]
        specialised = type(value) is int and not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (specialised and value == 1):
            signature[parameter.name], constants[(place,)] = "constexpr", value
            continue
        tensor = isinstance(value, torch.Tensor)
        signature[parameter.name] = f"*{TYPES[value.dtype]}" if tensor else "fp32" if type(value) is float else "i32"
        if tensor or (specialised and value % 16 == 0):
            aligned[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, aligned)
    built = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    numbers = re.search(r"REG:(\d+) STACK:(\d+)", found)
    return {"registers": int(numbers[1]), "stack": int(numbers[2]), "shared": built.metadata.shared}


def of_attention(capability: int, dtype: str, dim: int, shared: bool) -> dict[str, int]:
    """`attend_part` with all that it may have."""
    q, k = (x.to(getattr(torch, dtype)) for x in (torch.zeros(2, 8, 1, dim), torch.zeros(2, 2, 4096, dim)))
    columns = 4096 if shared else 512
    slot = None if shared else torch.zeros(2, 1, 1, columns, dtype=torch.int64)
    allowed = torch.ones(2, 1, 1, columns, dtype=torch.bool)
    _, arguments = queries.part_arguments(q, k, k, slot, allowed, torch.zeros(2, 1, 1, columns), 0.1, 30.0)
    return resources(decode.attend_part, arguments, capability)


def of_others(capability: int) -> list[dict[str, int]]:
    """`merge_parts` and `find_columns`."""
    x = torch.zeros(2, 8, 1, 128)
    table = torch.zeros(2, 1, 4096, dtype=torch.int32)
    merging = {
        **dict.fromkeys(("part_out", "part_lse", "out", "lse"), x),
        **{"parts": 128, "DIM_V": 256, "BLOCK_P": 128, "BLOCK_V": 64},
    }
    finding = {
        **{"token": x.long(), "table": table, "slot": x.long(), "allowed": x.byte(), "bias": x, "correction": 0.5},
        **{"token_batch": 1, "token_query": 1, "table_half": 4096, "table_head": 4096, "heads": 2, "queries": 1},
        **{"keys": 4096, "columns": 767, "window": 256, "span": 256, "sinks": 4},
        **{"RANDOM": True, "IN_BLOCKS": False, "HAS_BIAS": True, "LEVELS": 12, "BLOCK_C": 128},
    }
    kernels = ((decode.merge_parts, merging), (decode.find_columns, finding))
    return [resources(kernel, arguments, capability) for kernel, arguments in kernels]


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    if len(sys.argv) > 1:
        print(json.dumps([of_attention(*case) for case in json.loads(sys.argv[1])]))
    else:
        print(json.dumps([of_others(capability) for capability in (80, 90)]))
