"""Outputs that the caller drops before backward cost nothing after the forward; kept ones count to the end."""

import pytest
import torch
from conftest import assert_as_eager, model_of, raises
from torch import nn
from torch.nn import functional as F

import ackpt
from ackpt.planner.policies import POLICIES


class Classifier(nn.Module):
    """Returns the loss, the logits, the predictions and the features."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.head = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, 40)

    def forward(self, x, labels):
        for _ in range(2):
            x = F.gelu(self.down(F.gelu(self.up(x))))
        logits = self.head(x)
        return F.cross_entropy(logits, labels), logits, logits.argmax(-1), x


@pytest.fixture
def given():
    torch.manual_seed(0)
    return Classifier(), torch.randn(64, 16), torch.randint(0, 40, (64,))


def measured(step, model, batch, outputs: str) -> int:
    def once():
        model.zero_grad()
        returned = step(*batch)
        if outputs == "drop":
            returned = returned[:1]
        returned[0].backward()

    return ackpt.measure(once, resident=(model, *batch), repeats=0).peak_bytes


@pytest.mark.parametrize("policy", [policy for policy in POLICIES if policy not in ("manual", "selective")])
def test_the_measured_peak_is_the_planned_one(given, policy):
    model, *batch = given
    peaks = {}
    for outputs in ("drop", "keep"):
        budget = None if policy in ("none", "full") else 0.8
        step = ackpt.compile(model, *batch, budget=budget, policy=policy, outputs=outputs)
        peaks[outputs] = measured(step, model, batch, outputs)
        assert peaks[outputs] == step.plan.peak_bytes
    assert peaks["drop"] < peaks["keep"]


def test_the_baseline_of_a_fraction_drops_them_as_well(given):
    model, *batch = given
    for outputs in ("drop", "keep"):
        step = ackpt.compile(model, *batch, budget=0.8, outputs=outputs)
        assert measured(model, model, batch, outputs) == step.plan.baseline_peak_bytes


def test_outputs_kept_by_the_caller_are_refused_beyond_the_budget(given):
    model, *batch = given
    step = ackpt.compile(model, *batch, budget=0.8)
    returned = step(*batch)
    raises(ackpt.BudgetError, r"output 1 of shape \[64, 40\].*outputs='keep'", lambda: returned[0].backward())
    del returned
    loss = step(*batch)[0]
    loss.backward()
    for budget in ("1MiB", None):
        step = ackpt.compile(model, *batch, budget=budget, policy="auto" if budget else "full")
        returned = step(*batch)
        returned[0].backward()


def test_the_model_itself_runs_only_if_its_outputs_fit_as_well(given):
    model, *batch = given
    kept = ackpt.compile(model, *batch, outputs="keep").plan.peak_bytes
    dropped = ackpt.compile(model, *batch).plan.peak_bytes
    step = ackpt.compile(model, *batch, budget=(kept + dropped) // 2)
    returned = step(*batch)
    raises(ackpt.BudgetError, "still referenced", lambda: returned[0].backward())


def test_a_plan_for_dropped_outputs_is_refused_for_kept_ones(given):
    model, *batch = given
    plan = ackpt.compile(model, *batch, policy="full").plan
    with pytest.raises(ackpt.PlanError):
        ackpt.compile(model, *batch, plan=plan, outputs="keep")


def test_invalid_values_of_the_option_are_refused(given):
    model, *batch = given
    with pytest.raises(ValueError, match="outputs must be 'drop' or 'keep', got 'all'"):
        ackpt.compile(model, *batch, outputs="all")
    raises(ValueError, "outputs must be 'drop' or 'keep', got 3", lambda: ackpt.trace(model, *batch, outputs=3))


def reshaped(function):
    def forward(self, x):
        hidden = self.first(x)
        return self.second(hidden).tanh().mean(), self.function(hidden)

    return model_of(forward, first=nn.Linear(16, 16), second=nn.Linear(16, 16), function=function)


@pytest.mark.parametrize("function", [lambda h: h.view(4, 32), lambda h: h, lambda h: h[0]])
@pytest.mark.parametrize("differentiate", ["loss", "all"])
def test_an_output_that_is_changed_before_backward_reads_it(function, differentiate):
    """Eager raises an error; AOTAutograd does not notice a change of a single view."""
    step = ackpt.compile(reshaped(function), torch.randn(8, 16), policy="none", differentiate=differentiate)
    loss, output = step(torch.randn(8, 16))
    with torch.no_grad():
        output.mul_(2)
    raises(ackpt.CheckpointError, "output 1 of shape .* was changed in place .*output.clone()", loss.backward)
    loss, output = step(torch.randn(8, 16))
    output.clone().mul_(2)
    loss.backward()


@pytest.mark.parametrize("policy", ["none", "full"])
def test_the_caller_may_change_an_output_that_backward_does_not_read(given, policy):
    class Masked(Classifier):
        def forward(self, x, labels):
            loss, logits, *_ = super().forward(x, labels)
            return loss, logits * 2

    torch.manual_seed(0)
    model = Masked()
    step = ackpt.compile(model, *given[1:], policy=policy)

    def change(outputs):
        loss, logits = outputs
        logits[:, 0] = -1e9
        logits.mul_(2)
        return loss

    assert_as_eager(model, step, *given[1:], loss=change)
