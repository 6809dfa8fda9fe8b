import dataclasses
import json

import pytest

from stochastic_attention import Pattern, cli
from stochastic_attention.evaluation import recommend as module
from stochastic_attention.evaluation.budget import Queries
from stochastic_attention.evaluation.candidates import LAYERS, Candidate, draw_candidates
from stochastic_attention.evaluation.compare import Settings
from stochastic_attention.evaluation.halving import Rung, halve, rungs
from stochastic_attention.evaluation.recommend import figures, recommend, verdict
from stochastic_attention.evaluation.requests import Profile
from stochastic_attention.hf import load_preset


@pytest.fixture
def settings(text_file):
    return Settings(
        methods=("swa+sinks",),
        budgets=(12,),
        tasks=("perplexity", "recall"),
        limits=(4, 4),
        seeds=2,
        length=64,
        repeats=1,
        text=text_file,
    )


@pytest.fixture
def run(language, settings, tmp_path):
    def run(output="out", settings=settings, **options):
        options = {"candidates": 9, "finalists": 2, **options}
        return recommend(settings, tmp_path / output, load=lambda *_, **__: language, **options)

    return run


def rigged(best):
    """A loss that grows with the distance of a preset's first stochastic pattern from the best."""

    def loss(preset, items):
        patterns = [preset.pattern] if isinstance(preset.pattern, Pattern) else preset.pattern.values()
        pattern = next(pattern for pattern in patterns if pattern.is_random)
        same = [getattr(pattern, field) == getattr(best, field) for field in ("sinks", "correction", "scope", "shape")]
        return len(items) * (5.0 - sum(same))

    return loss


class TestHalving:
    def test_thirds_survive_and_see_thrice_the_windows(self):
        assert rungs(54, 9, 3) == [Rung(54, range(1)), Rung(18, range(1, 3)), Rung(6, range(3, 9))]
        assert rungs(20, 4, 2) == [Rung(20, range(1)), Rung(7, range(1, 3)), Rung(3, range(3, 4))]
        assert rungs(3, 9, 3) == []

    def test_once_all_windows_are_seen_the_finalists_are_known(self):
        assert rungs(100, 1, 2) == [Rung(100, range(1))]

    def test_the_least_summed_loss_wins_and_no_window_is_seen_twice(self):
        seen = []

        def loss(value, windows):
            seen.append((value, windows))
            return abs(value - 17) * len(windows)

        steps = rungs(40, 9, 2)
        assert halve(range(40), steps, 2, loss) == [17, 16]
        assert [sum(windows == step.windows for _, windows in seen) for step in steps] == [s.entrants for s in steps]
        assert len(set(seen)) == len(seen)

    def test_a_good_start_does_not_save_who_falls_behind(self):
        losses = {0: [0.0, 9.0, 9.0], 1: [1.0, 1.0, 1.0], 2: [2.0, 0.0, 0.0], 3: [50.0, 0.0, 0.0]}
        found = halve(range(4), [Rung(4, range(1)), Rung(3, range(1, 3))], 2, lambda c, w: sum(losses[c][i] for i in w))
        assert found == [2, 1]


class TestCandidates:
    QUERIES = Queries(Profile({(256, 256): 1}))

    def test_draws_are_distinct_and_always_the_same(self):
        drawn = draw_candidates(40, 64)
        assert drawn == draw_candidates(40, 64)
        assert len(set(drawn)) == 40

    def test_sinks_leave_half_of_the_budget(self):
        assert {candidate.sinks for candidate in draw_candidates(200, 12)} == {1, 4}

    @pytest.mark.parametrize("count", [0, 10_000])
    def test_counts_that_the_grid_has_not_are_refused(self, count):
        with pytest.raises(ValueError, match=r"candidates must be in \[1, 432\] at budget 64"):
            draw_candidates(count, 64)

    @pytest.mark.parametrize("candidate", draw_candidates(12, 64), ids=str)
    def test_every_layer_meets_the_budget_in_expectation(self, candidate):
        preset = candidate.preset(self.QUERIES, 64, "w_scored", layers=4)
        patterns = [preset.pattern] if isinstance(preset.pattern, Pattern) else list(preset.pattern.values())
        for pattern in patterns:
            assert self.QUERIES.expected(pattern).w_scored == pytest.approx(64, rel=0.03)

    @pytest.mark.parametrize("layers", LAYERS)
    def test_the_union_is_in_its_layers_and_a_window_with_as_many_sinks_in_the_others(self, layers):
        preset = Candidate(0.5, 4, 0.5, "prefix", "block", layers).preset(self.QUERIES, 32, "w_scored", layers=5)
        kinds = ["stochastic" if i in LAYERS[layers](5) else "local" for i in range(5)]
        found = [preset.pattern] * 5 if isinstance(preset.pattern, Pattern) else [preset.pattern[i] for i in range(5)]
        assert [pattern.kind for pattern in found] == kinds
        assert {pattern.sinks for pattern in found} == {4}


