"""Gradients that autograd sums in place have the measured bytes; caches keep no tensors of a predicted step."""

import contextlib
import functools
import sys
import types

import pytest
import torch
import torch.nn.functional as F
from caches import Attends, in_closure, in_default, in_dict, in_list, mask
from conftest import function_of
from torch._subclasses.fake_tensor import FakeTensorMode

import ackpt
from ackpt.metering.meter import measure
from ackpt.metering.prediction import predict

ELEMENTS = 100_000
UsesItsGradient = function_of(lambda ctx, x: x * 2, lambda ctx, gradient: gradient.sin() + gradient)
OneGradientForTwo = function_of(lambda ctx, x, y: x + y, lambda ctx, gradient: (gradient.sin(),) * 2)


def three_uses(h):
    return (h.sin() + h.cos() + h.exp()).sum()


def kept_by_a_hook(h):
    kept = []
    h.sin().register_hook(kept.append)
    first = h.cos()
    first.register_hook(kept.append)
    return (first + h + h.exp()).sum()


def with_retain_grad(h):
    first = h.cos()
    first.retain_grad()
    return (first.sin() + first + h.exp()).sum()


def changed_by_a_hook(h):
    h.register_hook(lambda gradient: gradient.sin() + gradient)
    return three_uses(h)


def residual_chain(h):
    for _ in range(4):
        h = h + h.sin().tanh()
    return h.sum()


def products(h):
    square = h.view(250, 400)
    return (square @ square.t()).sin().sum() + (h * h).sin().sum()


def normed(h):
    rows = h.view(250, 400)
    return (F.layer_norm(rows, (400,)) + F.softmax(rows, -1) + rows.sigmoid()).sum()


def formulas(h):
    return (torch.hypot(h, h.sin()) + torch.lerp(h, h.cos(), h.sigmoid()) + torch.addcdiv(h, h, h.exp())).sum()


def region(h):
    def function(x):
        inner = x.sin()
        return inner.sin() + inner.cos() + inner.exp() + x

    return (ackpt.checkpoint(function, h) + h.cos()).sum() + ackpt.checkpoint(function, h.sin()).sum()


LOSSES = {
    "three uses": three_uses,
    "expanded": lambda h: h.sum() + h.sum() + h.sin().sum(),
    "expanded and not": lambda h: h.sum() + h.cos().sum() + h.sin().sum(),
    "residual chain": residual_chain,
    "halves": lambda h: (h[:50_000].sin() + h[50_000:].cos() + h.view(2, 50_000)[0]).sum(),
    "unbound": lambda h: sum((a * b).sum() for a in h.view(4, 25_000).unbind(0) for b in h.view(4, 25_000).unbind(0)),
    "transposed": lambda h: h.view(250, 400).t().sin().sum() + h.view(250, 400).cos().sum(),
    "concatenated": lambda h: torch.cat([h, h.cos(), h]).sin().sum(),
    "products": products,
    "normed": normed,
    "kept by a hook": kept_by_a_hook,
    "with retain_grad": with_retain_grad,
    "changed by a hook": changed_by_a_hook,
    "uses its gradient": lambda h: (UsesItsGradient.apply(h) + h.cos()).sum(),
    "one gradient for two": lambda h: (OneGradientForTwo.apply(h, h) + h.cos()).sum(),
    "formulas": formulas,
    "region": region,
}


def backward(loss, h, x):
    loss.backward()


def twice(loss, h, x):
    loss.backward(retain_graph=True)
    loss.backward()


def second_order(loss, h, x):
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    gradient.sin().sum().backward()


def to_several(loss, h, x):
    torch.autograd.grad(loss, [h, x])


def both(loss_of, run=backward):
    results = []
    for meter, options, mode in ((measure, {"repeats": 0}, contextlib.nullcontext()), (predict, {}, FakeTensorMode())):
        with mode:
            x = torch.ones(ELEMENTS, requires_grad=True)

        def step():
            h = x.sin()  # noqa: B023
            run(loss_of(h), h, x)  # noqa: B023
            x.grad = None  # noqa: B023

        results.append(meter(step, resident=(x,), **options))
    return results


def levels(measurement):
    """Live bytes after every allocation and free, in whole tensors: kernels allocate scalars and rows out of sight."""
    whole = [round(value / (4 * ELEMENTS)) for value in measurement.timeline.live]
    return [value for value, before in zip(whole, [None, *whole]) if value != before]


def is_within(predicted, measured):
    """Whether the predicted levels are among the measured ones, in their order."""
    following = iter(measured)
    return all(any(level == other for other in following) for level in predicted)


@pytest.mark.parametrize("name", LOSSES)
def test_gradient_sums_are_equal_at_every_event(name):
    measured, predicted = both(LOSSES[name])
    assert is_within(levels(predicted), levels(measured))
    assert predicted.flops == measured.flops


@pytest.mark.parametrize("run", [twice, second_order, to_several])
def test_gradient_sums_of_autograd_grad_and_repeated_backwards_are_equal_at_every_event(run):
    measured, predicted = both(three_uses, run)
    assert is_within(levels(predicted), levels(measured))


