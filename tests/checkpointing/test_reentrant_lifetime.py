"""A region is recomputed once and only if needed, and reference counting frees everything."""

import weakref

import pytest
import torch
from conftest import function_of, tensors_in
from torch import nn

import ackpt


def vector():
    return torch.randn(100, requires_grad=True)


def spy():
    """A function that notes weak references to its intermediates and whether it ran as a recompute."""
    runs: list = []

    def function(x):
        middle = [x.sin()]
        middle.append(middle[0].cos())
        runs.append((ackpt.is_recomputing(), [weakref.ref(tensor) for tensor in middle]))
        return middle[1].exp()

    function.runs = runs
    return function


def test_a_region_is_recomputed_exactly_once_per_backward():
    function, other = spy(), spy()
    x = vector()
    loss = (ackpt.checkpoint(function, x) * ackpt.checkpoint(other, x)).sum()
    assert len(function.runs) == len(other.runs) == 1
    loss.backward(retain_graph=True)
    assert [recomputing for recomputing, _ in function.runs] == [False, True]
    loss.backward()
    assert len(function.runs) == len(other.runs) == 3


def test_a_region_whose_gradient_is_not_needed_is_not_recomputed():
    function, x = spy(), vector()
    y = ackpt.checkpoint(function, x)
    (y.detach().sum() + x.sum()).backward()
    del y
    used, unused = ackpt.checkpoint(lambda x: (x.sin(), function(x).detach()), x)
    (unused.sum() + x.sum()).backward()
    del used, unused
    with torch.no_grad():
        ackpt.checkpoint(function, x)
    ackpt.checkpoint(function, x.detach())
    assert [recomputing for recomputing, _ in function.runs] == [False] * 4


def test_a_region_whose_output_gets_no_gradient_is_left_out():
    stop = function_of(lambda ctx, y: y.clone(), lambda ctx, grad: None)
    function, x = spy(), vector()
    (stop.apply(ackpt.checkpoint(function, x)).sum() + x.sum()).backward()
    assert torch.equal(x.grad, torch.ones_like(x))


class Everything:
    """A region with weak references to all that takes part in it."""

    def __init__(self, nested=False):
        self.layer = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        self.x = torch.randn(3, 4, requires_grad=True)
        self.h = self.x * 2
        self.mask = torch.ones(4)
        self.box = {"h": [self.h.cos()]}
        weight, mask, layer = self.h.exp(), self.mask, self.layer

        def inside(x):
            return layer(x) * weight * mask

        def function(x, box):
            y = ackpt.checkpoint(inside, x) if nested else inside(x)
            return y * box["h"][0], (y, {"y": y.sin()})

        self.function = function
        made = [self.layer, self.function, inside, weight, self.mask, *tensors_in([self.layer, self.x, self.box])]
        self.alive = [weakref.ref(thing) for thing in [*made, self.h]]

    def run(self):
        out = ackpt.checkpoint(self.function, self.h, box=self.box)
        self.alive += [weakref.ref(tensor) for tensor in tensors_in(out)]
        return out

    def die(self):
        alive = self.alive
        self.__dict__.clear()
        return [reference() for reference in alive if reference() is not None]


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("backward", [0, 1, 2])
def test_no_reference_cycles(no_gc, backward, nested):
    every = Everything(nested)
    out = every.run()
    loss = sum(tensor.sum() for tensor in tensors_in(out))
    for left in reversed(range(backward)):
        loss.backward(retain_graph=left > 0)
    del out, loss
    assert every.die() == []


def test_no_reference_cycles_after_errors(no_gc):
    every = Everything()

    def fails(x):
        y = every.function(x, every.box)[0]
        if ackpt.is_recomputing():
            raise ValueError
        return y

    every.alive.append(weakref.ref(fails))
    backward = ackpt.checkpoint(fails, every.h).sum().backward
    for call in (lambda: ackpt.checkpoint(every.function, every.h, box=None), backward):
        try:
            call()
        except (TypeError, ValueError):
            pass
    loss = every.run()[0].sum()
    with torch.no_grad():
        every.layer[0].weight.add_(1)
    try:
        loss.backward()
    except ackpt.CheckpointError:
        pass
    del loss, call, backward, fails
    assert every.die() == []


def test_no_reference_cycle_through_the_loop_that_makes_the_regions(no_gc):
    def forward(blocks, x):
        def shifted(v):
            return v + x

        for block in blocks:
            x = ackpt.checkpoint(lambda v: block(shifted(v)), x)  # noqa: B023
        return x

    blocks = [nn.Linear(4, 4) for _ in range(3)]
    y = forward(blocks, torch.randn(3, 4))
    alive = weakref.ref(y)
    y.sum().backward()
    del y
    assert alive() is None


def test_a_region_does_not_keep_a_leaf_that_it_made_itself(no_gc):
    made = []

    def function(x):
        inside = x.detach().clone().requires_grad_()
        made.append(weakref.ref(inside))
        return (inside * x).sin()

    y = ackpt.checkpoint(function, vector())
    assert made[0]() is None
    y.sum().backward()


@pytest.mark.parametrize("where", ["attribute", "hook", "list"])
def test_a_module_that_remembers_its_last_output_does_not_keep_all_steps(no_gc, where):
    class Remembers(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.last, self.all = nn.Linear(4, 4), None, [torch.zeros(4)]

        def forward(self, x):
            return self.layer(x)

    model = nn.ModuleList([Remembers()])
    ackpt.apply_activation_checkpointing(model, "0")
    alive = []
    for _ in range(4):
        y = model[0](torch.randn(3, 4))
        alive.append(weakref.ref(y))
        if where == "attribute":
            model[0].last = y
        elif where == "list":
            model[0].all[0] = y
        else:
            handle = model[0].register_forward_hook(lambda module, args, out: setattr(module, "last", out))
            model[0](torch.randn(3, 4))
            handle.remove()
        y.sum().backward()
    del y
    assert [reference() is not None for reference in alive[:-1]] == [False] * 3


@pytest.mark.parametrize("wrapped", [lambda h: h, lambda h: [h, {"h": h}]], ids=["tensor", "list"])
def test_a_remembered_activation_keeps_no_saved_tensors_after_the_first_step(wrapped):
    class Remembers(nn.Module):
        last = None

        def forward(self, x):
            h = x.tanh()
            self.last, self.first = wrapped(h), h
            return h * x

    module = Remembers()
    ackpt.checkpoint(module, torch.ones(2, requires_grad=True)).sum().backward()
    for h in tensors_in(module.last):
        with pytest.raises(RuntimeError, match="after they have already been freed"):
            _ = h.grad_fn._saved_result
