"""Graphs from files: edge lists, tables, adjacency matrices, GraphML, and the connectomes that come with the package.

A node is any end of an edge in the file, under its name there. Names are kept as text: ids of 64 bits do not survive a
float. Nothing is dropped unseen: what cannot be read is an error that names its lines, the rest is in the tally.
"""

from __future__ import annotations

import csv
import gzip
import math
import re
import zipfile
import zlib
from array import array
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import resources
from io import TextIOWrapper
from pathlib import Path
from typing import Any

import numpy as np
from scipy import io, sparse

from ..ops.validation import check_count
from .graph import Graph, as_graph

_DATA = resources.files("stochastic_attention") / "data"
EMBEDDED = ("larva", "larva-brain", "worm")

_SOURCE = ("source", "src", "from", "pre", "pre_id", "pre_root_id", "pre_pt_root_id")
_TARGET = ("target", "dst", "to", "post", "post_id", "post_root_id", "post_pt_root_id")
_WEIGHT = ("weight", "syn_count", "n_syn", "synapses", "count")
# What separates fields, before spaces; names may hold the later ones of these.
_MARKS = "\t;,"
_SHOWN = 5
_BRACES = "holds attributes in braces: networkx writes none by data=False, the weight by data=['weight']"
# A 64-bit id that a spreadsheet or a float column has rounded.
_ROUNDED = re.compile(r"\d\.\d+[eE]\+\d+")


def read_graph(
    source: str | Path, *, columns: Sequence[str] | None = None, min_weight: float = 0, nodes: int | None = None
) -> Graph:
    """Read a directed graph.

    Args:
        source: one of `EMBEDDED`, or a file: .parquet; .npz (a scipy.sparse matrix, or one square array), .npy or .mtx
            with entry [i, j] the edge i -> j; .graphml; anything else is text, a row an edge, separated by tabs,
            semicolons, commas or spaces. Text, .mtx and .graphml may be gzipped (.gz).
        columns: names of the source, the target and, optionally, the weight column. By default those of FlyWire Codex
            and other usual names are known; text without a header has them in this order.
        min_weight: keep pairs whose weight, summed over their rows, is at least this. Without a weight
            column every row counts 1.
        nodes: N, where more nodes exist than have an edge in the file; N counts in densities.

    Raises:
        ValueError: rows that cannot be read, with their lines; columns that are not there.
    """
    if nodes is not None:
        check_count("nodes", nodes, minimum=1)
    if str(source) in EMBEDDED:
        rows = _read_embedded(str(source), columns)
    else:
        path = Path(source)
        if not path.is_file():
            raise ValueError(f"EDGES must be a file or one of {', '.join(EMBEDDED)}, got {str(source)!r}")
        kind = path.name.lower().removesuffix(".gz").rpartition(".")[2]
        try:
            if kind in _MATRICES:
                _refuse_columns(columns, kind)
                if nodes is not None:
                    raise ValueError(f"nodes is given by the matrix in {path.name}, got {nodes} besides")
                return as_graph(_MATRICES[kind](path), min_weight=min_weight)
            rows = _read_rows(path, kind, columns)
        except (OSError, EOFError, zlib.error, zipfile.BadZipFile, UnicodeDecodeError) as error:
            raise ValueError(f"{path.name} cannot be read: {error}") from error
    if nodes is not None and nodes < rows.nodes:
        raise ValueError(f"nodes must be at least the {rows.nodes} that the file names, got {nodes}")
    return Graph.from_edges(
        rows.sources,
        rows.targets,
        rows.nodes if nodes is None else nodes,
        weights=rows.weights,
        min_weight=min_weight,
        notes=tuple(rows.notes),
    )


@dataclass
class _Rows:
    sources: np.ndarray
    targets: np.ndarray
    weights: np.ndarray | None
    nodes: int
    notes: list[str] = field(default_factory=list)


def _read_embedded(name: str, columns: Sequence[str] | None) -> _Rows:
    _refuse_columns(columns, name)
    if name == "worm":
        with resources.as_file(_DATA / "worm.csv.gz") as path:
            return _read_text(path, None)
    only = None
    if name == "larva-brain":
        with resources.as_file(_DATA / "larva_neurons.csv.gz") as path, gzip.open(path, "rt", encoding="utf-8") as file:
            only = {row["neuron_id"] for row in csv.DictReader(file) if row["brain_and_inputs"] == "True"}
    with resources.as_file(_DATA / "larva.txt.gz") as path:
        return _read_text(path, None, only=only)


def _read_rows(path: Path, kind: str, columns: Sequence[str] | None) -> _Rows:
    if kind == "parquet":
        return _read_parquet(path, columns)
    if kind == "graphml":
        _refuse_columns(columns, kind)
        return _read_graphml(path)
    return _read_text(path, columns)


