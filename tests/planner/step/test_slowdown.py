"""`slowdown=`: the lowest peak whose modeled time is at most so much above the baseline's."""

import pytest
import torch
from conftest import measured_step, raises
from planned_models import Residuals
from torch import nn

import ackpt
from ackpt.core.errors import BudgetError

_SIZES = (4, 12, 7)  # tokens of a batch of 8


def _model(kind=Residuals):
    torch.manual_seed(0)
    return kind(nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 32)) for _ in range(6))


@pytest.fixture(scope="module")
def graph():
    return ackpt.trace(_model(), torch.ones(8, 8, 32))


def test_a_larger_slowdown_gives_a_lower_peak_within_it(graph):
    plans = [ackpt.plan(graph, slowdown=slowdown) for slowdown in (0.0, 0.02, "5%", 0.1, 0.2, 0.5)]
    assert all(plan.cost <= most for plan, most in zip(plans, (0.0, 0.02, 0.05, 0.1, 0.2, 0.5)))
    peaks = [plan.peak_bytes for plan in plans]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[-1] < peaks[0] <= plans[0].baseline_peak_bytes
    assert plans[2].limit_bytes is None and plans[2].lower_bound is None


@pytest.mark.parametrize(
    ("options", "budget"),
    [({}, "a budget"), ({"slowdown": "10%"}, "a budget and without slowdown="), ({"regions": False}, "")],
)
def test_the_refusal_of_a_model_that_branches_names_the_budget_with_which_it_is_planned(options, budget):
    class Branching(Residuals):
        def forward(self, x):
            return super().forward(x if x.sum() > 0 else -x)

    with pytest.raises(ackpt.TraceError, match="looks at the values of a tensor") as raised:
        ackpt.compile(_model(Branching), torch.ones(8, 4, 32), **options)
    hint = f'on its blocks. With {budget}, as in budget="6GiB", the model is planned in parts.'
    assert str(raised.value).endswith(hint if budget else "on its blocks.")
    ackpt.compile(_model(Branching), torch.ones(8, 4, 32), budget="6GiB")


def test_no_cheaper_plan_has_a_lower_peak(graph):
    """A budget of one byte less than the lowest peak within a slowdown costs more than it."""
    plan = ackpt.plan(graph, slowdown=0.1)
    assert ackpt.plan(graph, plan.peak_bytes).cost == plan.cost
    assert ackpt.plan(graph, plan.peak_bytes - 1).cost > 0.1


def test_a_budget_is_kept_or_refused_by_its_slowdown(graph):
    within = ackpt.plan(graph, slowdown=0.1)
    assert ackpt.plan(graph, 1.0, slowdown=0).cost == 0
    said = r"makes the step \S+% longer, and slowdown=0.1 allows 10.0%. The smallest"
    e = raises(BudgetError, said, lambda: ackpt.plan(graph, within.peak_bytes - 1, slowdown=0.1))
    assert e.value.least_bytes == within.peak_bytes
    assert ackpt.plan(graph, within.peak_bytes, slowdown=0.1).peak_bytes == within.peak_bytes
    with pytest.raises(BudgetError, match="policy 'full' makes the step .* or policy='auto'"):
        ackpt.plan(graph, 1.0, "full", slowdown=0.01)


@pytest.mark.parametrize("budget", [None, "1MiB"])
def test_every_length_stays_within_the_slowdown(budget):
    model = _model()
    step = ackpt.compile(model, torch.ones(8, _SIZES[0], 32), budget=budget, slowdown=0.25)
    for size in _SIZES:
        x = torch.randn(8, size, 32)
        step(x).backward()
        assert step.plan.cost <= 0.25
        measured = measured_step(model, step, x, warmup=0)
        assert measured.peak_bytes == step.plan.peak_bytes
        assert budget is not None or measured.peak_bytes < step.plan.baseline_peak_bytes
    assert [event.kind for event in step.history if "capture" in event.kind] == ["capture", "dynamic capture"]


def test_the_backend_of_torch_compile_takes_a_slowdown():
    plans: list[ackpt.Plan] = []
    model = torch.compile(_model(), backend="ackpt", options={"slowdown": "10%", "on_plan": plans.append})
    model(torch.ones(8, 8, 32)).backward()
    assert 0 < plans[-1].cost <= 0.1


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"slowdown": -0.1}, ValueError, "slowdown=-0.1: give a fraction of the baseline's time from 0 to 1"),
        ({"slowdown": 10}, ValueError, "1 is twice the time"),
        ({"slowdown": "10"}, ValueError, "such as 0.1 or '10%'"),
        ({"slowdown": "some"}, ValueError, "slowdown='some': give a fraction"),
        ({"slowdown": float("nan")}, ValueError, "slowdown=nan"),
        ({"slowdown": True}, TypeError, "a slowdown is a float or a string such as '10%', got bool"),
        ({"slowdown": [0.1]}, TypeError, "got list"),
        ({"slowdown": 0.1, "policy": "full"}, ValueError, "slowdown= without a budget is for policy 'auto'"),
        ({"slowdown": 0.1, "budget": 0.5, "regions": True}, ValueError, "whose times are not modeled"),
    ],
)
def test_an_invalid_slowdown_is_refused(options, error, message):
    raises(error, message, lambda: ackpt.apply_budget(_model(), torch.ones(8, 8, 32), **options))
