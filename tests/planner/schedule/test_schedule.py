"""Schedules: what is saved follows from the order; recomputation comes late, once, and only where it is needed."""

import random

import pytest
import torch
from conftest import model_of, raises
from torch import nn

import ackpt
from ackpt.graph import ScheduleError, lower, profile, scheduled, simulate
from ackpt.planner.capture.joint_graph import BACKWARD
from ackpt.planner.schedule.schedule import COMPUTE, frees, live_before_backward, recompute_late, unpacked_at_once


@pytest.fixture(scope="module")
def graph():
    layers = [layer for _ in range(3) for layer in (nn.Linear(4, 4), nn.Tanh())]
    return ackpt.trace(nn.Sequential(*layers), torch.ones(2, 4))


def recomputed(graph, schedule):
    return [s.id for s in schedule.backward if s.kind == COMPUTE and graph.nodes[s.id].phase == "forward"]


def operations(graph, places):
    return [graph.nodes[place].target for place in places if graph.analysis.allocated.get(place)]


def test_saving_nothing_recomputes_each_value_once_and_late(graph):
    schedule = lower(graph, ())
    again = operations(graph, recomputed(graph, schedule))
    # The last Tanh is the output, which the caller holds; of the others each runs once more.
    assert sorted(again) == 2 * ["aten.addmm.default"] + 2 * ["aten.tanh.default"]
    order = [graph.nodes[step.id].target for step in schedule.backward if step.kind == COMPUTE]
    assert order.index("aten.tanh_backward.default") < order.index("aten.addmm.default")
    simulated = simulate(graph, profile(graph), schedule)
    assert simulated.recompute_flops == 2 * (2 * 2 * 4 * 4)


def test_writing_operations_are_not_recomputed():
    graph = ackpt.trace(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh()), torch.ones(3, 4))
    copy = next(node.id for node in graph.nodes if node.target == "aten.copy_.default")
    raises(ScheduleError, "cannot be recomputed: it changes its argument", lambda: scheduled(graph, None, [copy]))


@pytest.fixture(scope="module")
def drawn_graph():
    def forward(self, x):
        for _ in range(3):
            a, b, c = self.norm(self.first(x)).tanh().chunk(3, 1)
            x = self.last(self.dropout(torch.cat([a * b, b.exp(), c.max(0).values + a], 1))) + x
        return x.square().mean()

    layers = {"first": nn.Linear(8, 24), "norm": nn.BatchNorm1d(24), "last": nn.Linear(24, 8)}
    return ackpt.trace(model_of(forward, **layers, dropout=nn.Dropout(0.5)), torch.randn(16, 8))


def one_by_one(drawn_graph, order):
    """(position, storage) of every free in backward, and the storages that are needed before."""
    analysis = drawn_graph.analysis
    found, later = [], set()
    for position in range(len(order) - 1, -1, -1):
        for storage in analysis.accessed[BACKWARD][order[position]]:
            if storage not in later:
                later.add(storage)
                found.append((position, storage))
        later -= analysis.allocated.get(order[position], set())
    return found[::-1], later


@pytest.mark.parametrize("seed", range(20))
def test_frees_are_those_found_one_by_one(drawn_graph, seed):
    analysis = drawn_graph.analysis
    chooser = random.Random(seed)
    share = chooser.random()
    saved = {s for s in sorted(analysis.savable) if chooser.random() < share}
    readers = analysis.needed_backward
    order = unpacked_at_once(drawn_graph, recompute_late(analysis, readers, live_before_backward(analysis, saved)))
    freed = frees(drawn_graph, order, BACKWARD)
    found = list(zip(freed.positions.tolist(), freed.storages.tolist())), set(freed.needed.tolist())
    assert found == one_by_one(drawn_graph, order)


@pytest.mark.parametrize("seed", range(10))
def test_results_are_taken_right_after_their_operation_so_nothing_is_freed_later(drawn_graph, seed):
    analysis, chooser = drawn_graph.analysis, random.Random(seed)
    live = live_before_backward(analysis, {s for s in sorted(analysis.savable) if chooser.random() < 0.2})
    order = recompute_late(analysis, analysis.needed_backward, live)
    unpacked = unpacked_at_once(drawn_graph, order)
    assert sorted(unpacked) == sorted(order) and unpacked_at_once(drawn_graph, unpacked) == unpacked
    for position, node in enumerate(unpacked):
        if node in analysis.taken_from:
            before = unpacked[position - 1]
            assert analysis.taken_from.get(before, before) == analysis.taken_from[node]

    def last_users(nodes):  # by storage
        freed = frees(drawn_graph, nodes, BACKWARD)
        return dict(zip(freed.storages.tolist(), (nodes[at] for at in freed.positions.tolist())))

    before, after = last_users(order), last_users(unpacked)
    place = {node: position for position, node in enumerate(order)}
    assert all(place[after[s]] <= place[before[s]] for s in before)


def test_an_empty_order_frees_nothing(drawn_graph):
    assert [len(part) for part in frees(drawn_graph, [], BACKWARD)] == [0, 0, 0]
