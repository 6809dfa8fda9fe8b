"""One graph in every format, what is counted, and what is refused by its line."""

import gzip
import re

import numpy as np
import pytest

pytest.importorskip("igraph")
sparse = pytest.importorskip("scipy.sparse")
io = pytest.importorskip("scipy.io")
pa = pytest.importorskip("pyarrow")
from pyarrow import parquet  # noqa: E402

from stochastic_attention.analysis.graph_files import read_graph  # noqa: E402

# Ids of 64 bits that one float could not tell apart, in the order in which the rows below meet them.
IDS = [720575940600000001 + step for step in range(4)]
# (source, target, neuropil, synapses): 0 -> 1 in two neuropils, a self loop, a reciprocated pair.
ROWS = [(0, 1, "LOP_R", 3), (0, 1, "ME_R", 4), (1, 2, "GNG", 5), (2, 2, "GNG", 9), (2, 0, "GNG", 2), (0, 2, "EB", 1)]
ROWS += [(2, 3, "EB", 8)]
WEIGHTS = np.array([[0, 7, 1, 0], [0, 0, 5, 0], [2, 0, 9, 8], [0, 0, 0, 0]])


def lines(mark, *, header=None):
    rows = [mark.join((str(IDS[s]), str(IDS[t]), str(w))) for s, t, _, w in ROWS]
    return "\n".join([header, *rows] if header else rows) + "\n"


def write_text(text):
    return lambda path: path.write_text(text, encoding="utf-8")


def write_gzip(text):
    return lambda path: path.write_bytes(gzip.compress(text.encode()))


def write_parquet(path):
    columns = zip(*((IDS[s], IDS[t], w) for s, t, _, w in ROWS), strict=True)
    parquet.write_table(pa.table(dict(zip(("pre_root_id", "post_root_id", "syn_count"), columns, strict=True))), path)


def write_graphml(path):
    from igraph import Graph

    graph = Graph(4, edges=[(s, t) for s, t, _, _ in ROWS], directed=True)
    graph.es["weight"] = [w for *_, w in ROWS]
    graph.write_graphml(str(path))


CODEX = "pre_root_id,post_root_id,neuropil,syn_count,nt_type\n" + "".join(
    f"{IDS[s]},{IDS[t]},{place},{w},ACH\n" for s, t, place, w in ROWS
)
FILES = {
    "spaces.txt": write_text(lines("  ")),
    "comments.edges": write_text("# a comment\n\n% another\n" + lines(" ")),
    "commas.csv": write_text(lines(",")),
    "header.csv": write_text(lines(" , ", header="Source,Target,Weight")),
    "quotes.csv": write_text(re.sub(r"(\d+),(\d+),", r'"\1","\2",', lines(",", header='"source","target",weight'))),
    "marked.csv": write_text("\ufeff" + lines(",", header="source,target,weight")),
    "windows.tsv": write_text(lines("\t").replace("\n", "\r\n")),
    "semicolons.csv": write_text(lines(";")),
    "later_marks.tsv": write_text(lines("\t").replace(str(IDS[0]), "5-HT, raphe; left")),
    "codex.csv.gz": write_gzip(CODEX),
    "spaces.txt.gz": write_gzip(lines(" ")),
    "table.parquet": write_parquet,
    "sparse.npz": lambda path: sparse.save_npz(path, sparse.csr_array(WEIGHTS)),
    "dense.npz": lambda path: np.savez(path, WEIGHTS),
    "dense.npy": lambda path: np.save(path, WEIGHTS),
    "matrix.mtx": lambda path: io.mmwrite(path, sparse.coo_array(WEIGHTS)),
    "graph.graphml": write_graphml,
}
# The two rows of 0 -> 1 are one entry of a matrix.
MATRICES = ("sparse.npz", "dense.npz", "dense.npy", "matrix.mtx")


@pytest.mark.parametrize("min_weight", [0, 5, 6])
@pytest.mark.parametrize("name", FILES)
def test_every_format_gives_the_same_graph_and_the_same_counts(name, min_weight, tmp_path):
    FILES[name](tmp_path / name)
    graph = read_graph(tmp_path / name, min_weight=min_weight)
    kept = np.where(min_weight > WEIGHTS, 0, WEIGHTS > 0)
    assert graph.adjacency.toarray().tolist() == (kept - np.diag(np.diag(kept))).tolist()
    repeated = 0 if name in MATRICES else 1
    assert graph.tally.rows == 6 + repeated
    assert graph.tally.repeated == repeated
    assert graph.tally.below_threshold == 6 - kept.sum()
    assert graph.tally.self_loops == 1
    assert graph.tally.weight == (WEIGHTS * kept).sum()


