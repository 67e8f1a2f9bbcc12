"""Policy min-cut: what torch's partitioner saves, in our order and in its own, within budgets and to the last bit."""

import pytest
from conftest import raises
from planned_models import MODELS, plans, step_keeps, traced

import ackpt
from ackpt.planner.policies.search.frontier import added_cost, costs
from ackpt.planner.schedule.simulator import simulate
from experiments.policies import min_cut

pytestmark = pytest.mark.usefixtures("one_thread")

ORDERS = ("late", "torch")


def is_heavy(graph, place):
    return graph.nodes[place].target.split(".")[1] in ("mm", "addmm", "bmm", "convolution")


@pytest.mark.parametrize("name", MODELS)
def test_settings_range_from_cheap_recomputation_to_saving_nothing(name):
    graph, _ = traced(name)
    before = graph.to_json(), [list(node.meta) for node in graph.module.graph.nodes]
    most, least = min_cut.partition(graph, 1.0), min_cut.partition(graph, 0.0)
    assert most.saved and not least.saved
    assert not any(place < graph.boundary and is_heavy(graph, place) for place in most.backward)
    again = [place for place in least.backward if place < graph.boundary]
    assert any(is_heavy(graph, place) for place in again)
    for found in (most, least):
        assert len(set(found.backward)) == len(found.backward)
    assert (graph.to_json(), [list(node.meta) for node in graph.module.graph.nodes]) == before


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", MODELS)
def test_budgets_are_kept_and_a_refusal_names_one_that_works(name, order):
    found = plans(name, min_cut.min_cut, order=order)
    graph, profile = traced(name)
    added = [added_cost(graph, plan.schedule, costs(graph, profile)) for plan in found]
    peaks = [plan.peak_bytes for plan in found]
    assert added == sorted(added) and peaks == sorted(peaks, reverse=True)
    assert peaks[-1] < found[-1].baseline_peak_bytes


def test_without_a_budget_the_setting_decides():
    graph, profile = traced("line")
    default = ackpt.plan(graph, policy=min_cut.min_cut, profile=profile)
    half = ackpt.plan(graph, policy=min_cut.min_cut, profile=profile, activation_memory_budget=0.5)
    assert default.schedule == min_cut.min_cut(graph, profile, None, activation_memory_budget=1)
    assert half.saved_bytes <= 0.5 * default.saved_bytes and half.recompute_flops > default.recompute_flops == 0


def test_torchs_order_has_a_higher_peak_on_a_resnet():
    graph, profile = traced("resnet18")
    late, torchs = (
        simulate(graph, profile, min_cut.min_cut(graph, profile, None, order=order, activation_memory_budget=0.1))
        for order in ORDERS
    )
    assert late.peak_bytes < torchs.peak_bytes
    assert late.saved_bytes == torchs.saved_bytes and late.recompute_flops == torchs.recompute_flops


@pytest.mark.parametrize("order", ORDERS)
def test_the_step_has_the_planned_peak_and_the_bits_of_eager(order):
    step_keeps("language_model", plans("language_model", min_cut.min_cut, order=order)[-1])


@pytest.mark.parametrize(
    "options, what",
    [
        ({"order": "early"}, "order must be 'late' or 'torch', got 'early'"),
        ({"activation_memory_budget": 1.5}, "activation_memory_budget is a number between 0 and 1, got 1.5"),
        ({"activation_memory_budget": True}, "activation_memory_budget is a number"),
        ({"activation_memory_budget": "half"}, "activation_memory_budget is a number"),
    ],
)
def test_bad_options_are_refused(options, what):
    graph, profile = traced("line")
    raises(ValueError, what, lambda: ackpt.plan(graph, policy=min_cut.min_cut, profile=profile, **options))
