"""A capture sees the model's own objects: tensors, their attributes and classes, errors, iterators, random numbers."""

import contextlib
import copy
import io
import itertools
import queue
import random
import threading
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from conftest import model_of, raises
from small_models import build
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_map_only

import ackpt
from ackpt.graph import TraceError


class Model(nn.Module):
    def __init__(self, function, **attributes):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.function = nn.Linear(4, 8), nn.Linear(8, 3), function
        self.a.weight.scale = 0.5
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x))).square().mean() * self.function(self, x)


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w.t() * w.scale

    @staticmethod
    def backward(ctx, gradient):
        x, w = ctx.saved_tensors
        scale = w.scale if isinstance(w, nn.Parameter) else 7.0
        return gradient @ w * scale, gradient.t() @ x * scale


class Holds(torch.autograd.Function):
    """Its backward reads a parameter that it did not get as a tensor."""

    @staticmethod
    def forward(ctx, x, weights):
        ctx.weights = weights
        return x @ weights[0].t()

    @staticmethod
    def backward(ctx, gradient):
        return gradient @ ctx.weights[0], None


@torch.jit.script
def scripted(x, weights: list[torch.Tensor]):
    return x @ weights[0].t()


X = torch.linspace(-1, 1, 20).reshape(5, 4)
NINE = torch.tensor([9])


def stepped(model, steps=3):
    losses = []
    for _ in range(steps):
        losses.append(model(X))
        losses[-1].backward()
    return [loss.item() for loss in losses], [parameter.grad for parameter in model.parameters()]


def attempted(body, error=Exception):
    def function(model, x):
        hidden, factor = model.a(x), 3.0
        try:
            factor = body(model, hidden)
        except error:
            pass
        return factor

    return function


def suppressed(model, x):
    with contextlib.suppress(RuntimeError):
        return 1 + model.a(x).std().item()
    return 3.0


def hooked(model, x):
    hidden = model.a(x)
    hidden.register_hook(lambda gradient: gradient * model.b.bias.mean())
    return hidden.mean()


def choleskys(model, x):
    square = model.a(x).t() @ model.a(x)
    try:
        return torch.linalg.cholesky(square).mean()
    except torch.linalg.LinAlgError:
        return torch.linalg.cholesky(square + torch.eye(8)).mean()


def assigns_data(model, hidden):
    model.a.weight.data = model.a.weight.data * 2
    return 2.0


EQUAL = {
    "isinstance": lambda self, x: 2.0 if isinstance(self.a.weight, nn.Parameter) else 1.0,
    "in a set": lambda self, x: 2.0 if self.a.weight in {*self.parameters()} else 1.0,
    "attribute": lambda self, x: self.a.weight.scale,
    "is_leaf": lambda self, x: 2.0 if self.a.weight.is_leaf and x.grad_fn is None else 1.0,
    "itself": lambda self, x: 1.0 + (x.contiguous() is x and torch.atleast_1d(x, self.a.bias)[1] is self.a.bias),
    "custom function": lambda self, x: Scaled.apply(x, self.a.weight).mean(),
    "in a list": lambda self, x: Holds.apply(self.a(x) @ self.a.weight, [self.a.weight]).mean(),
    "scripted": lambda self, x: scripted(x, [self.a.weight]).mean(),
    "parameter": lambda self, x: F.linear(x, nn.Parameter(self.a.weight)).mean(),
    "vmap": lambda self, x: torch.vmap(lambda row: x @ row)(self.a.weight).mean(),
    "hook": hooked,
    "own error": attempted(lambda self, hidden: hidden.view(7, 7).mean(), RuntimeError),
    "strides": attempted(lambda self, hidden: hidden.t().view(-1).mean(), RuntimeError),
}


def in_a_thread(self, x):
    drawn = []
    thread = threading.Thread(target=lambda: drawn.append(torch.rand(())))
    thread.start()
    thread.join()
    return 1.0


