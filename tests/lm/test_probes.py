"""Probes: the tasks' examples, the paths that layers have, and the training of cells."""

import dataclasses
import json

import pytest
import torch

from stochastic_attention import Pattern, cli
from stochastic_attention.lm.probes import tasks
from stochastic_attention.lm.probes.cells import Settings, Training, plan
from stochastic_attention.lm.probes.paths import expected_direct, paths
from stochastic_attention.lm.probes.tasks import TaskSize, draw
from stochastic_attention.lm.probes.training import make_model, rate, train

SIZE = TaskSize(length=12, symbols=6, pairs=3)
SETTINGS = Settings(
    task="mqar",
    attention=("full", "swa", "sa", "gated"),
    scopes=("sequence",),
    shapes=("sliding",),
    windows=(4,),
    layers=(2,),
    size=SIZE,
    training=Training(steps=4, batch=4, hidden=16, check=2),
    seeds=1,
    rows=8,
    routing_steps=2,
)


def draw_from(words, task, size, stream):
    """One row of a task made from these hashed words, a list for each purpose."""
    return tasks.TASKS[task].draw(lambda purpose, n: torch.tensor([words[purpose][:n]]), size, 1, stream)


@pytest.mark.parametrize(
    ("stream", "word", "tokens", "answers", "source"),
    [
        ("test", 4, [1, 5, 3, 6, 1, 3, 3], [5, 6, 6], [1, 3, 3]),
        ("train", 5, [1, 5, 3, 6, 1, 3, 3], [5, 6, 6], [1, 3, 3]),
        ("train", 4, [1, 5, 8, 8, 1, 1, 1], [5, 5, 5], [1, 1, 1]),
    ],
    ids=["test", "all pairs", "one of two pairs"],
)
def test_a_row_of_recall_by_hand(stream, word, tokens, answers, source):
    # Keys in the order of their words: 1, 3, 0, 2. Values 4 + word % 4, queries pair word % pairs.
    row = draw_from([[30, 10, 40, 20], [5, 10], [0, 1, 7], [word]], "mqar", TaskSize(7, symbols=4, pairs=2), stream)
    assert row.tokens.tolist() == [tokens]
    assert row.answers.tolist() == [[-1] * 4 + answers]
    assert row.source.tolist() == [[-1] * 4 + source]


@pytest.mark.parametrize(
    ("word", "tokens", "answers", "source"),
    [
        (0, [4, 2, 4, 2, 5, 5, 5, 5], [-1, -1, 2, -1, -1, -1, -1, -1], [-1, -1, 1, -1, -1, -1, -1, -1]),
        (2, [4, 2, 0, 3, 4, 2, 0, 3], [-1, -1, -1, -1, 2, 0, 3, -1], [-1, -1, -1, -1, 1, 2, 3, -1]),
    ],
    ids=["one letter", "as many as fit"],
)
def test_a_row_of_copying_by_hand(word, tokens, answers, source):
    row = draw_from([[word], [2, 8, 1, 3]], "copy", TaskSize(8, symbols=4), "train")
    assert (row.tokens.tolist(), row.answers.tolist(), row.source.tolist()) == ([tokens], [answers], [source])


SIZES = {"mqar": TaskSize(40, symbols=20, pairs=8), "copy": TaskSize(40, symbols=20)}


@pytest.mark.parametrize("task", tasks.TASKS)
def test_every_query_repeats_the_cue_before_its_answer(task):
    size = SIZES[task]
    rows = draw(task, size, 64, seed=3, step=2, stream="train")
    asks = rows.answers >= 0
    row, query = asks.nonzero().T
    source = rows.source[asks]
    assert (rows.source >= 0).equal(asks)
    assert (source < query).all()
    assert rows.tokens[row, source].equal(rows.answers[asks])
    assert rows.tokens[row, source - 1].equal(rows.tokens[row, query])
    assert rows.tokens.min() >= 0
    assert rows.tokens.max() < tasks.TASKS[task].vocabulary(size)