@pytest.mark.parametrize("kinds", [("int64", "uint64"), ("int64", "string"), ("large_string", "string")])
def test_columns_of_two_types_name_the_same_nodes(kinds, tmp_path):
    ends = zip(*((IDS[s], IDS[t]) for s, t, *_ in ROWS), strict=True)
    columns = [pa.array(end).cast(kind) for end, kind in zip(ends, kinds, strict=True)]
    parquet.write_table(pa.table(columns, names=["pre", "post"]), tmp_path / "edges.parquet")
    graph = read_graph(tmp_path / "edges.parquet")
    assert graph.adjacency.toarray().tolist() == ((WEIGHTS > 0) & ~np.eye(4, dtype=bool)).astype(int).tolist()


def test_rows_count_one_each_without_weights(tmp_path):
    path = tmp_path / "edges.txt"
    path.write_text("a b\na b\nb c\n")
    graph = read_graph(path, min_weight=2)
    assert (graph.nodes, graph.edges, graph.tally.repeated, graph.tally.below_threshold) == (3, 1, 1, 1)
    assert graph.tally.notes == ("no weight column: every row counts 1",)


def test_what_is_not_used_is_said(tmp_path):
    path = tmp_path / "codex.csv"
    path.write_text("# v630\n" + CODEX)
    notes = read_graph(path).tally.notes
    assert notes == ("columns not used: neuropil, nt_type", "blank and comment lines: 1")
    path.write_text("neuron,other\nAVAL,AVAR\nAVAR,AVBL\n")
    first, _ = read_graph(path).tally.notes
    assert first == "the first row, neuron and other, is an edge of nodes that no other row names"


def test_columns_are_chosen_by_name(tmp_path):
    path = tmp_path / "edges.csv"
    path.write_text("w,b,a\n5,1,0\n3,0,1\n")
    graph = read_graph(path, columns=("a", "b", "w"), min_weight=4)
    assert (graph.nodes, graph.edges, graph.tally.weight) == (2, 1, 5)


def test_nodes_without_edges_can_be_counted_in(tmp_path):
    path = tmp_path / "edges.txt"
    path.write_text("0 1\n")
    assert read_graph(path, nodes=10).nodes == 10
    with pytest.raises(ValueError, match="nodes must be at least the 2 that the file names, got 1"):
        read_graph(path, nodes=1)


def test_an_undirected_graphml_goes_both_ways(tmp_path):
    from igraph import Graph

    path = tmp_path / "graph.graphml"
    Graph(3, edges=[(0, 1), (1, 1)]).write_graphml(str(path))
    graph = read_graph(path)
    assert graph.adjacency.toarray().tolist() == [[0, 1, 0], [1, 0, 0], [0, 0, 0]]
    assert (graph.tally.rows, graph.tally.self_loops) == (3, 1)


