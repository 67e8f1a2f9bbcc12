"""Order a backward pass that recomputes each missing activation right before its first reader.

`LateOrders` finds it for many sets of saved activations: its time grows with the recomputed nodes, not with the graph.
`ackpt.planner.schedule.schedule.recompute_late` is the same for a single set and for nodes in any order.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from ackpt.planner.capture.joint_graph import Analysis

_REMEMBERED = 16  # orders of one block; they differ in few ways, because a block reads few values of others


class LateOrders:
    """Orders in which the backward nodes `readers`, which are sorted, run with the recomputations that they need."""

    def __init__(self, analysis: Analysis, readers: Sequence[int]):
        self._readers = np.array(readers, dtype=np.int64)
        self._reads, self._taken_from = analysis.backward_reads, analysis.taken_from
        own = set(readers)
        self._first: dict[int, int] = {}  # by node, the position of its first reader among the readers
        for position, reader in enumerate(readers):
            for node in self._reads[reader]:
                if node not in own:
                    self._first.setdefault(node, position)
        self._remembered: list[tuple[tuple[int, ...], tuple[int, ...], list[int]]] = []

    def order(self, live: set[int]) -> list[int]:
        """The readers, each after the nodes that it needs and that are not among the values `live`.

        The list must not be changed: an order depends only on which of the nodes met on the way are live.
        """
        for index, (recomputed, given, order) in enumerate(self._remembered):
            if live.isdisjoint(recomputed) and live.issuperset(given):
                if index:
                    self._remembered.insert(0, self._remembered.pop(index))
                return order
        recomputed, given, order = self._found(live)
        self._remembered.insert(0, (recomputed, given, order))
        del self._remembered[_REMEMBERED:]
        return order

    def _found(self, live: set[int]) -> tuple[tuple[int, ...], tuple[int, ...], list[int]]:
        """The nodes that are recomputed, the live ones that they and the readers read, and the order."""
        first = {node: position for node, position in self._first.items() if node not in live}
        given = self._first.keys() - first.keys()
        latest = [-node for node in first]  # each node comes before the nodes it reads
        heapq.heapify(latest)
        while latest:
            node = -heapq.heappop(latest)
            position = first[node]
            for source in self._reads[node]:
                if source in live:
                    given.add(source)
                    continue
                before = first.get(source)
                if before is None:
                    heapq.heappush(latest, -source)
                if before is None or position < before:
                    first[source] = position
        for node in first.keys() & self._taken_from.keys():
            first[node] = first.get(self._taken_from[node], first[node])  # right after the operation
        nodes = np.fromiter(first, np.int64, len(first))
        positions = np.fromiter(first.values(), np.int64, len(first))
        by_position = np.lexsort((nodes, positions))
        order = np.insert(self._readers, positions[by_position], nodes[by_position]).tolist()
        return tuple(first), tuple(given), order
