"""Methods at equal measured keys: interpolation by hand, an order that turns with the measure, and the curves."""

import pytest

from stochastic_attention.evaluation.curves import SWEEP_X_LABEL, sweep_panels
from stochastic_attention.evaluation.ranking import Cell, Standing, at_equal_keys, common_targets, over_tasks, rank
from stochastic_attention.plots import plot_panels

TASKS = ("one", "two")


def run(method, budget, seed, value, w_eff, w_scored):
    """A cell a task, whose means are the figures given."""
    return [
        Cell(method, budget, seed, task, w_eff * (1 + sign / 8), w_scored * (1 + sign / 8), value + sign / 16)
        for task, sign in zip(TASKS, (-1, 1), strict=True)
    ]


# By the keys of scored queries, "swa" is the better; over all queries "sa" reads half as many for the same score.
SWEEP = [
    *run("full", None, None, 0.75, 512, 512),
    *run("swa", 32, None, 0.25, 32, 32),
    *run("swa", 128, None, 0.5, 128, 128),
    *(cell for seed, more in ((0, -0.0625), (1, 0.0625)) for cell in run("sa", 32, seed, 0.1875 + more, 16, 32)),
    *(cell for seed, more in ((0, -0.0625), (1, 0.0625)) for cell in run("sa", 128, seed, 0.4375 + more, 64, 128)),
]


class TestAtEqualKeys:
    POINTS = ((64, 1.0), (16, 0.0), (256, 0.5))

    @pytest.mark.parametrize(
        ("keys", "score"),
        [(15.9, None), (16, 0.0), (32, 0.5), (64, 1.0), (128, 0.75), (256, 0.5), (256.1, None)],
    )
    def test_linear_in_the_logarithm_and_never_beyond(self, keys, score):
        assert at_equal_keys(self.POINTS, keys) == (None if score is None else pytest.approx(score))

    def test_equal_keys_are_averaged(self):
        points = [(16, 0.0), (64, 0.5), (64, 1.0)]
        assert at_equal_keys(points, 64) == 0.75
        assert at_equal_keys(points, 32) == pytest.approx(0.375)

    def test_nothing_measured_is_nothing_known(self):
        assert at_equal_keys([], 8) is None

    @pytest.mark.parametrize(("points", "keys"), [([(1, 1.0)], 0), ([(0, 1.0)], 1), ([(1, 1.0)], float("nan"))])
    def test_keys_without_a_logarithm_are_refused(self, points, keys):
        with pytest.raises(ValueError, match="keys must be positive and finite, got"):
            at_equal_keys(points, keys)


class TestRank:
    def test_the_order_turns_with_the_measure(self):
        (by_scored,), (by_all,) = (rank(SWEEP, by, [64]) for by in ("w_scored", "w_eff"))
        assert [(ranking.by, ranking.keys) for ranking in (by_scored, by_all)] == [("w_scored", 64), ("w_eff", 64)]
        spread = pytest.approx(0.125 / 2**0.5)
        assert by_scored.standings == [Standing("swa", pytest.approx(0.375), None), Standing("sa", 0.3125, spread)]
        assert by_all.standings == [Standing("sa", 0.4375, spread), Standing("swa", pytest.approx(0.375), None)]

    def test_targets_lie_where_all_methods_were_measured(self):
        assert common_targets(SWEEP, "w_scored") == [32, 51, 81]
        assert common_targets(SWEEP, "w_eff") == [32, 41, 51]
        assert common_targets(SWEEP, "w_eff", count=1) == [32]
        assert common_targets(SWEEP[:4], "w_eff") == []  # one budget

    def test_what_was_not_measured_comes_last(self):
        (beyond,) = rank(SWEEP, "w_eff", [100])
        assert beyond.by == "w_eff"
        assert beyond.standings[1] == Standing("sa", None, None)

    def test_one_seed_that_was_not_measured_there_leaves_no_mean(self):
        cells = [cell for cell in SWEEP if (cell.method, cell.budget, cell.seed) != ("sa", 128, 1)]
        (by_scored,) = rank(cells, "w_scored", [64])
        assert by_scored.standings[1] == Standing("sa", None, None)


def test_runs_are_means_over_the_tasks():
    (found,) = over_tasks(run("swa", 8, None, 0.5, 4, 6))
    assert (found.w_eff, found.w_scored, found.value) == (4, 6, 0.5)


@pytest.mark.parametrize("cells", [SWEEP[:-1], [*SWEEP, SWEEP[-1]]], ids=["one less", "one twice"])
def test_uneven_sets_of_tasks_are_refused(cells):
    with pytest.raises(
        ValueError, match=r"every task once for each method, budget and seed: one, two; got .* for sa, 128"
    ):
        rank(cells, "w_eff", [64])


def test_a_panel_by_each_measure_with_bands_over_seeds(tmp_path):
    by_scored, by_all = panels = sweep_panels(SWEEP, "accuracy")
    assert (by_scored.title, by_all.title) == ("by w_scored", "by w_eff")
    assert by_all.reference == 0.75
    assert by_all.bands
    assert [curve.label for curve in by_all.curves] == ["swa", "sa"]
    assert [point.x for point in by_scored.curves[1].points] == [32, 128]
    assert [(point.x, point.y) for point in by_all.curves[1].points] == [(16, 0.1875), (64, 0.4375)]
    assert by_all.curves[1].points[0].error == pytest.approx(0.125 / 2**0.5)
    pytest.importorskip("matplotlib")
    plot_panels(panels, SWEEP_X_LABEL, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000
