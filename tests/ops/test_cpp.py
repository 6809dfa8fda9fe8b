"""The compiled backend: how it is built, kept and found missing, and what no other backend could get wrong."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch

from stochastic_attention import Pattern, attention
from stochastic_attention.ops import cpp, few_queries, native
from stochastic_attention.ops.call import Call
from stochastic_attention.ops.layout import make_layout

from .cases import LAYOUTS, all_patterns, outcome, stochastic_patterns, tensors, union
from .fuzz import check_random_call

FUZZ = Path(__file__).parent / "fuzz.py"

pytestmark = pytest.mark.skipif(native.why_not_built() is not None, reason="no C++ compiler")


def interpreter(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A fresh Python with more environment variables."""
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False, env={**os.environ, **environment}
    )


class TestBuilding:
    PROGRAM = (
        "import torch; from stochastic_attention import Pattern, attention; x = torch.ones(1, 1, 9, 4)\n"
        "for _ in range(2): print(attention(x, x, x, Pattern.local(2)).sum().item())\n"
        "try: attention(x, x, x, Pattern.local(2), backend='cpp')\n"
        "except ValueError as error: print(error)\n"
    )

    @pytest.mark.parametrize(
        ("compiler", "reason"),
        [("no-such-compiler", "no C++ compiler: no-such-compiler"), ("false", "failed")],
        ids=["none", "broken"],
    )
    def test_without_a_compiler_other_code_runs_and_it_is_said_once(self, tmp_path, compiler, reason):
        done = interpreter("-W", "error", "-c", self.PROGRAM, CXX=compiler, SATTN_CACHE=str(tmp_path))
        assert done.returncode == 0, done.stderr
        first, second, refused = done.stdout.splitlines()
        assert first == second == "36.0"
        assert "no backend takes this call: cpp: " in refused
        assert reason in refused
        assert done.stderr.count("not available") == 1
        assert not list(tmp_path.rglob("*.so"))

    def test_a_cache_that_cannot_be_written(self, monkeypatch, tmp_path):
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("SATTN_CACHE", str(tmp_path / "file"))
        with pytest.raises(native.NotBuiltError, match="cannot be built"):
            native.library.__wrapped__()

    def test_a_cache_in_nobodys_home(self, monkeypatch):
        monkeypatch.setenv("SATTN_CACHE", "~no-such-user/cache")
        with pytest.raises(native.NotBuiltError, match="no cache directory"):
            native.library.__wrapped__()

    def test_what_is_no_library_is_not_run(self, monkeypatch, tmp_path):
        monkeypatch.setenv("SATTN_CACHE", str(tmp_path))
        broken = native._kept_at(native._flags())
        broken.parent.mkdir()
        broken.write_text("not a library")
        with pytest.raises(native.NotBuiltError, match="cannot be loaded"):
            native.library.__wrapped__()

    def test_builds_at_once_neither_wait_nor_find_a_part(self, monkeypatch, tmp_path):
        compiler, path = tmp_path / "compiler", tmp_path / "cache" / "kernels.so"
        compiler.write_text(
            '#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\nprintf first >"$2"; sleep 0.1; printf second >>"$2"\n'
        )
        compiler.chmod(0o755)
        monkeypatch.setenv("CXX", str(compiler))
        with ThreadPoolExecutor() as pool:
            builds = [pool.submit(native._build, path, ()) for _ in range(2)]
            while not all(build.done() for build in builds):
                assert not path.exists() or path.read_text() == "firstsecond"
        assert [build.result() for build in builds] == [None, None]
        assert [file.name for file in path.parent.iterdir()] == ["kernels.so"]

    def test_instruction_sets_are_kept_apart(self, monkeypatch):
        names = set()
        for capability in ("AVX512", "AVX2", "DEFAULT"):
            monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda c=capability: c)
            names.add(native._kept_at(native._flags()))
        assert len(names) == 3

    @pytest.mark.slow
    @pytest.mark.parametrize("capability", ["default", "avx2"])
    def test_older_instruction_sets_agree_with_the_oracle(self, tmp_path, capability):
        if capability == "avx2" and torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
            pytest.skip("this processor has no AVX2")
        environment = {"ATEN_CPU_CAPABILITY": capability, "SATTN_CACHE": str(tmp_path)}
        done = interpreter("-W", "error", str(FUZZ), "cpp", "60", "1000", **environment)
        assert done.returncode == 0, done.stderr

    @pytest.mark.slow
    def test_sanitizers_find_nothing(self, tmp_path):
        """Address and undefined-behaviour sanitizers over random shapes, strides, dtypes and documents."""
        compiler = native._compiler()[0]
        found = (
            subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=False)
            for name in ("libasan.so", "libubsan.so")
        )
        runtimes = [path.stdout.strip() for path in found]
        if not all(Path(path).is_absolute() for path in runtimes):
            pytest.skip("the compiler has no sanitizers")
        environment = {
            "CXX": f"{compiler} -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all",
            "SATTN_CACHE": str(tmp_path),
            "LD_PRELOAD": ":".join(runtimes),
            "ASAN_OPTIONS": "detect_leaks=0",  # Python frees nothing at exit
        }
        done = interpreter("-W", "error", str(FUZZ), "cpp", "150", "0", **environment)
        assert done.returncode == 0, done.stderr
        assert list(tmp_path.rglob("*.so"))