def matrices(h):
    square = h.view(250, 400)
    wide = square.t() @ square  # 400 x 400: larger than what it is computed from
    return (wide.sin() + wide @ wide + wide.t()).sum()


def test_a_peak_at_a_gradient_sum_is_exact():
    measured, predicted = both(matrices)
    assert predicted.peak_bytes == measured.peak_bytes


def test_a_dispatch_mode_of_the_step_sees_its_operations():
    """Torch then passes tensors through that mode first, and no sum must be mistaken for an in-place one."""
    from torch.utils.flop_counter import FlopCounterMode

    with FakeTensorMode():
        x = torch.ones(ELEMENTS, requires_grad=True)

    def step():
        with FlopCounterMode(display=False):
            three_uses(x.sin()).backward()

    assert predict(step, resident=(x,)).peak_bytes >= 4 * ELEMENTS


class Shares(Attends):
    of_class = None
    shared: dict = {}


GLOBAL: dict = {}
NESTED: dict = {"masks": {}}
LIST: list = []
NAME = None


class Table:
    def __init__(self):
        self.mask = None


TABLE, CACHED = Table(), functools.lru_cache(mask)


def in_attribute(owner, name):
    def mask_of(model, x):
        if getattr(owner, name, None) is None:
            setattr(owner, name, mask(x.shape[1]))
        return getattr(owner, name)

    return mask_of


def logs_activations(model, x):
    LIST.append(model.linear.weight * 2)
    return mask(x.shape[1])


PLACES = {
    "cache": lambda model, x: CACHED(x.shape[1]),
    "dict": in_dict(lambda model: GLOBAL, lambda table: table.repeat(2, 2)[: len(table), : len(table)]),
    "tuple": in_dict(lambda model: GLOBAL, lambda table: (table,), lambda value: value[0]),
    "nested dict": in_dict(
        lambda model: NESTED["masks"],
        lambda table: {"mask": types.SimpleNamespace(both=[table])},
        lambda value: value["mask"].both[0],
    ),
    "list": in_list(LIST),
    "global": in_attribute(sys.modules[__name__], "NAME"),
    "class": in_attribute(Shares, "of_class"),
    "new attribute of the class": in_attribute(Shares, "new"),
    "object": in_attribute(TABLE, "mask"),
    "dict of the class": in_dict(lambda model: model.shared),
    "default": in_default,
    "function": in_attribute(in_default, "mask"),
    "closure": in_closure,
    "log": logs_activations,
}


def predicted(model, x, context=contextlib.nullcontext):
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        with context():
            model(x).backward()
        optimizer.step()
        optimizer.zero_grad()

    return [ackpt.predict(step, resident=(model, x, *kept)) for kept in ((), (optimizer,))]


@pytest.mark.parametrize(
    ("kind", "place"),
    [*(("fake", place) for place in PLACES), *(("meta", place) for place in ("cache", "nested dict", "closure"))],
)
def test_a_prediction_leaves_no_cached_tensors(kind, place):
    mask_of = in_closure() if place == "closure" else PLACES[place]
    context = FakeTensorMode() if kind == "fake" else torch.device("meta")
    with context:
        model, x = Shares(mask_of), torch.empty(2, 6, 8)
    predicted(model, x, contextlib.nullcontext if kind == "fake" else lambda: context)
    assert NESTED == {"masks": {}} and not GLOBAL and not LIST and not Shares.shared and TABLE.mask is NAME is None
    real = Shares(mask_of)
    loss = real(torch.randn(2, 6, 8))
    loss.backward()
    assert type(loss) is torch.Tensor and torch.isfinite(loss)
    GLOBAL.clear(), NESTED["masks"].clear(), LIST.clear(), Shares.shared.clear(), CACHED.cache_clear()
    in_default.__defaults__[0].clear()
    globals().update(NAME=None)
    Shares.of_class = TABLE.mask = None
    for owner, name in ((Shares, "new"), (in_default, "mask")):
        if name in vars(owner):
            delattr(owner, name)


def test_a_failed_prediction_leaves_no_cached_tensors():
    with FakeTensorMode():
        model, x = Shares(PLACES["dict"]), torch.empty(2, 6, 8)
    with pytest.raises(ackpt.MeterError, match="needs the values of a tensor"):
        ackpt.predict(lambda: model(x).item(), resident=(model, x))
    assert not GLOBAL


def test_earlier_caches_and_state_of_the_step_are_kept():
    four = CACHED(4)
    GLOBAL[4] = four
    with FakeTensorMode():
        model, x, counter = Shares(PLACES["dict"]), torch.empty(2, 6, 8), {"steps": torch.zeros(())}
        scaler = torch.amp.GradScaler("cpu")
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        counter["steps"].add_(1)
        scaler.scale(model(x)).backward()
        scaler.step(optimizer)
        scaler.update()

    for _ in range(2):
        ackpt.predict(step, resident=(model, x), warmup=0)
    assert GLOBAL == {4: four} and CACHED(4) is four and "steps" in counter and scaler._scale is not None
    assert all("exp_avg" in optimizer.state[each] and each.grad is not None for each in model.parameters())
    GLOBAL.clear()
    CACHED.cache_clear()
