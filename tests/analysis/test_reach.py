"""Receptive fields against products of dense masks, closed forms and hand-computed cases."""

import itertools
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from stochastic_attention import Pattern, cli
from stochastic_attention.analysis import reach, reach_report
from stochastic_attention.analysis.edges import PATTERNS, adjacency, layer_edges
from stochastic_attention.records import Record

CAUSAL = [
    Pattern.full(),
    Pattern.local(5),
    Pattern.local(1),
    Pattern.local(4, sinks=2),
    *(
        Pattern.stochastic(5, scope=scope, shape=shape, seed=3, local=local, sinks=sinks)
        for scope, shape in itertools.product(("sequence", "prefix"), ("sliding", "block"))
        for local, sinks in ((0, 0), (3, 0), (4, 2))
    ),
    Pattern.stochastic(1, seed=3),
    Pattern.stochastic(100),
]
BOTH_WAYS = [p for p in CAUSAL if p.scope == "sequence"]
CASES = [(p, True) for p in CAUSAL] + [(p, False) for p in BOTH_WAYS]


def name(value):
    return str(value) if isinstance(value, Pattern) else {True: "causal", False: "both ways"}.get(value)


@pytest.mark.parametrize("n", [1, 41])
@pytest.mark.parametrize(("pattern", "causal"), CASES, ids=name)
def test_fields_are_products_of_dense_masks(pattern, causal, n):
    layers = 3
    masks = [pattern.dense_mask(n, layer=layer, causal=causal)[0].double() for layer in range(layers)]
    found = reach.receptive_fields(pattern, n, layers, np.arange(n), causal=causal)
    direct = reach.direct_fields(pattern, n, layers, np.arange(n), causal=causal)
    through, once = masks[-1].new_zeros(n, n).fill_diagonal_(1.0), masks[-1].new_zeros(n, n)
    for depth, mask in enumerate(reversed(masks)):
        through, once = through @ mask, once + mask
        assert found.sizes[depth].tolist() == (through > 0).sum(1).tolist()
        assert direct.sizes[depth].tolist() == (once > 0).sum(1).tolist()
    assert found.possible.tolist() == [i + 1 if causal else n for i in range(n)]


@pytest.mark.parametrize(("pattern", "causal"), CASES, ids=name)
def test_adjacency_is_the_dense_mask(pattern, causal):
    for n, layer in ((1, 0), (53, 2)):
        dense = pattern.dense_mask(n, layer=layer, causal=causal)[0]
        assert adjacency(layer_edges(pattern, n, layer=layer, causal=causal)).toarray().tolist() == dense.tolist()


@pytest.mark.parametrize(("top_k", "n"), [(1, 22), (3, 22), (4, 40), (9, 22)])
def test_moba_sees_its_own_block_and_random_past_ones(top_k, n):
    layers = [adjacency(layer_edges(Pattern.moba(4, top_k), n, layer=k, seed=1)).toarray() for k in range(2)]
    for seen in layers:
        for i, row in enumerate(seen):
            own = i // 4
            whole = [b for b in range(own) if row[4 * b : 4 * b + 4].all()]
            assert len(whole) == min(top_k - 1, own)
            assert np.flatnonzero(row).tolist() == [j for j in range(i + 1) if j // 4 in (*whole, own)]
    if 1 < top_k < n // 4:
        assert (layers[0] != layers[1]).any()
        assert (layers[0] != adjacency(layer_edges(Pattern.moba(4, top_k), n, layer=0, seed=2)).toarray()).any()


def test_moba_draws_every_past_block_equally_often():
    draws = [adjacency(layer_edges(Pattern.moba(1, 3), 6, layer=k)).toarray()[5, :5] for k in range(500)]
    # Two of five blocks: a share of 0.4, standard deviation 0.022.
    assert np.mean(draws, axis=0) == pytest.approx(np.full(5, 0.4), abs=0.11)


def test_fields_by_hand():
    # Three tokens a window: a token back is two sources more a layer.
    found = reach.receptive_fields(Pattern.local(3), 8, 3, np.array([0, 4, 7]))
    assert found.sizes.tolist() == [[1, 3, 3], [1, 5, 5], [1, 5, 7]]
    assert found.coverage[:, 1].tolist() == [3 / 5, 1, 1]
    both = reach.receptive_fields(Pattern.local(2), 8, 2, np.array([0, 4]), causal=False)
    assert both.sizes.tolist() == [[3, 5], [5, 8]]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [1, 2, 7, 50, 60])
