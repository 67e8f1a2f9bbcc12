"""The explorer's data: every number is that of a plan, as made again for the same budget."""

import copy

import pytest
from conftest import raises

import ackpt
from ackpt.core.errors import BudgetError
from experiments.frontier import FrontierConfig, run_frontier
from experiments.steps.frontier_models import workload
from experiments.widgets import explorer

pytestmark = pytest.mark.usefixtures("one_thread")
SIZES = {"layers": 1, "dim": 16, "heads": 2, "ff_dim": 32, "vocab_size": 20, "seq_len": 24, "batch_size": 2}


@pytest.fixture(scope="module")
def step():
    config = FrontierConfig(sizes=SIZES, policies=("auto",), budgets=(0.5,), peers=("checkpoint",))
    record = run_frontier(config)
    work = workload(config.model, config.sizes, config.seed)
    graph = ackpt.trace(work.model, *work.args)
    profile = ackpt.profile(graph, workspace="measured")
    return graph, profile, record, explorer.explorer(graph, profile, record)


def test_every_budget_has_the_plan_that_is_made_for_it_or_is_refused(step):
    graph, profile, _, data = step
    assert [row["percent"] for row in data["budgets"]] == [*range(2, 101, 2)]
    for row in data["budgets"][::6]:
        if row["plan"] is None:
            with pytest.raises(BudgetError) as refused:
                ackpt.plan(graph, row["percent"] / 100, profile=profile)
            assert refused.value.least_bytes == data["baseline"]["resident_bytes"] + data["least_bytes"]
            continue
        plan, shown = ackpt.plan(graph, row["percent"] / 100, profile=profile), data["plans"][row["plan"]]
        assert shown["peak_bytes"] == plan.dynamic_peak_bytes <= plan.limit_bytes
        assert shown["recompute_flops"] == plan.recompute_flops and shown["saved_bytes"] == plan.saved_bytes
        assert shown["cost"] == plan.cost and row["lower_bound"] == plan.lower_bound
        fates = {"s": "saved", "r": "recomputed"}
        listed = zip(data["activations"], shown["fates"], strict=True)
        found = [(row["name"], row["module"], row["bytes"], fates[fate]) for row, fate in listed if fate != "-"]
        assert found == [(a.name, a.module, a.bytes, a.fate) for a in plan.activations]
    assert {row["plan"] is None for row in data["budgets"]} == {True, False}


def test_the_largest_live_bytes_are_the_peak(step):
    _, _, _, data = step
    for shown in data["plans"]:
        live = [sum(bucket) for bucket in zip(*shown["live"].values(), strict=True)]
        assert max(live) == shown["peak_bytes"] and len(live) <= explorer.BUCKETS
        assert 0 < shown["boundary"] < len(live)


def test_the_smallest_feasible_budget_is_where_refusals_begin(step):
    _, _, _, data = step
    baseline, least = data["baseline"]["peak_bytes"], data["least_bytes"]
    for row in data["budgets"]:
        assert (row["plan"] is None) == (row["percent"] * baseline // 100 < least)
    assert least == min(point["peak_bytes"] for point in data["front"])


def test_only_correct_peers_are_shown(step):
    graph, profile, record, data = step
    (row,) = record.metrics["peers"]
    shown = {"peak_bytes": row["measured_peak_bytes"], "recompute_flops": row["recompute_flops"]}
    assert data["peers"] == [{"name": "PyTorch: per-block", **shown}]
    changed = copy.deepcopy(record)
    changed.metrics["peers"][0]["gradients_difference"] = 1.0
    assert explorer.explorer(graph, profile, changed)["peers"] == []


def test_a_record_of_another_step_is_refused(step):
    graph, profile, record, _ = step
    changed = copy.deepcopy(record)
    changed.metrics["baseline"]["predicted_peak_bytes"] += 4
    raises(ValueError, "another step", lambda: explorer.explorer(graph, profile, changed))
