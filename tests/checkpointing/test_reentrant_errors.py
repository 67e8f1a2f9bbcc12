"""Regions that cannot compute the gradients of the baseline raise an error with cause and fix, and leave no trace."""

import collections
import dataclasses

import pytest
import torch
import torch.utils.checkpoint
from conftest import batch, raises_cleanly
from torch import nn

import ackpt

Error = ackpt.CheckpointError


def layers():
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def region(function=None):
    """A step up to its loss: ``(loss, x)``."""
    x = batch()
    return ackpt.checkpoint(function or layers(), x).sum(), x


CREATE_GRAPH = {
    "backward": lambda loss, x: loss.backward(create_graph=True),
    "grad": lambda loss, x: torch.autograd.grad(loss, x, create_graph=True),
    "hessian": lambda loss, x: torch.autograd.functional.hvp(lambda x: ackpt.checkpoint(torch.sin, x).sum(), x, x),
}


@pytest.mark.parametrize("differentiate", CREATE_GRAPH.values(), ids=CREATE_GRAPH)
@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
def test_create_graph_is_refused(differentiate):
    loss, x = region()
    with raises_cleanly(Error, "create_graph=True .* Call the function without checkpoint"):
        differentiate(loss, x)
    assert x.grad is None


PARTIAL = {
    "autograd.grad": lambda loss, x: torch.autograd.grad(loss, x),
    "inputs": lambda loss, x: loss.backward(inputs=[x]),
    "inputs of torch.autograd": lambda loss, x: torch.autograd.backward(loss, inputs=x),
    "jacobian": lambda loss, x: torch.autograd.functional.jacobian(lambda x: ackpt.checkpoint(torch.sin, x), x),
}


@pytest.mark.parametrize("differentiate", PARTIAL.values(), ids=PARTIAL)
@pytest.mark.parametrize("nested", [False, True])
def test_gradients_of_chosen_inputs_are_refused(differentiate, nested):
    model = layers()
    loss, x = region(lambda x: ackpt.checkpoint(model, x).sin() if nested else model(x))
    with raises_cleanly(Error, r"torch.autograd.grad\(\) or backward\(inputs=...\) .* Call loss.backward\(\)"):
        differentiate(loss, x)
    loss.backward()
    assert x.grad is not None


def test_transforms_of_torch_func_are_refused():
    model = layers()

    def loss(x):
        return ackpt.checkpoint(model, x).sum()

    x = batch().detach()
    for transform in (torch.func.grad(loss), torch.func.vmap(loss), torch.func.jacrev(loss), torch.func.hessian(loss)):
        with raises_cleanly(Error, "torch.func transform .* Apply the transform to the function without"):
            transform(x)
    with raises_cleanly(Error, "torch.func transform"):
        torch.func.jvp(loss, (x,), (x,))


@dataclasses.dataclass
class Box:
    value: object


def add_item(items):
    items.append(items[0].cos())
    return items[0].sin()


def replace_item(items):
    items[0] = items[0].cos()
    return items[0].sin()


def set_key(items):
    items["b"] = items["a"].cos()
    return items["a"].sin()


def set_field(box):
    box.value = box.value.cos()
    return box.value.sin()


CONTAINERS = {
    "append": (add_item, lambda x: [x]),
    "replace": (replace_item, lambda x: [x]),
    "pop": (lambda items: items.pop().sin() + items[0], lambda x: [x, x * 2]),
    "key": (set_key, lambda x: {"a": x}),
    "key of a subclass": (set_key, lambda x: collections.OrderedDict(a=x)),
    "field": (set_field, lambda x: Box(x)),
}


@pytest.mark.parametrize(("function", "make"), CONTAINERS.values(), ids=CONTAINERS)
def test_a_container_argument_changed_by_the_region_is_refused(function, make):
    with raises_cleanly(Error, "adds, removes or replaces tensors in a list, dict or dataclass .* Return the tensors"):
        ackpt.checkpoint(function, make(batch()))


class Cache:
    """Keys seen so far, as transformers keep them."""

    def __init__(self):
        self.layers = [Box(None)]

    def update(self, keys):
        old = self.layers[0].value
        self.layers[0].value = keys if old is None else torch.cat([old, keys])
        return self.layers[0].value


OBJECTS = {
    "object": (lambda x, cache: (x @ cache.update(x).t()).sum(1), Cache),
    "empty list": (lambda x, seen: seen.append(x.cos()) or x.sin() * len(seen), list),
    "empty dict": (lambda x, seen: x.sin() + seen.setdefault(len(seen), x.cos()), dict),
}


@pytest.mark.parametrize(("function", "make"), OBJECTS.values(), ids=OBJECTS)
def test_an_argument_object_changed_in_every_run_is_refused(function, make):
    with raises_cleanly(Error, "changes an object that it got as an argument .*use_cache=False"):
        ackpt.checkpoint(function, batch(), make())