def test_copying_has_every_distance():
    rows = draw("copy", TaskSize(21, symbols=11), 256, seed=0, step=0, stream="test")
    asks = rows.answers >= 0
    distance = asks.nonzero()[:, 1] - rows.source[asks]
    assert distance.unique().tolist() == list(range(1, 10))


@pytest.mark.parametrize("task", tasks.TASKS)
def test_rows_are_a_function_of_seed_step_and_index_alone(task):
    def tokens(rows, first=0, **changed):
        options = {"seed": 5, "step": 7, "stream": "train", **changed}
        return draw(task, SIZES[task], rows, first=first, **options).tokens

    state = torch.get_rng_state()
    whole = tokens(9)
    assert torch.cat([tokens(4), tokens(5, first=4)]).equal(whole)
    assert torch.get_rng_state().equal(state)
    others = [tokens(9, seed=6), tokens(9, step=8), tokens(9, stream="test"), tokens(9, first=9)]
    assert not any(other.equal(whole) for other in others)


def test_training_never_sees_a_test_row():
    size = TaskSize(40, symbols=16, pairs=8)
    seen = set()
    for seed in range(3):
        for step in range(50):
            seen |= {tuple(row) for row in draw("mqar", size, 32, seed=seed, step=step, stream="train").tokens.tolist()}
    for seed in range(3):
        test = draw("mqar", size, 256, seed=seed, step=0, stream="test").tokens.tolist()
        assert seen.isdisjoint(map(tuple, test))


@pytest.mark.parametrize(
    ("task", "size", "changed", "message"),
    [
        ("sort", SIZE, {}, "task must be one of 'mqar', 'copy', got 'sort'"),
        ("mqar", TaskSize(6, 6, 3), {}, "length must be an integer >= 7, got 6"),
        ("mqar", TaskSize(12, 3, 4), {}, r"pairs must be an integer in \[1, 3\], got 4"),
        ("mqar", TaskSize(12, 1, 1), {}, "symbols must be an integer >= 2, got 1"),
        ("copy", TaskSize(12, 4), {}, "symbols must be an integer >= 5, got 4"),
        ("copy", TaskSize(3, 4), {}, "length must be an integer >= 4, got 3"),
        ("copy", TaskSize(12, 6, 3), {}, r"pairs must be an integer in \[0, 0\], got 3"),
        ("mqar", SIZE, {"stream": "dev"}, "stream must be one of"),
        ("mqar", SIZE, {"seed": -1}, "seed must be an integer in"),
        ("mqar", SIZE, {"step": 0.5}, "step must be an integer >= 0"),
        ("mqar", SIZE, {"rows": 0}, "rows must be an integer >= 1"),
    ],
)
def test_examples_that_cannot_be_are_refused(task, size, changed, message):
    with pytest.raises(ValueError, match=message):
        draw(task, size, **{"rows": 2, "seed": 0, "step": 0, "stream": "train", **changed})


STACKS = {
    "full": (Pattern.full(),),
    "swa": (Pattern.local(5),),
    "sa": (Pattern.stochastic(5),),
    "sa-prefix-block": (Pattern.stochastic(5, scope="prefix", shape="block"),),
    "gated": (Pattern.stochastic(3, seed=2), Pattern.local(4)),
}


