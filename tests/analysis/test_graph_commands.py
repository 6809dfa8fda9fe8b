"""`sattn graph` and `sattn compare-graphs`: what they write, say and refuse."""

import re

import pytest

pytest.importorskip("igraph")
pytest.importorskip("scipy")
pytest.importorskip("matplotlib")
pytest.importorskip("pyarrow")

from stochastic_attention import cli
from stochastic_attention.records import Record


def test_the_report_of_a_file_says_what_was_read_left_out_and_measured(tmp_path, capsys):
    edges = tmp_path / "connections.csv"
    rows = ["1,2,A,3", "1,2,B,2", "2,3,A,9", "3,1,A,6", "3,3,A,7", "3,4,A,4", "4,5,A,5"]
    edges.write_text("pre_root_id,post_root_id,neuropil,syn_count\n" + "\n".join(rows))
    arguments = ["graph", edges, "--min-synapses", 5, "--nodes", 7, "--nulls", 2, "--output", tmp_path / "out"]
    assert cli.main([str(argument) for argument in arguments]) == 0
    said = capsys.readouterr()
    report = (tmp_path / "out" / "report.md").read_text()
    assert report in said.out
    assert "%" in said.err
    for line in (
        "- rows: 7; repeating a pair: 1, summed",
        "- pairs left out below a weight of 5: 1",
        "- self loops, left out of all that follows: 1",
        "- columns not used: neuropil",
        "- nodes: 7, 2 of them without an edge",
        "- edges: 4",
        "- strongly connected components: 5, the largest of 3 nodes",
        "- pairs joined by a path: 0.16667 of all",
        "(exact, from all 7 nodes)",
        "transitivity, 3 triangles / connected triples: 1.000000 (1 triangles)",
    ):
        assert line in report
    record = Record.load(tmp_path / "out" / "record.json")
    assert record.config["min_synapses"] == 5
    assert record.results["tally"]["below_threshold"] == 1
    assert record.results["paths"]["reachable"]["value"] == pytest.approx(7 / 42)
    assert record.results["seconds"] > 0


def test_a_sampled_report_says_so(tmp_path, capsys):
    options = "--pattern sa --n 300 --window 4 --layers 2 --sources 70 --nulls 2"
    assert cli.main(["graph", *options.split(), "--output", str(tmp_path)]) == 0
    report = capsys.readouterr().out
    assert "# sa, 300 tokens" in report
    assert "- union of 2 causal layers of stochastic(window=4), an edge from key to query" in report
    assert report.count("(sampled, from 70 of 300 nodes)") == 2
    assert re.search(r"mean shortest path L over these pairs: \d\.\d{4} ± 0\.\d{4}", report)
    assert Record.load(tmp_path / "record.json").config == {
        "edges": None,
        "min_synapses": None,
        "columns": None,
        "nodes": None,
        "pattern": "sa",
        "n": 300,
        "window": 4,
        "layers": 2,
        "sources": "70",
        "nulls": 2,
        "seed": 0,
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("graph", "a graph is needed: `sattn graph larva`"),
        ("graph larva --pattern sa", "EDGES or --pattern, not both"),
        ("graph nowhere.csv", "EDGES must be a file or one of larva, larva-brain, worm, got 'nowhere.csv'"),
        ("graph worm --window 4", "window has no meaning without --pattern"),
        ("graph --pattern sa --min-synapses 5", "min_synapses has no meaning for --pattern"),
        ("graph --pattern nonsense", "pattern must be one of 'full', 'swa'"),
        ("graph --pattern sa --n 0", "n must be an integer >= 1, got 0"),
        ("graph worm --min-synapses -1", "min_synapses must be a finite number >= 0, got -1.0"),
        ("graph worm --nodes 2", "nodes must be at least the 448 that the file names, got 2"),
        ("graph worm --sources 449", "sources must be all or an integer in [2, 448], got '449'"),
        ("graph worm --sources some", "sources must be all or an integer in [2, 448], got 'some'"),
        ("graph worm --sources 1", "sources must be all or an integer in [2, 448], got '1'"),
        ("graph worm --sources ²", "sources must be all or an integer in [2, 448], got '²'"),
        ("graph worm --seed -1", "seed must be an integer >= 0, got -1"),
        ("graph worm --nulls 1", "nulls must be an integer >= 2, got 1"),
        ("compare-graphs --patterns sa,nonsense", "patterns must be one of"),
        ("compare-graphs --layers 1,x", "layers must be integers separated by commas"),
        ("compare-graphs --layers 0", "layers must be an integer >= 1, got 0"),
        ("compare-graphs --layers ,", "layers must be distinct and at least one, got none"),
        ("compare-graphs --patterns sa,sa", "patterns must be distinct and at least one, got sa, sa"),
        ("compare-graphs --seed -1", "seed must be an integer >= 0, got -1"),
        ("compare-graphs --fly x --min-synapses nan", "min_synapses must be a finite number >= 0, got nan"),
        ("compare-graphs --min-synapses 5", "min_synapses has no meaning without --fly"),
    ],
)
def test_bad_options_are_told_in_one_line(options, message, capsys, tmp_path):
    assert cli.main([*options.split(), "--output", str(tmp_path)]) == 2
    told = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("Reading")]
    assert len(told) == 1
    assert message in told[0]


def test_graphs_stand_side_by_side(tmp_path, capsys):
    fly = tmp_path / "fly.txt"
    fly.write_text("".join(f"{i} {(i + step) % 40} {step}\n" for i in range(40) for step in (1, 2, 9)))
    arguments = f"compare-graphs --fly {fly} --min-synapses 2 --n 256 --window 4 --layers 1,3 --nulls 2 --output"
    assert cli.main([*arguments.split(), str(tmp_path / "out")]) == 0
    table = (tmp_path / "out" / "table.md").read_text()
    assert table in capsys.readouterr().out
    names = ["fly", "larva-brain", "worm", "swa"]
    names += [f"{name}, {layers}" for name in ("sa", "gated-half") for layers in ("1 layer", "3 layers")]
    assert [line.split("|")[1].strip() for line in table.splitlines()[2:10]] == names
    results = Record.load(tmp_path / "out" / "record.json").results
    assert list(results) == names
    assert results["fly"]["edges"] == 80
    # One layer of SA is SWA on shuffled tokens.
    assert results["sa, 1 layer"]["clustering"] == results["swa"]["clustering"]
    assert results["sa, 1 layer"]["undirected_paths"]["mean"]["value"] == pytest.approx(
        results["swa"]["undirected_paths"]["mean"]["value"]
    )
    assert (tmp_path / "out" / "plot.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    "command", ["graph larva", "compare-graphs", "reach", "mixing", "estimator", "report .", "probe"]
)
def test_an_output_that_is_no_folder_is_told_before_any_work(command, tmp_path, capsys):
    taken = tmp_path / "taken"
    taken.write_text("a file")
    output = taken / "page.html" if command == "report ." else taken
    assert cli.main([*command.split(), "--output", str(output)]) == 2
    assert f"output must be a folder to write into, got {taken}: File exists" in capsys.readouterr().err