def _refuse_columns(columns: Sequence[str] | None, kind: str) -> None:
    if columns is not None:
        raise ValueError(f"columns has no meaning for {kind}, got {','.join(columns)!r}")


def _choose(header: Sequence[str], columns: Sequence[str] | None) -> list[int] | None:
    """Places of source, target and, where there is one, weight; None where the header names no source or target."""
    names = [name.strip().lower() for name in header]
    if columns is not None:
        missing = [name for name in columns if name.lower() not in names]
        if len(columns) not in (2, 3) or len(set(columns)) < len(columns) or missing:
            raise ValueError(
                f"columns must name the source, the target and perhaps the weight column, all different, among "
                f"{', '.join(header)}; got {','.join(columns)!r}"
            )
        return [names.index(name.lower()) for name in columns]
    found = [[names.index(name) for name in known if name in names] for known in (_SOURCE, _TARGET, _WEIGHT)]
    if not found[0] or not found[1]:
        return None
    return [places[0] for places in found if places]


def _read_text(path: Path, columns: Sequence[str] | None, only: Collection[str] | None = None) -> _Rows:
    """A row an edge. `only` keeps the rows between these nodes."""
    ids: dict[str, int] = {}
    sources, targets, weights = array("q"), array("q"), array("d")
    bad = _BadRows(path)
    notes: list[str] = []
    places: list[int] = []
    width = outside = skipped = 0
    is_headed = False
    for number, fields in _split_lines(path):
        if not fields:
            skipped += 1
            continue
        if not width:
            width = len(fields)
            chosen = _choose(fields, columns)
            places = list(range(min(width, 3))) if chosen is None else chosen
            unused = [str(x + 1) if chosen is None else fields[x] for x in range(width) if x not in places]
            if unused:
                notes.append(f"columns not used: {', '.join(unused)}")
            if chosen is not None:
                is_headed = True
                continue
        if len(fields) != width or width < 2:
            bad.add(number, f"has {len(fields)} fields, not {max(width, 2)}")
            continue
        source, target = fields[places[0]].strip(), fields[places[1]].strip()
        if only is not None and not (source in only and target in only):
            outside += 1
            continue
        new = [_name_problem(name) for name in (source, target) if name not in ids]
        weight = 1.0 if len(places) < 3 else _number(fields[places[2]])
        if not 0 < weight < math.inf:
            text = fields[places[2]].strip()
            new.append(_BRACES if "{" in text else f"has the weight {text!r}, not a number above 0")
        problem = next(filter(None, new), None)
        if problem:
            bad.add(number, problem)
            continue
        sources.append(ids.setdefault(source, len(ids)))
        targets.append(ids.setdefault(target, len(ids)))
        weights.append(weight)
    bad.raise_if_any("; the columns of a header can be named with --columns")
    if not sources:
        raise ValueError(f"{path.name} holds no edge")
    first, rest = list(ids)[:2], list(ids)[2:]
    if rest and not any(name.isdigit() for name in first) and all(name.isdigit() for name in rest):
        raise ValueError(
            f"{path.name} begins with {' and '.join(first)}, and all other nodes are numbers: "
            "name the columns of its header with --columns"
        )
    if not is_headed and len(sources) > 1 and min(np.min(sources[1:]), np.min(targets[1:])) > 1:
        notes.append(f"the first row, {' and '.join(first)}, is an edge of nodes that no other row names")
    if skipped:
        notes.append(f"blank and comment lines: {skipped:,}")
    if only is not None:
        notes.append(f"rows that leave the chosen nodes: {outside:,}")
    if len(places) < 3:
        notes.append("no weight column: every row counts 1")
    return _Rows(np.asarray(sources), np.asarray(targets), np.asarray(weights), len(ids), notes)


def _split_lines(path: Path) -> Iterator[tuple[int, list[str]]]:
    """(line number, fields), no fields for a blank line or a comment. The first row tells the delimiter."""
    delimiter: str | None = None
    begun = False
    with (
        gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as raw,
        TextIOWrapper(raw, encoding="utf-8-sig") as file,
    ):
        for number, line in enumerate(file, 1):
            text = line.strip(" \r\n")
            if not text or text[0] in "#%":
                yield number, []
                continue
            if not begun:
                begun, delimiter = True, next((mark for mark in _MARKS if mark in text), None)
            if delimiter is not None and '"' in text:
                yield number, next(csv.reader([text], delimiter=delimiter))
            else:
                yield number, text.split(delimiter)


def _name_problem(name: str) -> str | None:
    if not name:
        return "names a node without a name"
    if "{" in name:
        return _BRACES
    return f"names a node {name}: a rounded number, its digits are lost" if _ROUNDED.fullmatch(name) else None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _numbers(path: Path, name: str, values: Any) -> np.ndarray:  # noqa: ANN401  # an array or a list of anything
    try:
        return np.asarray(values).astype(np.float64)
    except (ValueError, TypeError):
        raise ValueError(f"{path.name}: {name} must hold numbers alone, got others among them") from None


