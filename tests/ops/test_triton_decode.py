"""Few queries by the kernels for CUDA devices: in Triton's interpreter, and compiled for cards that are not there."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from stochastic_attention import Pattern
from stochastic_attention.ops import gather, products
from stochastic_attention.ops.call import Call
from stochastic_attention.ops.layout import make_layout
from stochastic_attention.ops.rank_tables import rank_table

from .cases import all_patterns, assert_same, attention, outcome, tensors, union

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("triton is not its interpreter here; `sattn check` runs the kernels", allow_module_level=True)

from stochastic_attention.ops.triton import queries as kernels

PATTERNS = [pattern for pattern in all_patterns(window=5) if pattern.kind != "moba"]
PLACES = torch.tensor([70, 3, 40])
DOCUMENTS = {
    "padded": torch.stack([torch.arange(71) >= 4, torch.arange(71) < 45]).long() - 1,
    "packed": torch.stack([torch.arange(71) * 2 // 71, torch.arange(71) % 2]),
}


@pytest.fixture(autouse=True)
def on_gpu(monkeypatch):
    """The kernels take every call that they would take on a CUDA device, whose values the host does not read."""
    monkeypatch.setattr(products, "can_read", lambda _device: False)
    monkeypatch.setattr(gather, "_can_run_on_gpu", lambda call: call.compute_dtype == torch.float32)


@pytest.mark.parametrize(
    ("pattern", "documents"),
    [(p, "single") for p in PATTERNS] + [(p, x) for p in (PATTERNS[0], PATTERNS[2], PATTERNS[-1]) for x in DOCUMENTS],
    ids=str,
)
def test_output_and_gradients_are_the_oracles(pattern, documents):
    inputs = (*tensors(71, queries=3, dtype=torch.float32), torch.linspace(-1, 1, 4))
    options = {"query_positions": PLACES, "documents": DOCUMENTS.get(documents), "layer": 2, "step": 3, "softcap": 3.0}
    got, want = (
        outcome(attention, *inputs, pattern=pattern, return_lse=True, backend=backend, **options)
        for backend in ("gather", "reference")
    )
    assert_same(got, want, tolerance=2e-5)


@pytest.mark.parametrize(("heads", "dims"), [((1, 1), (24, 17)), ((6, 2), (1, 1)), ((20, 1), (130, 80))], ids=str)
@pytest.mark.parametrize("pattern", [Pattern.full(), union(5, scope="prefix", shape="block")], ids=["full", "union"])
def test_shapes(pattern, heads, dims):
    q, k, v = tensors(71, queries=3, heads=heads, dims=dims, dtype=torch.float32)
    got, want = (
        attention(q, k, v, pattern, query_positions=PLACES, backend=backend, return_lse=True)
        for backend in ("gather", "reference")
    )
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtypes", [("float16",) * 3, ("bfloat16",) * 3, ("float32", "bfloat16", "float16")], ids=str)
@pytest.mark.parametrize("strided", [False, True])
def test_dtypes_and_strides(dtypes, strided):
    inputs = [x.to(getattr(torch, dtype)) for x, dtype in zip(tensors(71, queries=3), dtypes, strict=True)]
    if strided:
        inputs = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs]
        inputs[2] = inputs[2].mT.contiguous().mT
    pattern, options = Pattern.stochastic(5, scope="prefix"), {"query_positions": PLACES, "return_lse": True}
    got = attention(*inputs, pattern, backend="gather", **options)
    want = attention(*(x.double() for x in inputs), pattern, backend="reference", **options)
    assert [x.dtype for x in got] == [inputs[2].dtype, torch.float32]
    rounding = 2 * float(torch.finfo(inputs[2].dtype).eps)
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=rounding, atol=rounding)


@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("pattern", [Pattern.full(), Pattern.stochastic(5, scope="prefix")], ids=["full", "prefix"])
def test_what_is_not_finite_spoils_the_rows_that_see_it_alone(pattern, bad):
    n = 71
    for which in range(3):
        inputs = list(tensors(n, queries=3, dtype=torch.float32))
        place = 1 if which == 0 else 30
        inputs[which][0, 0, place, 3] = bad
        got, want = (
            attention(*inputs, pattern, query_positions=PLACES, backend=backend, return_lse=True)
            for backend in ("gather", "reference")
        )
        torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5, equal_nan=True)


LOOKED_UP = [
    *(Pattern.local(5), Pattern.local(5, sinks=2)),
    *(Pattern.stochastic(5, scope="prefix"), union(5, scope="prefix", shape="block")),
]


@pytest.mark.parametrize("place", [-1, 71, 10**6])
@pytest.mark.parametrize("pattern", LOOKED_UP, ids=str)
def test_a_query_that_stands_at_no_key_is_nan(pattern, place):
    """On a device its position cannot be read beforehand, and reading there would be reading foreign memory."""
    q, k, v = tensors(71, queries=1, dtype=torch.float32)
    layout = make_layout(None, torch.tensor([70]), batch=2, queries=1, keys=71, device=q.device)
    layout.query_token.fill_(place)
    out, lse = gather.run(Call.checked(q, k, v, pattern, layout=layout))
    assert out.isnan().all()
    assert lse.isnan().all()


def columns_by_both(pattern: Pattern, places: torch.Tensor, keys: int) -> list[dict[int, float]]:
    """For each query, the keys that it sees and their bias, by `neighbours` and by the kernel."""
    q, k, v = tensors(keys, queries=len(places), dtype=torch.float32)
    layout = make_layout(None, places, batch=2, queries=len(places), keys=keys, device=q.device)
    call = Call.checked(q, k, v, pattern, layout=layout, layer=1, step=2)
    found = []
    for neighbours in (gather.neighbours, gather._find_on_gpu):
        x = neighbours(call, slice(None))
        bias = torch.zeros(()) if x.bias is None else x.bias
        slot, allowed, bias = torch.broadcast_tensors(x.slot, x.allowed, bias)
        assert bool((slot[~allowed] >= 0).all())
        found.append((torch.where(allowed, slot, -1), bias.masked_fill(~allowed, 0.0)))
    return found


@pytest.mark.parametrize("window", [1, 4, 16])
@pytest.mark.parametrize("shape", ["sliding", "block"])
def test_columns_are_those_of_the_plain_look_up(shape, window):
    places = torch.tensor([0, 1, window - 1, window, window + 1, 64, 66])
    for pattern in (
        Pattern.local(window, sinks=3),
        Pattern.stochastic(window, scope="prefix", shape=shape, seed=3, per_head=True),
        Pattern.stochastic(window, scope="prefix", shape=shape, local=3, sinks=2, correction=0.5),
    ):
        (slot, bias), (slot_of_kernel, bias_of_kernel) = columns_by_both(pattern, places, 67)
        assert torch.equal(slot, slot_of_kernel)
        torch.testing.assert_close(bias, bias_of_kernel, rtol=1e-6, atol=1e-6)


def test_a_row_has_the_same_bits_in_any_batch_and_chunk():
    q, k, v = tensors(71, queries=3, dtype=torch.float32)
    pattern = union(5, scope="prefix")
    together = attention(q, k, v, pattern, query_positions=PLACES, backend="gather")
    for b in range(2):
        for i in range(3):
            alone = attention(
                q[b : b + 1, :, i : i + 1], k[b : b + 1], v[b : b + 1], pattern, query_positions=PLACES[i : i + 1],
                backend="gather",
            )  # fmt: skip
            assert torch.equal(alone[0, :, 0], together[b, :, i])


def test_long_runs_of_columns_are_merged():
    q, k, v = tensors(1100, batch=1, heads=(2, 1), queries=1, dtype=torch.float32)
    got, want = (
        attention(q, k, v, Pattern.full(), query_positions=torch.tensor([1090]), backend=backend, return_lse=True)
        for backend in ("gather", "reference")
    )
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("shared", [False, True])
def test_the_operators_keep_their_contract(shared):
    q, k, v = (x.requires_grad_() for x in tensors(40, queries=2, dtype=torch.float32))
    draw = torch.Generator().manual_seed(0)
    columns = 40 if shared else 9
    slot = None if shared else torch.randint(0, 40, (1, 1, 2, columns), generator=draw)
    allowed = torch.rand(1, 1, 2, columns, generator=draw) < 0.7
    torch.library.opcheck(kernels.attend_few, (q, k, v, slot, allowed, None, 0.3, 2.0))
    token = torch.tensor([[5, 30]])
    table = rank_table(4, 5, seed=0, step=0, layer=0, heads=2, device=q.device)
    torch.library.opcheck(kernels.find_few, (token, None, [7, 1, 5, 2], 1, 1, 40, False, 0.0))
    torch.library.opcheck(kernels.find_few, (token, table, [15, 4, 5, 2], 5, 2, 40, True, 0.5))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("pattern", [Pattern.full(), union(4, scope="prefix")], ids=str)
def test_compiled_code_is_one_graph_wherever_the_query_stands(pattern):
    torch._dynamo.reset()
    q, k, v = tensors(64, queries=1, dtype=torch.float32, grad=True)

    def step(q, k, v, place):
        return attention(q, k, v, pattern, layer=2, query_positions=place, decode=True)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for place in (torch.tensor([i]) for i in (0, 5, 63)):
            results = []
            for run in (compiled, step):
                out = run(q, k, v, place)
                results.append([out, *torch.autograd.grad(out.square().sum(), (q, k, v))])
            torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


def compiled(*arguments: str) -> list:
    script = Path(__file__).parent / "decode_resources.py"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# Bytes of shared memory that a program may hold: on all cards of 8.x, and on 9.0.
SHARED = {80: 99 * 1024, 90: 227 * 1024}
PRODUCT = [
    (capability, dtype, dim, shared)
    for capability in SHARED
    for dtype in ("bfloat16", "float16", "float32")
    for dim in (16, 64, 96, 128, 256)
    for shared in (False, True)
]


@pytest.mark.parametrize(
    "cases", [[(90, "bfloat16", 128, False)], pytest.param(PRODUCT, marks=pytest.mark.slow)], ids=["one", "product"]
)
def test_attention_compiles_and_fits(cases):
    for case, found in zip(cases, compiled(json.dumps(cases)), strict=True):
        print(*case, found)
        assert found["registers"] <= 255, case
        assert found["stack"] <= 16, case
        assert found["shared"] <= SHARED[case[0]], case


@pytest.mark.slow
def test_looking_up_and_merging_compile_and_fit():
    for found in (x for of_capability in compiled() for x in of_capability):
        assert found["registers"] <= 128
        assert found["stack"] == 0
        assert found["shared"] <= 48 * 1024
