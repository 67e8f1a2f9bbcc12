"""The integer program: a replay of every schedule, and all schedules of small graphs."""

import heapq
import re
from math import inf

import pytest
from conftest import raises
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from ackpt import BudgetError
from experiments.policies import ilp


def layers(n, costs=None, sizes=None):
    """`n` layers in a line, and their backwards, which read the layer's input and output and the last gradient."""
    edges = [(layer - 1, layer) for layer in range(1, n)]
    for place, layer in enumerate(reversed(range(n)), n):
        edges += [
            (layer, place),
            *([(layer - 1, place)] if layer else []),
            *([(place - 1, place)] if place > n else []),
        ]
    return ilp.Dag(costs or [1] * n + [2] * n, sizes or [1] * 2 * n, edges)


def replay(dag, schedule):
    """Cost and peak of `schedule`, step by step."""
    live, seen, cost, peak = set(), set(), 0, 0
    for kind, node in schedule:
        if kind == "free":
            assert node in live and node not in dag.held
            live.remove(node)
            continue
        assert kind == "compute" and node not in live
        assert {producer for producer, consumer in dag.edges if consumer == node} <= live
        if node in seen:
            assert node not in dag.once and len(seen) >= dag.boundary
        else:
            assert node == len(seen)  # first computations are in order
        seen.add(node)
        live.add(node)
        cost += dag.costs[node]
        peak = max(peak, sum(dag.bytes[n] for n in live) + dag.workspace[node])
    assert len(seen) == len(dag.costs)
    assert live == set(dag.held)
    return cost, peak


def checked(dag, budget, **options):
    found = ilp.solve(dag, budget, **options)
    assert replay(dag, found.schedule) == (found.cost, found.peak_bytes)
    assert found.peak_bytes <= budget
    assert found.lower_bound <= found.cost
    assert found.optimal == (found.lower_bound == found.cost)
    return found


def exhaustive(dag, budget, any_order=False):
    """The least cost of all schedules within `budget`, inf if there is none.

    As in the program, what runs between two first computations runs at most once and in order, unless `any_order`.
    """
    count = len(dag.costs)
    queue = [(0, 0, frozenset(), 0, -1)]  # cost, tie, live, first computations so far, last node of this stage
    done, number = set(), 0
    while queue:
        cost, _, live, stage, last = heapq.heappop(queue)
        if stage == count:
            return cost
        if (live, stage, last) in done:
            continue
        done.add((live, stage, last))
        following = [(cost, live - {node}, stage, last) for node in live if node not in dag.held]
        again = [i for i in range(0 if any_order else last + 1, stage) if i not in dag.once and stage >= dag.boundary]
        for node in [*again, stage]:
            size = sum(dag.bytes[n] for n in live | {node}) + dag.workspace[node]
            if node not in live and set(dag.inputs[node]) <= live and size <= budget:
                new = node == stage
                following.append((cost + dag.costs[node], live | {node}, stage + new, -1 if new or any_order else node))
        for step in following:
            number += 1
            heapq.heappush(queue, (step[0], number, *step[1:]))
    return inf


def cost_of(dag, budget):
    try:
        found = checked(dag, budget)
    except BudgetError:
        return inf
    assert found.optimal
    return found.cost


@st.composite
def dags(draw, largest=3):
    """A few layers, their backwards, and other reads."""
    n = draw(st.sampled_from([4, 3, 2]))
    edges = set(layers(n).edges)
    if draw(st.integers(0, 3)) == 0:
        pairs = [(a, b) for b in range(2 * n) for a in range(b)]
        edges ^= draw(st.sets(st.sampled_from(pairs), max_size=3))
    costs = draw(st.lists(st.integers(0, largest), min_size=2 * n, max_size=2 * n))
    sizes = draw(st.lists(st.integers(1, largest), min_size=2 * n, max_size=2 * n))
    if draw(st.integers(0, 3)):
        return ilp.Dag(costs, sizes, sorted(edges))
    workspace = draw(st.lists(st.integers(0, largest), min_size=2 * n, max_size=2 * n))
    some = st.sets(st.integers(0, 2 * n - 1), max_size=2)
    return ilp.Dag(costs, sizes, sorted(edges), workspace, draw(some), draw(some), draw(st.integers(0, n)))


def least_budget(dag):
    with pytest.raises(BudgetError) as refused:
        ilp.solve(dag, 0.5)
    return int(re.search(r"the smallest feasible budget is (\d+) bytes", str(refused.value)).group(1))