READS = "looks at the values"
REFUSED = {
    "item": (attempted(lambda self, hidden: hidden.std().item()), READS),
    "suppress": (suppressed, READS),
    "data_ptr": (attempted(lambda self, hidden: 2.0 if self.a.weight.data_ptr() else 1.0), "data"),
    "data": (attempted(assigns_data), "replaces the data"),
    "cholesky": (choleskys, "catches errors of linalg_cholesky"),
    "embedding": (attempted(lambda self, hidden: F.embedding(NINE, hidden).mean()), "catches errors of embedding"),
    "index": (attempted(lambda self, hidden: hidden[:, torch.tensor([9])].mean()), "catches errors of __getitem__"),
    "version": (lambda self, x: 1.0 + self.a.weight._version, "reads the version of a tensor"),
    "thread": (in_a_thread, "starts a thread"),
    "counts": (
        lambda self, x: setattr(self.a.weight, "scale", self.a.weight.scale + 1) or 1.0,
        "changes attribute 'weight.scale' of module 'a'",
    ),
    "type": (lambda self, x: 2.0 if type(self.a(x)) in (torch.Tensor, nn.Parameter) else 1.0, "compares a type"),
    "assigns a module": (lambda self, x: setattr(self, "empty", nn.Tanh()) or 1.0, "replaces submodule 'empty'"),
}
ITEMS = {
    "next": (lambda self, x: next(self.of), lambda: itertools.cycle([1.0, 0.5])),
    "zip": (lambda self, x: next(zip(self.of, "a"))[0], lambda: (1.0 / n for n in itertools.count(1))),
    "list": (lambda self, x: next(self.of[0]), lambda: [itertools.cycle([1.0, 0.5])]),
    "tuple": (lambda self, x: next(self.of[0]), lambda: (itertools.cycle([1.0, 0.5]), 1)),
    "method": (lambda self, x: self.of(), lambda: itertools.cycle([1.0, 0.5]).__next__),
    "partial": (lambda self, x: self.of(), lambda: partial(next, itertools.cycle([1.0, 0.5]))),
    "text": (lambda self, x: float(self.of.readline()), lambda: io.StringIO("1.0\n0.5\n0.25\n")),
    "queue": (lambda self, x: self.of.get_nowait(), lambda: filled(queue.Queue())),
    "caught": (attempted(lambda self, hidden: next(self.of)), lambda: itertools.cycle([1.0, 0.5])),
}


def filled(items):
    for value in (1.0, 0.5, 0.25):
        items.put(value)
    return items


@pytest.mark.parametrize("name", EQUAL)
def test_a_capture_sees_the_models_own_objects(name):
    model, own = Model(EQUAL[name]), Model(EQUAL[name])
    (losses, gradients), (own_losses, own_gradients) = stepped(ackpt.compile(model, X, policy="none")), stepped(own)
    assert losses == own_losses and all(map(torch.equal, gradients, own_gradients))


@pytest.mark.parametrize("name", REFUSED)
def test_what_only_a_capture_does_is_refused_even_if_the_model_catches_it(name):
    function, said = REFUSED[name]
    model = Model(function, empty=None)
    before = dict(vars(model))
    error = raises(ackpt.TraceError, said, lambda: ackpt.compile(model, X))
    assert error.value.can_split and vars(model) == before and vars(model.a.weight) == {"scale": 0.5}


@pytest.mark.parametrize("name", ITEMS)
def test_items_that_a_forward_takes_are_refused_and_not_consumed(name):
    function, make = ITEMS[name]
    model, own = Model(function, of=make()), Model(function, of=make())
    items = model.of
    raises(ackpt.TraceError, "takes items from attribute 'of'", lambda: ackpt.compile(model, X))
    assert model.of is items and stepped(model)[0] == stepped(own)[0]


@pytest.mark.parametrize("kind", [iter, enumerate, lambda items: (each for each in items)])
def test_an_iterator_as_argument_is_refused_and_not_consumed(kind):
    model = model_of(
        lambda self, batches: sum(self.a(item if torch.is_tensor(item) else item[1]).sum() for item in batches),
        a=nn.Linear(X.shape[-1], 2),
    )
    items = kind([X, X])
    raises(ackpt.TraceError, "whose items a capture would take", lambda: ackpt.trace(model, items))
    step = ackpt.compile(model, [X, X], budget="1MiB")
    assert step(items) == model(kind([X, X])) and next(items, None) is None


def test_attributes_of_parameters_are_compared_at_every_call():
    model = Model(lambda self, x: getattr(self.a.weight, "scale", 1.0) * getattr(self.b.bias, "scale", 1.0))
    own, step = copy.deepcopy(model), ackpt.compile(model, X, policy="none")
    own.a.weight.scale = 0.5
    for change in (partial(setattr, value=2.0), delattr):
        for net in (model, own):
            change(net.a.weight, "scale") if change is delattr else setattr(net.a.weight, "scale", 2.0)
        assert step(X).item() == own(X).item()
    for net in (model, own):
        net.b.bias.scale = torch.tensor(3.0)
    assert step(X).item() == own(X).item()


