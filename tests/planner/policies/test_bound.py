"""The lower bound: below every schedule that fits, and never above what a search through all of them finds."""

import itertools
import random

import pytest
import torch
from conftest import model_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from planned_models import MODELS, plans, traced
from torch import nn

import ackpt
from ackpt.graph import simulate
from ackpt.planner.policies.search.frontier import added_cost, baseline_cost, costs
from ackpt.planner.policies.search.lower_bound import lower_bound
from ackpt.planner.policies.search.refinement import decisions
from ackpt.planner.schedule.schedule import everything, lower
from ackpt.planner.schedule.simulator import peak_of


def make_small(widths):
    """A few operations whose results differ in bytes and cost, with a value that is read again at the end."""

    def forward(self, x):
        first = x = self.layers[0](x).sigmoid()
        for layer in self.layers[1:]:
            x = layer(x).tanh()
        return x.square().mean() + first.mean()

    return model_of(forward, layers=nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in zip(widths, widths[1:])))


def small(widths, rows):
    graph = ackpt.trace(make_small(widths), torch.randn(rows, widths[0]))
    return graph, ackpt.profile(graph)


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.integers(1, 12), min_size=3, max_size=4), st.integers(4, 40))
def test_no_set_of_saved_values_is_cheaper_than_the_bound(widths, rows):
    graph, profile = small(widths, rows)
    cost = costs(graph, profile)
    kept = everything(graph).saved
    found = []
    for share in itertools.product((False, True), repeat=len(kept)):
        schedule = lower(graph, {s for s, is_kept in zip(kept, share) if is_kept})
        found.append((peak_of(graph, schedule, profile.workspace_bytes), added_cost(graph, schedule, cost)))
    for limit in {peak for peak, _ in found}:
        bound = lower_bound(graph, cost, profile.workspace_bytes, limit)
        assert bound is not None
        assert bound <= min(added for peak, added in found if peak <= limit) * (1 + 1e-9) + 1e-6


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("policy", ["auto", "rotor", "full"])
def test_no_plan_costs_less_than_its_bound(name, policy):
    for plan in plans(name, policy):
        assert plan.lower_bound is not None and plan.lower_bound <= plan.cost * (1 + 1e-9)
        assert plan.gap == (1 + plan.cost) / (1 + plan.lower_bound) - 1


def test_the_bound_rises_as_the_budget_falls_until_nothing_fits():
    graph, profile = traced("line")
    cost, plain = costs(graph, profile), everything(graph)
    peak = peak_of(graph, plain, profile.workspace_bytes)
    bounds = [lower_bound(graph, cost, profile.workspace_bytes, int(share * peak)) for share in (1.0, 0.8, 0.5, 0.3)]
    assert bounds[0] == 0 and all(a < b for a, b in itertools.pairwise(bounds))
    assert bounds[-1] < baseline_cost(graph, profile)
    assert lower_bound(graph, cost, profile.workspace_bytes, 1) is None


def test_a_plan_without_a_budget_has_no_bound():
    graph, profile = traced("line")
    plan = ackpt.plan(graph, policy="full", profile=profile)
    assert plan.lower_bound is None and plan.gap is None
    assert "no lower bound" in plan.table()


def test_without_scipy_the_plan_is_the_same_and_says_that_it_has_no_bound(monkeypatch):
    import importlib.util

    graph, profile = traced("language_model")
    with_bound = ackpt.plan(graph, 0.8, profile=profile)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *args: None if name == "scipy" else find(name, *args))
    without = ackpt.plan(graph, 0.8, profile=profile)
    assert without.schedule == with_bound.schedule and without.lower_bound is None
    assert (
        "no lower bound" in without.table()
        and f"optimality gap {with_bound.gap:.1%} = (1 + cost) / (1 + lower bound) - 1" in with_bound.table()
    )


def test_a_budget_that_the_baseline_keeps_is_said_to_need_nothing():
    graph, profile = traced("line")
    said = "recomputed        nothing: the baseline fits the budget"
    assert said in ackpt.plan(graph, "1GiB", profile=profile).table()
    assert said not in ackpt.plan(graph, policy="none", profile=profile).table()
    assert said not in ackpt.plan(graph, 0.9, profile=profile).table()


@pytest.mark.parametrize("name", MODELS)
def test_decisions_are_sorted_by_cost_and_have_their_bytes(name):
    graph, profile = traced(name)
    plan = plans(name, "auto")[-1]
    assert plan.decisions and len(plan.decisions) <= 10
    shares = [decision.cost for decision in plan.decisions]
    assert shares == sorted(shares, reverse=True) and sum(shares) <= plan.cost + 1e-12
    assert all(decision.runs >= 1 and decision.module in plan.table() for decision in plan.decisions)
    analysis = graph.analysis
    by_name = {node.name: node.id for node in graph.nodes}
    rng = random.Random(0)
    for decision in rng.sample(plan.decisions, min(3, len(plan.decisions))):
        assert decision.bytes == sum(
            analysis.bytes[s] for s in analysis.allocated[by_name[decision.name]] & analysis.savable
        )


def test_keeping_one_of_two_values_by_hand():
    """Two equal layers, both recomputed; keeping the second adds its bytes to what lives at the peak."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Sigmoid(), nn.Linear(8, 8), nn.Sigmoid(), nn.Linear(8, 1))
    graph = ackpt.trace(model, torch.randn(64, 8), differentiate="all")
    profile, cost = ackpt.profile(graph), None
    cost = costs(graph, profile)
    sigmoids = [
        s for s in everything(graph).saved if graph.nodes[graph.storages[s].producer].target.startswith("aten.sig")
    ]
    assert len(sigmoids) == 2
    plan = lower(graph, set())
    found = decisions(graph, plan, cost, 1.0, profile)
    for decision in found:
        place = next(node.id for node in graph.nodes if node.name == decision.name)
        saved = {s for s in sigmoids if graph.storages[s].producer == place}
        if saved:
            assert decision.peak_if_kept_bytes == simulate(graph, profile, lower(graph, saved)).peak_bytes


def test_a_model_without_recomputable_values_has_a_bound_of_zero():
    plan = ackpt.plan(ackpt.trace(nn.Linear(8, 8), torch.randn(4, 8)), 1.0)
    assert plan.cost == 0 and plan.lower_bound == 0
