"""The fast parts of planning, against the same things one step at a time: frees, and late orders."""

import random

import pytest
import torch

import ackpt
from ackpt.planner.capture.joint_graph import BACKWARD
from ackpt.planner.schedule.schedule import frees, live_before_backward, recompute_late, unpacked_at_once


class Net(torch.nn.Module):
    """Views, several results of one operation, batch norm, and random numbers."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = torch.nn.Linear(8, 24), torch.nn.BatchNorm1d(24), torch.nn.Linear(24, 8)
        self.dropout = torch.nn.Dropout(0.5)

    def forward(self, x):
        for _ in range(3):
            a, b, c = self.norm(self.first(x)).tanh().chunk(3, 1)
            x = self.last(self.dropout(torch.cat([a * b, b.exp(), c.max(0).values + a], 1))) + x
        return x.square().mean()


@pytest.fixture(scope="module")
def graph():
    return ackpt.trace(Net(), torch.randn(16, 8))


def one_by_one(graph, order):
    """(position, storage) of every free in backward, and the storages that are needed before."""
    analysis = graph.analysis
    found, later = [], set()
    for position in range(len(order) - 1, -1, -1):
        for storage in analysis.accessed[BACKWARD][order[position]]:
            if storage not in later:
                later.add(storage)
                found.append((position, storage))
        later -= analysis.allocated.get(order[position], set())
    return found[::-1], later


@pytest.mark.parametrize("seed", range(20))
def test_frees_are_those_found_one_by_one(graph, seed):
    analysis = graph.analysis
    chooser = random.Random(seed)
    share = chooser.random()
    saved = {s for s in sorted(analysis.savable) if chooser.random() < share}
    readers = analysis.needed_backward
    order = unpacked_at_once(graph, recompute_late(analysis, readers, live_before_backward(analysis, saved)))
    freed = frees(graph, order, BACKWARD)
    assert (list(zip(freed.positions.tolist(), freed.storages.tolist())), set(freed.needed.tolist())) == one_by_one(
        graph, order
    )


@pytest.mark.parametrize("seed", range(10))
def test_results_are_taken_right_after_their_operation_so_nothing_is_freed_later(graph, seed):
    analysis, chooser = graph.analysis, random.Random(seed)
    live = live_before_backward(analysis, {s for s in sorted(analysis.savable) if chooser.random() < 0.2})
    order = recompute_late(analysis, analysis.needed_backward, live)
    unpacked = unpacked_at_once(graph, order)
    assert sorted(unpacked) == sorted(order) and unpacked_at_once(graph, unpacked) == unpacked
    for position, node in enumerate(unpacked):
        if node in analysis.taken_from:
            before = unpacked[position - 1]
            assert analysis.taken_from.get(before, before) == analysis.taken_from[node]

    def last_users(nodes):  # by storage
        freed = frees(graph, nodes, BACKWARD)
        return dict(zip(freed.storages.tolist(), (nodes[at] for at in freed.positions.tolist())))

    before, after = last_users(order), last_users(unpacked)
    place = {node: position for position, node in enumerate(order)}
    assert all(place[after[s]] <= place[before[s]] for s in before)


def test_an_empty_order_frees_nothing(graph):
    assert [len(part) for part in frees(graph, [], BACKWARD)] == [0, 0, 0]