class TestKernel:
    @pytest.mark.parametrize("seed", range(40))
    def test_random_calls(self, seed):
        check_random_call("cpp", seed)

    @pytest.mark.parametrize("pattern", all_patterns(window=20), ids=str)
    def test_bits_do_not_depend_on_the_number_of_threads(self, pattern):
        inputs = tensors(300, dtype=torch.float32)
        run = partial(attention, pattern=pattern, backend="cpp", return_lse=True)
        alone = outcome(run, *inputs)
        before = torch.get_num_threads()
        try:
            torch.set_num_threads(3)
            together = outcome(run, *inputs)
        finally:
            torch.set_num_threads(before)
        assert all(torch.equal(alone[name], together[name]) for name in alone)

    @pytest.mark.parametrize("pattern", [Pattern.local(20), union(20)], ids=str)
    def test_bfloat16_is_storage(self, pattern):
        inputs = tensors(150, dims=(31, 40), dtype=torch.bfloat16)
        run = partial(attention, pattern=pattern, backend="cpp", return_lse=True)
        stored, widened = outcome(run, *inputs), outcome(run, *(x.float() for x in inputs))
        assert torch.equal(stored["lse"], widened["lse"])
        assert torch.equal(stored["out"], widened["out"].bfloat16())

    def test_every_tile_of_a_long_sequence(self):
        """More tiles than are planned at once, in every direction."""
        inputs = tensors(64 * 64 + 77, batch=1, heads=(1, 1), dims=(4, 4), dtype=torch.float32)
        results = [
            outcome(partial(attention, pattern=Pattern.stochastic(30), backend=name, return_lse=True), *inputs)
            for name in ("cpp", "blocked")
        ]
        for name, got in results[0].items():
            torch.testing.assert_close(got, results[1][name], rtol=1e-4, atol=1e-4)


