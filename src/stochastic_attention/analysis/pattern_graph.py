"""The graph of an attention pattern: the union of its layers' edges, from the keys that the op itself would read."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..ops.pattern import Pattern
from ..ops.validation import check_count
from .edges import adjacency, layer_edges
from .graph import Graph


def pattern_graph(pattern: Pattern, n: int, layers: int, *, seed: int = 0) -> Graph:
    """The causal graph of one document of n tokens: an edge j -> i where query i reads key j in any of the layers.

    Edges point the way information flows. O(layers * n * window) time and memory. A token's edge to itself is a self
    loop of the tally, a pair that several layers read a repeated row. The union forgets the order of the layers: a path
    in it need not be one that information can take through the stack.

    Args:
        pattern: any that `layer_edges` takes; MoBA by its model there.
        n, layers: tokens, and layers 0 to layers - 1.
        seed: of the permutations, in place of the pattern's own, and of MoBA's model.
    """
    check_count("layers", layers, minimum=1)
    if pattern.is_random:
        pattern = replace(pattern, seed=seed)
    read = [adjacency(layer_edges(pattern, n, layer=layer, seed=seed)).tocoo() for layer in range(layers)]
    queries, keys = (np.concatenate([getattr(layer, ends) for layer in read]) for ends in ("row", "col"))
    note = f"union of {layers} causal layer{'s' if layers > 1 else ''} of {pattern}, an edge from key to query"
    return Graph.from_edges(keys, queries, n, notes=(note,))
