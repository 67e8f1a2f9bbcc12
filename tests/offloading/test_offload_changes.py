"""In-place changes of saved tensors give the right gradient or an error, never a wrong gradient."""

import copy
import threading

import pytest
import torch
from conftest import assert_equal, raises
from offload_helpers import MODES, SIDE, assert_empty, gradients, matrix, offload, offloaded, plain, region
from torch import nn

import ackpt

CHANGES = {
    "the saved tensor": lambda h, y: h.add_(1),
    "a view of it": lambda h, y: h[0].mul_(2),
    "a detached view": lambda h, y: h.detach().zero_(),
    "its result": lambda h, y: y.detach().zero_(),
}


@pytest.fixture
def gate(monkeypatch):
    """An event that all copies wait for."""
    opened, move = threading.Event(), ackpt.offloading.transport._move

    def waits(*args):
        opened.wait()
        move(*args)

    monkeypatch.setattr(ackpt.offloading.transport, "_move", waits)
    yield opened
    opened.set()


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("keep_last", [0, 1, 2])
def test_a_change_in_place_is_refused_or_gradients_are_right(mode, change, kept, keep_last):
    x = matrix().requires_grad_()
    with offload(mode, keep_last=keep_last):
        h = x * 2
        y = h.sin()
        z = y.exp()
    with torch.no_grad():
        CHANGES[change](h, y)
    if not kept:
        del h, y
    refused_or_right(z.sum(), x)
    h = y = z = None
    assert_empty(offload(mode).engine)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("release", [0, 2])
def test_a_change_in_place_during_the_copy_is_refused_or_gradients_are_right(gate, change, release):
    x = matrix().requires_grad_()
    with offload("async", lookahead_bytes=1 << 20):
        h = x * 2
        y = h.sin()
        z = y.exp()
        with torch.no_grad():
            CHANGES[change](h, y)
        gate.set()
        del h, y
        for _ in range(release):
            z = z * 1
    refused_or_right(z.sum(), x)
    del z
    assert_empty(offload("async").engine)


def refused_or_right(loss, x):
    try:
        loss.backward()
    except (ackpt.OffloadError, ackpt.CheckpointError) as error:
        assert "in place" in str(error) or "in-place" in str(error)
    else:
        other = x.detach().clone().requires_grad_()
        (other * 2).sin().exp().sum().backward()
        assert torch.equal(x.grad, other.grad)


@pytest.mark.parametrize("guarded", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_an_input_of_a_region_changed_in_place_is_refused_or_gradients_are_right(mode, guarded):
    x = matrix().requires_grad_()
    with ackpt.guarantees(unchanged=guarded):
        h = x * 2
        y = region(mode)(torch.sin, h)
        z = region(mode)(torch.exp, y).sum()
    with torch.no_grad():
        h.add_(1)
    refused_or_right(z, x)
    del y, z
    assert_empty(offload(mode).engine)


def test_a_tensor_that_stays_and_is_changed_in_place_is_refused():
    x = matrix().requires_grad_()
    with offload("sync", min_bytes=1 << 20):
        h = x * 2
        z = h.sin().sum()
    with torch.no_grad():
        h.add_(1)
    raises(ackpt.OffloadError, r"shape \[32, 32\].* at version 1, and was at 0", z.backward)


def test_changes_allowed_without_offload_are_allowed():
    """Changes of running statistics, and of buffers and tensors that are not saved."""
    model = nn.Sequential(nn.BatchNorm1d(SIDE), nn.Linear(SIDE, SIDE), nn.BatchNorm1d(SIDE))
    x, found = matrix(), []
    for context in (plain()[0], offloaded("async")[0]):
        other = copy.deepcopy(model)
        with context():
            losses = [other(x * scale).square().sum() for scale in (1, 2)]
        for loss in losses:
            loss.backward()
        found.append([*gradients(other), *other.buffers()])
    assert_equal(*found, "gradient")
