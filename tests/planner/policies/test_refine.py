"""Plans with fewer recomputations: within their limit, cheaper, and sound."""

import pytest
from planned_models import MODELS, SKIPS, line, traced

import ackpt
from ackpt.graph import simulate
from ackpt.planner.policies import rotor
from ackpt.planner.policies.full import segmentations
from ackpt.planner.policies.search.frontier import added_cost, costs, frontier
from ackpt.planner.policies.search.refinement import runs, with_fewer_runs, with_saved
from ackpt.planner.schedule.schedule import everything, lower, recomputed

TRIES = 200


@pytest.mark.parametrize("name", [*MODELS, *SKIPS])
def test_fewer_recomputations_cost_less_and_stay_within_the_limit(name):
    graph, profile = traced(name)
    cost, workspace = costs(graph, profile), profile.workspace_bytes
    plain = simulate(graph, profile, everything(graph)).peak_bytes
    for schedule in [lower(graph, saved) for saved in segmentations(graph)][-2:]:
        peak, before = simulate(graph, profile, schedule).peak_bytes, added_cost(graph, schedule, cost)
        for limit in (peak, (peak + plain) // 2, max(peak, plain)):
            less, left = with_fewer_runs(graph, schedule, cost, workspace, limit, TRIES)
            assert simulate(graph, profile, less).peak_bytes <= limit
            assert added_cost(graph, less, cost) <= before and 0 <= left <= TRIES
        if peak < plain:  # there is room for everything
            assert added_cost(graph, less, cost) == 0


@pytest.mark.parametrize("name", [*MODELS, *SKIPS])
def test_results_would_be_live_from_their_last_use_before_a_recomputation(name):
    graph, profile = traced(name)
    analysis = graph.analysis
    for schedule in [lower(graph, saved) for saved in segmentations(graph)]:
        order = schedule.backward_arrays.computed
        forward = schedule.forward_arrays.computed
        last = {s: at for at, node in enumerate(forward) for s in analysis.allocated.get(node, ())}
        expected = {}
        for at, node in enumerate(order, len(forward)):
            own = analysis.allocated.get(node, ())
            expected[at] = max((last[s] for s in own if s in last), default=at), sum(analysis.bytes[s] for s in own)
            last.update(dict.fromkeys(analysis.accessed["backward"][node], at))
        _, found = runs(graph, schedule, order, profile.workspace_bytes)
        assert {node for node in recomputed(graph, schedule) if node in analysis.allocated} >= {r.node for r in found}
        assert [(r.start, r.size) for r in found] == [expected[r.stop] for r in found]
        assert all(order[r.position] == r.node and r.stop == r.position + len(forward) for r in found)


@pytest.mark.parametrize("name", [*MODELS, *SKIPS])
def test_a_saved_node_is_not_recomputed(name):
    graph, profile = traced(name)
    schedule = lower(graph, segmentations(graph)[-1])
    cost, results = costs(graph, profile), {storage.producer for storage in graph.storages}
    for place in sorted(results.intersection(recomputed(graph, schedule)), key=lambda place: -cost[place])[:4]:
        kept = with_saved(graph, schedule, place, profile)
        simulate(graph, profile, kept)
        assert place not in recomputed(graph, kept)


def test_the_lowest_peak_of_a_recursion_leaves_room_to_save_much_of_it():
    model, inputs = line(pairs=6, width=16)
    graph = ackpt.trace(model, *inputs)
    profile = ackpt.profile(graph)
    lowest = frontier(graph, profile, rotor.candidates)[-1]
    cost = costs(graph, profile)
    less, _ = with_fewer_runs(graph, lowest.schedule, cost, profile.workspace_bytes, lowest.peak_bytes, TRIES)
    assert simulate(graph, profile, less).peak_bytes <= lowest.peak_bytes
    assert added_cost(graph, less, cost) < 0.8 * lowest.cost
