"""Policies by name on chains of blocks: the counts of the theory, budgets that are kept, gradients to the last bit."""

import pytest
import torch
from conftest import model_of
from hypothesis import example, given, settings
from hypothesis import strategies as st
from planned_models import MODELS, plans, step_keeps, traced
from torch import nn

import ackpt
from ackpt.planner.policies.chains.blocks import fine_chain
from ackpt.planner.policies.search.frontier import added_cost, costs
from ackpt.planner.schedule.schedule import recomputed
from ackpt.planner.schedule.simulator import simulate
from experiments.policies import PAPERS, chen, revolve

pytestmark = pytest.mark.usefixtures("one_thread")

POLICIES = {name: PAPERS.get(name, name) for name in ("chen-sqrt", "chen-log", "revolve", "rotor")}
UNIT = 4000
UNHELPFUL = "resnet18", "revolve"  # the first block is the largest, and all of it must be there beside the states


def line_of(n):
    def forward(self, x):
        x = x * self.weight
        for _ in range(self.n):
            x = x.tanh()
        return x.sum()

    graph = ackpt.trace(model_of(forward, n=n, weight=nn.Parameter(torch.ones(1))), torch.ones(UNIT // 4))
    return graph, ackpt.profile(graph), len(fine_chain(graph).blocks)


def runs_again(graph, schedule):
    """How many operations that bring results along run in backward a second time."""
    return sum(place in graph.analysis.allocated for place in recomputed(graph, schedule))


@pytest.mark.parametrize("n", [6, 14, 30])
def test_sqrt_segments_are_those_of_the_theory(n):
    graph, profile, blocks = line_of(n)
    schedule = chen.chen_sqrt(graph, profile, None)
    counts = chen.sqrt_counts(blocks)
    assert simulate(graph, profile, schedule).peak_bytes // UNIT == counts.peak
    assert runs_again(graph, schedule) == counts.extra_forwards


@pytest.mark.parametrize("n", [6, 14, 30])
def test_recursive_halves_are_those_of_the_theory(n):
    graph, profile, blocks = line_of(n)
    schedule = chen.chen_log(graph, profile, None)
    gradients = 3  # of a layer's input and output, and the layer's output beside what is kept
    assert simulate(graph, profile, schedule).peak_bytes // UNIT <= chen.recursive_peak(blocks) + gradients
    assert chen.recursive_extra_forwards(n) <= runs_again(graph, schedule) <= chen.recursive_extra_forwards(blocks)


@pytest.mark.parametrize("n", [5, 14])
def test_snapshots_are_those_of_the_theory(n):
    graph, profile, blocks = line_of(n)
    schedules = revolve.candidates(graph, profile)
    assert len(schedules) == blocks
    for snapshots, schedule in enumerate(schedules, 1):
        assert revolve.advances(n, snapshots) <= runs_again(graph, schedule) <= revolve.advances(blocks, snapshots)


def test_long_chains_are_joined():
    graph, _, blocks = line_of(30)
    assert blocks == 32
    joined = fine_chain(graph, 10).blocks
    assert len(joined) == 8 and sum(len(block.forward) for block in joined) == sum(
        len(block.forward) for block in fine_chain(graph).blocks
    )


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", MODELS)
def test_budgets_are_kept_and_a_refusal_names_one_that_works(name, policy):
    found = plans(name, POLICIES[policy])
    assert found[-1].dynamic_peak_bytes < found[-1].baseline_dynamic_peak_bytes or (name, policy) == UNHELPFUL
    graph, profile = traced(name)
    cost = costs(graph, profile)
    added = [added_cost(graph, plan.schedule, cost) for plan in found]
    peaks = [plan.peak_bytes for plan in found]
    assert added == sorted(added) and peaks == sorted(peaks, reverse=True)


RUNS = [*(("language_model", policy) for policy in POLICIES), ("resnet18", "rotor"), ("line", "revolve")]


@pytest.mark.parametrize("name, policy", RUNS)
def test_the_step_has_the_planned_peak_and_the_bits_of_eager(name, policy):
    step_keeps(name, plans(name, POLICIES[policy])[-1])


def chain(widths, kinds):
    """A line of layers that differ in size."""
    layers = [
        layer
        for before, width, kind in zip([4, *widths], widths, kinds)
        for layer in (nn.Linear(before, width), kind())
    ]
    return nn.Sequential(*layers, nn.Linear(widths[-1], 1))


@st.composite
def chains(draw):
    widths = draw(st.lists(st.sampled_from([1, 2, 4, 8]), min_size=2, max_size=6))
    kinds = draw(st.lists(st.sampled_from([nn.Tanh, nn.GELU, nn.ReLU]), min_size=len(widths), max_size=len(widths)))
    return chain(widths, kinds)


@settings(max_examples=10, deadline=None)
@given(chains())
@example(chain([1, 2, 1, 1], [nn.Tanh] * 4))
def test_rotor_recomputes_least_or_nearly(model):
    """Its schedules recompute block by block, as those of revolve do.

    Those of Chen's policies recompute each activation right before its first reader, which takes less memory.
    """
    graph = ackpt.trace(model, torch.ones(64, 4))
    profile = ackpt.profile(graph)
    cost = costs(graph, profile)

    def added(policy, budget):
        return added_cost(graph, ackpt.plan(graph, budget, POLICIES[policy], profile=profile).schedule, cost)

    assert all(added(policy, 1.0) == 0 for policy in POLICIES)
    for policy, memory in (("revolve", 1.0), ("chen-sqrt", 1.25), ("chen-log", 1.25)):
        for budget in (0.9, 0.7, 0.5, 0.3):
            try:
                theirs = added(policy, budget)
            except ackpt.BudgetError:
                continue
            assert added("rotor", min(1.0, memory * budget)) <= 1.1 * theirs  # its table rounds bytes to slots


def test_a_model_without_cut_points():
    def wide():
        return model_of(
            lambda self, x: sum(layer(x).tanh().sum() for layer in self.layers),
            layers=nn.ModuleList(nn.Linear(4, 4) for _ in range(3)),
        )

    graph = ackpt.trace(wide(), torch.ones(64, 4))
    profile = ackpt.profile(graph)
    for policy in POLICIES.values():
        plan = ackpt.plan(graph, 1.0, policy, profile=profile)
        assert plan.recompute_flops == 0
        with pytest.raises(ackpt.BudgetError, match=f"policy '{plan.policy}' cannot keep"):
            ackpt.plan(graph, 0.01, policy, profile=profile)
