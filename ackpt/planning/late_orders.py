"""The order in which backward runs if it recomputes each missing activation right before its first reader.

`LateOrders` finds it for many sets of saved activations: its time grows with the recomputed nodes, not with the graph.
`ackpt.planning.schedule.recompute_late` is the same for a single set and for nodes in any order.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from ackpt.capture.analysis import Analysis


class LateOrders:
    """Orders in which the backward nodes `readers`, which are sorted, run with the recomputations that they need."""

    def __init__(self, analysis: Analysis, readers: Sequence[int]):
        self._readers = np.array(readers, dtype=np.int64)
        self._reads = analysis.backward_reads
        own = set(readers)
        self._first: dict[int, int] = {}  # by node, the position of its first reader among the readers
        for position, reader in enumerate(readers):
            for node in self._reads[reader]:
                if node not in own:
                    self._first.setdefault(node, position)

    def order(self, live) -> list[int]:
        """The readers, each after the nodes that it needs and that are not among the values `live`."""
        first = {node: position for node, position in self._first.items() if node not in live}
        if not first:
            return self._readers.tolist()
        latest = [-node for node in first]  # each node comes before the nodes it reads
        heapq.heapify(latest)
        while latest:
            node = -heapq.heappop(latest)
            position = first[node]
            for source in self._reads[node]:
                if source not in live:
                    before = first.get(source)
                    if before is None:
                        heapq.heappush(latest, -source)
                    if before is None or position < before:
                        first[source] = position
        nodes = np.fromiter(first, np.int64, len(first))
        positions = np.fromiter(first.values(), np.int64, len(first))
        by_position = np.lexsort((nodes, positions))
        return np.insert(self._readers, positions[by_position], nodes[by_position]).tolist()
