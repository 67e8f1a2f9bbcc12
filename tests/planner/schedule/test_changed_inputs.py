"""Outputs that are views of an input which the forward changes: the caller holds the input, not the copied value."""

import pytest
import torch
from conftest import model_of
from torch import nn

import ackpt

pytestmark = pytest.mark.usefixtures("one_thread")


def make_model(function):
    """Adds one to its input, in place."""

    def forward(self, x):
        x.add_(1)
        return self.function(x, self.weight)

    return model_of(forward, weight=nn.Parameter(torch.randn(4, 4)), function=function)


CASES = {
    "a view": lambda x, w: (x.t(), (x.sin() @ w).sum()),
    "a part, which backward does not read": lambda x, w: (x[1:], w.sin()),
    "itself, which backward reads": lambda x, w: (x, (x @ w).sin()),
    "a copy": lambda x, w: (x.clone(), (x @ w).sin()),
    "two views": lambda x, w: (x.t(), x.view(-1), (x @ w).tanh().sin()),
}


@pytest.mark.parametrize("policy", ["none", "full"])
@pytest.mark.parametrize("name", CASES)
def test_planned_as_measured(name, policy):
    model, x = make_model(CASES[name]), torch.randn(3, 4)
    expected = [output.detach().clone() for output in model(x.clone())]
    step = ackpt.compile(model, x, policy=policy, differentiate="all")
    own = x.clone()
    found = step(own)
    assert all(map(torch.equal, found, expected))
    assert (found[0].data_ptr() == own.data_ptr()) is (name not in ("a copy", "a part, which backward does not read"))

    def once():
        model.zero_grad()
        last = step(x)[-1]
        last.backward(torch.ones_like(last))

    del found
    measured = ackpt.measure(once, "cpu", resident=(model, x), repeats=0)
    assert measured.dynamic_peak_bytes == step.plan.dynamic_peak_bytes


def views(function):
    return model_of(
        lambda self, x, y: (self.function(x, y), self.layer(y).sum()), layer=nn.Linear(6, 6), function=function
    )


CHANGED = {
    "a view of the other": lambda x, y: (x.add_(100), y[0])[1],
    "a view of the one": lambda x, y: (y.add_(100), y[0])[1],
}


@pytest.mark.parametrize("name", CHANGED)
@pytest.mark.parametrize("parts", [lambda x: (x, x[1:]), lambda x: (x[:3], x[1:]), lambda x: (x[1:], x)])
def test_a_view_of_inputs_that_share_memory_is_refused_if_one_is_changed(name, parts):
    with pytest.raises(ackpt.TraceError, match="output 0 of the model is a view of an input that shares memory"):
        ackpt.compile(views(CHANGED[name]), *parts(torch.arange(24.0).view(4, 6)), policy="full")


KEPT = {
    "the input itself": lambda x, y: (x.add_(100), y)[1],
    "a copy": lambda x, y: (x.add_(100), y[0].clone())[1],
    "nothing changed": lambda x, y: y[0],
}


@pytest.mark.parametrize("name", KEPT)
def test_other_outputs_of_inputs_that_share_memory(name):
    model, results = views(KEPT[name]), []
    x = torch.arange(24.0).view(4, 6)
    step = ackpt.compile(model, x, x[1:], policy="full")
    for call in (model, step):
        x = torch.arange(24.0).view(4, 6)
        results.append([x, *call(x, x[1:])])
    assert all(map(torch.equal, *results))
