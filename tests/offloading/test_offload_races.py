"""Races: copies run as late as allowed, freed memory is reused at once, and every result must be bit-equal.

The same check with transports that are broken on purpose must find wrong bits, which shows that it can fail.
"""

import contextlib
import time
import types

import late
import pytest
import torch
from late import Arena, LateTransport, late_offload
from steps import (
    BYTES,
    KINDS,
    LAYERS,
    STEPS,
    Training,
    differing,
    in_regions,
    one_forward,
    own_engine,
    plain,
    run_network,
    saved,
    train,
)

import ackpt
from ackpt.offloading import engine as offload_engine
from ackpt.offloading import transport
from ackpt.offloading.store import Pool, host_memory

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def right():
    return train()


@pytest.fixture
def made_late():
    """A factory of transports, all of whose copies run at the end of the test."""
    transports = []

    def make(kind=LateTransport):
        transports.append(kind(Arena()))
        return transports[-1]

    yield make
    for each in transports:
        each.finish()


DELAYED = [
    *({"mode": mode, "keep_last": keep_last} for mode in ("sync", "async") for keep_last in (0, 1, 3)),
    *({"keep_last": 0, "lookahead_bytes": size} for size in (0, BYTES - 1, BYTES, 3 * BYTES, 100 * BYTES)),
]


@KINDS
@pytest.mark.parametrize("options", DELAYED, ids=str)
def test_copies_delayed_to_the_latest_moment_give_the_same_bits(right, made_late, kind, options):
    late_copies = made_late()
    offload = late_offload(late_copies, **options)
    assert differing(train(kind, offload, late_copies.arena), right) == 0
    assert late_copies.faults == []
    stats = offload.engine.stats()
    assert (stats["store_bytes"], stats["stored"]) == (0, 0)
    saved_each_step = LAYERS // 2 if kind is in_regions else LAYERS
    assert stats["copies_out"] == STEPS * (saved_each_step - options["keep_last"])
    assert stats["pool_hits"] >= (STEPS - 1) * (saved_each_step - options["keep_last"])  # buffers are reused
    assert late_copies.arena.reused > STEPS * LAYERS  # and so are freed blocks


@KINDS
@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize(
    "broken", [late.EventBeforeCopyOut, late.EventBeforeCopyIn, late.FreesSourceEarly, late.UsesTargetEarly]
)
def test_the_check_finds_wrong_bits_where_a_transport_is_broken(right, made_late, kind, mode, broken):
    late_copies = made_late(broken)
    offload = late_offload(late_copies, mode, keep_last=0)
    # A region would restore what it writes into the arena, a tensor from outside, and so hide the wrong bits.
    with ackpt.guarantees(unchanged=False):
        assert differing(train(kind, offload, late_copies.arena), right) > 0
    assert late_copies.faults or broken in (late.EventBeforeCopyIn, late.UsesTargetEarly)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_one_wrong_copy_is_reported(right, made_late, mode):
    class OnceEarly(LateTransport):
        """Broken once: one source is freed without waiting."""

        def wait_event(self, event, used=None):
            is_broken = event in [copy.event for copy in self.copies[1:2]]
            return transport.Ended() if is_broken else super().wait_event(event, used)

    late_copies = made_late(OnceEarly)
    found = train(saved, late_offload(late_copies, mode, keep_last=0, lookahead_bytes=2 * BYTES), late_copies.arena, 2)
    assert 0 < differing(found, right[: len(found)])


@KINDS
def test_computation_waits_for_the_copy_it_reads(right, made_late, kind):
    late_copies = made_late()
    log = []

    def observe(what, event, size):
        if what != "store":
            log.append((what, event, event.done()))

    offload_engine.observers.append(observe)
    try:
        offload = late_offload(late_copies, keep_last=0)
        made = train(kind, offload, late_copies.arena)
    finally:
        offload_engine.observers.remove(observe)
    assert differing(made, right) == 0
    submitted = [event for what, event, _ in log if what in ("out", "in")]
    held = [event for what, event, _ in log if what == "waited"]
    assert sorted(map(id, held)) == sorted(map(id, submitted))  # each once
    for event in submitted:
        moments = [(what, done) for what, other, done in log if other is event]
        assert moments in ([("out", False), ("waited", True)], [("in", False), ("waited", True)])


def test_every_copy_waits_for_earlier_uses_of_its_buffer(made_late):
    late_copies = made_late()
    train(saved, late_offload(late_copies, keep_last=0, lookahead_bytes=2 * BYTES), late_copies.arena)
    users, latest, reused = {}, {}, 0
    for copy in late_copies.copies:
        before, event = users.setdefault(copy.buffer, {}), copy.event._event
        assert copy.after == tuple(before.values())
        if copy.buffer in latest:
            assert event.began >= latest[copy.buffer].ended > 0
        latest[copy.buffer] = event
        reused += bool(before)
        if copy.way == "out":
            before.clear()
        before[copy.way] = copy.event
    assert reused > len(late_copies.copies) / 2 and len(latest) <= LAYERS < len(late_copies.copies)


