"""Orders of nodes: when each storage is freed, and when each missing activation is recomputed.

Planning makes thousands of schedules for a graph, so this is its innermost loop: `frees` is one pass of numpy over a
whole order, and the time of `LateOrders` grows with the recomputed nodes, not with the graph.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ackpt.planner.capture.analysis import Analysis, once_per_graph
from ackpt.planner.capture.joint_graph import BACKWARD, FORWARD, JointGraph


class Frees(NamedTuple):
    """``storages[i]`` is last used by the node at ``positions[i]`` of the order, before the order allocates it again.

    Both in the order in which schedules free. ``needed``: the storages that must be live before the order begins.
    """

    positions: np.ndarray
    storages: np.ndarray
    needed: np.ndarray


class Uses(NamedTuple):
    """Entries for every storage that every node of an order uses.

    ``positions``: of the node in the order, rising; ``storages``. ``is_access``: whether the node reads or writes the
    storage, otherwise it only allocates it; ``results``: whether its result lies there; ``allocates``.
    """

    positions: np.ndarray
    storages: np.ndarray
    is_access: np.ndarray
    results: np.ndarray
    allocates: np.ndarray


def uses_of(graph: JointGraph, order, phase: str) -> Uses:
    """The storages that the nodes `order` use when they run in the forward or in the backward."""
    start, count, columns = _table(graph, phase)
    order = np.asarray(order, dtype=np.int64)
    count = count[order]
    positions = np.repeat(np.arange(len(order)), count)
    entries = np.arange(len(positions)) + np.repeat(start[order] - (np.cumsum(count) - count), count)
    return Uses(positions, *(column[entries] for column in columns))


def frees(graph: JointGraph, order, phase: str) -> Frees:
    """The last uses of all storages when the nodes `order` run in the forward or in the backward, one by one."""
    uses = uses_of(graph, order, phase)
    by_storage = np.argsort(uses.storages, kind="stable")  # in linear time, since storages are numbers of two bytes
    grouped, allocates = uses.storages[by_storage], uses.allocates[by_storage]
    changes = np.ones(len(grouped) + 1, dtype=bool)  # where another storage begins
    np.not_equal(grouped[1:], grouped[:-1], out=changes[1:-1])
    is_last = np.empty(len(grouped), dtype=bool)
    is_last[by_storage] = changes[1:] | np.append(allocates[1:], True)
    is_last &= uses.is_access
    return Frees(uses.positions[is_last], uses.storages[is_last], grouped[changes[:-1] & ~allocates])


def unpacked_at_once(graph: JointGraph, order: list[int]) -> list[int]:
    """`order` with every result of an operation that has several taken right after the operation has run.

    The operation returns a tuple, which holds all of its results until the last of them is taken from it: a recomputed
    batch norm's output, for example, until backward reads the mean.
    """
    nodes = np.asarray(order, dtype=np.int64)
    operations = _operations(graph)[nodes]
    places = np.flatnonzero(operations >= 0)  # of the operations with several results, and of what is taken from them
    operations = operations[places]
    # Every group begins with a run of its operation.
    group, groups = operations * len(nodes), np.argsort(operations, kind="stable")
    runs = np.where(nodes[places] == operations, group + places, -1)
    runs[groups] = np.maximum.accumulate(runs[groups])
    moved = np.arange(len(nodes))
    moved[places] = runs - group
    rank = moved * len(graph.nodes) + nodes  # what is taken from one run: by node
    return order if (np.diff(rank) >= 0).all() else nodes[np.argsort(rank, kind="stable")].tolist()


@once_per_graph
def _operations(graph: JointGraph) -> np.ndarray:
    """By node: the operation with several results that it is or whose result it takes, else -1."""
    operations = np.full(len(graph.nodes), -1, dtype=np.int64)
    for node, operation in graph.analysis.taken_from.items():
        operations[[node, operation]] = operation
    return operations


@once_per_graph
def _table(graph: JointGraph, phase: str):
    """The entries of all nodes: by node, where they start and how many they are; and the columns of `Uses`."""
    analysis: Analysis = graph.analysis
    rows = []
    for node, accessed in enumerate(analysis.accessed[phase]):
        allocated = analysis.allocated.get(node, frozenset())
        results = analysis.storages(node, again=phase == BACKWARD and graph.nodes[node].phase == FORWARD)
        # A schedule frees in falling order of storages.
        storages = sorted(allocated.union(accessed), reverse=True)
        rows.append([(s, s in accessed, s in results, s in allocated) for s in storages])
    count = np.array([len(row) for row in rows], dtype=np.int64)
    entries = np.array([entry for row in rows for entry in row], dtype=np.int64).reshape(-1, 4)
    storages = entries[:, 0].astype(np.uint16 if len(graph.storages) <= 2**16 else np.int64)
    return np.cumsum(count) - count, count, (storages, *(entries[:, 1:] == 1).T.copy())


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
