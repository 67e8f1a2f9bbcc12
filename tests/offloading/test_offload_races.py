"""Races: copies run as late as allowed, freed memory is reused at once, and every result must be bit-equal.

The same check with transports that are broken on purpose must find wrong bits, which shows that it can fail.
"""

import late
import pytest
from late import Arena, LateTransport, late_offload
from steps import BYTES, KINDS, LAYERS, STEPS, differing, in_regions, train

import ackpt
from ackpt.offloading import engine as offload_engine

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def right():
    return train()


@pytest.fixture
def made_late():
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
