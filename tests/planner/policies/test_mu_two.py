"""Policy mu-two: the paper's attributes by hand and by definition, and plans that keep their budget."""

import random
import re
import sys

import pytest
import torch
from conftest import assert_as_eager, measured_step
from planned_models import language_model, resnet18
from small_models import build
from torch import nn

import ackpt
from ackpt.graph import profile, rewrite, simulate
from ackpt.models import LanguageModel
from ackpt.planner.policies.mu_two import Link, drop, evictions, intermediates, order_for_each_reader
from ackpt.planner.schedule.schedule import everything, missing, scheduled
from ackpt.planner.schedule.simulator import copies

pytestmark = pytest.mark.usefixtures("one_thread")


def unit_times(graph):
    """A second for each operation, none for views."""
    analysis = graph.analysis
    return [float(node.id in analysis.allocated and node.id not in analysis.sources) for node in graph.nodes]


def known_of(graph, swap_seconds=None):
    return intermediates(graph.analysis, everything(graph), unit_times(graph), swap_seconds)


@pytest.fixture(scope="module")
def chain():
    layers = [layer for _ in range(3) for layer in (nn.Linear(4, 4), nn.Tanh())]
    return ackpt.trace(nn.Sequential(*layers), torch.ones(2, 4))


def test_attributes_counted_by_hand(chain):
    first, second = known_of(chain, [0.5] * len(chain.storages)).values()  # the third Tanh's result is the output
    assert first.memory_size == second.memory_size == 2 * 4 * 4 and first.swap_time == 0.5
    # Read last in the forward by the next layer's addmm, and first in backward by the gradient of that one's weight.
    # Between: six operations of the forward, of which it waits for the last three; of backward six, and two.
    assert (first.inactive_time, second.inactive_time) == (3 + 6, 1 + 2)
    assert [chain.nodes[n].target for n in (first.last_fw_access, first.first_bw_access)] == [
        "aten.addmm.default",
        "aten.mm.default",
    ]
    # addmm and tanh run again, from the input or from the first result.
    assert (first.recomp_srcs, second.recomp_srcs) == (set(), {first.rank})
    assert first.recomp_time == second.recomp_time == 2
    assert second.recompute_ratio == 2 * 4 * 4 / 2