class _BadRows:
    """Rows that cannot be read: the first few in words, the rest as a count."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._count = 0
        self._shown: list[str] = []

    def add(self, number: int, problem: str) -> None:
        self._count += 1
        if self._count <= _SHOWN:
            self._shown.append(f"line {number} {problem}")

    def raise_if_any(self, advice: str = "") -> None:
        if self._count:
            more = f"; and {self._count - _SHOWN} more" if self._count > _SHOWN else ""
            raise ValueError(f"{self._path.name}: {'; '.join(self._shown)}{more}{advice}")


def _read_parquet(path: Path, columns: Sequence[str] | None) -> _Rows:
    from pyarrow import parquet, types

    def names_nodes(kind: object) -> bool:
        return types.is_integer(kind) or types.is_string(kind) or types.is_large_string(kind)

    table = parquet.read_table(path)
    places = _choose(table.column_names, columns)
    if places is None:
        raise ValueError(
            f"{path.name} has the columns {', '.join(table.column_names)}: name source and target with --columns"
        )
    for place in places:
        column = table.column(place)
        if column.null_count:
            row = int(np.flatnonzero(column.is_null().to_numpy())[0])
            raise ValueError(f"{path.name}: row {row + 1} has no {table.column_names[place]}")
        if place in places[:2] and not names_nodes(column.type):
            raise ValueError(
                f"{path.name}: nodes must be integers or text, got {column.type} in {table.column_names[place]}"
            )
    ends = [table.column(place) for place in places[:2]]
    if ends[0].type != ends[1].type:  # as text: numpy would join int64 and uint64 as floats
        ends = [column.cast("string") for column in ends]
    names, index = np.unique(np.concatenate([column.to_numpy() for column in ends]), return_inverse=True)
    weights = None
    notes = ["no weight column: every row counts 1"]
    if len(places) == 3:
        weights = _numbers(path, table.column_names[places[2]], table.column(places[2]).to_numpy())
        bad = _BadRows(path)
        for row in np.flatnonzero(~(np.isfinite(weights) & (weights > 0))):
            bad.add(int(row) + 1, f"has the weight {weights[row]}, not a number above 0")
        bad.raise_if_any()
        notes = []
    unused = [name for place, name in enumerate(table.column_names) if place not in places]
    if unused:
        notes.append(f"columns not used: {', '.join(unused)}")
    half = len(ends[0])
    return _Rows(index[:half], index[half:], weights, len(names), notes)


def _load_numpy(path: Path) -> Any:  # noqa: ANN401  # an array, or an archive of arrays
    try:
        return np.load(path, allow_pickle=False)
    except ValueError:  # whose message recommends to unpickle it
        raise ValueError(f"{path.name} cannot be read: it holds no plain arrays of numpy") from None


def _load_npz(path: Path) -> sparse.sparray | np.ndarray:
    with _load_numpy(path) as arrays:
        names = list(arrays)
        if "format" not in names:
            if len(names) != 1:
                raise ValueError(f"{path.name} must hold one matrix, got the arrays {', '.join(names)}")
            return arrays[names[0]]
    return sparse.csr_array(sparse.load_npz(path))


def _load_market(path: Path) -> Any:  # noqa: ANN401  # sparse or dense, as the file says
    try:
        return io.mmread(path, spmatrix=False)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{path.name} cannot be read: {error}") from error


_MATRICES = {"npz": _load_npz, "npy": _load_numpy, "mtx": _load_market}


def _read_graphml(path: Path) -> _Rows:
    from igraph import Graph as Compiled
    from igraph import InternalError

    try:
        read = Compiled.Read_GraphMLz if path.suffix == ".gz" else Compiled.Read_GraphML
        graph = read(str(path))
    except InternalError as error:
        raise ValueError(f"{path.name} is no GraphML: {str(error).splitlines()[0]}") from None
    ends = np.array(graph.get_edgelist(), dtype=np.int64).reshape(-1, 2)
    name = next((name for name in _WEIGHT if name in graph.es.attributes()), None)
    weights = None if name is None else _numbers(path, name, graph.es[name])
    if weights is not None and np.isnan(weights).any():
        raise ValueError(f"{path.name}: {np.isnan(weights).sum()} of {len(weights)} edges have no {name}")
    notes = ["no weight attribute: every edge counts 1"] if name is None else []
    if not graph.is_directed():
        notes.append("undirected file: every edge goes both ways, and counts as two rows")
        ends = np.concatenate([ends, ends[ends[:, 0] != ends[:, 1], ::-1]])
        if weights is not None:
            loops = np.array([e.is_loop() for e in graph.es], dtype=bool)
            weights = np.concatenate([weights, weights[~loops]])
    return _Rows(ends[:, 0], ends[:, 1], weights, graph.vcount(), notes)
