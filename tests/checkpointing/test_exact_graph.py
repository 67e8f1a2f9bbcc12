"""``guarantees(exact_graph=False)``: the classic reentrant algorithm has the gradients of the baseline."""

import torch
from conftest import raises

import ackpt


def chain(checkpoint):
    torch.manual_seed(0)
    first, second = torch.nn.Linear(4, 4), torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5))
    x = torch.randn(3, 4, requires_grad=True)
    out = checkpoint(second, checkpoint(first, x))
    out.square().sum().backward()
    return out, [x.grad, *(parameter.grad for layer in (first, second) for parameter in layer.parameters())]


def lean(function, *args):
    with ackpt.guarantees(other_rng=False, unchanged=False, exact_graph=False):
        return ackpt.checkpoint(function, *args)


def test_outputs_and_gradients_are_those_of_the_plain_model():
    plain_out, plain = chain(lambda function, *args: function(*args))
    lean_out, gradients = chain(lean)
    assert torch.equal(plain_out, lean_out)
    assert all(torch.equal(a, b) for a, b in zip(plain, gradients, strict=True))


def test_outputs_without_grad_and_several_outputs():
    x = torch.ones(2, requires_grad=True)
    a, b, c, d = lean(lambda x: (x * 2, (x * 3).detach(), x, torch.arange(2)), x)
    assert c is x and not d.requires_grad and a.requires_grad
    (a + b + c).sum().backward()
    assert torch.equal(x.grad, torch.full((2,), 3.0))


def test_only_an_output_that_needs_no_gradient_is_used():
    x = torch.ones(2, requires_grad=True)
    _, detached = lean(lambda x: (x * 2, (x * 3).detach()), x)
    detached.sum().backward()
    assert x.grad is None


def test_switches_end_with_their_context_and_apply_to_regions_made_inside():
    parameter = torch.nn.Parameter(torch.ones(2))
    x = torch.ones(2, requires_grad=True)
    y = lean(lambda x: x * parameter * x, x)
    strict = ackpt.checkpoint(lambda x: x * parameter * x, x)
    with torch.no_grad():
        parameter.add_(1)
    y.sum().backward()  # changed, and not noticed: that guarantee was off
    raises(ackpt.CheckpointError, "parameter", lambda: strict.sum().backward())
