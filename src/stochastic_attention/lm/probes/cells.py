"""What a run of probes consists of: its settings, and one cell for each model to be trained."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, get_args

from ...ops.pattern import Pattern, Scope, Shape
from ...ops.validation import check_choice, check_count, check_device, check_distinct, check_real
from .tasks import TASKS, TaskSize

# Kind of attention -> its paths, of which two are gated, and what part of the window each gets.
KINDS: dict[str, dict[str, int]] = {
    "full": {},
    "swa": {"swa": 1},
    "sa": {"sa": 1},
    "gated": {"sa": 1, "swa": 1},
    "gated-half": {"sa": 2, "swa": 2},
}


@dataclass(frozen=True)
class Training:
    """How every model of a run is trained: one rule for all kinds of attention.

    AdamW; the rate rises linearly for `warmup` steps and falls along a cosine to a tenth of `learning_rate` at `steps`.
    Every `check` steps a model answers the test rows at the fixed routing step, and is finished once more than the
    share `enough` of its answers is right.
    """

    steps: int = 1500
    batch: int = 32
    learning_rate: float = 3e-3
    warmup: int = 50
    hidden: int = 64
    heads: int = 2
    check: int = 100
    enough: float = 0.999


@dataclass(frozen=True)
class Settings:
    """What to train and to measure. Two runs with equal settings give equal figures on one machine, times aside.

    Attributes:
        attention: names from `KINDS`.
        scopes, shapes: of the stochastic patterns.
        windows: of all patterns but full attention.
        layers: depths.
        seeds: how many, 0 and up; a seed gives the weights, the examples and the routing.
        rows: test rows.
        routing_steps: how many routing steps evaluation averages over, 0 and up; training runs at later ones.
    """

    task: str
    attention: tuple[str, ...]
    scopes: tuple[str, ...]
    shapes: tuple[str, ...]
    windows: tuple[int, ...]
    layers: tuple[int, ...]
    size: TaskSize
    training: Training = Training()
    seeds: int = 3
    rows: int = 256
    routing_steps: int = 16
    device: str = "cpu"

    def __post_init__(self) -> None:
        """Check every setting before any work starts."""
        check_choice("task", self.task, TASKS)
        TASKS[self.task].check(self.size)
        for name in ("attention", "scopes", "shapes", "windows", "layers"):
            check_distinct(name, getattr(self, name))
        for name, choices in (("attention", KINDS), ("scopes", get_args(Scope)), ("shapes", get_args(Shape))):
            for value in getattr(self, name):
                check_choice(name, value, choices)
        for window in self.windows:
            check_count("windows", window, minimum=2)
            if "gated-half" in self.attention and window % 2:
                raise ValueError(f"windows must be even where gated-half is trained, got {window}")
        for depth in self.layers:
            check_count("layers", depth, minimum=1)
        for name in ("seeds", "rows", "routing_steps"):
            check_count(name, getattr(self, name), minimum=1)
        for name in ("steps", "batch", "hidden", "heads", "check"):
            check_count(name, getattr(self.training, name), minimum=1)
        check_count("warmup", self.training.warmup, minimum=0)
        check_real("learning_rate", self.training.learning_rate, above=0.0)
        check_real("enough", self.training.enough, above=0.0)
        if self.training.hidden % (2 * self.training.heads):
            raise ValueError(
                f"hidden must be a multiple of twice the heads, {2 * self.training.heads}, got {self.training.hidden}"
            )
        check_device(self.device)

    @property
    def of_a_cell(self) -> dict[str, Any]:
        """The settings that a cell's figures depend on. The others say which cells there are."""
        return {name: value for name, value in asdict(self).items() if name not in _GRID}


_GRID = ("attention", "scopes", "shapes", "windows", "layers", "seeds")


@dataclass(frozen=True)
class Cell:
    """One model to train. `patterns`: what each layer runs; two are gated. Scope, shape and window are None where the
    kind of attention has none."""

    attention: str
    scope: str | None
    shape: str | None
    window: int | None
    layers: int
    seed: int
    patterns: tuple[Pattern, ...]

    @property
    def name(self) -> str:
        """Without depth and seed, for people."""
        return " ".join(str(part) for part in (self.attention, self.scope, self.shape, self.window) if part is not None)

    @property
    def key(self) -> str:
        """Its name in the journal."""
        return f"{self.name}, {self.layers} layers, seed {self.seed}"


def plan(settings: Settings) -> list[Cell]:
    """The cells in order: every seed of a depth, of a window, of a kind. Kinds without a choice appear once."""
    cells: dict[str, Cell] = {}
    for kind in settings.attention:
        for scope in settings.scopes:
            for shape in settings.shapes:
                for window in settings.windows:
                    for layers in settings.layers:
                        for seed in range(settings.seeds):
                            cell = _cell(kind, scope, shape, window, layers, seed)
                            cells.setdefault(cell.key, cell)
    return list(cells.values())


def _cell(kind: str, scope: str, shape: str, window: int, layers: int, seed: int) -> Cell:
    made = {
        "sa": lambda w: Pattern.stochastic(w, scope=scope, shape=shape, seed=seed),  # type: ignore[arg-type]
        "swa": Pattern.local,
    }
    patterns = tuple(made[path](window // parts) for path, parts in KINDS[kind].items())
    is_random = "sa" in KINDS[kind]
    return Cell(
        attention=kind,
        scope=scope if is_random else None,
        shape=shape if is_random else None,
        window=window if patterns else None,
        layers=layers,
        seed=seed,
        patterns=patterns or (Pattern.full(),),
    )
