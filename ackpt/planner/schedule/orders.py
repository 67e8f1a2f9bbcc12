"""Orders of nodes: when each storage is freed, and when results are taken from an operation that has several.

Planning makes thousands of schedules for a graph, so this is its innermost loop: one pass of numpy over a whole order.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ackpt.planner.capture.joint_graph import BACKWARD, FORWARD, Analysis, JointGraph, once_per_graph


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

    The tuple of results holds all of them until the last is taken: a batch norm's output until backward reads the mean.
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
