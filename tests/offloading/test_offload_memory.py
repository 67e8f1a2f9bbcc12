"""Bytes on the device during an offloaded step, from the allocator's events, equal those of theory and prediction.

Gradients exist before the step here, so the peak occurs while the last region is recomputed. Offload saves the inputs
of the earlier regions, except the first region's input, which the caller holds, and the newest ones (`keep_last`).
"""

import contextlib
import functools

import pytest
import torch
from conftest import seed
from offload_helpers import MODES, assert_empty, counts, offload
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import ackpt
from ackpt.models.transformer import Block, Transformer, TransformerConfig
from ackpt.offloading.engine import observers

SIDE, TOKENS = 128, 256
BOUNDARY = TOKENS * SIDE * 4  # bytes


class Chain(nn.Module):
    def __init__(self, length):
        super().__init__()
        self.blocks = nn.Sequential(*(self._block() for _ in range(length)))

    def _block(self):
        return nn.Sequential(nn.Linear(SIDE, SIDE), nn.GELU(), nn.Linear(SIDE, SIDE), nn.GELU())

    def forward(self, x):
        return self.blocks(x).square().sum()


class AutoEncoder(nn.Module):
    def __init__(self, length):
        super().__init__()
        sizes = TransformerConfig(dim=SIDE, ff_dim=3 * SIDE, layers=length, head_dim=64)
        self.transformer = Transformer(sizes)
        self.register_buffer("offsets", torch.tensor([0, TOKENS // 2, TOKENS], dtype=torch.int32))

    def forward(self, x):
        return (self.transformer(x, self.offsets, TOKENS // 2) - x).square().mean()


BLOCKS = {Chain: nn.Sequential, AutoEncoder: Block}


def switch_on(model, how, **options):
    """ "plain", "classic", a mode, or "saved" and a mode; returns the context of a forward."""
    if how.startswith("saved"):
        return offload(how.removeprefix("saved "), min_bytes=1024, **options)
    if how != "plain":
        chosen = None if how == "classic" else offload(how, **{"min_bytes": 1024, "keep_last": 1, **options})
        names = [name for name, _ in model.named_modules() if name.split(".")[-2:-1] == ["blocks"]]
        ackpt.apply_activation_checkpointing(model, names, offload=chosen)
    return contextlib.nullcontext()


def step_of(model, x, context):
    def step():
        model.zero_grad(set_to_none=False)
        with context:
            loss = model(x)
        loss.backward()

    return step


@functools.cache
def measured(kind, length, how, meter=ackpt.measure, without_data=None, **options):
    with FakeTensorMode() if without_data == "fake" else torch.device(without_data or "cpu"):
        seed()
        model, x = kind(length), torch.ones(TOKENS, SIDE)
    step = step_of(model, x, switch_on(model, how, **options))
    return meter(step, resident=(model, x), **({"repeats": 0} if meter is ackpt.measure else {}))


def left_by_forward(measurement) -> int:
    """Live bytes when backward begins, without the loss and the gradients, which exist during the whole step."""
    timeline = measurement.timeline
    return timeline.live[timeline.boundary] - timeline.categories["gradients"][timeline.boundary]


def peaks(measurement) -> tuple[int, int]:
    """Of the forward and the backward, without what is resident."""
    live, boundary = measurement.timeline.live, measurement.timeline.boundary
    return max(live[:boundary]), max(live[boundary:])


@pytest.mark.parametrize(
    ("kind", "length", "keep_last"), [(Chain, 3, 1), (Chain, 6, 0), (Chain, 6, 1), (Chain, 6, 2), (AutoEncoder, 6, 1)]
)
def test_the_peak_falls_by_all_boundaries_but_the_first_and_the_tail(kind, length, keep_last):
    options = {} if keep_last == 1 else {"keep_last": keep_last}
    classic = measured(kind, length, "classic")
    sync, together = (measured(kind, length, mode, **options) for mode in MODES)
    in_forward, in_backward = zip(*map(peaks, (classic, sync, together)))
    assert in_backward[1] == in_backward[2]
    # Without a tail, the input that the last region recomputes from is there all the same.
    assert in_backward[0] - in_backward[1] == (length - 1 - max(1, keep_last)) * BOUNDARY
    # A forward holds a region's whole graph, random number states, and with "async" a boundary that is being copied.
    assert in_forward[1] < in_backward[1] + BOUNDARY and in_forward[2] < in_backward[2] + 2 * BOUNDARY
    assert classic.resident_bytes == sync.resident_bytes == together.resident_bytes
    assert classic.flops == sync.flops == together.flops


@pytest.mark.parametrize("how", ["classic", "sync", "async", "saved sync", "saved async"])
@pytest.mark.parametrize("kind", BLOCKS)
def test_device_memory_does_not_grow_during_the_forward(kind, how):
    short, long = (left_by_forward(measured(kind, length, how)) for length in (3, 6))
    if how == "classic":
        assert long - short == 3 * BOUNDARY
    elif kind is Chain or not how.startswith("saved"):
        assert long == short
    else:  # what is smaller than min_bytes stays
        assert (long - short) // BOUNDARY == 0


@pytest.mark.parametrize("store", ["host", "disk"])
@pytest.mark.parametrize("how", ["sync", "async", "saved sync", "saved async"])
@pytest.mark.parametrize("kind", BLOCKS)
def test_nothing_is_allocated_for_the_store_after_the_first_step(kind, how, store, tmp_path):
    options = {"store": store, **({"folder": str(tmp_path)} if store == "disk" else {})}
    mode = how.removeprefix("saved ")
    chosen = ackpt.offload_saved_tensors(mode, min_bytes=1024, **options)
    engine = chosen.engine
    engine.release_buffers()
    model = kind(4)
    if mode == how:
        ackpt.apply_activation_checkpointing(model, BLOCKS[kind] if kind is AutoEncoder else None, offload=chosen)
    step = step_of(model, torch.ones(TOKENS, SIDE), contextlib.nullcontext() if mode == how else chosen)
    engine.reset_stats()
    step()
    first = counts(engine, "pool_hits", "pool_misses", "copies_out", "pool_bytes")
    assert first["pool_hits"] + first["pool_misses"] == first["copies_out"] and first["pool_misses"] > 0
    for _ in range(3):
        engine.reset_stats()
        step()
        again = counts(engine, "pool_hits", "pool_misses", "copies_out", "pool_bytes")
        assert again == {**first, "pool_hits": first["copies_out"], "pool_misses": 0}
    assert_empty(engine)
    engine.release_buffers()
    assert counts(engine, "pool_bytes") == {"pool_bytes": 0}


@pytest.mark.parametrize("lookahead", [0, 1, 2, 3])
def test_copies_in_flight_are_bounded_in_both_directions(lookahead):
    chosen = offload("async", lookahead_bytes=lookahead * BOUNDARY, keep_last=1)
    x, on_the_way, most = torch.ones(TOKENS, SIDE, requires_grad=True), {}, {"out": 0, "in": 0}

    def observe(what, event, size):
        if what == "waited":
            on_the_way.pop(event, None)
        elif what in most:
            on_the_way[event] = what, size
            most[what] = max(most[what], sum(size for way, size in on_the_way.values() if way == what))

    chosen.engine.reset_stats()
    observers.append(observe)
    try:
        with chosen:
            y = x
            for _ in range(12):
                y = y.sin()
        y.sum().backward()
    finally:
        observers.remove(observe)
    # A copy out begins before the oldest one is waited for; without lookahead one runs at a time.
    assert most == {"out": (lookahead + 1) * BOUNDARY, "in": max(1, lookahead) * BOUNDARY}
    found = counts(chosen.engine, "found", "just_in_time", "copies_in")
    # Twelve sines save eleven results; the tail and what has not left yet are here.
    assert found["copies_in"] == 10 - lookahead
    assert found["just_in_time"] == (10 if lookahead == 0 else 0)
    assert found["found"] + found["just_in_time"] == 11


@pytest.mark.parametrize("how", ["classic", "sync", "async", "saved sync", "saved async"])
@pytest.mark.parametrize(("kind", "without_data"), [(Chain, "fake"), (Chain, "meta"), (AutoEncoder, "fake")])
def test_predicted_bytes_are_the_measured_ones(kind, how, without_data):
    real, predicted = measured(kind, 6, how), measured(kind, 6, how, ackpt.predict, without_data)
    assert left_by_forward(predicted) == left_by_forward(real)
    assert predicted.store_peak_bytes == real.store_peak_bytes
    assert predicted.flops == real.flops
    if kind is Chain:  # attention takes memory of its own while it runs, which a prediction cannot see
        assert predicted.peak_bytes == real.peak_bytes
        assert predicted.categories == real.categories
    elif how in MODES:
        saved = [
            measured(kind, 6, "classic", *meter).peak_bytes - offloaded.peak_bytes
            for meter, offloaded in (((), real), ((ackpt.predict, without_data), predicted))
        ]
        assert saved == [4 * BOUNDARY] * 2


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", BLOCKS)
def test_store_and_device_bytes_add_up(kind, mode):
    stored = [measured(kind, 6, how).store_peak_bytes for how in ("classic", mode)]
    assert stored == [0, 5 * BOUNDARY]  # the batch is saved too, the newest input stays