@pytest.mark.parametrize("patterns", STACKS.values(), ids=STACKS)
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_paths_against_loops(patterns, layers):
    n, step = 23, 6
    sees = [
        torch.stack([p.dense_mask(n, layer=layer, step=step)[0] for p in patterns]).any(0).tolist()
        for layer in range(layers)
    ]
    found = paths(patterns, n, layers, step=step)
    for i in range(n):
        field = {i}
        for layer in reversed(sees):
            field |= {j for q in field for j in range(n) if layer[q][j]}
        for j in range(1, n):
            hops = [(a, b) for b in range(layers) for a in range(b) if sees[a][j][j - 1] and sees[b][i][j]]
            assert bool(found.direct[i, j]) == bool(hops)
            assert bool(found.field[i, j]) == (j in field and j - 1 in field)
    keys = sum(p.dense_mask(n, layer=k, step=step).sum(-1)[0] for p in patterns for k in range(layers)) / layers
    torch.testing.assert_close(found.keys, keys.double(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("layers", [1, 2, 4])
@pytest.mark.parametrize("patterns", STACKS.values(), ids=STACKS)
def test_the_closed_form_of_direct_paths(patterns, layers):
    n, steps = 40, 100
    measured = torch.stack([paths(patterns, n, layers, step=step).direct for step in range(steps)]).double().mean(0)
    queries, sources = slice(20, None), slice(1, 20, 2)
    expected = expected_direct(patterns, n, layers)[queries, sources]
    if any(p.is_random for p in patterns):
        # Tokens of one permutation do not meet quite independently, and only so many permutations were drawn.
        assert abs(measured[queries, sources].mean() - expected.mean()) < 0.03
    else:
        assert measured[queries, sources].equal(expected)


def test_the_plan_has_each_model_once():
    settings = dataclasses.replace(
        SETTINGS,
        attention=("full", "swa", "gated-half"),
        scopes=("sequence", "prefix"),
        shapes=("sliding", "block"),
        windows=(4, 8),
        layers=(2, 3),
        seeds=2,
    )
    cells = plan(settings)
    count = {kind: sum(cell.attention == kind for cell in cells) for kind in settings.attention}
    assert count == {"full": 4, "swa": 8, "gated-half": 32}
    assert len({cell.key for cell in cells}) == len(cells)
    half = next(cell for cell in cells if cell.key == "gated-half prefix block 8, 3 layers, seed 1")
    assert half.patterns == (Pattern.stochastic(4, scope="prefix", shape="block", seed=1), Pattern.local(4))


@pytest.mark.parametrize("cell", plan(SETTINGS), ids=lambda cell: cell.name)
def test_the_model_runs_the_patterns_that_the_paths_are_of(cell):
    (layer, *others) = make_model(SETTINGS, cell).config.attention_plan.layers.values()
    assert others == [layer]
    assert (layer.pattern, *([layer.gated_with] if layer.gated_with else [])) == cell.patterns


def test_a_cell_trains_alike_each_time_and_measures_every_answer():
    (*_, cell) = plan(SETTINGS)
    torch.manual_seed(0)
    first = train(SETTINGS, cell)
    state = torch.get_rng_state()
    torch.manual_seed(1)
    again = train(SETTINGS, cell)
    assert dataclasses.replace(first, seconds=0.0) == dataclasses.replace(again, seconds=0.0)
    torch.manual_seed(0)
    assert torch.get_rng_state().equal(state)
    assert [step for step, _, _ in first.checks] == [2, 4]
    answers = SETTINGS.rows * (SIZE.length - 2 * SIZE.pairs)
    for groups in ((first.direct, first.field, first.beyond), tuple(first.by_distance.values())):
        assert sum(group.count for group in groups) == answers
        right = sum(group.count * group.accuracy for group in groups if group.count)
        assert right / answers == pytest.approx(first.accuracy)
    assert list(first.by_distance) == ["1", "2", "4", "8"]


def test_full_attention_learns_recall():
    settings = dataclasses.replace(
        SETTINGS,
        attention=("full",),
        size=TaskSize(length=12, symbols=2, pairs=2),
        training=Training(steps=300, batch=16, hidden=32, check=20, enough=0.9),
        rows=32,
    )
    (cell,) = plan(settings)
    result = train(settings, cell)
    assert result.accuracy > 0.9  # a guess among two values: 0.5
    assert result.steps < 300
    assert result.direct.count == 32 * 8


def test_the_rate_rises_and_falls():
    training = Training(steps=100, warmup=10, learning_rate=1.0)
    rates = [rate(training, step) for step in range(100)]
    assert rates[0] == 0.1
    assert max(rates) == rates[9]
    assert rates[9:] == sorted(rates[9:], reverse=True)
    assert 0.1 < rates[-1] < 0.101


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"attention": ()}, "attention must be distinct and at least one, got none"),
        ({"attention": ("moba",)}, "attention must be one of"),
        ({"scopes": ("row",)}, "scopes must be one of"),
        ({"shapes": ("ring",)}, "shapes must be one of"),
        ({"windows": (4, 4)}, "windows must be distinct"),
        ({"windows": (1,)}, "windows must be an integer >= 2, got 1"),
        ({"windows": (5,), "attention": ("gated-half",)}, "windows must be even where gated-half is trained, got 5"),
        ({"layers": (0,)}, "layers must be an integer >= 1, got 0"),
        ({"seeds": 0}, "seeds must be an integer >= 1, got 0"),
        ({"routing_steps": 0}, "routing_steps must be an integer >= 1, got 0"),
        ({"training": Training(steps=0)}, "steps must be an integer >= 1, got 0"),
        ({"training": Training(hidden=30, heads=4)}, "hidden must be a multiple of twice the heads, 8, got 30"),
        ({"training": Training(learning_rate=0.0)}, "learning_rate must be a finite number > 0"),
        ({"task": "sort"}, "task must be one of"),
        ({"device": "nowhere"}, "device must be one that torch has here"),
    ],
)
def test_settings_that_cannot_be_are_refused(changed, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SETTINGS, **changed)