def test_a_sliding_window_meets_its_closed_form(window, causal):
    n, layers, pattern = 50, 60, Pattern.local(window)
    queries = np.arange(n)
    found = reach.receptive_fields(pattern, n, layers, queries, causal=causal).coverage
    np.testing.assert_allclose(found, reach.predicted_coverage(pattern, n, layers, queries, causal=causal), rtol=1e-12)
    full = np.flatnonzero(found.min(1) == 1)
    predicted = reach.predicted_layers(pattern, n, causal=causal)
    assert predicted == (full[0] + 1 if len(full) else None)


STOCHASTIC = [Pattern.stochastic(8, scope=s, shape=t) for s in ("sequence", "prefix") for t in ("sliding", "block")]


@pytest.mark.parametrize(
    ("pattern", "causal"), [(p, True) for p in STOCHASTIC] + [(p, False) for p in STOCHASTIC[:2]], ids=name
)
def test_the_direct_share_is_one_minus_a_power_of_the_miss(pattern, causal):
    n, layers, queries = 200, 5, np.arange(200)
    runs = [
        reach.direct_fields(replace(pattern, seed=s), n, layers, queries, causal=causal).coverage.mean(1)
        for s in range(12)
    ]
    error = np.std(runs, axis=0, ddof=1) / len(runs) ** 0.5
    predicted = reach.predicted_direct(pattern, n, layers, queries, causal=causal)
    assert predicted is not None
    # Where each layer connects a fixed number of pairs, the error of the first layer is 0 up to rounding.
    assert (np.abs(np.mean(runs, axis=0) - predicted.mean(1)) <= 4 * error + 1e-9).all()


@pytest.mark.parametrize(
    ("pattern", "causal"), [(p, True) for p in STOCHASTIC] + [(p, False) for p in STOCHASTIC[:2]], ids=name
)
def test_the_mean_field_is_near(pattern, causal):
    n, layers, queries = 512, 6, np.arange(512)
    runs = [
        reach.receptive_fields(replace(pattern, seed=s), n, layers, queries, causal=causal).coverage.mean(1)
        for s in range(4)
    ]
    predicted = reach.predicted_coverage(pattern, n, layers, queries, causal=causal)
    assert predicted is not None
    assert np.mean(runs, axis=0) == pytest.approx(predicted.mean(1), abs=0.05)
    assert np.mean(runs, axis=0)[0] == pytest.approx(predicted[0].mean(), rel=0.02)


@pytest.mark.parametrize("scope", ["sequence", "prefix"])
def test_causal_fields_are_full_when_the_last_neighbours_have_met(scope):
    n, pattern = 64, Pattern.stochastic(8, scope=scope)
    predicted = reach.predicted_layers(pattern, n)
    assert predicted is not None
    firsts = []
    for seed in range(6):
        found = reach.receptive_fields(replace(pattern, seed=seed), n, 3 * int(predicted), np.arange(n))
        firsts.append(int(np.flatnonzero(found.coverage.min(1) == 1)[0]) + 1)
    # The last of n pairs comes at a Gumbel time: 0.58 scales after the closed form, with a deviation of 1.3 scales.
    scale = predicted / np.log(n)
    assert abs(np.mean(firsts) - predicted - 0.58 * scale) < 4 * 1.3 * scale / 6**0.5


