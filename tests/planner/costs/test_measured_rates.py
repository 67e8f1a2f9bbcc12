"""Times of the operations of one graph, measured alone."""

import pytest
import torch

import ackpt
from ackpt.planner.costs import operation_runs as module
from ackpt.planner.costs.calibration import this_cpu
from ackpt.planner.costs.operation_runs import measured_rates
from ackpt.planner.costs.profiles import profile


def layers(count=3):
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()) for _ in range(count)))


@pytest.fixture
def clock(monkeypatch):
    """Every call takes one second more than the one before."""
    times = []
    monkeypatch.setattr(module, "_fastest", lambda call, clock, device: times.append(call()) or float(len(times)))
    return times


def test_equal_operations_are_timed_once(clock):
    graph = ackpt.trace(layers(), torch.ones(4, 8))
    seconds = profile(graph, measured_rates(graph, this_cpu())).seconds
    by_target = {}
    for node in graph.nodes:
        by_target.setdefault(node.target, set()).add(seconds[node.id])
    assert len(by_target["aten.gelu.default"]) == 1
    assert len(clock) < sum(seconds[node.id] > 0 for node in graph.nodes)
    assert by_target["aten.gelu.default"] != by_target["aten.addmm.default"]


def test_other_sizes_have_the_average_rate_of_the_operation(clock):
    graph = ackpt.trace(layers(), torch.ones(4, 8))
    larger = ackpt.trace(layers(), torch.ones(40, 8))
    rates = measured_rates(graph, this_cpu())

    def of_gelu(traced):
        return next(s for node, s in zip(traced.nodes, profile(traced, rates).seconds) if "gelu.d" in node.target)

    once = of_gelu(graph)
    launch = this_cpu().seconds_per_call
    assert of_gelu(larger) == pytest.approx(10 * (once - launch) + launch)


def test_a_step_plans_with_measured_costs_at_every_length(clock):
    model = layers()
    step = ackpt.compile(model, torch.ones(40, 8), budget=0.9, costs="measured")
    assert step.plan.device == "cpu, measured"
    for rows in (40, 60, 100):
        model.zero_grad(set_to_none=True)
        step(torch.ones(rows, 8)).sum().backward()
    timed = len(clock)
    model.zero_grad(set_to_none=True)
    step(torch.ones(90, 8)).sum().backward()
    assert len(clock) == timed


def test_the_backend_takes_the_same_option(clock):
    plans = []
    model = torch.compile(layers(), backend="ackpt", options={"costs": "measured", "on_plan": plans.append})
    model(torch.ones(4, 8)).sum().backward()
    assert [plan.device for plan in plans] == ["cpu, measured"]


def test_steps_that_cannot_be_measured_are_refused():
    with pytest.raises(ValueError, match="costs must be 'rates' or 'measured', got 'seconds'"):
        ackpt.compile(layers(), torch.ones(4, 8), costs="seconds")
    with pytest.raises(ValueError, match="leave device_profile out"):
        ackpt.compile(layers(), torch.ones(4, 8), costs="measured", device_profile="t4")
    with pytest.raises(ValueError, match="this model has no data"):
        ackpt.compile(layers().to("meta"), torch.ones(4, 8, device="meta"), costs="measured")
    with pytest.raises(ValueError, match="budget"):
        ackpt.compile(layers(), torch.ones(4, 8), budget="5s")
