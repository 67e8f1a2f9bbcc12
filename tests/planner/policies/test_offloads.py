"""Policy auto where the device has a link: what a copy may hide behind computing is offloaded instead of run again."""

from dataclasses import replace

import pytest
from planned_models import traced

import ackpt
from ackpt.graph import profile, rewrite, simulate
from ackpt.planner.policies import auto
from ackpt.planner.policies.auto import offloads
from ackpt.planner.policies.search.frontier import added_cost, costs, frontier
from ackpt.planner.schedule.offload_steps import offloadable
from ackpt.planner.schedule.simulator import copies, waiting

BUDGETS = (0.9, 0.7, 0.5, 0.4)


@pytest.fixture(scope="module")
def graph():
    return traced("language_model")[0]


@pytest.fixture(scope="module")
def linked(graph):
    return profile(graph, "h200")


@pytest.fixture(scope="module")
def alone(linked):
    return replace(linked, swap_seconds=None)


def frontier_of(graph, costs):
    return frontier(graph, costs, auto.candidates)


def test_the_frontier_counts_waiting_for_copies(graph, linked):
    points = frontier_of(graph, linked)
    assert any(copies(point.schedule) for point in points)
    for point in points:
        found = simulate(graph, linked, point.schedule)
        assert found.peak_bytes == point.peak_bytes
        assert point.cost == added_cost(graph, point.schedule, costs(graph, linked)) + found.exposed_seconds
    for higher, lower in zip(points, points[1:]):
        assert lower.peak_bytes < higher.peak_bytes and lower.cost > higher.cost


def test_a_link_never_raises_the_cost_and_mostly_lowers_it(graph, linked, alone):
    gains = 0
    for without in frontier_of(graph, alone):
        best = min(point.cost for point in frontier_of(graph, linked) if point.peak_bytes <= without.peak_bytes)
        assert best <= without.cost
        gains += best < without.cost
    assert gains > len(frontier_of(graph, alone)) / 2


@pytest.mark.parametrize("budget", BUDGETS)
def test_plans_with_recomputation_and_offload_keep_their_budget_and_are_proved(graph, linked, budget):
    plan = ackpt.plan(graph, budget, profile=linked)
    assert plan.dynamic_peak_bytes <= budget * plan.baseline_dynamic_peak_bytes
    assert plan.host_bytes > 0 and plan.lower_bound is None
    assert "offloaded" in plan.fates.values()
    rewrite(graph, plan.schedule)  # captured again, it takes what was simulated, or this is an error


def test_only_the_plan_with_the_lowest_peak_waits_for_a_slow_link(graph, alone):
    slow = replace(alone, swap_seconds=tuple(1e3 * sum(alone.seconds) for _ in graph.storages))
    schedules = [point.schedule for point in frontier_of(graph, alone)]
    (one,) = offloads(graph, slow, schedules)
    assert waiting(slow, one) > 0 and len(one.offloaded) == len(offloadable(graph, schedules[-1]))
    assert not any(copies(point.schedule) for point in frontier_of(graph, slow)[:-1])


def test_without_a_link_or_with_inductor_nothing_is_offloaded(graph, linked, alone):
    schedules = [point.schedule for point in frontier_of(graph, alone)]
    assert offloads(graph, alone, schedules) == []
    assert offloads(graph, replace(linked, seconds=None), schedules) == []
    assert offloads(graph, linked, schedules)
    assert offloads(replace(graph, replays_random=False), linked, schedules) == []