def test_an_argument_object_completed_once_is_allowed():
    class Mask:
        value = None

        def get(self, x):
            if self.value is None:
                self.value = torch.ones(4) * 2
            return self.value

    x = batch()
    ackpt.checkpoint(lambda x, mask: x * mask.get(x), x, Mask()).sum().backward()
    assert torch.equal(x.grad, torch.full((3, 4), 2.0))


LEAKS = {
    "attribute": lambda keep: lambda x: setattr(keep, "value", x.cos()) or x.sin(),
    "list": lambda keep: lambda x: keep.all.append(x.cos()) or x.sin(),
    "plain object": lambda keep: lambda x: Namespace(x.sin()),
}


class Namespace:
    def __init__(self, value=None):
        self.value = value
        self.all = []


@pytest.mark.parametrize("leak", LEAKS.values(), ids=LEAKS)
def test_a_tensor_that_no_recorder_sees_and_is_not_returned_cannot_take_part_in_the_loss(leak):
    keep, x = Namespace(), batch()
    with ackpt.guarantees(unchanged=False):
        out = ackpt.checkpoint(leak(keep), x)
    if not isinstance(out, torch.Tensor):
        loss = out.value.sum()
    else:
        loss = out.sum() + (keep.all[0] if keep.all else keep.value).sum()
    with raises_cleanly(Error, "left it other than through its return value .* Return the tensor"):
        loss.backward()


def test_an_unreachable_tensor_is_named():
    """A closed-over tensor that no walk finds: here behind an attribute with slots."""

    class Hidden:
        __slots__ = ("tensor",)

    root, hidden = batch(), Hidden()
    hidden.tensor = root.exp()
    with (
        raises_cleanly(Error, "computed before it \\(by ExpBackward0\\).* Pass it as an argument.*in the thread"),
        ackpt.guarantees(unchanged=False),
    ):
        ackpt.checkpoint(lambda x: x * hidden.tensor, batch())
    for _ in range(5):  # a recorder sees it
        ackpt.checkpoint(lambda x: x * hidden.tensor, x := batch()).sum().backward(retain_graph=True)
        assert torch.equal(x.grad, hidden.tensor)
    root.grad = None
    hidden.tensor = root
    ackpt.checkpoint(lambda x: x * hidden.tensor, batch()).sum().backward()
    assert root.grad is not None  # a leaf is found by the graph alone


def counted(*results):
    """A function that returns a different result in each call."""
    calls = iter(results)
    return lambda x: next(calls)(x)


DIFFERENT = {
    "number": (lambda x: (x.sin(), x.cos()), lambda x: (x.sin(),), "2 tensors in forward, 1 in recompute"),
    "none": (lambda x: x.sin(), lambda x: None, "1 tensors in forward, 0 in recompute"),
    "shape": (lambda x: x.sin(), lambda x: x.sin()[:2], r"\[3, 4\] .* in forward, shape \[2, 4\] .* in recompute"),
    "dtype": (lambda x: x.sin(), lambda x: x.sin().double(), "float32 .* in forward, .* float64 .* in recompute"),
    "device": (lambda x: x.sin(), lambda x: x.sin().to("meta"), "on cpu in forward, .* on meta in recompute"),
    "without grad": (lambda x: x.sin(), lambda x: x.sin().detach(), "in forward, .* without grad in recompute"),
    "second of two": (lambda x: (x.sin(), x), lambda x: (x.sin().half(), x), "output 0: .*float32 .*float16"),
}


@pytest.mark.parametrize(("first", "second", "message"), DIFFERENT.values(), ids=DIFFERENT)
def test_a_recomputation_with_other_outputs_is_refused(first, second, message):
    x = batch()
    out = ackpt.checkpoint(counted(first, second), x)
    loss = out[0].sum() if isinstance(out, tuple) else out.sum()
    with raises_cleanly(Error, message):
        loss.backward()
    assert x.grad is None


@pytest.mark.parametrize("option", ["use_reentrant", "context_fn", "determinism_check", "early_stop"])
def test_options_of_torchs_checkpoint_are_named(option):
    layer, x = nn.Linear(2, 2), torch.ones(1, 2)
    for function in (layer, lambda x: layer(x)):
        with raises_cleanly(TypeError, f"'{option}' is an option of torch's checkpoint.*drop it"):
            ackpt.checkpoint(function, x, **{option: False})
    assert ackpt.checkpoint(lambda x, **options: x + len(options), x, **{option: False}).sum() == 4
    assert ackpt.checkpoint(lambda x, use_reentrant: x, x, use_reentrant=False) is not None


def test_a_result_passed_as_function_is_refused():
    layer, x = nn.Linear(2, 2), torch.ones(1, 2)
    with raises_cleanly(TypeError, r"got Tensor: write checkpoint\(layer, x\), not"):
        ackpt.checkpoint(layer(x), x)