def test_random_numbers_of_another_thread_are_not_the_models():
    stop, drawn = threading.Event(), []

    def draw():
        while not stop.is_set():
            drawn.append(random.random())
            stop.wait(0.0005)

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        ackpt.compile(Model(lambda self, x: 1.0), X)
        with pytest.raises(ackpt.TraceError, match="draws random numbers from Python's module random"):
            ackpt.compile(Model(lambda self, x: random.random()), X)
    finally:
        stop.set()
        thread.join()
    assert len(set(drawn)) == len(drawn) > 0


# Which tensors a step can be captured with: plain ones, on meta or not; subclasses are refused before planning.


ONES = torch.ones(3, 4)


class Sub(torch.Tensor):
    """Keeps its type through every operation."""


class Tagged(torch.Tensor):
    """Carries an attribute, as MONAI's MetaTensor does."""

    tag = None

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        result = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(result, Tagged):
            result.tag = next(value.tag for value in args if isinstance(value, Tagged))
        return result


class OwnParameter(nn.Parameter):
    """A parameter like any other."""


class Held(nn.Module):
    def __init__(self, register, value):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        register(self, "held", value)

    def forward(self, x, *others, **named):
        return self.linear(x) * self.held


def refused(match, model, *args, **kwargs):
    for call in (ackpt.compile, ackpt.trace):
        with pytest.raises(TraceError, match=match):
            call(model, *args, **kwargs)


@pytest.mark.parametrize("kind", [Sub, Tagged])
def test_arguments_of_a_subclass_are_refused_by_name(kind):
    model, value = Held(setattr, torch.ones(4)), ONES.as_subclass(kind)
    refused(f"argument 0 is .*{kind.__name__}.*as_subclass", model, value)
    refused(f"argument mask .*{kind.__name__}", model, ONES, mask=value)
    refused(f"argument 1.1. .*{kind.__name__}", model, ONES, [ONES, value])


@pytest.mark.parametrize("kind", [Sub, Tagged])
def test_tensor_subclasses_held_by_the_model_are_refused_by_name(kind):
    value = torch.ones(4).as_subclass(kind)
    refused("buffer 'held'.*as_subclass", Held(nn.Module.register_buffer, value), ONES)
    refused("parameter 'held'.*as_subclass", Held(nn.Module.register_parameter, nn.Parameter(value)), ONES)
    refused("test_own_objects.py.*as_subclass", Held(setattr, value), ONES)


def test_a_wrapper_of_tensors_is_refused_by_name():
    refused("argument 0 is .*TwoTensor", Held(setattr, torch.ones(4)), TwoTensor(ONES, ONES.clone()))


def test_a_later_call_with_a_subclass_is_refused_and_the_next_plain_one_runs():
    step = ackpt.compile(Held(setattr, torch.ones(4)), ONES)
    expected = step(ONES)
    raises(TraceError, "argument 0 .*Tagged", lambda: step(ONES.as_subclass(Tagged)))
    assert torch.equal(step(ONES), expected)


def test_parameters_and_buffers_of_torchs_own_types_are_plain():
    for register, value in [
        (nn.Module.register_parameter, OwnParameter(torch.ones(4))),
        (setattr, nn.Buffer(torch.ones(4))),
    ]:
        model = Held(register, value)
        assert torch.equal(ackpt.compile(model, ONES)(ONES), model(ONES))
    with FakeTensorMode():
        assert ackpt.trace(Held(setattr, nn.Buffer(torch.ones(4))), torch.ones(3, 4)).nodes


@pytest.mark.parametrize("name", ["resnet", "bert"])
def test_trace_and_compile_plan_a_model_on_meta_alike(name):
    model, args, kwargs = build(name)
    args, kwargs = tree_map_only(torch.Tensor, lambda value: value.to("meta"), (args, kwargs))
    graph = ackpt.trace(model.to("meta"), *args, **kwargs)
    assert not graph.has_data
    assert ackpt.plan(graph, budget="100%") == ackpt.compile(model, *args, budget="100%", **kwargs).plan


@pytest.mark.parametrize("kind", ["GRU", "LSTM", "RNN"])
def test_recurrent_layers_on_meta_are_captured_as_on_the_cpu(kind):
    def traced(device):
        return ackpt.trace(getattr(nn, kind)(8, 8, 2, device=device), torch.zeros(5, 2, 8, device=device))

    assert traced("meta").hash == traced("cpu").hash