GATED = ("gated sequence sliding 4", "gated sequence sliding 2")


@pytest.fixture
def arguments(tmp_path):
    sizes = "--length 12 --pairs 3 --window 4 --hidden 16 --batch 4 --rows 8 --routing-steps 2 --steps 3 --seeds 2"
    return ["probe", "--attention", "swa,sa", *sizes.split(), "--output", str(tmp_path / "out")]


def test_probe_writes_what_it_measured_and_resumes(arguments, tmp_path, capsys, monkeypatch):
    from stochastic_attention.lm.probes import training

    trained = []

    def killed_at_the_third(settings, cell, on_step):
        if len(trained) == 2:
            raise KeyboardInterrupt
        trained.append(cell.key)
        return train(settings, cell, on_step)

    with monkeypatch.context() as patch:
        patch.setattr(training, "train", killed_at_the_third)
        assert cli.main(arguments) == 130
    assert "to resume: sattn probe --attention swa,sa" in capsys.readouterr().err
    journal = tmp_path / "out" / "cells.jsonl"
    kept = journal.read_text().splitlines()
    assert len(kept) == 1 + 2
    # As a kill in the middle of a write leaves it.
    journal.write_text(journal.read_text() + '{"key": "sa seq')
    assert cli.main(arguments) == 0
    assert journal.read_text().splitlines()[:3] == kept
    shown = capsys.readouterr().out
    assert shown.startswith((tmp_path / "out" / "table.md").read_text())
    record = json.loads((tmp_path / "out" / "record.json").read_text())
    assert list(record["results"])[:2] == trained
    assert len(record["results"]) == 4
    assert record["results"]["swa 4, 2 layers, seed 0"]["steps"] == 3
    assert (tmp_path / "out" / "plot.png").exists()


def test_a_folder_takes_more_models_of_its_configuration_and_no_others(arguments, tmp_path, capsys, monkeypatch):
    from stochastic_attention.lm.probes import training

    assert cli.main([*arguments, "--seeds", "1"]) == 0
    trained = []
    monkeypatch.setattr(training, "train", lambda *given: trained.append(given[1].key) or train(*given))
    assert cli.main([*arguments, "--seeds", "1", "--attention", "sa,gated", "--window", "4,2"]) == 0
    assert trained == [f"{name}, 2 layers, seed 0" for name in ("sa sequence sliding 2", *GATED)]
    record = json.loads((tmp_path / "out" / "record.json").read_text())
    assert len(record["results"]) == 4
    capsys.readouterr()
    assert cli.main([*arguments, "--rows", "9"]) == 2
    assert "rows was 8, now 9" in capsys.readouterr().err
