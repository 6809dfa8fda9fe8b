"""Write a random graph with given degrees, to measure `sattn graph` at a connectome's full size.

    python benchmarks/configuration_model.py DEGREES.csv EDGES.csv.gz
    sattn graph EDGES.csv.gz

DEGREES.csv has a header and the columns name, in-degree, out-degree. Half edges are matched uniformly (seed 0): a few
edges are self loops or repeat a pair, and `sattn graph` counts them.
"""

from __future__ import annotations

import csv
import gzip
import sys

import numpy as np


def main(degrees: str, edges: str) -> None:
    """Match each out-half of an edge with an in-half."""
    with open(degrees, encoding="utf-8") as file:
        names, inward, outward = zip(*list(csv.reader(file))[1:], strict=True)
    nodes = np.arange(len(names))
    sources = np.repeat(nodes, np.array(outward, dtype=np.int64))
    targets = np.repeat(nodes, np.array(inward, dtype=np.int64))
    if len(sources) != len(targets):
        raise SystemExit(f"in-degrees must sum to what out-degrees sum to, {len(sources)}, got {len(targets)}")
    np.random.default_rng(0).shuffle(targets)
    with gzip.open(edges, "wt", encoding="utf-8", compresslevel=1) as file:
        file.write("pre_root_id,post_root_id\n")
        file.writelines(f"{names[i]},{names[j]}\n" for i, j in zip(sources, targets, strict=True))


if __name__ == "__main__":
    main(*sys.argv[1:])