def tight(dag, share):
    """A budget that needs recomputation, and can be kept where `share` is not negative."""
    least, most = least_budget(dag), ilp.solve(dag, 10**12).peak_bytes
    assume(least < most)
    return least + int(share * (most - least))


SHARES = st.sampled_from([-0.1, 0, 0.3, 0.6, 0.9])


# HiGHS 1.12 with its presolve takes 11 for the least cost within 7 bytes; it is 10.
PRESOLVED_WRONGLY = ilp.Dag(
    [1, 3, 1, 0, 1, 0, 0, 0],
    [1, 3, 1, 3, 1, 2, 1, 1],
    sorted({*layers(4).edges, (0, 6), (0, 7), (2, 4), (1, 5), (1, 6)}),
)


# Without its presolve, told that 9 is known, it calls 8 within 8 bytes infeasible.
INFEASIBLE_WRONGLY = ilp.Dag(
    [2, 1, 1, 2, 0, 0, 0, 0],
    [3, 3, 1, 3, 1, 1, 1, 1],
    sorted({*layers(4).edges, (0, 7), (2, 4), (1, 5), (1, 6), (0, 6)}),
)


@settings(max_examples=80, deadline=None)
@given(dags(), SHARES)
@example(PRESOLVED_WRONGLY, 0)
@example(INFEASIBLE_WRONGLY, -0.1)
def test_the_exhaustive_search_finds_nothing_cheaper(dag, share):
    budget = tight(dag, share)
    cost = cost_of(dag, budget)
    assert cost == exhaustive(dag, budget)
    assert exhaustive(dag, budget, any_order=True) <= cost


# Some sizes are below the solver's relative tolerance of 1e-6. In the first DAG, a cheaper schedule was reported as
# infeasible; in the second, no schedule was found.
SMALL_AND_LARGE = layers(4, [1, 0, 1, 0, 0, 0, 0, 0], [47, 1, 36869517, 45, 6, 2, 6, 6])
NONE_FOUND = layers(4, [0, 0, 1, 0, 0, 0, 0, 0], [129, 1, 52813651, 90, 1, 1, 1, 1])


# `tight` filters out graphs of which no budget needs recomputation.
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(dags(largest=10**9 + 7), SHARES)
@example(SMALL_AND_LARGE, 0)
@example(NONE_FOUND, 0)
def test_large_numbers_keep_the_budget_to_the_byte(dag, share):
    budget = tight(dag, share)
    cost = exhaustive(dag, budget)
    try:
        found = checked(dag, budget)
    except BudgetError:
        assert cost == inf
    else:
        assert found.lower_bound <= cost <= found.cost <= cost + sum(dag.costs) * 1e-6


@settings(max_examples=20, deadline=None)
@given(dags())
def test_a_refusal_names_the_smallest_budget(dag):
    least = least_budget(dag)
    assert cost_of(dag, least) < inf
    assert least == 1 or exhaustive(dag, least - 1) == inf


def test_another_order_between_two_first_computations_may_need_less():
    # Node 4 reads 0 and 2; 2 runs again from 1, which fits only before 0 runs again.
    dag = ilp.Dag([1] * 5, [2, 4, 1, 1, 1], [(1, 2), (1, 3), (0, 4), (2, 4)])
    assert (cost_of(dag, 5), exhaustive(dag, 5, any_order=True)) == (inf, 7)


def test_after_the_time_limit_the_best_schedule_has_a_valid_bound():
    dag, least = layers(16), 64
    for time_limit in (1e-6, 0.1):
        found = checked(dag, 6, time_limit=time_limit)
        assert sum(dag.costs) <= found.lower_bound <= least <= found.cost
    assert not checked(dag, 6, time_limit=1e-6).optimal


@pytest.mark.parametrize(
    "arguments, what",
    [
        (([], [], []), "at least one node"),
        (([1], [1, 2], []), "bytes has 2 values for a graph of 1 nodes"),
        (([1, 1], [1, 1], [], [3]), "workspace has 1 values"),
        (([1, -1], [1, 1], []), "not negative"),
        (([1, 1], [1, 1], [(1, 0)]), "does not lead from a node to a later one of the 2"),
        (([1, 1], [1, 1], [(0, 2)]), "does not lead from a node to a later one"),
    ],
)
def test_invalid_graphs_are_refused(arguments, what):
    raises(ValueError, what, lambda: ilp.Dag(*arguments))


@pytest.mark.parametrize(
    "budget, options, what", [(0, {}, "budget"), (-1, {}, "budget"), (3, {"time_limit": 0}, "time_limit")]
)
def test_bad_input_is_refused(budget, options, what):
    raises(ValueError, what, lambda: ilp.solve(layers(4), budget, **options))