def test_fields_that_look_both_ways_are_full_within_a_layer_or_two_of_their_growth():
    n, pattern = 2048, Pattern.stochastic(16)
    growth = reach.growth_layers(pattern, n)
    assert growth == reach.predicted_layers(pattern, n, causal=False) == pytest.approx(2.2)
    found = reach.receptive_fields(pattern, n, 5, np.arange(n), causal=False).coverage
    assert found[1].max() < 1
    assert found[4].min() == 1


@pytest.mark.parametrize("shape", ["sliding", "block"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("ranks", [2, 3, 8, 13])
def test_the_chance_of_a_pair_counts_near_ranks(ranks, causal, shape):
    for window in (1, 2, 3, 20):
        near = [
            a // (2 * window) == b // (2 * window)
            if shape == "block"
            else abs(a - b) <= (window - 1 if causal else window)
            for a, b in itertools.permutations(range(ranks), 2)
        ]
        chance = reach.pair_chance(Pattern.stochastic(window, shape=shape), np.array([ranks]), causal=causal)
        assert chance.tolist() == pytest.approx([np.mean(near)], abs=1e-12)


def test_ranks_of_scope_prefix_are_the_levels():
    pattern = Pattern.stochastic(3, scope="prefix")
    assert reach._ranks(pattern, 14).tolist() == [3] * 3 + [6] * 3 + [12] * 6 + [24] * 2


@pytest.mark.parametrize("pattern", ["swa", "sa", "sa-prefix", "gated", "moba"])
def test_a_sample_is_within_its_error_of_everything(pattern):
    n, layers, pattern = 1024, 3, PATTERNS[pattern](16)
    exact = reach.receptive_fields(pattern, n, layers, np.arange(n))
    sampled = reach.receptive_fields(pattern, n, layers, reach.sample_queries(n, 96))
    assert sampled.sizes.tolist() == exact.sizes[:, sampled.queries].tolist()
    for few, all_of_them in zip(sampled.coverage, exact.coverage, strict=True):
        error = reach.standard_error(few, n)
        assert error is not None
        assert error < 0.02
        # A sample may miss rare queries that still lack a source: up to 3 in Q, each by what the worst lacks.
        unseen = 3 / len(few) * (1 - all_of_them.min()) if few.min() == 1 else 0.0
        assert abs(few.mean() - all_of_them.mean()) <= 4 * error + unseen
        assert reach.standard_error(all_of_them, n) == 0.0


def test_samples_are_spread_and_unbiased():
    samples = np.array([reach.sample_queries(10, 3, seed=s) for s in range(3000)])
    assert (np.diff(samples, axis=1) >= 0).all()
    # Each position is expected 900 times, with a standard deviation below 30.
    assert np.bincount(samples.ravel(), minlength=10) == pytest.approx(np.full(10, 900), abs=130)
    assert reach.sample_queries(10, 10).tolist() == list(range(10))


@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_the_error_of_a_sample_is_its_spread(noise):
    values = np.linspace(0, 9, 1000) ** 2 + noise * np.random.default_rng(0).normal(size=1000)
    samples = [values[reach.sample_queries(1000, 50, seed=s)] for s in range(400)]
    claimed = np.mean([reach.standard_error(sample, 1000) for sample in samples])
    assert claimed == pytest.approx(np.std([sample.mean() for sample in samples]), rel=0.15)
    assert reach.standard_error(values[:2], 1000) is None


def test_memory_grows_with_the_tokens_times_the_window_at_most():
    n, window = 100_000, 64
    tracemalloc.start()
    try:
        found = reach.receptive_fields(Pattern.stochastic(window), n, 2, reach.sample_queries(n, 16))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found.sizes[1].max() > 2 * window
    assert peak < 8 * n * window  # one float64 for every query and key of its window; a table of all pairs: 1,250 MB


def test_a_table_of_many_layers_thins_out():
    shown = [k for k in range(1, 66) if reach_report._is_shown(k, last=65)]
    assert shown == [*range(1, 13), 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 65]


def test_progress_counts_every_field_and_layer():
    done = []
    reach.receptive_fields(Pattern.full(), 40, 3, np.arange(40), progress=done.append)
    assert sum(done) == 3 * 40


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 0}, "n must be an integer >= 1, got 0"),
        ({"layers": 0}, "layers must be an integer >= 1, got 0"),
        ({"queries": np.array([9])}, r"queries must be positions in \[0, 9\), at least one, got \[9\]"),
        ({"queries": np.array([], dtype=int)}, "queries must be positions"),
        ({"pattern": Pattern.stochastic(2, per_head=True)}, "per_head must be False"),
        ({"pattern": Pattern.stochastic(2, scope="prefix"), "causal": False}, "causal=False needs scope"),
        ({"pattern": Pattern.moba(2, 2), "causal": False}, "causal=False has no meaning for MoBA"),
    ],
    ids=str,
)
@pytest.mark.parametrize("measure", [reach.receptive_fields, reach.direct_fields])
def test_bad_input(measure, options, message):
    good = {"pattern": Pattern.local(2), "n": 9, "layers": 2, "queries": np.arange(9), "causal": True}
    with pytest.raises(ValueError, match=message):
        measure(**{**good, **options})