def test_the_finalists_are_those_of_the_least_loss(run):
    every = draw_candidates(9, 12)
    wanted = every[4]
    best = Pattern.stochastic(
        1, sinks=wanted.sinks, correction=wanted.correction, scope=wanted.scope, shape=wanted.shape
    )
    found = run(loss=rigged(best))
    assert next(iter(found.finalists.values())) == wanted


def test_the_recommended_finalist_is_the_best_over_seeds(run):
    found = run()
    values = {method: figures(found.outcome, "perplexity", method).value for method in found.finalists}
    assert found.method == min(values, key=values.get)
    assert load_preset(found.method.removeprefix("preset:")).to_list() == found.preset.to_list()
    seeds = [cell.seed for cell in found.outcome.cells if (cell.task, cell.method) == ("recall", found.method)]
    assert seeds == [0, 1]
    told = verdict(found, "swa+sinks")
    assert str(found.finalists[found.method]) in told
    assert told.count("swa+sinks") == told.count("full ") == 2


def test_an_interrupted_search_resumes_and_computes_nothing_twice(run, monkeypatch):
    calls, whole = [], run("whole")
    score, fail_after = module.score_requests, [7]

    def counting(*args, **options):
        if len(calls) == fail_after[0]:
            raise KeyboardInterrupt
        calls.append(args)
        return score(*args, **options)

    monkeypatch.setattr(module, "score_requests", counting)
    with pytest.raises(KeyboardInterrupt):
        run("broken")
    fail_after[0] = -1
    resumed = run("broken")
    assert len(calls) == sum(step.entrants for step in rungs(9, 4, 2))
    assert resumed.preset == whole.preset
    assert list(resumed.finalists.values()) == list(whole.finalists.values())


@pytest.mark.parametrize(
    ("change", "options", "told"),
    [
        ({"budgets": (8, 12)}, {}, "budgets must be one for a recommendation, got 8, 12"),
        ({"budgets": (40,)}, {}, r"budget must be below the 32.0 keys of full attention on perplexity, got 40"),
        ({"budgets": (1,)}, {}, "budget must be at least 2 for a recommendation, got 1"),
        ({}, {"candidates": 0}, "candidates must be in"),
        ({}, {"finalists": 0}, "finalists must be an integer >= 1"),
        ({}, {"batch_tokens": 0}, "batch_tokens must be an integer >= 1"),
    ],
)
def test_bad_input_is_refused(run, settings, change, options, told):
    with pytest.raises(ValueError, match=told):
        run(settings=dataclasses.replace(settings, **change), **options)


def test_another_search_does_not_mix_into_one(run):
    run()
    with pytest.raises(ValueError, match="finalists was 2, now 3"):
        run(finalists=3)


@pytest.fixture
def arguments(tmp_path, model_folder, text_file):
    return [
        *("recommend", "--model", str(model_folder), "--budget", "12", "--text", str(text_file), "--length", "48"),
        *("--windows", "3", "--candidates", "4", "--finalists", "1", "--seeds", "2", "--output", str(tmp_path / "out")),
    ]


def test_the_command_keeps_a_preset_that_compare_and_generate_take(arguments, tmp_path, model_folder, capsys):
    assert cli.main(arguments) == 0
    shown = capsys.readouterr().out
    path = tmp_path / "out" / "recommended.json"
    assert "Recommended: " in shown
    assert f"sattn compare --methods preset:{path} --text OTHER" in shown
    record = json.loads(path.read_text(encoding="utf-8"))["record"]
    assert record["command"].startswith("sattn recommend --model")
    assert record["results"]["verdict"] in shown
    preset, model = f"preset:{path}", str(model_folder)
    assert (
        cli.main(
            [
                *(
                    "compare",
                    "--model",
                    model,
                    "--methods",
                    preset,
                    "--tasks",
                    "recall",
                    "--limit",
                    "2",
                    "--length",
                    "48",
                ),
                *(
                    "--seeds",
                    "2",
                    "--repeats",
                    "1",
                    "--text",
                    str(tmp_path / "text.txt"),
                    "--output",
                    str(tmp_path / "again"),
                ),
            ]
        )
        == 0
    )
    cells = json.loads((tmp_path / "again" / "record.json").read_text(encoding="utf-8"))["results"]["cells"]
    assert [(cell["method"], cell["budget"]) for cell in cells] == [("full", None), (preset, None), (preset, None)]
    assert 8 < cells[1]["w_eff"] < 16
    assert (
        cli.main(
            [
                "generate",
                "--model",
                model,
                "--prompt",
                "the old house",
                "--method",
                preset,
                "--max-new-tokens",
                "4",
                "--no-full",
            ]
        )
        == 0
    )
    assert preset in capsys.readouterr().err


@pytest.mark.parametrize("name", ["../x", "", "finalist-1"])
def test_the_command_refuses_a_name_that_is_no_files(arguments, name, capsys):
    assert cli.main([*arguments, "--name", name]) == 2
    assert "name must be that of a file without a folder" in capsys.readouterr().err


def test_an_interrupt_says_how_to_resume(arguments, capsys, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "score_requests", interrupted)
    assert cli.main(arguments) == 130
    assert "to resume: sattn recommend --model" in capsys.readouterr().err
