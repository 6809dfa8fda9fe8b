"""The import arrows, read from the source and tried in fresh interpreters.

cli -> commands -> evaluation -> hf -> ops.api -> backends -> one backend -> what backends share
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import stochastic_attention
from stochastic_attention import backend_names

PACKAGE = Path(stochastic_attention.__file__).parent
MODULES = sorted(
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
    for path in PACKAGE.rglob("*.py")
    if path.name not in ("__init__.py", "__main__.py")
)
# Lowest first. A module imports from its own level or a lower one; backends, which share a level, never each other.
LEVELS = [
    "ops",
    "nn",
    "records",
    "tables",
    "plots",
    "models",
    "analysis",
    "hf",
    "lm",
    "evaluation",
    "benchmark",
    "reports",
    "commands",
    "cli",
]
EXTRAS = ["transformers", "datasets", "matplotlib", "triton", "accelerate", "gguf", "tqdm", "scipy", "igraph"]


def imports_of(module: str) -> set[str]:
    """The modules of this package that `module` names anywhere in its source, function bodies and type checks too."""
    path = PACKAGE.joinpath(*module.split(".")).with_suffix(".py")
    package = module.split(".")[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom):
            continue
        if node.level:
            base = package[: len(package) - node.level + 1]
        elif node.module and node.module.split(".")[0] == "stochastic_attention":
            base = []
        else:
            continue
        named = node.module.split(".") if node.module else []
        target = [*base, *(named if node.level else named[1:])]
        found |= {".".join([*target, alias.name]) for alias in node.names} | {".".join(target)}
    return found & set(MODULES)


def level(module: str) -> int:
    return LEVELS.index(module.split(".")[0])


@pytest.mark.parametrize("module", [m for m in MODULES if m.split(".")[0] in LEVELS])
def test_arrows_point_down(module):
    assert [other for other in imports_of(module) if level(other) > level(module)] == []


@pytest.mark.parametrize("backend", backend_names())
def test_backends_do_not_know_each_other(backend):
    modules = {name: "ops.triton.backend" if name == "triton" else f"ops.{name}" for name in backend_names()}
    others = {"ops.api", "ops.backends", *(module for name, module in modules.items() if name != backend)}
    seen, waiting = set(), [modules[backend]]
    while waiting:
        module = waiting.pop()
        # A pattern asks the oracle for a mask to show, at call time; that is no backend leaning on another.
        waiting += [] if module in seen or module == "ops.pattern" else imports_of(module)
        seen.add(module)
    assert seen & others == set()


def test_every_module_is_on_the_map():
    assert [m for m in MODULES if m.split(".")[0] not in LEVELS] == []


def run(program: str) -> str:
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_package_needs_torch_alone():
    program = (
        f"import torch, sys; sys.modules.update(dict.fromkeys({EXTRAS}, None)); import stochastic_attention as s; "
        "patterns = s.Pattern.full(), s.Pattern.local(2), s.Pattern.stochastic(2), s.Pattern.moba(2, 2); "
        "x = torch.ones(1, 1, 9, 4); print([s.attention(x, x, x, p).sum().item() for p in patterns])"
    )
    assert run(program) == str([36.0] * 4)


def test_importing_loads_no_extra_and_draws_no_number():
    program = (
        # torch.compiler loads triton where there is one.
        "import sys, torch; torch.compiler.disable(print); state = torch.get_rng_state(); before = set(sys.modules); "
        "import stochastic_attention; "
        f"new = set({EXTRAS}) & (set(sys.modules) - before); print(new, torch.equal(state, torch.get_rng_state()))"
    )
    assert run(program) == "set() True"