class TestFewQueries:
    """What decoding runs: no gradient is asked for, so that the backend `gather` may use its kernel."""

    @pytest.fixture(autouse=True)
    def kernel_calls(self, monkeypatch):
        """How often the kernel was called."""
        calls = []
        attend = few_queries.attend
        monkeypatch.setattr(few_queries, "attend", lambda *args, **kwargs: calls.append(1) or attend(*args, **kwargs))
        return calls

    @pytest.mark.parametrize("heads", [(1, 1), (4, 2), (6, 2), (5, 1)], ids=str)
    @pytest.mark.parametrize("layout", ["single", "left-padded", "packed-and-padded", "interleaved"])
    @pytest.mark.parametrize("pattern", [Pattern.local(4, sinks=2), *stochastic_patterns(4)], ids=str)
    def test_like_the_oracle(self, kernel_calls, pattern, layout, heads):
        places = torch.tensor([[3, 70, 0, 3], [1, 1, 8, 69]])
        for dims, softcap in (((8, 3), None), ((31, 72), 2.0)):
            inputs = tensors(71, heads=heads, queries=4, dims=dims)
            options = {"query_positions": places, "documents": LAYOUTS[layout](71), "softcap": softcap, "layer": 3}
            got, want = (
                attention(*inputs, pattern, backend=name, return_lse=True, **options)
                for name in ("gather", "reference")
            )
            torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
        assert len(kernel_calls) == 2

    @pytest.mark.parametrize("scope", ["sequence", "prefix"])
    def test_the_newest_tokens(self, kernel_calls, scope):
        inputs = tensors(71, queries=40)
        options = {"decode": True, "query_positions": torch.arange(31, 71), "return_lse": True}
        got, want = (attention(*inputs, union(4, scope=scope), backend=b, **options) for b in ("gather", "reference"))
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
        assert kernel_calls

    @pytest.mark.parametrize("which", ["q", "k", "v"])
    @pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")], ids=str)
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
    def test_non_finite_values_show_where_they_are_seen_and_nowhere_else(self, kernel_calls, which, bad, dtype):
        places = torch.tensor([5, 20, 36])
        inputs = dict(zip("qkv", tensors(37, heads=(4, 2), queries=3, dtype=dtype), strict=True))
        pattern = Pattern.local(4, sinks=1)
        options = {"pattern": pattern, "query_positions": places, "backend": "gather", "return_lse": True}
        clean = attention(**inputs, **options)
        inputs[which][1, 1, 1 if which == "q" else 18, 2] = bad
        spoilt = attention(**inputs, **options)
        hit = torch.zeros(2, 4, 3, dtype=torch.bool)
        hit[1, 1 if which == "q" else slice(2, 4), 1] = True
        for got, expected in zip(spoilt, clean, strict=True):
            assert got[hit].isnan().all()
            assert torch.equal(got[~hit], expected[~hit])
        assert kernel_calls

    @pytest.mark.parametrize("make", [lambda x: x.half(), lambda x: x.mT.contiguous().mT], ids=["float16", "columns"])
    def test_a_cache_that_would_have_to_be_copied_is_left_to_other_code(self, kernel_calls, make):
        q, k, v = tensors(71, queries=1, dtype=torch.float32)
        place = torch.tensor([70])
        got = attention(q, make(k), v, Pattern.local(4), query_positions=place, backend="gather")
        want = attention(q, make(k).float(), v, Pattern.local(4), query_positions=place, backend="reference")
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
        assert not kernel_calls

    def test_a_gradient_that_is_asked_for_is_given(self, kernel_calls):
        """The forward is the kernel's all the same: a layer that is recomputed with gradients gets equal numbers."""
        inputs = tensors(71, queries=1, grad=True)
        found = []
        for backend in ("gather", "reference"):
            out = attention(*inputs, Pattern.local(4), query_positions=torch.tensor([70]), backend=backend)
            found.append(torch.autograd.grad(out.square().sum(), inputs))
        torch.testing.assert_close(found[0], found[1], rtol=1e-10, atol=1e-10)
        assert len(kernel_calls) == 1

    def test_bits_do_not_depend_on_the_number_of_threads(self):
        q, k, v = tensors(900, queries=40, dtype=torch.float32, dims=(64, 64))
        options = {"pattern": Pattern.stochastic(100, scope="prefix"), "query_positions": torch.arange(860, 900)}
        alone = attention(q, k, v, backend="gather", **options)
        before = torch.get_num_threads()
        try:
            torch.set_num_threads(3)
            assert torch.equal(attention(q, k, v, backend="gather", **options), alone)
        finally:
            torch.set_num_threads(before)


class TestRefusals:
    """What cannot come from a checked call is refused all the same, and before any memory is touched."""

    @pytest.mark.parametrize(
        ("field", "value"),
        [("query_rows", 33), ("key_rows", 33), ("key_rows", -1), ("start", -1), ("stop", 34)],
        ids=lambda x: str(x),
    )
    def test_rows_and_slots_out_of_range(self, monkeypatch, field, value):
        def spoilt(call: Call):
            return [
                dataclasses.replace(p, **{field: torch.full_like(getattr(p, field), value)}) for p in original(call)
            ]

        original = cpp.lower
        monkeypatch.setattr(cpp, "lower", spoilt)
        with pytest.raises(RuntimeError, match="out of range"):
            attention(*tensors(33), Pattern.local(4), backend="cpp")

    def test_other_devices(self):
        q, k, v = (x.to("meta") for x in tensors(33))
        layout = make_layout(None, None, batch=2, queries=33, keys=33, device=q.device)
        reason = cpp.unsupported(Call.checked(q, k, v, Pattern.local(4), layout=layout))
        assert reason is not None
        assert "on the CPU only, got meta" in reason