def test_weights_of_a_graphml_are_numbers(tmp_path):
    from igraph import Graph

    path = tmp_path / "graph.graphml"
    Graph(3, edges=[(0, 1), (1, 2)], edge_attrs={"weight": ["3", "x"]}).write_graphml(str(path))
    with pytest.raises(ValueError, match=r"graph.graphml: weight must hold numbers alone"):
        read_graph(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0 1 2\n1 2\n", "line 2 has 2 fields, not 3"),
        ("0,1,2\n\n# x\n1,,2\n", "line 4 names a node without a name"),
        ("0,1,2\n1,0,x\n", "line 2 has the weight 'x', not a number above 0"),
        ("0,1,2\n1,0,-3\n", "line 2 has the weight '-3'"),
        ("0,1,0\n", "line 1 has the weight '0'"),
        ("0,1,nan\n", "line 1 has the weight 'nan'"),
        ("0,1,inf\n", "line 1 has the weight 'inf'"),
        ("neuron,other,strength\n0,1,2\n", "line 1 has the weight 'strength'.*--columns"),
        ("neuron,other\n0,1\n2,1\n", "begins with neuron and other, .*--columns"),
        ("7.20576E+17,1\n", r"line 1 names a node 7.20576E\+17: a rounded number"),
        ("alone\nalone\n", "line 1 has 1 fields, not 2"),
        ("a;b;0,5\n", "line 1 has the weight '0,5'"),
        ("0 1 {}\n", r"line 1 holds attributes in braces: .* data=\['weight'\]"),
        ("0 1 {'weight': 3}\n", "line 1 holds attributes in braces"),
        ("0 1 {'weight': 3, 'sign': 1}\n", "line 1 holds attributes in braces"),
        ("0 1 x\n" * 7, "line 5 has the weight 'x'.*; and 2 more"),
        ("", "holds no edge"),
        ("source,target\n", "holds no edge"),
    ],
)
def test_bad_rows_are_named_by_their_line(text, message, tmp_path):
    path = tmp_path / "edges.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_graph(path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("latin.csv", "é,b".encode("latin-1")),
        ("excel.csv", "a,b".encode("utf-16")),
        ("torn.csv.gz", gzip.compress(b"a,b\n", mtime=0)[:-12]),
        ("plain.csv.gz", b"a,b\n"),
        ("torn.npz", b"PK"),
        ("other.mtx", b"1 2 3"),
        ("outside.mtx", b"%%MatrixMarket matrix coordinate real general\n2 2 1\n1 3 1\n"),
        ("empty.npy", b""),
    ],
)
def test_files_that_cannot_be_read_are_named(name, content, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"^{name} cannot be read: "):
        read_graph(tmp_path / name)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"pre": [0.5], "post": [1.0]}, "nodes must be integers or text, got double in pre"),
        ({"pre": [0, None], "post": [1, 1]}, "row 2 has no pre"),
        ({"pre": [0, 0], "post": [1, 1], "weight": [1.0, -1.0]}, "line 2 has the weight -1.0"),
        ({"pre": [0, 0], "post": [1, 1], "weight": ["3", "x"]}, "edges.parquet: weight must hold numbers alone"),
        ({"pre": [0], "post": [1], "weight": [[3]]}, "edges.parquet: weight must hold numbers alone"),
        ({"a": [0], "b": [1]}, "has the columns a, b: name source and target with --columns"),
    ],
)
def test_bad_tables_are_refused(columns, message, tmp_path):
    parquet.write_table(pa.table(columns), tmp_path / "edges.parquet")
    with pytest.raises(ValueError, match=message):
        read_graph(tmp_path / "edges.parquet")


def test_other_bad_input_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"EDGES must be a file or one of larva, larva-brain, worm, got 'nowhere.csv'"):
        read_graph("nowhere.csv")
    with pytest.raises(ValueError, match="columns has no meaning for worm"):
        read_graph("worm", columns=("a", "b"))
    np.savez(tmp_path / "two.npz", a=WEIGHTS, b=WEIGHTS)
    with pytest.raises(ValueError, match="must hold one matrix, got the arrays a, b"):
        read_graph(tmp_path / "two.npz")
    np.savez(tmp_path / "one.npz", WEIGHTS)
    with pytest.raises(ValueError, match=r"nodes is given by the matrix in one.npz, got 9 besides"):
        read_graph(tmp_path / "one.npz", nodes=9)
    (tmp_path / "edges.csv").write_text("pre,post\n0,1\n")
    for columns in (("pre",), ("pre", "pre"), ("pre", "post", "weight")):
        with pytest.raises(ValueError, match="columns must name the source"):
            read_graph(tmp_path / "edges.csv", columns=columns)
    edges = '<edge source="a" target="b"><data key="w">2</data></edge><edge source="b" target="a"/>'
    (tmp_path / "gap.graphml").write_text(
        '<graphml><key id="w" for="edge" attr.name="weight" attr.type="double"/><graph edgedefault="directed">'
        f'<node id="a"/><node id="b"/>{edges}</graph></graphml>'
    )
    with pytest.raises(ValueError, match=r"gap.graphml: 1 of 2 edges have no weight"):
        read_graph(tmp_path / "gap.graphml")
    (tmp_path / "no.graphml").write_text("<graph")
    with pytest.raises(ValueError, match=r"no.graphml is no GraphML"):
        read_graph(tmp_path / "no.graphml")


@pytest.mark.parametrize(
    ("name", "nodes", "rows", "pairs", "self_loops"),
    [
        ("larva", 3554, 119010, 119010, 577),
        ("larva-brain", 2987, 107344, 107344, 528),
        ("worm", 448, 7379, 6625, 46),
    ],
)
def test_the_connectomes_that_come_with_the_package(name, nodes, rows, pairs, self_loops):
    graph = read_graph(name)
    assert (graph.nodes, graph.tally.rows, graph.edges + graph.tally.self_loops) == (nodes, rows, pairs)
    assert graph.tally.self_loops == self_loops
