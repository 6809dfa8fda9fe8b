import dataclasses
import json

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

from stochastic_attention import Pattern
from stochastic_attention.evaluation import compare as comparison
from stochastic_attention.evaluation.budget import Queries
from stochastic_attention.evaluation.compare import Settings, compare, plan
from stochastic_attention.evaluation.prefill import attending, prefill_times
from stochastic_attention.evaluation.requests import Profile
from stochastic_attention.evaluation.scoring import score_requests
from stochastic_attention.hf import Preset, save_preset
from stochastic_attention.models import LanguageModel


@pytest.fixture
def settings(text_file, tmp_path):
    rows = [{"context": "the old house stood by the river and nobody", "continuation": "knew"}] * 3
    (tmp_path / "lambada_openai.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return Settings(
        methods=("full", "swa", "sa", "moba"),
        budgets=(8, 64),
        tasks=("perplexity", "lambada"),
        limits=(3, 2),
        seeds=2,
        length=48,
        repeats=1,
        text=text_file,
        data=tmp_path,
    )


@pytest.fixture
def run(language):
    def run(settings, output, **options):
        return compare(settings, output, load=lambda *_, **__: language, **options)

    return run


@pytest.fixture
def scored_batches(monkeypatch):
    """Batches that reach the model, counted; told to fail after some."""

    class Counter:
        seen = 0
        fail_after = None

    def counting(*args, **options):
        Counter.seen += 1
        if Counter.fail_after is not None and Counter.seen > Counter.fail_after:
            raise KeyboardInterrupt
        return score_requests(*args, **options)

    Counter.seen, Counter.fail_after = 0, None
    monkeypatch.setattr(comparison, "score_requests", counting)
    return Counter


def stripped(outcome):
    """Everything but times."""
    return [dataclasses.replace(cell, seconds=0.0) for cell in outcome.cells]


def test_plan_fits_every_budget_and_gives_seeds_to_random_methods(settings):
    cells = plan(settings, "perplexity", Queries(Profile({(47, 47): 3})))
    assert [(cell.method, cell.budget, cell.seed, cell.saturated) for cell in cells] == [
        ("full", None, None, False),
        ("swa", 8, None, False),
        ("swa", 64, None, True),
        ("sa", 8, 0, False),
        ("sa", 8, 1, False),
        ("sa", 64, None, True),
        ("moba", 8, None, False),
        ("moba", 64, None, True),
    ]
    assert cells[4].pattern == dataclasses.replace(cells[3].pattern, seed=1)
    assert all(cell.pattern == Pattern.full() for cell in cells if cell.saturated)


def test_a_large_budget_is_run_on_a_model_with_windows_of_its_own(settings, tmp_path, model, tokenizer):
    facts = model.config.to_dict()
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim", "initializer_range")
    shape = {name: facts[name] for name in names}
    torch.manual_seed(0)
    windowed = MistralForCausalLM(MistralConfig(**shape, sliding_window=8)).eval()
    whole = MistralForCausalLM(MistralConfig(**shape, sliding_window=None)).eval()
    whole.load_state_dict(windowed.state_dict())
    settings = dataclasses.replace(settings, methods=("swa",), tasks=("perplexity",), limits=(3,))

    def run(model, name):
        language = LanguageModel(model, tokenizer)
        return compare(settings, tmp_path / name, load=lambda *_, **__: language)

    untouched, _, at_64 = run(windowed, "windowed").cells
    full = run(whole, "whole").cells[0]
    assert not at_64.saturated
    assert at_64.metrics["perplexity"].value == pytest.approx(full.metrics["perplexity"].value, rel=1e-6)
    assert at_64.metrics["perplexity"].value != pytest.approx(untouched.metrics["perplexity"].value, rel=1e-3)
    assert (untouched.w_eff, at_64.w_eff, full.w_eff) == (pytest.approx((36 + 39 * 8) / 47), 24.0, 24.0)


def test_cells_carry_measured_budgets_and_metrics(settings, run, tmp_path):
    outcome = run(settings, tmp_path / "out")
    assert len(outcome.cells) == 2 * 8
    for cell in outcome.cells:
        assert bool(cell.metrics) != cell.saturated
        if cell.budget == 8 and cell.method != "moba":
            assert cell.w_scored == pytest.approx(8, rel=0.1)
    full = outcome.cells[0]
    assert (full.w_eff, full.w_scored) == (24.0, 24.0)
    assert full.metrics["perplexity"].n == 3
    assert [(time.method, len(time.milliseconds)) for time in outcome.prefill if not time.saturated] == [
        ("full", 1),
        ("swa", 1),
        ("sa", 1),
        ("moba", 1),
    ]


def test_a_cell_is_what_its_pattern_scores(settings, run, tmp_path, language):
    outcome = run(settings, tmp_path / "out")
    cell = next(cell for cell in outcome.cells if (cell.task, cell.method, cell.seed) == ("perplexity", "sa", 1))
    task = comparison.TASKS["perplexity"]
    items = task.items(language.tokenizer, settings.task_options, 3)
    planned = next(c for c in plan(settings, "perplexity", Queries(Profile({(47, 47): 3}))) if c.seed == 1)
    with attending(language.model, planned.pattern):
        scores = [score_requests(language.model, item.requests) for item in items]
    assert cell.metrics["perplexity"].value == pytest.approx(task.metrics(items, scores)["perplexity"].value)
    assert str(planned.pattern) == cell.pattern


