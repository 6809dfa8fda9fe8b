"""Tables made again from records: those that the commands printed, of data that went through JSON."""

import json
from dataclasses import asdict

import pytest

from stochastic_attention import Pattern
from stochastic_attention.records import Estimate
from stochastic_attention.reports.from_data import RENDERERS
from stochastic_attention.reports.markdown import to_html

pytest.importorskip("transformers")

from stochastic_attention.evaluation import generation, loss_comparison, table
from stochastic_attention.evaluation.results import CellResult, PrefillResult
from stochastic_attention.evaluation.token_losses import Bucket
from stochastic_attention.hf.presets import Preset, save_preset
from stochastic_attention.records import Environment, Record


def compared():
    """Cells and prefill times of two methods, one of them saturated."""
    found = {"perplexity": Estimate(12.5, 0.5, 3)}
    cells = [
        CellResult("perplexity", "full", None, None, "full", False, 32.0, 32.0, found, 1.0),
        CellResult("perplexity", "union", 8, 0, "union", False, 7.5, 8.5, found, 1.0),
        CellResult("perplexity", "swa", 64, None, "local(64)", True, 32.0, 32.0, {}, 0.0),
    ]
    times = {("full", None): [3.0], ("union", 8): [1.0, 2.0], ("swa", 64): []}
    prefill = [PrefillResult(*line, "", not found, 8.0, found) for line, found in times.items()]
    return cells, prefill


def comparison_results(**more):
    cells, prefill = compared()
    return {"cells": [asdict(x) for x in cells], "prefill": [asdict(x) for x in prefill], **more}


def perplexities():
    buckets = [Bucket("all", 0, 0, 62, Estimate(5.0, 0.25, 2)), Bucket("repeat", 2, 3, 4, Estimate(2.0, None, 1))]
    models = [(loss_comparison.Named("full", name), buckets) for name in ("a", "b")]
    return loss_comparison.Outcome({"length": 32}, models)


CONTINUATIONS = [
    generation.Continuation("union", "union(4)", 5, 3, 0.25, 12.0, 4.5, 4.0, [1, 2, 3], "a ``` <b>\n# c", False),
    generation.Continuation("full", "full", 5, 0, None, None, 3.0, None, [], "", True),
]
CONFIG = {"match": "w_scored", "length": 32}


@pytest.mark.parametrize(
    ("command", "results", "printed"),
    [
        ("compare", comparison_results(), table.render(*compared(), **CONFIG)),
        ("recommend", comparison_results(verdict="It."), f"{table.render(*compared(), **CONFIG)}\nIt.\n"),
        ("perplexity", perplexities().plain_results(), loss_comparison.render(perplexities())),
    ],
)
def test_a_table_is_what_its_command_printed(command, results, printed):
    assert RENDERERS[command](CONFIG, json.loads(json.dumps(results))) == printed


@pytest.mark.parametrize("methods", [{"swa+sinks": 8, "union": 8}, {None: None}], ids=["sweep", "as it is"])
def test_an_evaluation_is_what_its_command_printed(methods):
    pytest.importorskip("lm_eval")
    from stochastic_attention.evaluation.harness.evaluate import Outcome, Result
    from stochastic_attention.evaluation.harness.table import render

    metrics = {"acc": Estimate(0.5, 0.25, 4), "acc_norm": Estimate(0.25, None, 4)}
    rows = {"acc_norm": [0.0, 0.0, 0.0, 1.0]}
    outcome = Outcome(
        {},
        [
            Result("piqa", method, budget, seed, method, budget, budget, metrics, 1.0, rows)
            for method, budget in methods.items()
            for seed in (0, 1)
        ],
    )
    assert len(outcome.differences) == len(methods) - 1
    results = json.loads(json.dumps(outcome.plain_results()))
    assert RENDERERS["eval"](CONFIG, results) == render(outcome.results, outcome.differences, match="w_scored")


def test_continuations_are_shown_as_they_are():
    results = {"continuations": [asdict(found) for found in CONTINUATIONS]}
    html = to_html(RENDERERS["generate"]({}, json.loads(json.dumps(results))), label="x")
    assert generation.render(CONTINUATIONS) in html
    assert ">a ``` &lt;b&gt;\n# c</pre>" in html
    assert html.count("<pre") == 3


def test_a_probe_of_a_device_that_is_not_here_is_shown():
    from stochastic_attention.lm.probes.cells import Settings, plan
    from stochastic_attention.lm.probes.report import render
    from stochastic_attention.lm.probes.tasks import TaskSize
    from stochastic_attention.lm.probes.training import Group, ProbeResult

    settings = Settings(
        "copy", ("swa",), ("sequence",), ("sliding",), (4,), (1, 2), TaskSize(length=8, symbols=3, pairs=0), seeds=2
    )
    groups = [Group(2.0, 0.5), Group(0.0, None), Group(1.0, 1.0)]
    result = ProbeResult(7, 0.5, 0.25, {"2": Group(3.0, 0.75)}, *groups, 0.5, 3.5, 4.0, [(1, 2.0, 0.5)], 1.0)
    results = {cell.key: asdict(result) for cell in plan(settings)}
    config = {**asdict(settings), "device": "cuda:7"}
    found = RENDERERS["probe"](json.loads(json.dumps(config)), json.loads(json.dumps(results)))
    assert found == render([(cell, result) for cell in plan(settings)], settings)


@pytest.fixture
def recommended(tmp_path):
    """A folder as `sattn recommend` leaves it."""
    folder = tmp_path / "results" / "recommend"
    preset = Preset(Pattern.local(8), "all")
    results = comparison_results(verdict="Recommended: it.", finalists={"preset:1": "local"})
    save_preset(folder / "finalist-1.json", "finalist", preset)
    record = Record("sattn recommend --budget 8", CONFIG, Environment.current(), results)
    save_preset(folder / "mine.json", "mine", preset, record)
    (folder / "table.md").write_text("as it was kept\n", encoding="utf-8")
    return folder


def test_the_record_in_a_preset_is_shown_with_the_files_beside_it(recommended, capsys):
    from stochastic_attention import cli

    output = recommended.parents[1] / "report.html"
    assert cli.main(["report", str(recommended.parent), "--output", str(output)]) == 0
    assert capsys.readouterr().err == ""
    page = output.read_text(encoding="utf-8")
    assert "<h3>A recommended pattern: recommend/mine</h3>" in page
    assert "<p>Recommended: it.</p>" in page
    assert "as it was kept" not in page
    assert "Files of" not in page
    assert "<code>recommend/finalist-1.json</code>" in page.partition("Files not shown: 1")[2]
