"""Graphs that end in many ways: the gradients are right, and the store is empty afterwards."""

import concurrent.futures
import functools
import gc
import threading
import weakref

import pytest
import torch
from conftest import assert_equal, raises, seed
from offload_helpers import MODES, assert_empty, blocks, counts, gradients, matrix, offload, offloaded, plain

import ackpt


def forward(context, call, model, x):
    """Three blocks as regions in one context, with an operation outside of regions between them."""
    with context():
        for layer in model:
            x = call(layer, x).sin()
    return x


def backward_in_order(context, call, model, x, step=1):
    losses = [forward(context, call, model, x * scale).sum() for scale in (1, 2, 3)]
    for loss in losses[::step]:
        loss.backward()


def forwards_and_backwards_interleaved(context, call, model, x):
    first = forward(context, call, model, x * 1).sum()
    second = forward(context, call, model, x * 2).sum()
    first.backward()
    third = forward(context, call, model, x * 3).sum()
    second.backward()
    third.backward()


def contexts_nested(context, call, model, x):
    with context():
        y = model[0](x).sin()
        with context():
            y = call(model[1], y).sin()
            with context():
                y = y.cos()
            y = y * y
        y = model[2](y).sin()
    y.sum().backward()


def offload_inside_checkpoint(context, call, model, x):

    def inside(x):
        x = x.sin()
        with context():
            x = model[1](model[0](x)).sin()
        return x.cos()

    y = call(inside, x * 2)
    ackpt.checkpoint(inside, y).sum().backward()


def nested_checkpoints(context, call, model, x):

    def two(x):
        return call(model[1], call(model[0], x).sin()).sin()

    call(lambda x: call(two, call(model[2], x).cos()).sin(), call(two, x * 2)).sum().backward()


def no_grad_and_eval_between(context, call, model, x):
    loss = forward(context, call, model, x).sum()
    model.eval()
    with torch.no_grad():
        values = [forward(context, call, model, x)]
    values.append(forward(context, call, model, x).detach())
    with torch.inference_mode():
        values.append(forward(context, call, model, matrix()).clone())
    model.train()
    loss.backward()
    assert_equal(values[:1], values[1:2], "value")
    return [torch.stack([value.detach() for value in values[:2]])]


def an_exception_in_mid_forward(context, call, model, x):

    def fails(x):
        raise KeyError("in mid-forward")

    for _ in range(2):
        try:
            with context():
                call(fails, call(model[1], call(model[0], x).sin()).sin())
        except KeyError:
            pass
    seed(3)
    forward(context, call, model, x).sum().backward()


def an_exception_in_mid_backward(context, call, model, x):
    loss = forward(context, call, model, x)

    def fails(grad):
        raise KeyError("in mid-backward")

    def hooked():
        with context():
            y = call(model[0], x).sin()
            y.register_hook(fails)
            return call(model[1], y).sin().sum()

    raises(KeyError, "in mid-backward", lambda: hooked().backward())
    gradients(model, x)
    loss.sum().backward()


def a_backward_that_never_comes(context, call, model, x):
    for _ in range(3):
        forward(context, call, model, x)
    kept = forward(context, call, model, x)
    seed(3)
    forward(context, call, model, x).sum().backward()
    del kept


def two_losses_one_after_the_other(context, call, model, x, both=True):
    with context():
        y = call(model[0], x * 2).sin()
        losses = [call(model[1], y).sin().sum(), call(model[2], y).cos().sum()]
    if both:
        losses[0].backward(retain_graph=True)
    first = gradients(model, x)
    losses[1].backward()
    return first


def a_graph_retained_twice(context, call, model, x):
    loss = forward(context, call, model, x).sum()
    found = []
    for left in (2, 1, 0):
        loss.backward(retain_graph=left > 0)
        found += gradients(model, x)
    return found


def backward_inside_the_context(context, call, model, x):
    with context():
        for scale in (1, 2, 3):
            y = x * scale
            for layer in model:
                y = call(layer, y).sin()
            y.sum().backward()
            del y


def a_step_inside_a_backward(context, call, model, x):
    other = blocks(2)
    y = forward(context, call, model, x)

    def step(grad):
        with torch.enable_grad():
            forward(context, call, other, matrix()).sum().backward()

    y.register_hook(step)
    y.sum().backward()
    return gradients(other)


SCENARIOS = {
    "one_of_two_losses": functools.partial(two_losses_one_after_the_other, both=False),
    "backward_in_reverse": functools.partial(backward_in_order, step=-1),
    **{
        function.__name__: function
        for function in (
            *(backward_in_order, forwards_and_backwards_interleaved, contexts_nested),
            *(offload_inside_checkpoint, nested_checkpoints, no_grad_and_eval_between),
            *(an_exception_in_mid_forward, an_exception_in_mid_backward, a_backward_that_never_comes),
            *(two_losses_one_after_the_other, a_graph_retained_twice),
            *(backward_inside_the_context, a_step_inside_a_backward),
        )
    },
}