@pytest.mark.parametrize("done", [0, 3, 9])
def test_an_interrupted_run_resumes_to_the_same_record_and_computes_nothing_twice(
    settings, run, tmp_path, scored_batches, done
):
    unbroken = run(settings, tmp_path / "unbroken")
    whole = scored_batches.seen
    scored_batches.seen, scored_batches.fail_after = 0, done
    with pytest.raises(KeyboardInterrupt):
        run(settings, tmp_path / "broken")
    scored_batches.seen, scored_batches.fail_after = 0, None
    resumed = run(settings, tmp_path / "broken")
    assert scored_batches.seen == whole - done
    assert stripped(resumed) == stripped(unbroken)
    scored_batches.seen = 0
    assert stripped(run(settings, tmp_path / "broken")) == stripped(unbroken)
    assert scored_batches.seen == 0


def test_an_interrupted_cell_leaves_the_model_restored(settings, run, tmp_path, scored_batches, language):
    before = language.model.config._attn_implementation
    scored_batches.fail_after = 1
    with pytest.raises(KeyboardInterrupt):
        run(settings, tmp_path / "out")
    assert language.model.config._attn_implementation == before


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"seeds": 3}, "seeds was 2, now 3"),
        ({"length": 40}, "length was 48, now 40"),
        ({"match": "w_eff"}, "match was"),
    ],
    ids=["seeds", "length", "match"],
)
def test_other_settings_do_not_mix_into_a_run(settings, run, tmp_path, change, told):
    run(settings, tmp_path / "out")
    with pytest.raises(ValueError, match=told):
        run(dataclasses.replace(settings, **change), tmp_path / "out")


def test_other_data_does_not_mix_into_a_run(settings, run, tmp_path, text_file):
    run(settings, tmp_path / "out")
    text_file.write_text(text_file.read_text(encoding="utf-8").replace("house", "horse"), encoding="utf-8")
    with pytest.raises(ValueError, match="digests was"):
        run(settings, tmp_path / "out")


def test_progress_ends_at_its_total(settings, run, tmp_path):
    class Bar:
        total, done = None, 0

        def update(self, n=1):
            self.done += n

        def set_description(self, desc):
            self.desc = desc

    bar = Bar()
    run(settings, tmp_path / "out", progress=lambda: bar)
    assert bar.done == bar.total
    again = Bar()
    run(settings, tmp_path / "out", progress=lambda: again)
    assert again.done == again.total == 0


def test_text_longer_than_the_model_is_refused(settings, run, tmp_path):
    long = dataclasses.replace(settings, length=600, tasks=("lambada",), limits=(1,))
    with pytest.raises(ValueError, match="must fit the model's 512 positions"):
        run(long, tmp_path / "out")


def test_a_preset_for_other_layers_is_refused_before_anything_runs(settings, run, tmp_path, scored_batches):
    save_preset(tmp_path / "it.json", "it", Preset({7: Pattern.local(4)}))
    with pytest.raises(ValueError, match=r"indices in \[0, 2\)"):
        run(dataclasses.replace(settings, methods=("swa", f"preset:{tmp_path / 'it.json'}")), tmp_path / "out")
    assert scored_batches.seen == 0


def test_a_preset_is_measured_layer_by_layer_and_another_one_does_not_mix_in(settings, run, tmp_path):
    method = f"preset:{tmp_path / 'it.json'}"
    save_preset(tmp_path / "it.json", "it", Preset({1: Pattern.local(1)}))
    settings = dataclasses.replace(settings, methods=(method,), tasks=("perplexity",), limits=(2,))
    cell = run(settings, tmp_path / "out").cells[1]
    assert (cell.method, cell.budget, cell.seed) == (method, None, None)
    assert cell.w_scored == (24.0 + 1.0) / 2  # 47 queries see 24 keys on average in the layer left alone
    save_preset(tmp_path / "it.json", "it", Preset({1: Pattern.local(2)}))
    with pytest.raises(ValueError, match="presets was"):
        run(settings, tmp_path / "out")


def test_an_item_longer_than_the_model_is_refused_by_its_task(settings, run, tmp_path):
    (tmp_path / "lambada_openai.jsonl").write_text(json.dumps({"context": "x" * 600, "continuation": "y"}))
    with pytest.raises(ValueError, match="512 positions, got lambada with an item of 601 tokens"):
        run(dataclasses.replace(settings, limits=(3, 1)), tmp_path / "out")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"methods": ("swa", "swa")}, "methods must be distinct"),
        ({"methods": ("nonsense",)}, "methods must be among"),
        ({"budgets": ()}, "budgets must be distinct and at least one, got none"),
        ({"budgets": (0,)}, "budgets must be an integer >= 1"),
        ({"tasks": ("nonsense", "lambada")}, "tasks must be among"),
        ({"limits": (0, 1)}, "limit must be an integer >= 1"),
        ({"seeds": 0}, "seeds must be an integer >= 1"),
        ({"length": 4}, "length must be an integer >= 8"),
        ({"repeats": 0}, "repeats must be an integer >= 1"),
        ({"match": "mean"}, "match must be one of"),
        ({"dtype": "int8"}, "dtype must be one of"),
        ({"device": "nonsense"}, "device must be one that torch has here"),
        ({"backend": "nonsense"}, "backend must be one of"),
        ({"model": "./nowhere"}, "the missing path"),
        ({"model": "nowhere.gguf"}, "the missing file"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_settings_out_of_their_domain_are_refused(settings, change, told):
    with pytest.raises(ValueError, match=told):
        dataclasses.replace(settings, **change)


def test_prefill_patterns_take_turns_after_an_uncounted_one(model):
    order = []

    def spy(*_):
        order.append(model.config._attn_implementation)

    handle = model.register_forward_pre_hook(spy)
    try:
        times = prefill_times(model, [Pattern.full(), Pattern.local(4)], length=16, repeats=2)
    finally:
        handle.remove()
    assert [len(each) for each in times] == [2, 2]
    assert order[:2] * 3 == order
    assert order[0] != order[1]
