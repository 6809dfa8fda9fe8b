"""Chains of layers against dense linear algebra, closed forms and hand-computed cases."""

import numpy as np
import pytest
from scipy.sparse import csr_array

from stochastic_attention import Pattern, cli
from stochastic_attention.analysis import mixing
from stochastic_attention.records import Record

PATTERNS = [
    Pattern.local(3),
    Pattern.local(3, sinks=2),
    Pattern.stochastic(3, seed=5),
    Pattern.stochastic(3, shape="block", seed=5),
    Pattern.stochastic(2, local=2, seed=5),
]


def dense(pattern, n, layer):
    mask = pattern.dense_mask(n, layer=layer, causal=False)[0].double().numpy()
    return mask / mask.sum(1, keepdims=True)


def ring(n, window):
    steps = np.abs(np.subtract.outer(np.arange(n), np.arange(n)))
    return csr_array((np.minimum(steps, n - steps) <= window) / (2 * window + 1))


def reflecting_path(n, window):
    """Steps of a walk on a path whose ends are mirrors that stand half a step beyond the last tokens."""
    matrix = np.zeros((n, n))
    for i in range(n):
        for j in range(i - window, i + window + 1):
            matrix[i, -1 - j if j < 0 else 2 * n - 1 - j if j >= n else j] += 1 / (2 * window + 1)
    return csr_array(matrix)


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_chains_are_the_dense_masks_with_equal_weights(pattern):
    for layer in (0, 3):
        np.testing.assert_allclose(mixing.transition(pattern, 37, layer=layer).toarray(), dense(pattern, 37, layer))


@pytest.mark.parametrize("pattern", [p for p in PATTERNS if not p.sinks], ids=str)
def test_the_gap_is_that_of_the_eigenvalues(pattern):
    values = np.sort(np.abs(np.linalg.eigvals(dense(pattern, 37, 1))))
    assert mixing.spectral_gap(mixing.transition(pattern, 37, layer=1)) == pytest.approx(1 - values[-2], abs=1e-10)


@pytest.mark.parametrize("pattern", [*PATTERNS, Pattern.full()], ids=str)
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_what_is_kept_is_the_norm_off_the_mean(pattern, depth):
    n = 37
    off_mean = np.eye(n) - 1 / n
    product = np.linalg.multi_dot([off_mean, *(dense(pattern, n, k) for k in range(depth)), off_mean])
    layers = [mixing.transition(pattern, n, layer=k) for k in range(depth)]
    assert mixing.kept(layers) == pytest.approx(np.linalg.norm(product, 2), rel=1e-8)


@pytest.mark.parametrize(("n", "window"), [(9, 1), (9, 4), (40, 3), (41, 7)])
def test_ring_and_path_have_their_closed_forms(n, window):
    assert mixing.spectral_gap(ring(n, window)) == pytest.approx(mixing.ring_gap(n, window), abs=1e-10)
    values = np.sort(np.abs(np.linalg.eigvals(reflecting_path(n, window).toarray())))
    assert 1 - values[-2] == pytest.approx(mixing.path_gap(n, window), abs=1e-10)


def test_a_ring_of_single_steps_by_hand():
    # Eigenvalues (1 + 2 cos(2 pi m / 6)) / 3: 1, 2/3, 0, -1/3.
    assert mixing.ring_gap(6, 1) == pytest.approx(1 / 3)


def test_a_sliding_window_mixes_as_the_path_does():
    n, window = 400, 12
    gap = mixing.spectral_gap(mixing.transition(Pattern.local(window), n, layer=0))
    assert gap == pytest.approx(mixing.path_gap(n, window), rel=0.1)
    time = len(mixing.distances(Pattern.local(window), n, np.array([0]), level=0.25, limit=10_000))
    assert time == pytest.approx(mixing.path_mixing_time(n, window), rel=0.1)


def test_one_stochastic_layer_repeated_is_as_slow_as_a_window():
    window = mixing.spectral_gap(mixing.transition(Pattern.local(6), 200, layer=0))
    alone = mixing.spectral_gap(mixing.transition(Pattern.stochastic(6, seed=2), 200, layer=0))
    assert alone == pytest.approx(window, abs=1e-12)
    # Blocks that do not touch never mix; independent layers of either do.
    assert mixing.spectral_gap(mixing.transition(Pattern.stochastic(6, shape="block"), 200, layer=0)) == 0.0
    for shape in ("sliding", "block"):
        pattern = Pattern.stochastic(6, shape=shape)
        assert mixing.kept([mixing.transition(pattern, 200, layer=k) for k in range(6)]) < 0.1


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_distances_are_those_of_dense_rows(pattern):
    n, starts = 37, np.array([0, 5, 36])
    laws = np.eye(n)
    expected = []
    for layer in range(4):
        laws = laws @ dense(pattern, n, layer)
        expected.append(np.abs(laws[starts] - laws.mean(0)).sum(1).max() / 2)
    found = mixing.distances(pattern, n, starts, level=0.0, limit=4)
    assert found == pytest.approx(expected, abs=1e-12)
    assert mixing.distances(pattern, n, starts, level=expected[1], limit=4) == pytest.approx(expected[:2])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: mixing.ring_gap(6, 3), "n must be an integer >= 7, got 6"),
        (lambda: mixing.path_gap(9, 0), "window must be an integer >= 1, got 0"),
        (lambda: mixing.transition(Pattern.moba(2, 2), 9, layer=0), "causal=False has no meaning for MoBA"),
        (lambda: mixing.spectral_gap(csr_array(np.eye(2))), "n must be an integer >= 3, got 2"),
        (lambda: mixing.distances(Pattern.local(1), 9, np.array([0]), level=0.1, limit=0), "limit must be"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def arguments(folder, **options):
    options = {"n": 80, "window": 4, "seeds": 2, "starts": 4, **options}
    return ["mixing", *(f"--{key}={value}" for key, value in options.items()), f"--output={folder}"]


def test_the_command_writes_record_table_and_plot(tmp_path, capsys):
    assert cli.main(arguments(tmp_path)) == 0
    assert capsys.readouterr().out.startswith((tmp_path / "table.md").read_text())
    swa, sa, *_ = Record.load(tmp_path / "record.json").results["patterns"]
    assert (len(swa["time"]), len(sa["time"])) == (1, 2)
    assert swa["time"][0] == len(swa["distance"][0])
    assert swa["distance"][0][-1] <= 0.25 < swa["distance"][0][-2]
    assert (tmp_path / "plot.png").stat().st_size > 0


def test_so_few_tokens_that_all_see_all(tmp_path, capsys):
    assert cli.main(arguments(tmp_path, n=5, window=2, patterns="gated", starts=2)) == 0
    assert "gated" in capsys.readouterr().out


def test_a_walk_that_does_not_mix_within_the_limit_says_so(tmp_path, capsys):
    assert cli.main(arguments(tmp_path, patterns="swa", limit=3)) == 0
    assert capsys.readouterr().out.splitlines()[2].endswith(" > 3 |")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 8}, "n must be an integer >= 9, got 8"),
        ({"patterns": "sa-prefix"}, "patterns must be one of 'swa'"),
        ({"patterns": ""}, "patterns must name at least one pattern"),
        ({"starts": 1}, "starts must be an integer in [2, 80], got 1"),
        ({"seeds": 0}, "seeds must be an integer >= 1, got 0"),
    ],
    ids=str,
)
def test_bad_options_are_told_in_one_line(options, message, tmp_path, capsys):
    assert cli.main(arguments(tmp_path, **options)) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