def run(scenario, context, call):
    seed(1)
    model, x = blocks(3), matrix().requires_grad_()
    return [*(SCENARIOS[scenario](context, call, model, x) or ()), *gradients(model, x)]


@pytest.mark.parametrize("options", [{}, {"keep_last": 1}, {"lookahead_bytes": 1 << 30}], ids=["0", "1", "far"])
@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("mode", MODES)
def test_gradients_are_right_and_the_store_is_empty(no_gc, mode, scenario, options):
    expected = run(scenario, *plain())
    engine = offload(mode, **options).engine
    engine.reset_stats()
    assert_equal(expected, run(scenario, *offloaded(mode, **options)), "gradient")
    assert counts(engine, "copies_out")["copies_out"] > 0
    assert_empty(engine)
    assert not engine._storages and not engine.returned


def test_the_tensors_of_a_dropped_graph_are_freed_with_it(no_gc):
    for keep_last in (0, 1, 3):
        x = matrix().requires_grad_()
        with offload("async", keep_last=keep_last):
            tensors = [x.sin()]
            for _ in range(4):
                tensors.append(tensors[-1].sin())
        storages = [weakref.ref(tensor.untyped_storage()) for tensor in tensors]
        tensors.clear()
        assert sum(storage() is not None for storage in storages[:-1]) <= 1  # one copy may still be running
        assert storages[-1]() is None


@pytest.mark.parametrize("mode", MODES)
def test_backward_towards_some_inputs_only(mode):
    def scenario(context, inputs):
        seed(1)
        model, x = blocks(3), matrix().requires_grad_()
        h = x * 2
        with context():
            y = model(h).sin()
        y.sum().backward(inputs=inputs(model, x, h), retain_graph=True)
        first = gradients(model, x)
        (by_input,) = torch.autograd.grad(y.sum(), [h], retain_graph=True)
        y.sum().backward()
        return [*first, by_input, *gradients(model, x)]

    for inputs in (
        lambda model, x, h: [x],
        lambda model, x, h: [h],
        lambda model, x, h: list(model[1].parameters()),
        lambda model, x, h: [model[2][4].weight],
    ):
        assert_equal(scenario(plain()[0], inputs), scenario(offloaded(mode)[0], inputs), "gradient")
        assert_empty(offload(mode).engine)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_double_backward(mode, inside):
    def scenario(context):
        x = matrix().double().requires_grad_()
        w = matrix(0.1).double().requires_grad_()
        with context():
            y = ((x * 2) @ w).tanh().pow(3)
            if inside:
                (grad,) = torch.autograd.grad(y.sum(), [x], create_graph=True)
        if not inside:
            (grad,) = torch.autograd.grad(y.sum(), [x], create_graph=True)
        (second,) = torch.autograd.grad(grad.square().sum(), [x], create_graph=True)
        second.exp().sum().backward()
        return [grad.detach(), second.detach(), *gradients(x, w)]

    assert_equal(scenario(plain()[0]), scenario(offloaded(mode)[0]), "gradient")
    gc.collect()  # create_graph makes a cycle of every leaf and its gradient
    assert_empty(offload(mode).engine)


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("mode", MODES)
def test_threads_share_an_engine(mode, count):
    context, call = offloaded(mode)
    models = [blocks(3).eval() for _ in range(count)]
    x = matrix()
    expected = []
    for model in models:
        for scale in (1, 2, 3):
            forward(*plain(), model, x * scale).sum().backward()
        expected.append(gradients(model))
    barrier = threading.Barrier(count)
    context().engine.reset_stats()

    def work(model):
        barrier.wait()
        for scale in (1, 2, 3):
            forward(context, call, model, x * scale).sum().backward()
        return gradients(model)

    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        for wanted, found in zip(expected, pool.map(work, models)):
            assert_equal(wanted, found, "gradient")
    assert counts(context().engine, "copies_out")["copies_out"] > 3 * count
    assert_empty(context().engine)


@pytest.mark.parametrize("mode", MODES)
def test_backward_in_another_thread_than_the_forward(mode):
    context, call = offloaded(mode)
    model, x = blocks(3).eval(), matrix()
    forward(*plain(), model, x).sum().backward()
    expected = gradients(model)
    loss = forward(context, call, model, x).sum()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    del loss, thread
    assert_equal(expected, gradients(model), "gradient")
    assert_empty(context().engine)
