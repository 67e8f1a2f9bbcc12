"""Bounds, optima and policies in their order, and the search of auto taken apart into the parts that it has."""

import pytest
import torch

import ackpt
from ackpt.planner.policies import auto
from ackpt.planner.policies.search.frontier import costs as costs_of
from ackpt.planner.policies.search.frontier import frontier, pareto
from ackpt.planner.policies.search.refinement import refined
from experiments import optimum, sublinear
from experiments.steps.frontier_models import checked_sizes, workload

pytestmark = pytest.mark.usefixtures("one_thread")


def traced(model, *args):
    graph = ackpt.trace(model, *args)
    return graph, ackpt.profile(graph, workspace="measured")


def test_lower_bound_optimum_and_policies_are_in_order():
    pytest.importorskip("scipy")
    chain = sublinear.Chain(*(sublinear.Block(4) for _ in range(4)))
    rows = optimum.distances(*traced(chain, torch.randn(256, 4)), (0.9, 0.8, 0.1), ("auto", "full"), exact=True)
    for row in rows[:2]:
        assert 0 <= row["bound"] <= row["ilp_bound"] == row["ilp"] <= row["auto"] <= row["full"]
    assert rows[1]["ilp"] > rows[1]["bound"]
    assert rows[2] == {"budget": 0.1, "bound": None, "ilp": None, "ilp_bound": None, "auto": None, "full": None}


def test_the_generators_of_auto_end_in_its_frontier_and_none_makes_it_worse():
    sizes = {"layers": 2, "dim": 16, "heads": 2, "ff_dim": 32, "vocab_size": 20, "seq_len": 24, "batch_size": 2}
    work = workload("transformer", checked_sizes("transformer", sizes), 0)
    graph, profile = traced(work.model, *work.args)
    parts = optimum.parts_of_auto(graph, profile)
    assert [*parts] == ["segments", "blocks", "levels", "instead", "policies", "refined", "evicted"]
    points = frontier(graph, profile, auto.candidates)
    assert parts["evicted"] == points
    again = refined(graph, parts["policies"], costs_of(graph, profile), profile.workspace_bytes)
    before = [point.schedule for point in parts["policies"]]
    found = pareto(graph, profile, [*before, *again])
    assert [point[:2] for point in found] == [point[:2] for point in parts["refined"]]
    budgets = (0.8, 0.6)
    costs = [optimum.least_costs(graph, profile, part, budgets) for part in parts.values()]
    for budget in budgets:
        found = [float("inf") if cost[budget] is None else cost[budget] for cost in costs]
        assert found[0] > found[1] and found == sorted(found, reverse=True)
        assert costs[-1][budget] == ackpt.plan(graph, budget, profile=profile).cost
    assert optimum.least_costs(graph, profile, points, (0.01,)) == {0.01: None}
