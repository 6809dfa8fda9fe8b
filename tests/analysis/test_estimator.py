"""The estimator's moments against exact sampling theory, and the slopes that follow from it."""

import math

import numpy as np
import pytest
import torch

from stochastic_attention import Pattern, cli
from stochastic_attention.analysis import estimator, estimator_report
from stochastic_attention.records import Estimate, Record


def problem(n=256, queries=1, score_std=0.0, memory=0.0, bound=1.0, seed=1):
    return estimator.synthetic(n, queries, head_dim=4, score_std=score_std, bound=bound, memory=memory, seed=seed)


def test_the_problem_is_what_it_says():
    made = problem(n=20_000, queries=5_000, score_std=0.7, memory=3.0, bound=2.0)
    assert made.k.std().item() == pytest.approx(1, abs=0.03)
    neighbours = (made.k[1:] * made.k[:-1]).mean().item()
    assert neighbours == pytest.approx(math.exp(-1 / 3), abs=0.03)
    assert (made.q @ made.k[::20].mT / 2).std().item() == pytest.approx(0.7, rel=0.05)
    assert 1.5 < made.v.abs().max() <= 2
    # The same problem with other values: keys and queries stay, values scale.
    scaled = problem(n=20_000, queries=5_000, score_std=0.7, memory=3.0, bound=4.0)
    assert torch.equal(scaled.k, made.k)
    torch.testing.assert_close(scaled.v, 2 * made.v)


@pytest.mark.parametrize("window", [2, 32])
def test_equal_weights_have_the_moments_of_sampling_without_replacement(window):
    # The last query of equal blocks sees itself and 2 * window - 1 others, each set of others as likely as any.
    made, keys, n = problem(), 2 * window, 256
    draws = estimator.stochastic_draws(made, Pattern.stochastic(window, shape="block"), 1600)
    own, others = made.v[-1], made.v[:-1]
    mean = own / keys + (1 - 1 / keys) * others.mean(0)
    spread = (1 - 1 / keys) ** 2 * others.var(0) / (keys - 1) * (1 - (keys - 1) / (n - 1))
    error = (spread / len(draws)).sqrt()
    assert ((draws.mean(0)[0] - mean).abs() < 5 * error).all()
    # The variance of R draws has a relative standard error of about sqrt(2 / R).
    torch.testing.assert_close(draws.var(0)[0], spread, rtol=5 * (2 / len(draws)) ** 0.5, atol=0.0)


@pytest.mark.parametrize("keys", [1, 5, 256, 300])
def test_uniform_keys_have_the_moments_of_sampling_without_replacement(keys):
    made, n = problem(), 256
    drawn = min(keys, n)
    draws = estimator.uniform_key_draws(made, keys, 1600)[:, 0]
    spread = made.v.var(0) / drawn * (1 - drawn / n)
    error = (spread / len(draws)).sqrt()
    assert ((draws.mean(0) - made.v.mean(0)).abs() <= 5 * error + 1e-12).all()
    torch.testing.assert_close(draws.var(0), spread, rtol=5 * (2 / len(draws)) ** 0.5, atol=1e-12)


def test_uniform_keys_are_of_the_past_and_weighed_by_their_scores():
    made = problem(n=6, queries=6, score_std=1.0)
    everything = estimator.uniform_key_draws(made, 6, 3)
    torch.testing.assert_close(everything, estimator.full_attention(made).expand(3, -1, -1))


def test_draws_are_independent_and_repeat():
    made = problem(score_std=1.0, queries=3)
    pattern = Pattern.stochastic(4)
    draws = estimator.stochastic_draws(made, pattern, 40)
    assert draws.shape == (40, 3, 4)
    assert len({tuple(draw.flatten().tolist()) for draw in draws}) == 40
    assert torch.equal(draws, estimator.stochastic_draws(made, pattern, 40))
    assert torch.equal(draws[16:32], estimator.stochastic_draws(made, pattern, 16, first_step=1))


def test_moments_find_a_known_bias_and_variance():
    draw = torch.Generator().manual_seed(0)
    target = torch.randn(200, 3, generator=draw, dtype=torch.float64)
    draws = target + 0.1 + 2 * torch.randn(50, 200, 3, generator=draw, dtype=torch.float64)
    bias = estimator.squared_bias(draws, target)
    spread = estimator.variance(draws)
    assert abs(bias.value - 0.01) < 4 * bias.stderr
    assert abs(spread.value - 4) < 4 * spread.stderr
    # Without taking the noise of the mean off, 0.01 would drown in 4 / 50.
    assert bias.stderr < 0.01
    other = target + 2 * torch.randn(50, 200, 3, generator=draw, dtype=torch.float64)
    between = estimator.squared_bias(draws, other)
    assert abs(between.value - 0.01) < 4 * between.stderr


def test_averages_are_of_disjoint_draws():
    draws = torch.arange(7.0)[:, None, None]
    assert estimator.averages(draws, 2).flatten().tolist() == [0.5, 2.5, 4.5]
    assert torch.equal(estimator.averages(draws, 1), draws)


@pytest.mark.parametrize("power", [-1.0, 0.0, 2.5])
def test_a_power_law_is_fitted(power):
    x = np.array([2.0, 4.0, 8.0, 16.0, 32.0])
    fitted = estimator.fit_slope(x.tolist(), (3 * x**power).tolist())
    assert fitted is not None
    assert (fitted.value, fitted.stderr, fitted.n) == (pytest.approx(power), pytest.approx(0, abs=1e-12), 5)


