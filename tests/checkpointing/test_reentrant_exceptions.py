"""Exceptions of the function itself pass through unchanged, and the next step works."""

import random

import pytest
import torch
from conftest import assert_next_step_works, batch, raises, raises_cleanly, seed, surroundings
from torch import nn

import ackpt


class OwnError(ValueError):
    """Raised by the functions here."""


def raises_on_call(number):
    """A function that draws random numbers, changes modes, and raises at its `number`-th call."""
    layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    calls = []

    def function(x):
        calls.append(None)
        y = layers(x) * random.random()
        with torch.autocast("cpu"), torch.no_grad(), ackpt.guarantees(other_rng=False):
            y @ y.t()
            if len(calls) == number:
                raise OwnError("mine")
        return y

    function.layers = layers
    return function


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("nested", [False, True])
def test_an_exception_in_the_forward_leaves_nothing_behind(nested, autocast):
    function = raises_on_call(1)
    seed()
    with torch.autocast("cpu", enabled=autocast), pytest.raises(OwnError, match="^mine$") as raised:
        ackpt.checkpoint(lambda x: ackpt.checkpoint(function, x) if nested else function(x), batch())
    assert type(raised.value) is OwnError and raised.value.__cause__ is None
    assert_next_step_works()


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("nested", [False, True])
def test_an_exception_in_the_recomputation_leaves_nothing_behind(nested, autocast):
    function = raises_on_call(3 if nested else 2)
    x = batch()
    with torch.autocast("cpu", enabled=autocast):
        loss = ackpt.checkpoint(lambda x: ackpt.checkpoint(function, x) if nested else function(x), x).sum()
    with raises_cleanly(OwnError, "^mine\nackpt: this error was raised while backward recomputed"):
        loss.backward()
    assert x.grad is None and all(p.grad is None for p in function.layers.parameters())


def test_buffers_change_once_although_the_recompute_fails():
    function = raises_on_call(2)
    loss = ackpt.checkpoint(function, batch()).sum()
    values = [buffer.clone() for buffer in function.layers.buffers()]
    with pytest.raises(OwnError):
        loss.backward()
    assert all(torch.equal(one, other) for one, other in zip(values, function.layers.buffers()))
    assert function.layers[1].num_batches_tracked == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt, StopIteration, SystemExit, AssertionError, MemoryError])
def test_every_kind_of_exception_is_passed_on(error):
    def function(x):
        if ackpt.is_recomputing():
            raise error("in recompute")
        return x.sin()

    loss = ackpt.checkpoint(function, batch()).sum()
    with raises_cleanly(error, "in recompute"):
        loss.backward()


def test_a_failed_backward_can_be_repeated():
    function = raises_on_call(2)
    x = batch()
    loss = ackpt.checkpoint(function, x).sum()
    with pytest.raises(OwnError):
        loss.backward()
    loss.backward()  # nothing of the region was released
    assert x.grad is not None


def test_an_error_in_one_thread_does_not_block_others():
    import threading

    def fails():
        with pytest.raises(OwnError):
            ackpt.checkpoint(raises_on_call(1), batch())
        loss = ackpt.checkpoint(raises_on_call(2), batch()).sum()
        with pytest.raises(OwnError):
            loss.backward()

    thread = threading.Thread(target=fails)
    thread.start()
    thread.join(timeout=30)
    assert not thread.is_alive()
    assert_next_step_works()


def test_an_object_that_is_not_callable_and_wrong_arguments_are_refused():
    before = surroundings()
    raises(TypeError, "takes a function and its arguments, got int", lambda: ackpt.checkpoint(3, batch()))
    raises(TypeError, "missing 1 required positional argument", ackpt.checkpoint)
    with pytest.raises(TypeError, match="unexpected keyword argument 'nonsense'"):
        ackpt.checkpoint(nn.Linear(4, 4), batch(), nonsense=1)
    assert surroundings() == before


def test_an_error_in_the_recomputation_names_its_origin():
    blocks = [nn.Linear(4, 4)]
    loss = ackpt.checkpoint(lambda x: blocks[0](x), batch()).sum()
    blocks.clear()
    with raises_cleanly(IndexError, "list index out of range\nackpt: .* recomputed the checkpointed region .*<lambda>"):
        loss.backward()
