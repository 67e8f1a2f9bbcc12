"""Schedules: what is saved follows from the order; recomputation comes late, once, and only where it is needed."""

import pytest
import torch
from conftest import raises
from torch import nn

import ackpt
from ackpt.graph import ScheduleError, lower, profile, scheduled, simulate
from ackpt.planner.schedule.schedule import COMPUTE, FREE


@pytest.fixture(scope="module")
def graph():
    layers = [layer for _ in range(3) for layer in (nn.Linear(4, 4), nn.Tanh())]
    return ackpt.trace(nn.Sequential(*layers), torch.ones(2, 4))


def names(graph, steps):
    return [graph.nodes[step.id].target for step in steps if step.kind == COMPUTE]


def recomputed(graph, schedule):
    return [s.id for s in schedule.backward if s.kind == COMPUTE and graph.nodes[s.id].phase == "forward"]


def operations(graph, places):
    return [graph.nodes[place].target for place in places if graph.analysis.allocated.get(place)]


def test_saving_everything_recomputes_nothing(graph):
    schedule = lower(graph, graph.analysis.savable)
    assert operations(graph, recomputed(graph, schedule)) == []
    assert simulate(graph, profile(graph), schedule).recompute_flops == 0


def test_saving_nothing_recomputes_each_value_once_and_late(graph):
    schedule = lower(graph, ())
    again = operations(graph, recomputed(graph, schedule))
    # The last Tanh is the output, which the caller holds; of the others each runs once more.
    assert sorted(again) == 2 * ["aten.addmm.default"] + 2 * ["aten.tanh.default"]
    order = names(graph, schedule.backward)
    assert order.index("aten.tanh_backward.default") < order.index("aten.addmm.default")
    simulated = simulate(graph, profile(graph), schedule)
    assert simulated.recompute_flops == 2 * (2 * 2 * 4 * 4)


def test_every_free_follows_the_last_use(graph):
    for saved in (graph.analysis.savable, ()):
        schedule = lower(graph, saved)
        steps = schedule.backward
        for at, step in enumerate(steps):
            if step.kind == FREE:
                used = next(s for s in reversed(steps[:at]) if s.kind == COMPUTE)
                reads = {s for i in graph.nodes[used.id].inputs for s in graph.nodes[i].storages}
                assert step.id in reads | set(graph.nodes[used.id].storages)


def test_writing_operations_are_not_recomputed():
    graph = ackpt.trace(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh()), torch.ones(3, 4))
    copy = next(node.id for node in graph.nodes if node.target == "aten.copy_.default")
    raises(ScheduleError, "cannot be recomputed: it changes its argument", lambda: scheduled(graph, None, [copy]))


def test_the_bytes_of_a_step_counted_by_hand(graph):
    everything = simulate(graph, profile(graph), lower(graph, graph.analysis.savable))
    value, weight, bias = 2 * 4 * 4, 4 * 4 * 4, 4 * 4
    assert everything.saved_bytes == 3 * value  # the results of the three Tanh
    assert everything.resident_bytes == 3 * (weight + bias) + value
    assert everything.timeline.live[-1] == 2 * value + 3 * (weight + bias)  # output, its gradient, and all gradients