def test_what_has_no_closed_form_says_so():
    for pattern in (PATTERNS["gated"](4), PATTERNS["moba"](4), Pattern.local(4, sinks=1)):
        assert reach.predicted_coverage(pattern, 20, 2, np.arange(20)) is None
        assert reach.predicted_direct(pattern, 20, 2, np.arange(20)) is None
        assert reach.predicted_layers(pattern, 20) is None
    with pytest.raises(ValueError, match="pattern must be stochastic"):
        reach.pair_chance(Pattern.local(4), np.array([9]))


def arguments(folder, **options):
    options = {"n": 96, "window": 8, "layers": 3, "seeds": 2, **options}
    return ["reach", *(f"--{key}={value}" for key, value in options.items()), f"--output={folder}"]


def test_the_command_writes_record_table_and_plots(tmp_path, capsys):
    assert cli.main(arguments(tmp_path)) == 0
    shown = capsys.readouterr().out
    assert shown.startswith((tmp_path / "table.md").read_text())
    record = Record.load(tmp_path / "record.json")
    assert [result["name"] for result in record.results["patterns"]] == list(PATTERNS)
    full, swa = record.results["patterns"][:2]
    assert full["layers_to"] == {"0.5": 1, "0.99": 1, "1.0": 1}
    assert swa["layers_to"]["1.0"] is None
    assert swa["predicted_layers"] == 14
    assert [x["coverage"]["value"] for x in swa["layers"]] == pytest.approx([x["predicted"] for x in swa["layers"]])
    assert record.results["peak_memory_bytes"] is None or record.results["peak_memory_bytes"] > 1 << 20
    assert (tmp_path / "plot.png").stat().st_size > 0
    assert (tmp_path / "position.png").stat().st_size > 0


def test_a_sampled_run_says_so(tmp_path, capsys):
    assert cli.main([*arguments(tmp_path, queries=20, patterns="swa,sa"), "--bidirectional"]) == 0
    shown = capsys.readouterr().out
    assert "A sample: the exact fields of 20 queries" in shown
    assert "the share of all 96 tokens" in shown


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 0}, "n must be an integer >= 1, got 0"),
        ({"seeds": 0}, "seeds must be an integer >= 1, got 0"),
        ({"patterns": "sa,ring"}, "patterns must be one of 'full'"),
        ({"patterns": ","}, "patterns must name at least one pattern, got none"),
        ({"queries": 97}, "queries must be an integer in [3, 96], got 97"),
        ({"queries": 2}, "queries must be an integer in [3, 96], got 2"),
    ],
    ids=str,
)
def test_bad_options_are_told_before_any_work(options, message, tmp_path, capsys):
    assert cli.main(arguments(tmp_path / "none", **options)) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "none").exists()


def test_patterns_without_a_meaning_both_ways_are_refused(tmp_path, capsys):
    assert cli.main([*arguments(tmp_path, patterns="sa-prefix"), "--bidirectional"]) == 2
    assert "causal=False needs scope" in capsys.readouterr().err
