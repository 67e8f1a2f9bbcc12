"""Policy ilp on whole graphs: the exhaustive search finds nothing cheaper, nor does any policy; bounds and refusals."""

import sys
from math import inf

import pytest
import torch
from conftest import model_of, raises
from hypothesis import given, settings
from hypothesis import strategies as st
from planned_models import traced
from test_ilp import exhaustive
from torch import nn

import ackpt
from ackpt.planner.policies import POLICIES, auto
from ackpt.planner.policies.search.frontier import added_cost, costs
from ackpt.planner.schedule.schedule import everything
from ackpt.planner.schedule.simulator import peak_of, simulate
from experiments.policies import ilp

pytestmark = pytest.mark.usefixtures("one_thread")

OTHERS = sorted(set(POLICIES) - {"none", "manual"})


def graph_of(model, *args):
    graph = ackpt.trace(model, *args)
    return graph, ackpt.profile(graph)


def plain_peak(graph, profile):
    return peak_of(graph, everything(graph), profile.workspace_bytes)


def added(graph, profile, plan):
    return added_cost(graph, plan.schedule, costs(graph, profile))


def squares(widths):
    """Few operations, which differ in size."""

    def forward(self, x):
        for weight in self.weights:
            x = (x[:, :1] * weight).tanh()
        return x.sum()

    return model_of(forward, weights=nn.ParameterList(nn.Parameter(torch.ones(width)) for width in widths))


@settings(max_examples=12, deadline=None)
@given(st.lists(st.sampled_from([1, 2, 3, 5]), min_size=2, max_size=3), st.sampled_from([0.9, 0.75, 0.6]))
def test_the_exhaustive_search_finds_nothing_cheaper(widths, share):
    graph, profile = graph_of(squares(widths), torch.ones(32, 1))
    dag = ilp.contracted(graph, profile).dag
    limit = int(share * plain_peak(graph, profile))
    least = exhaustive(dag, limit)
    found = ilp.solve_graph(graph, profile, limit)
    fits = peak_of(graph, found.schedule, profile.workspace_bytes) <= limit
    assert fits == (least < inf)
    if fits:
        assert found.cost == found.lower_bound == least - sum(dag.costs)


@st.composite
def chains(draw):
    widths = draw(st.lists(st.sampled_from([2, 4, 8]), min_size=2, max_size=3))
    kinds = draw(st.lists(st.sampled_from([nn.Tanh, nn.GELU]), min_size=len(widths), max_size=len(widths)))
    layers = [nn.Sequential(nn.Linear(a, b), kind()) for a, b, kind in zip([4, *widths], widths, kinds)]
    return nn.Sequential(*layers, nn.Linear(widths[-1], 1))


@settings(max_examples=6, deadline=None)
@given(chains())
def test_no_policy_is_cheaper(model):
    graph, profile = graph_of(model, torch.ones(64, 4))
    for budget in (0.95, 0.8, 0.65):
        costs = {}
        for policy in (ilp.ilp, *OTHERS):
            try:
                costs[policy] = added(graph, profile, ackpt.plan(graph, budget, policy, profile=profile))
            except ackpt.BudgetError:
                costs[policy] = inf
        assert costs[ilp.ilp] == min(costs.values())


class Sum(nn.Module):
    def forward(self, x):
        return x.sum()


def pooled():
    """Operations with several results of which some die early."""
    torch.manual_seed(0)
    layers = [
        layer
        for before, channels in ((1, 2), (2, 4), (4, 4))
        for layer in (nn.Conv2d(before, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU())
    ]
    return nn.Sequential(*layers[:3], nn.MaxPool2d(2), *layers[3:], nn.MaxPool2d(2), Sum()), torch.randn(4, 1, 12, 12)


def test_results_of_one_operation_are_freed_separately():
    graph, profile = graph_of(*pooled())
    dag = ilp.contracted(graph, profile).dag
    assert dag.siblings
    assert ilp.solution(dag, range(len(dag.costs))).peak_bytes == plain_peak(graph, profile)
    for share in (0.95, 0.7):
        limit = int(share * plain_peak(graph, profile))
        found = ilp.solve_graph(graph, profile, limit)
        assert simulate(graph, profile, found.schedule).peak_bytes <= limit
        auto_cost = added_cost(graph, auto.schedule(graph, profile, limit), costs(graph, profile))
        assert 0 < found.cost == found.lower_bound <= auto_cost


@pytest.mark.parametrize("name", ["language_model", "resnet18", "line"])
def test_large_graphs_are_refused(name):
    graph, profile = traced(name)
    with pytest.raises(ValueError, match=r"'ilp' solves graphs of up to 160 nodes, and this one has \d+: use policy"):
        ackpt.plan(graph, 0.5, ilp.ilp, profile=profile)
    everything = ackpt.plan(graph, policy="none", profile=profile).peak_bytes
    assert ackpt.plan(graph, everything, ilp.ilp, profile=profile).recompute_flops == 0


def test_a_refusal_names_a_budget_that_works():
    graph, profile = graph_of(squares([2, 3]), torch.ones(32, 1))
    found = ilp.solve_graph(graph, profile, 1)
    least = simulate(graph, profile, found.schedule)
    said = f"smallest feasible budget of this policy is .* \\({least.peak_bytes + least.resident_bytes} bytes\\)"
    raises(ackpt.BudgetError, said, lambda: ackpt.plan(graph, 0.01, ilp.ilp, profile=profile))
    plan = ackpt.plan(graph, least.peak_bytes + least.resident_bytes, ilp.ilp, profile=profile)
    assert plan.dynamic_peak_bytes == least.peak_bytes
    assert exhaustive(ilp.contracted(graph, profile).dag, least.peak_bytes - 1) == inf


def test_without_scipy_the_error_says_what_to_install(monkeypatch):
    graph, profile = graph_of(squares([2, 3]), torch.ones(32, 1))
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(ImportError, match=r'policy .ilp. .*pip install "ackpt\[plan\]"'):
        ackpt.plan(graph, 0.5, ilp.ilp, profile=profile)
