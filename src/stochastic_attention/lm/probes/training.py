"""Train one small model from scratch, and measure what it answers rightly, and why it could."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...hf.swap import set_step
from ..config import StochasticLlamaConfig
from ..model import StochasticLlamaForCausalLM
from .cells import Cell, Settings, Training
from .paths import expected_direct, paths
from .tasks import TASKS, Examples, draw

_ROWS_AT_ONCE = 64


@dataclass(frozen=True)
class Group:
    """Answers of one group: how many there are at one routing step, and the share of them that was right.

    `count` and `accuracy` are means over routing steps; accuracy is that of all answers, None where there are none.
    """

    count: float
    accuracy: float | None


@dataclass(frozen=True)
class ProbeResult:
    """What one trained model does on the test rows.

    Attributes:
        steps: optimizer steps taken.
        accuracy: of all answers, mean over the routing steps. accuracy_fixed: at the first of them.
        by_distance: by distance from a query to its answer: "4" holds distances 4 ... 7.
        direct, field, beyond: the answers with a direct path; with none, but in the receptive field; outside of it.
        expected_direct: the share of answers with a direct path, in closed form.
        w_eff, w_scored: measured mean keys a layer reads for a query, both paths of a gated one together: over all
            queries, and over those that ask for something.
        checks: (step, loss, accuracy at the fixed routing step) as training went.
        seconds: to train and to measure.
    """

    steps: int
    accuracy: float
    accuracy_fixed: float
    by_distance: dict[str, Group]
    direct: Group
    field: Group
    beyond: Group
    expected_direct: float
    w_eff: float
    w_scored: float
    checks: list[tuple[int, float, float]]
    seconds: float

    @classmethod
    def from_json(cls, facts: Mapping[str, Any]) -> ProbeResult:
        """Read what `dataclasses.asdict` made."""
        groups = {name: Group(**facts[name]) for name in ("direct", "field", "beyond")}
        by_distance = {distance: Group(**group) for distance, group in facts["by_distance"].items()}
        checks = [(step, loss, accuracy) for step, loss, accuracy in facts["checks"]]
        return cls(**{**facts, **groups, "by_distance": by_distance, "checks": checks})


def make_model(settings: Settings, cell: Cell) -> StochasticLlamaForCausalLM:
    """The model of a cell, its weights drawn from the cell's seed; torch's own generator is left as it was."""
    arguments = {pattern.kind: pattern.to_dict() for pattern in cell.patterns}
    for given in arguments.values():
        del given["kind"]
    training = settings.training
    config = StochasticLlamaConfig(
        vocab_size=TASKS[settings.task].vocabulary(settings.size),
        hidden_size=training.hidden,
        intermediate_size=2 * training.hidden,
        num_hidden_layers=cell.layers,
        num_attention_heads=training.heads,
        max_position_embeddings=settings.size.length,
        # For short rows and narrow models; chosen, like the rate, with full attention alone.
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        initializer_range=0.1,
        use_cache=False,
        layer_attention=cell.attention.removesuffix("-half"),
        swa=arguments.get("local"),
        sa=arguments.get("stochastic"),
    )
    with torch.random.fork_rng():
        torch.manual_seed(cell.seed)
        return StochasticLlamaForCausalLM(config).to(settings.device)  # type: ignore[arg-type]


def train(settings: Settings, cell: Cell, on_step: Callable[[], object] = lambda: None) -> ProbeResult:
    """Train and measure the model of one cell.

    Optimizer step s runs at routing step `settings.routing_steps` + s, so that no permutation of the evaluation was
    trained on.
    """
    begin = time.perf_counter()
    training, model = settings.training, make_model(settings, cell)
    test = _draw(settings, cell, "test", 0, settings.rows)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.1, fused=True)
    checks = []
    for step in range(training.steps):
        for group in optimizer.param_groups:
            group["lr"] = rate(training, step)
        set_step(model, settings.routing_steps + step)
        loss = _loss(model, _draw(settings, cell, "train", step, training.batch))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        on_step()
        if (step + 1) % training.check == 0 or step + 1 == training.steps:
            set_step(model, 0)
            checks.append((step + 1, loss.item(), float(_is_right(model, test).double().mean())))
            if checks[-1][-1] > training.enough:
                break
    return _measure(settings, cell, model, test, checks, begin)


def rate(training: Training, step: int) -> float:
    """The learning rate of optimizer step `step`, counted from 0."""
    risen = min(1.0, (step + 1) / max(training.warmup, 1))
    fallen = 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * step / training.steps))
    return training.learning_rate * min(risen, fallen)


def _draw(settings: Settings, cell: Cell, stream: str, step: int, rows: int) -> Examples:
    examples = draw(settings.task, settings.size, rows, seed=cell.seed, step=step, stream=stream)  # type: ignore[arg-type]
    return examples.to(settings.device)


def _logits(model: StochasticLlamaForCausalLM, tokens: Tensor, asks: Tensor) -> Tensor:
    """[answers, vocabulary]: the head runs where something is asked, and nowhere else."""
    return model.lm_head(model.model(input_ids=tokens).last_hidden_state[asks])


def _loss(model: StochasticLlamaForCausalLM, examples: Examples) -> Tensor:
    asks = examples.answers >= 0
    return F.cross_entropy(_logits(model, examples.tokens, asks), examples.answers[asks])


@torch.no_grad()
def _is_right(model: StochasticLlamaForCausalLM, examples: Examples) -> Tensor:
    """bool [answers], in the order of `answers[answers >= 0]`."""
    parts = []
    for tokens, answers in zip(
        examples.tokens.split(_ROWS_AT_ONCE), examples.answers.split(_ROWS_AT_ONCE), strict=True
    ):
        asks = answers >= 0
        parts.append(_logits(model, tokens, asks).argmax(-1) == answers[asks])
    return torch.cat(parts)


def _measure(
    settings: Settings,
    cell: Cell,
    model: StochasticLlamaForCausalLM,
    test: Examples,
    checks: list[tuple[int, float, float]],
    begin: float,
) -> ProbeResult:
    n, layers = settings.size.length, cell.layers
    query = (test.answers >= 0).nonzero()[:, 1].cpu()
    source = test.source[test.answers >= 0].cpu()
    octave = (query - source).double().log2().floor().long()
    right, found = [], []
    for step in range(settings.routing_steps):
        set_step(model, step)
        right.append(_is_right(model, test).cpu())
        found.append(paths(cell.patterns, n, layers, step=step))
    rights = torch.stack(right)  # [routing steps, answers]
    direct, field = (torch.stack([getattr(p, name)[query, source] for p in found]) for name in ("direct", "field"))
    field &= ~direct
    keys = torch.stack([p.keys for p in found]).mean(0)
    return ProbeResult(
        steps=checks[-1][0],
        accuracy=float(rights.double().mean()),
        accuracy_fixed=float(rights[0].double().mean()),
        by_distance={str(2**k): _group(rights, (octave == k).expand_as(rights)) for k in octave.unique().tolist()},
        direct=_group(rights, direct),
        field=_group(rights, field),
        beyond=_group(rights, ~direct & ~field),
        expected_direct=float(expected_direct(cell.patterns, n, layers)[query, source].mean()),
        w_eff=float(keys.mean()),
        w_scored=float(keys[query].mean()),
        checks=checks,
        seconds=time.perf_counter() - begin,
    )


def _group(rights: Tensor, members: Tensor) -> Group:
    count = int(members.sum())
    return Group(count / len(rights), float(rights[members].double().mean()) if count else None)
