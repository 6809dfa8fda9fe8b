import dataclasses

import pytest

from stochastic_attention.evaluation.curves import panels
from stochastic_attention.evaluation.results import CellResult, PrefillResult, summarise
from stochastic_attention.evaluation.table import render
from stochastic_attention.plots import plot_panels
from stochastic_attention.records import Estimate


def cell(method, budget=None, seed=None, value=12.0, w_scored=64.0, saturated=False):
    metrics = {} if saturated else {"perplexity": Estimate(value, 0.5, 8)}
    return CellResult("recall", method, budget, seed, "pattern", saturated, 40.0, w_scored, metrics, 1.0)


CELLS = [
    cell("full", value=1.25, w_scored=900.0),
    cell("swa", 64, value=28.0, w_scored=70.0),
    cell("sa", 64, 0, value=40.0),
    cell("sa", 64, 1, value=44.0),
    cell("swa", 1024, saturated=True, w_scored=900.0),
]
PREFILL = [
    PrefillResult("full", None, "full()", False, 512.0, [300.0, 100.0, 200.0]),
    PrefillResult("swa", 64, "local(64)", False, 64.0, [100.0]),
    PrefillResult("sa", 64, "stochastic(64)", False, 64.0, [400.0]),
    PrefillResult("swa", 1024, "full()", True, 512.0, []),
]


@pytest.fixture
def rows():
    text = render(CELLS, PREFILL, match="w_scored", length=1024)
    table = [line for line in text.splitlines() if line.startswith("|")]
    return [[entry.strip() for entry in line.strip("|").split("|")] for line in table]


def test_a_line_a_method_and_budget(rows):
    assert rows[0] == [
        "method",
        "budget",
        "recall: w_scored (w_eff)",
        "recall: perplexity ↓",
        "prefill ms",
        "full / it",
    ]
    assert rows[2:] == [
        ["full", "-", "900.0 (40.0)", "1.250", "200", "1.00x"],
        ["swa", "64", "70.0* (40.0)", "28.00", "100", "2.00x"],
        ["sa", "64", "64.0 (40.0)", "42.00 ± 2.83", "400", "0.50x"],
        ["swa", "1024", "900.0 (40.0)", "saturated", "saturated", ""],
    ]


def test_lines_are_aligned():
    lines = render(CELLS, PREFILL, match="w_scored", length=1024).splitlines()
    assert len({len(line) for line in lines if line.startswith("|")}) == 1


def test_the_fitted_mean_stands_first():
    text = render(CELLS, PREFILL, match="w_eff", length=1024)
    assert "recall: w_eff (w_scored)" in text
    assert "40.0* (64.0)" in text


def test_notes_tell_items_and_their_standard_error():
    text = render(CELLS, PREFILL, match="w_scored", length=1024)
    assert "recall: perplexity of 8 items, standard error over them 0.5 (full attention)." in text


def test_spread_needs_two_seeds():
    assert summarise([cell("sa", 64, 0)], "perplexity").spread is None
    assert summarise([cell("sa", 64, saturated=True)], "perplexity").value is None


def test_cells_survive_json():
    assert CellResult.from_json(dataclasses.asdict(CELLS[2])) == CELLS[2]


def test_curves_hold_each_method_against_full_attention():
    (panel,) = panels(CELLS)
    assert (panel.title, panel.reference, panel.y_is_log) == ("recall", 1.25, True)
    swa, sa = panel.curves
    assert [(point.x, point.y, point.error) for point in swa.points] == [(70.0, 28.0, 0.0)]
    assert [(point.x, point.y) for point in sa.points] == [(64.0, 42.0)]
    assert sa.points[0].error == pytest.approx(8**0.5)
    assert swa.colour != sa.colour


def test_the_plot_is_a_png(tmp_path):
    plot_panels(panels([*CELLS, cell("moba", 1024, saturated=True)]), "keys", tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
