"""Failed copies: the step raises one OffloadError, and the next step is bit-equal to the baseline."""

import threading

import pytest
import torch
from steps import KINDS, differing, one_forward, own_engine, run_network

import ackpt
from ackpt.offloading import transport

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def network_right():
    return run_network(None, None)


def failure(step, *args):
    """The message and cause of the OffloadError that `step` raises; drops its traceback and the tensors in it."""
    try:
        step(*args)
    except ackpt.OffloadError as error:
        return str(error), type(error.__cause__)
    return None


def count_moves(monkeypatch, kind, mode):
    counted, move = [], transport._move
    monkeypatch.setattr(transport, "_move", lambda *args: (counted.append(1), move(*args)))
    run_network(kind, own_engine(mode, keep_last=0), 1)
    monkeypatch.undo()
    return len(counted)


def failing_at(monkeypatch, number):
    move, count, lock = transport._move, iter(range(10**6)), threading.Lock()

    def fails_once(*args):
        with lock:
            place = next(count)
        if place == number:
            raise OSError("the bus is down")
        move(*args)

    monkeypatch.setattr(transport, "_move", fails_once)


@KINDS
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_copy_that_fails_fails_the_step_and_no_other(network_right, monkeypatch, kind, mode):
    moves, said = count_moves(monkeypatch, kind, mode), "a copy to or from the offload store failed: the bus is down"
    assert moves >= 8
    for number in range(moves):
        offload = own_engine(mode, keep_last=0)
        failing_at(monkeypatch, number)
        assert failure(run_network, kind, offload, 1) == (said, OSError)
        torch.manual_seed(0)
        made = run_network(kind, offload, 2)
        assert differing(made, network_right[: len(made)]) == 0, number
        stats = offload.engine.stats()
        assert (stats["store_bytes"], stats["stored"]) == (0, 0), number
        offload.engine.release_buffers()
        assert offload.engine.stats()["pool_bytes"] == 0, number
        monkeypatch.undo()


@KINDS
def test_the_next_step_works_while_the_error_is_still_held(network_right, monkeypatch, kind):
    offload = own_engine(keep_last=0)
    failing_at(monkeypatch, 1)
    try:
        run_network(kind, offload, 1)
    except ackpt.OffloadError as error:
        held = error  # and with it the frames of the step, and its graph
        assert differing(run_network(None, None), network_right) == 0  # without offload
        made = run_network(kind, offload, 2)
    assert differing(made, network_right[: len(made)]) == 0
    assert "the bus is down" in str(held)


@KINDS
def test_a_failed_copy_does_not_break_a_later_step_of_other_sizes(monkeypatch, kind):
    offload = own_engine(keep_last=0)

    def step(rows):
        x = torch.ones(rows, 64, requires_grad=True)
        with one_forward(kind, offload) as call:
            y = call(torch.sin, call(torch.sin, x * 2))
        y.sum().backward()
        return x.grad

    expected = [step(1024), step(512)]
    failing_at(monkeypatch, 0)
    assert failure(step, 1024) is not None
    found = [step(512), step(256), step(1024)]
    assert torch.equal(found[0], expected[1]) and torch.equal(found[2], expected[0])
    offload.engine.release_buffers()
    assert offload.engine.stats()["pool_bytes"] == 0


def refused(*args, **options):
    raise RuntimeError("can't start new thread")


def test_a_copy_that_cannot_be_submitted_leaves_the_counts_right(monkeypatch):
    offload = own_engine(keep_last=0)
    x = torch.randn(64, 64, requires_grad=True)

    with monkeypatch.context() as patched:
        patched.setattr(transport.CpuTransport, "copy_out", refused)
        with pytest.raises(RuntimeError) as raised, offload:
            (x * 2).square()
    raised.value.__traceback__ = None
    stats = offload.engine.stats()
    assert (stats["store_bytes"], stats["stored"]) == (0, 0)


def test_a_reload_that_cannot_be_submitted_is_not_counted(monkeypatch):
    offload = own_engine("sync", keep_last=0)
    x = torch.randn(64, 64, requires_grad=True)
    with offload:
        y = (x * 2).square()

    with monkeypatch.context() as patched:
        patched.setattr(transport.CpuTransport, "copy_in", refused)
        with pytest.raises(RuntimeError):
            y.sum().backward(retain_graph=True)
    x.grad = None
    y.sum().backward()
    assert torch.equal(x.grad, 8 * x.detach())
