"""Policy auto packs dropout masks where drawing them again costs more than packing, and never without dropout."""

from dataclasses import replace

import pytest
import torch
from conftest import assert_as_eager, measured_step, model_of
from torch import nn

import ackpt
from ackpt.graph import simulate
from ackpt.planner.choose import default_profile
from ackpt.planner.policies import auto
from ackpt.planner.policies.auto import packings
from ackpt.planner.policies.search.frontier import Point, added_cost, costs, frontier, packing_cost, pareto, thinned
from ackpt.planner.schedule.schedule import everything
from experiments.models import BertConfig, BertForMaskedLM

SIZES = {"dim": 32, "ff_dim": 64, "layers": 1, "heads": 2, "vocab_size": 50, "positions": 32}


def bert(dropout: float, **sizes: int):
    torch.manual_seed(0)
    ids = torch.randint(0, 50, (4, 32))
    return BertForMaskedLM(BertConfig(dropout=dropout, **(SIZES | sizes))), (ids,), {"labels": ids}


@pytest.fixture(scope="module")
def graph():
    model, args, kwargs = bert(0.1)
    return ackpt.trace(model, *args, **kwargs)


@pytest.fixture(scope="module")
def profile(graph):
    return default_profile(graph)


def test_auto_packs_the_masks_of_a_bert(graph, profile):
    plan = ackpt.plan(graph, budget=0.6, profile=profile)
    assert "packed" in plan.fates.values() and 0 <= plan.lower_bound <= plan.cost
    model, args, kwargs = bert(0.1)
    step = ackpt.compile(model, *args, budget=0.6, **kwargs)
    assert step.plan.schedule == plan.schedule
    assert_as_eager(model, step, *args, **kwargs)
    assert measured_step(model, step, *args, **kwargs).peak_bytes == step.plan.peak_bytes


def test_packing_never_raises_the_cost_and_mostly_lowers_it(graph, profile):
    points = frontier(graph, profile, auto.candidates)
    gains = 0
    without = pareto(graph, profile, auto.recomputing(graph, profile))
    for point in without:
        best = min(each.cost for each in points if each.peak_bytes <= point.peak_bytes)
        assert best <= point.cost
        gains += best < point.cost
    assert gains > len(without) / 2


def test_a_further_schedule_never_makes_a_plan_with_packed_masks_dearer():
    model, args, kwargs = bert(0.1, layers=4)
    graph = ackpt.trace(model, *args, **kwargs)
    profile = ackpt.profile(graph, "t4")
    searched = []

    def search(tiny, its_profile):
        searched.extend(point.schedule for point in pareto(tiny, its_profile, auto.through_chain(tiny, its_profile)))
        return searched

    def with_packed(search):
        return pareto(graph, profile, packings(graph, profile, [everything(graph)], search))

    best = with_packed(search)
    assert len(searched) > 30
    for further in range(1, len(searched) - 1, len(searched) // 4):
        for point in with_packed(lambda *_, left_out=further: [*searched[:left_out], *searched[left_out + 1 :]]):
            assert min(each.cost for each in best if each.peak_bytes <= point.peak_bytes) <= point.cost


def test_thinning_leaves_out_the_points_that_budgets_miss_least():
    points = [Point(cost, peak, everything) for cost, peak in ((0, 100), (1, 90), (2, 89), (3, 60), (9, 50), (10, 30))]
    assert [point.cost for point in thinned(points, 6)] == [0, 1, 2, 3, 9, 10]
    assert [point.cost for point in thinned(points, 4)] == [0, 1, 3, 10]
    assert [point.cost for point in thinned(points, 1)] == [0, 10]


def test_the_frontier_counts_packing(graph, profile):
    points = frontier(graph, profile, auto.candidates)
    assert any(point.schedule.packed for point in points)
    cost, plain = costs(graph, profile), simulate(graph, profile, everything(graph)).seconds
    for point in points:
        found = simulate(graph, profile, point.schedule)
        assert found.peak_bytes == point.peak_bytes
        assert found.seconds - plain == pytest.approx(point.cost)
        added = added_cost(graph, point.schedule, cost) + packing_cost(graph, profile, point.schedule)
        assert point.cost == pytest.approx(added)


def test_a_graph_without_dropout_has_no_variants():
    model, args, kwargs = bert(0.0)
    graph = ackpt.trace(model, *args, **kwargs)
    profile = default_profile(graph)
    assert profile.pack_seconds is None and not graph.analysis.masks
    assert packings(graph, profile, [everything(graph)], auto.recomputing) == []
    assert auto.candidates(graph, profile) == auto.recomputing(graph, profile)


def test_expensive_packing_is_chosen_only_for_peaks_that_nothing_else_reaches(graph, profile):
    slow = replace(profile, pack_seconds=tuple(1.0 for _ in graph.storages))
    least = min(point.peak_bytes for point in pareto(graph, slow, auto.recomputing(graph, slow)))
    packing = [point for point in frontier(graph, slow, auto.candidates) if point.schedule.packed]
    assert all(point.peak_bytes < least for point in packing)


def test_nothing_is_packed_without_times_or_by_a_compiler_that_cannot(graph, profile):
    saving = [everything(graph)]
    for other in (replace(profile, pack_seconds=None), replace(profile, seconds=None)):
        assert packings(graph, other, saving, auto.recomputing) == []
    assert packings(replace(graph, replays_random=False), profile, saving, auto.recomputing) == []


def test_boolean_masks_that_are_saved_are_packed():
    """As on a GPU, one operation draws the mask and computes the result: a mask that it draws again stays."""

    def native(layer):
        return model_of(lambda self, x: torch.native_dropout(self.layer(x).tanh(), 0.1, True)[0], layer=layer)

    model = nn.Sequential(*(native(nn.Linear(32, 32)) for _ in range(4)))
    graph = ackpt.trace(model, torch.ones(64, 32))
    profile = default_profile(graph)
    points = frontier(graph, profile, auto.candidates)
    packing = [point.schedule for point in points if point.schedule.packed]
    assert packing and all(simulate(graph, profile, each).peak_bytes for each in packing)
    sizes = {(graph.storages[s].bytes, graph.analysis.masks[s].packed_bytes) for each in packing for s in each.packed}
    assert sizes == {(64 * 32, 64 * 32 // 8)}