@pytest.mark.parametrize("name", ["transformer", "resnet", "hf gpt2"])
def test_updated_attributes_are_those_of_the_definition(name):
    model, args, kwargs = build(name)
    graph = ackpt.trace(model, *args, **kwargs)
    analysis, found, run_time = graph.analysis, known_of(graph), unit_times(graph)
    kept, recomps = list(found.values()), []
    order = [i for i in kept if i.can_recompute]
    random.Random(0).shuffle(order)
    for chosen in order[: len(order) // 2]:
        if chosen in kept:
            drop(chosen, recomps, kept)
    assert len(recomps) > 5 and len(kept) > 5
    there = {*analysis.must_be_saved, *analysis.live_to_end, *(s for i in kept for s in i.storages)}
    live = {*analysis.sources, *(analysis.base_of[s] for s in there if s in analysis.base_of)}
    for each in found.values():
        own = {analysis.base_of[s] for s in analysis.allocated[each.rank] if s in analysis.base_of}
        nodes = {n for s in each.storages for n in missing(analysis, analysis.base_of[s], live - own)}
        read = {s for n in nodes for p in analysis.reads(n, True) if p in live - own for s in graph.nodes[p].storages}
        assert each.recomp_time == sum(run_time[n] for n in nodes)
        assert each.recomp_srcs == {i.rank for i in kept if i.storages & read and i is not each}
        assert each.recomp_cnt == 1 + sum(each.rank in recomp.recomp_srcs for recomp in recomps)
        if each in recomps:
            assert not {i.rank for i in kept} & nodes  # nothing that is kept would be made a second time


def test_copies_that_overlap_with_compute_are_free(chain):
    first, second = known_of(chain, [3.0] * len(chain.storages)).values()
    link = Link(unit_times(chain), chain.boundary)
    # Behind the first are four operations of the forward, before its use six of backward; the second has two and two.
    assert (link.overhead(first), link.overhead(second)) == (0, 1 + 1)  # never below 0, though more would be hidden
    assert link.overhead(first, spend=True) == 0
    # The first has taken the next three of the forward, and of backward the last three before its use.
    assert link.overhead(second, spend=True) == 2 + 1
    assert link.overhead(second) == 3 + 3  # all is taken
    first.swap_time = 100.0
    assert Link(unit_times(chain), chain.boundary).overhead(first) == (100 - 4) + (100 - 6)


# With a budget for the CPU, where operations take memory within themselves, which is not in the analytic profile.
CASES = {
    "language model": (lambda: language_model(40, 48, ff_dim=64, head_dim=16), (0.9, 0.7, 0.5, 0.4), 0.5),
    "resnet18": (lambda: resnet18(images=(4, 3, 64, 64)), (0.9, 0.8, 0.7), 0.9),
}


@pytest.fixture(scope="module", params=CASES)
def case(request):
    torch.manual_seed(0)
    make, budgets, on_cpu = CASES[request.param]
    model, args = make()
    return model, args, budgets, on_cpu, ackpt.trace(model, *args)


@pytest.mark.parametrize("device", [None, "h200"])
def test_plans_keep_their_budget_and_cost_more_for_smaller_ones(case, device):
    model, _, budgets, _, graph = case
    costs = profile(graph, device)
    plans = [ackpt.plan(graph, budget, "mu-two", profile=costs) for budget in budgets]
    for budget, plan in zip(budgets, plans):
        assert plan.dynamic_peak_bytes <= budget * plan.baseline_dynamic_peak_bytes
        assert bool(plan.host_bytes) == copies(plan.schedule)
    rewrite(graph, plans[-1].schedule)
    peaks = [plan.peak_bytes for plan in plans]
    assert peaks == sorted(peaks, reverse=True)
    if device is not None:
        seconds = [simulate(graph, costs, plan.schedule).seconds for plan in plans]
        assert seconds == sorted(seconds)
    offloads = device is not None and isinstance(model, LanguageModel)  # images this small are sooner made anew
    assert any(plan.host_bytes for plan in plans) == offloads
    assert plans[-1].recompute_flops > 0
    with pytest.raises(ackpt.BudgetError, match="smallest feasible budget of this policy") as refused:
        ackpt.plan(graph, 0.01, "mu-two", profile=costs)
    least = float(re.findall(r" or ([0-9.]+) of", str(refused.value))[-1])
    assert ackpt.plan(graph, least, "mu-two", profile=costs).peak_bytes <= peaks[-1]
    assert ackpt.plan(graph, policy="mu-two", profile=costs).schedule == everything(graph)


def test_on_the_cpu_it_recomputes_and_the_measured_peak_keeps_the_budget(case):
    model, args, _, budget, _ = case
    step = ackpt.compile(model, *args, budget=budget, policy="mu-two")
    assert not copies(step.plan.schedule) and {*step.plan.fates.values()} == {"saved", "recomputed"}
    measured = measured_step(model, step, *args, warmup=0)
    assert measured.dynamic_peak_bytes <= budget * step.plan.baseline_dynamic_peak_bytes
    assert_as_eager(model, step, *args)


def test_with_many_choices_only_some_are_simulated(monkeypatch):
    monkeypatch.setattr(sys.modules["ackpt.planner.policies.mu_two"], "_MOST_STATES", 4)
    layers = [layer for _ in range(10) for layer in (nn.Linear(4, 4), nn.Tanh())]
    graph = ackpt.trace(nn.Sequential(*layers), torch.ones(64, 4))
    found = [simulate(graph, profile(graph), made) for made in evictions(graph, profile(graph))]
    assert 4 <= len(found) <= 2 * 4
    nothing_kept = simulate(graph, profile(graph), scheduled(graph, None, order_for_each_reader(graph.analysis, ())))
    assert min(each.peak_bytes for each in found) == nothing_kept.peak_bytes
