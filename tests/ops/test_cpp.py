"""The compiled backend: how it is built, kept and found missing, and what no other backend could get wrong."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from stochastic_attention import Pattern, attention
from stochastic_attention.ops import cpp, native
from stochastic_attention.ops.call import Call
from stochastic_attention.ops.layout import make_layout

from .cases import all_patterns, outcome, tensors, union
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

    def test_what_is_no_library_is_not_run(self, monkeypatch, tmp_path):
        monkeypatch.setenv("SATTN_CACHE", str(tmp_path))
        broken = native._kept_at(native._flags())
        broken.parent.mkdir()
        broken.write_text("not a library")
        with pytest.raises(native.NotBuiltError, match="cannot be loaded"):
            native.library.__wrapped__()

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