def test_the_error_of_a_slope_is_that_of_least_squares():
    x = np.exp(np.arange(4.0))
    fitted = estimator.fit_slope(x.tolist(), np.exp([0.0, 1.0, 1.0, 2.0]).tolist())
    # By hand: residuals -0.1, 0.3, -0.3, 0.1 about a slope of 0.6; 0.2 / 2 / 5 = 0.02.
    assert fitted == Estimate(pytest.approx(0.6), pytest.approx(0.02**0.5), 4)
    assert estimator.fit_slope([1, 2], [1, 2]) is None


def test_the_predicted_slopes_show_for_stochastic_keys_and_the_full_correction_alone():
    settings = estimator_report.Settings(
        n=1024,
        windows=(4, 8, 16),
        local=32,
        queries=24,
        draws=112,
        head_dim=8,
        score_std=1.0,
        bound=1.0,
        memory=32.0,
        seed=0,
    )
    calls = []
    series = estimator_report.measure(settings, lambda: calls.append(1))
    assert len(calls) == estimator_report.work(settings)
    slopes = {(one.name, one.target, one.axis): (one.bias_slope, one.variance_slope) for one in series}
    # 2 w - 1 in place of w, and n no larger than 64 w, move a slope by up to a tenth; the rest is noise.
    for name in ("sa", "sa-block", "union, correction 1"):
        bias, spread = slopes[name, "full", "window"]
        assert bias.value == pytest.approx(-1, abs=0.35)
        assert spread.value == pytest.approx(-1, abs=0.2)
    weak, none = (slopes[f"union, correction {c}", "full", "window"][0].value for c in ("0.5", "0"))
    assert -0.9 < weak < -0.3
    assert -0.7 < none < 0
    assert slopes["sa", "full", "draws"][1].value == pytest.approx(-1, abs=0.15)
    assert slopes["sa", "full", "bound"][1].value == pytest.approx(2, abs=1e-6)


def test_a_union_with_the_full_correction_is_right_on_average_for_equal_weights():
    # Two of six keys are certain, the others are met with chance p = (2 w - 1) / n, weight 1 / p: a ratio estimator.
    made = problem(n=512, queries=16, memory=16.0)
    full = estimator.full_attention(made)
    biases = [
        estimator.squared_bias(
            estimator.stochastic_draws(made, Pattern.stochastic(16, local=64, correction=c), 256), full
        )
        for c in (0.0, 1.0)
    ]
    assert biases[0].value > 10 * biases[0].stderr
    assert biases[1].value < biases[0].value / 20


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: problem(n=0), "n must be an integer >= 1, got 0"),
        (lambda: problem(queries=300), r"queries must be an integer in \[1, 256\], got 300"),
        (lambda: problem(score_std=-1.0), "score_std must be a finite number >= 0.0, got -1.0"),
        (lambda: problem(memory=math.nan), "memory must be a finite number"),
        (lambda: estimator.stochastic_draws(problem(), Pattern.local(4), 2), "pattern must be stochastic"),
        (lambda: estimator.stochastic_draws(problem(), Pattern.stochastic(4), 0), "count must be an integer >= 1"),
        (lambda: estimator.uniform_key_draws(problem(), 0, 2), "keys must be an integer >= 1, got 0"),
        (lambda: estimator.averages(torch.zeros(3, 1, 1), 4), r"count must be an integer in \[1, 3\], got 4"),
        (lambda: estimator.fit_slope([1, 2, 0], [1, 2, 3]), "x and y must be positive"),
        (lambda: estimator.fit_slope([1, 2, 3], [1, 2]), "x and y must be positive and of one length"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def arguments(folder, **options):
    options = {"n": 64, "windows": "2,4,8", "local": 4, "queries": 4, "draws": 32, "head-dim": 4, **options}
    return ["estimator", *(f"--{key}={value}" for key, value in options.items()), f"--output={folder}"]


def test_the_command_writes_record_table_and_plot(tmp_path, capsys):
    assert cli.main(arguments(tmp_path)) == 0
    shown = capsys.readouterr().out
    assert shown.startswith((tmp_path / "table.md").read_text())
    series = Record.load(tmp_path / "record.json").results["series"]
    assert {one["axis"] for one in series} == {"window", "draws", "bound"}
    assert [m["x"] for m in series[0]["moments"]] == [2, 4, 8]
    assert (tmp_path / "plot.png").stat().st_size > 0


def test_a_slope_that_is_not_the_predicted_one_is_told():
    assert estimator_report.shows(Estimate(-0.95, 0.001, 5), -1) is True
    assert estimator_report.shows(Estimate(-0.6, 0.2, 5), -1) is True
    assert estimator_report.shows(Estimate(-0.6, 0.1, 5), -1) is False
    assert estimator_report.shows(None, -1) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"windows": "2,4"}, "windows must be at least three different ones"),
        ({"windows": "2,4,4"}, "windows must be at least three different ones"),
        ({"windows": "2,4,40"}, "windows must be an integer in [1, 31], got 40"),
        ({"windows": "2,4,32"}, "windows must be an integer in [1, 31], got 32"),
        ({"draws": 31}, "draws must be an integer >= 32, got 31"),
        ({"bound": 0}, "bound must be a finite number > 0.0, got 0.0"),
        ({"local": 0}, "local must be an integer in [1, 63], got 0"),
        ({"local": 64}, "local must be an integer in [1, 63], got 64"),
    ],
    ids=str,
)
def test_bad_options_are_told_in_one_line(options, message, tmp_path, capsys):
    assert cli.main(arguments(tmp_path, **options)) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
