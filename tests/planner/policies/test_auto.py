"""The default policy: a frontier of sound plans, each as cheap as its neighbours allow, the same every time."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from planned_models import MODELS, SKIPS, build, line, plans, step_keeps, traced
from torch import nn

import ackpt
from ackpt.graph import simulate
from ackpt.planner.policies import auto
from ackpt.planner.policies.chains.blocks import coarse_chain, long_skips
from ackpt.planner.policies.search.frontier import added_cost, costs, frontier
from ackpt.planner.schedule.schedule import everything

ALL = [*MODELS, *SKIPS]


def frontier_of(graph, profile):
    return frontier(graph, profile, auto.candidates)


@cache
def plans_of(name):
    return frontier_of(*traced(name))


@pytest.mark.parametrize("name", ALL)
def test_the_frontier_is_what_the_simulator_finds(name):
    graph, profile = traced(name)
    points = plans_of(name)
    assert points[0].schedule == everything(graph) and points[0].cost == 0
    for point in points:
        assert simulate(graph, profile, point.schedule).peak_bytes == point.peak_bytes
        assert added_cost(graph, point.schedule, costs(graph, profile)) == point.cost
    for higher, lower in zip(points, points[1:]):
        assert lower.peak_bytes < higher.peak_bytes and lower.cost > higher.cost


@pytest.mark.parametrize("name", ALL)
def test_a_lower_budget_means_no_higher_peak_and_no_lower_cost(name):
    found = plans(name, "auto")
    assert len(found) > 1
    for more, less in zip(found, found[1:]):
        assert less.peak_bytes <= more.peak_bytes and less.cost >= more.cost


@pytest.mark.parametrize("name", ALL)
def test_the_plan_of_the_smallest_feasible_budget_runs_as_planned(name):
    step_keeps(name, plans(name, "auto")[-1])


@pytest.mark.parametrize("name", ALL)
def test_no_policy_on_blocks_is_cheaper(name):
    for theirs in plans(name, "rotor"):
        graph, profile = traced(name)
        assert ackpt.plan(graph, theirs.peak_bytes, profile=profile).cost <= theirs.cost


@pytest.mark.parametrize("name", ALL)
def test_auto_keeps_every_budget_of_full_at_no_higher_cost(name):
    graph, profile = traced(name)
    full = ackpt.plan(graph, policy="full", profile=profile)
    assert ackpt.plan(graph, full.peak_bytes, profile=profile).cost <= full.cost


@pytest.mark.parametrize("name", ["language_model", "unet"])
def test_the_same_graph_has_the_same_plans(name):
    again = ackpt.trace(*flat(build(name)))
    assert [(p.peak_bytes, p.cost, p.schedule) for p in frontier_of(again, ackpt.profile(again))] == [
        (p.peak_bytes, p.cost, p.schedule) for p in plans_of(name)
    ]


def flat(built):
    model, args = built
    return (model, *args)


def test_a_budget_above_the_baseline_recomputes_nothing():
    graph, profile = traced("line")
    plan = ackpt.plan(graph, 10 * ackpt.plan(graph, profile=profile).peak_bytes, profile=profile)
    assert plan.schedule == everything(graph) and plan.cost == 0 and not plan.decisions


def test_measured_times_decide_where_the_profile_has_them():
    graph = ackpt.trace(*flat(line(pairs=8)))
    profile, analysis = ackpt.profile(graph), graph.analysis
    dear = {place for place in analysis.allocated if graph.nodes[place].target.startswith("aten.gelu.")}
    assert dear
    seconds = tuple(100.0 if place in dear else 1.0 for place in range(len(graph.nodes)))
    timed = replace(profile, seconds=seconds)
    plan = ackpt.plan(graph, 0.6, profile=timed)
    again = [name for name, fate in plan.fates.items() if fate == "recomputed"]
    assert again and not any(name.startswith("gelu") for name in again)


@pytest.mark.parametrize("name", SKIPS)
def test_long_skips_are_pinned(name):
    graph, _ = traced(name)
    skips = long_skips(graph)
    assert skips
    largest = [max(len(block.units) for block in coarse_chain(graph, pinned).blocks) for pinned in (frozenset(), skips)]
    assert largest[1] < largest[0] / 2
    assert skips <= coarse_chain(graph, skips).pinned


def test_a_short_chain_of_single_operations_is_cut_everywhere():
    graph, _ = traced("line")
    assert len(coarse_chain(graph).blocks) > 60


def test_a_long_chain_of_operations_is_cut_into_a_limited_number_of_blocks():
    layers = [layer for _ in range(80) for layer in (nn.Linear(2, 2), nn.Tanh())]
    graph = ackpt.trace(nn.Sequential(*layers), torch.ones(1, 2), differentiate="all")
    assert 64 < len(coarse_chain(graph).blocks) <= 130


class Codebook(nn.Module):
    """A layer whose result is replaced by the nearest row of a buffer, which then changes: that cannot run again."""

    def __init__(self):
        super().__init__()
        self.front, self.back = (nn.Sequential(*(self.block() for _ in range(3))) for _ in range(2))
        self.gate = nn.Linear(16, 4)
        self.register_buffer("rows", torch.randn(32, 16))

    def block(self):
        return nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 16))

    def forward(self, x):
        z = self.front(x)
        nearest = self.rows[torch.cdist(z.detach(), self.rows).argmin(-1)]
        with torch.no_grad():
            self.rows.mul_(0.9)
        q = z + (nearest - z).detach()
        gates = nn.functional.gumbel_softmax(self.gate(q), hard=True)
        result = self.back(q * gates.sum(-1, keepdim=True))
        weights = q.detach().sigmoid()
        spread = (result.sum(-1, keepdim=True) * weights).mean()
        loss = nn.functional.mse_loss(result, x) + gates[:, 0].mean() + 1e-3 * spread
        return loss + 0.25 * nn.functional.mse_loss(z, nearest.detach())


def test_fixed_operations_are_not_cut_points():
    graph = ackpt.trace(Codebook(), torch.randn(128, 16))
    analysis = graph.analysis
    fixed = {storage for node in analysis.not_recomputable for storage in graph.nodes[node].storages} & analysis.savable
    chains = [coarse_chain(graph, skips) for skips in (frozenset(), long_skips(graph))]
    assert fixed and not any(fixed & block.output for each in chains for block in each.blocks)
    least = min(point.peak_bytes for point in frontier_of(graph, ackpt.profile(graph)))
    assert least < 0.9 * ackpt.plan(graph).dynamic_peak_bytes


class Frozen(nn.Module):
    """Residual blocks with batch norms whose statistics stay as they are: then torch saves two empty tensors."""

    def __init__(self):
        super().__init__()
        self.stem = self.block(3)
        self.blocks = nn.ModuleList(self.block(8) for _ in range(3))

    def block(self, width):
        return nn.Sequential(nn.Conv2d(width, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())

    def forward(self, x):
        h = self.stem(x)
        for block in self.blocks:
            h = h + block(h)
        return h.square().mean()


def test_empty_activations_are_not_saved_twice():
    graph = ackpt.trace(Frozen().eval(), torch.randn(6, 3, 16, 16))
    profile = ackpt.profile(graph, workspace="measured")
    assert any(storage.bytes == 0 for storage in graph.storages)
    for schedule in auto.candidates(graph, profile):
        simulate(graph, profile, schedule)  # or a ScheduleError