def reuse_of_a_buffer(late_copies):
    """The bytes copied from a buffer that is returned and taken again while it is still being read."""
    pool = Pool(host_memory)
    first, second = late_copies.arena.storage(BYTES), late_copies.arena.storage(BYTES)
    torch.frombuffer(late_copies.arena._blocks[first.data_ptr()], dtype=torch.uint8).fill_(1)
    torch.frombuffer(late_copies.arena._blocks[second.data_ptr()], dtype=torch.uint8).fill_(2)
    buffer = pool.take(BYTES)
    left = late_copies.copy_out(first, 0, buffer.bytes, BYTES, buffer.after)
    late_copies.wait_event(left)
    target = late_copies.allocate(BYTES)
    loaded = late_copies.copy_in(buffer.bytes, target, BYTES, [left])
    pool.give(buffer, [left, loaded])
    again = pool.take(BYTES)
    assert again is buffer
    late_copies.wait_event(late_copies.copy_out(second, 0, again.bytes, BYTES, again.after))
    late_copies.wait_event(loaded, target)
    return set(torch.tensor(target, dtype=torch.uint8).tolist())


@pytest.mark.parametrize(("kind", "read"), [(LateTransport, 1), (late.IgnoresEarlierCopies, 2)])
def test_a_buffer_is_used_again_only_after_the_copy_that_reads_it(made_late, kind, read):
    assert reuse_of_a_buffer(made_late(kind)) == {read}


class Broken(Exception):
    pass


def dropped_forward(training, kind, offload, layers):
    def until(function, x):
        nonlocal layers
        if not layers:
            raise Broken
        layers -= 1
        return call(function, x)

    with one_forward(kind, offload) as call:
        training.forward(until)


def broken_backward(training, kind, offload, fails_at):
    def fail(grad):
        raise Broken

    handle = training.weights[fails_at].register_hook(fail)
    try:
        with one_forward(kind, offload) as call:
            loss = training.forward(call)
        loss.backward()
    finally:
        handle.remove()


FAILURES = [
    *((dropped_forward, layers, {"mode": mode}) for layers in (1, 2, 3) for mode in ("sync", "async")),
    *((broken_backward, layer, {"lookahead_bytes": 2 * BYTES}) for layer in range(LAYERS)),
]


@KINDS
@pytest.mark.parametrize(("fails", "at", "options"), FAILURES)
def test_a_step_that_fails_during_copies_leaves_the_engine_usable(right, made_late, kind, fails, at, options):
    late_copies = made_late()
    offload = late_offload(late_copies, keep_last=0, **options)
    training = Training(late_copies.arena)
    made = []
    for _ in range(STEPS):
        state = training.generator.get_state()
        with contextlib.suppress(Broken):
            fails(training, kind, offload, at)
        for weight in training.weights:
            weight.grad = None
        training.generator.set_state(state)
        with one_forward(kind, offload) as call:  # its first tensors get the memory of the dropped ones
            loss = training.forward(call)
        loss.backward()
        made += [loss.detach(), *training.update()]
    assert differing(made, right) == 0 and late_copies.faults == []
    stats = offload.engine.stats()
    assert (stats["store_bytes"], stats["stored"]) == (0, 0)


@KINDS
@pytest.mark.parametrize("forwards, backwards", [(2, 1), (1, 2)])
def test_two_live_forwards_and_retained_graphs_share_the_streams_and_the_pool(made_late, kind, forwards, backwards):
    late_copies = made_late()
    offload = late_offload(late_copies, keep_last=0)

    def step(training, kind):
        losses = []
        for _ in range(forwards):
            with one_forward(kind, offload) if kind else contextlib.nullcontext(plain) as call:
                losses.append(training.forward(call))
        for loss in losses:
            for left in reversed(range(backwards)):
                loss.backward(retain_graph=left > 0)
        return [*(loss.detach() for loss in losses), *training.update()]

    plain_training, training = Training(Arena()), Training(late_copies.arena)
    for _ in range(STEPS):
        assert differing(step(training, kind), step(plain_training, None)) == 0
    assert late_copies.faults == [] and offload.engine.stats()["store_bytes"] == 0


def test_hold_returns_how_long_it_waited(monkeypatch):
    now = [100.0]

    class Running:
        def done(self):
            return False

        def error(self):
            now[0] += 5.0 if now[0] == 100.0 else 0.0

    monkeypatch.setattr(transport, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))
    waited = transport.CpuTransport().wait_event(Running())
    assert waited.done() and waited.seconds() == 5.0


# Copies that take their time, over torch's own memory and operations.


@pytest.fixture(scope="module")
def network_right():
    return run_network(None, None)


@KINDS
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_slow_copies_give_the_same_bits(network_right, monkeypatch, kind, mode):
    move = transport._move

    def slow(*args):
        time.sleep(0.002)
        move(*args)

    monkeypatch.setattr(transport, "_move", slow)
    offload = own_engine(mode)
    assert differing(run_network(kind, offload), network_right) == 0
    stats = offload.engine.stats()
    assert stats["store_bytes"] == 0 and 0 < stats["copies_in"] <= stats["copies_out"]
    assert stats["pool_hits"] > stats["pool_misses"] > 0
