"""Recomputed tensors are a category of their own: in measured, predicted and simulated steps, to the byte."""

import pytest
import torch
from conftest import model_of
from torch import nn
from torch.utils.checkpoint import checkpoint

import ackpt
from ackpt.metering import cuda_meter
from ackpt.metering.timeline import build_timeline

S = 4 * 64 * 32  # bytes of an activation
pytestmark = pytest.mark.usefixtures("one_thread")


def sines():
    """Three sines: each saves its input."""
    return model_of(lambda self, x: x.sin().sin().sin())


def step(model, x):
    def run():
        for parameter in getattr(model, "parameters", list)():
            parameter.grad = None
        model(x).sum().backward()

    return run


def test_tensors_that_outlive_a_recomputation_count_as_recomputed():
    actions = [("alloc", 1, 10), ("backward",), ("alloc", 2, 20), ("recompute",), ("alloc", 3, 30), ("free", 3)]
    actions += [("alloc", 4, 40), ("free", 2), ("recomputed",), ("alloc", 5, 50), ("free", 4), ("recomputed",)]
    timeline = build_timeline(actions)
    assert timeline.categories["activations"] == (0, 10, 10, 10, 10, 10, 10, 10, 10)
    assert timeline.categories["recomputed"] == (0, 0, 0, 0, 0, 40, 40, 90, 50)
    assert timeline.categories["temporaries"] == (0, 0, 20, 50, 20, 20, 0, 0, 0)


def test_marks_between_two_events_of_a_gpu_keep_their_order():
    history = [{"action": "alloc", "addr": 1, "size": 512}, {"action": "free_requested", "addr": 1}]
    marks = [(0, ("recompute",)), (1, ("recomputed",)), (1, ("recompute",)), (1, ("recomputed",))]
    events = [*cuda_meter.actions(history, marks)]
    assert events == [("recompute",), ("alloc", 1, 512), *(mark for _, mark in marks[1:]), ("free", 1)]
    assert build_timeline(events).categories == {"recomputed": (0, 512, 0)}


def test_a_gradient_in_a_recomputation_stays_a_gradient():
    actions = [("backward",), ("recompute",), ("alloc", 1, 8), ("mark", 1, "gradients"), ("recomputed",)]
    assert build_timeline(actions).categories == {"gradients": (0, 8)}


@pytest.mark.parametrize("meter", [ackpt.measure, ackpt.predict])
def test_the_recomputed_tensors_of_a_region(meter):
    device = "meta" if meter is ackpt.predict else "cpu"
    model, x = sines(), torch.randn(64, 32, device=device, requires_grad=True)
    plain = meter(step(model, x), resident=[x])
    assert "recomputed" not in plain.timeline.categories
    region = meter(step(lambda value: ackpt.checkpoint(model, value), x), resident=[x])
    # Backward reads the inputs of all three sines; the first one's is resident, and the result is freed at once.
    assert max(region.timeline.categories["recomputed"]) == 2 * S
    assert region.timeline.categories["recomputed"][-1] == 0
    saved, saved_by_baseline = (one.timeline.at(one.timeline.boundary) for one in (region, plain))
    assert saved["recomputed"] == 0 and saved["activations"] == saved_by_baseline["activations"] - 2 * S


@pytest.mark.parametrize("meter", [ackpt.measure, ackpt.predict])
def test_the_recomputed_tensors_of_the_checkpoint_of_torch(meter):
    device = "meta" if meter is ackpt.predict else "cpu"
    x = torch.randn(64, 32, device=device, requires_grad=True)
    timeline = meter(step(lambda value: checkpoint(sines(), value, use_reentrant=False), x), resident=[x]).timeline
    # It stops once it has the inputs of all sines; the first one's is resident.
    assert max(timeline.categories["recomputed"]) == 2 * S
    assert timeline.categories["recomputed"][timeline.boundary] == timeline.categories["recomputed"][-1] == 0


def test_every_region_of_a_chain_is_recomputed_in_its_turn():
    model, x = nn.Sequential(*(sines() for _ in range(4))), torch.randn(64, 32, requires_grad=True)
    ackpt.apply_activation_checkpointing(model, ["0", "1", "2", "3"])
    series = ackpt.measure(step(model, x), resident=[x]).timeline.categories["recomputed"]
    assert max(series) == 2 * S
    assert sum(now == 2 * S > before for before, now in zip(series, series[1:])) == 4


@pytest.mark.parametrize("policy", ["full", "rotor"])
def test_a_measured_plan_has_the_recomputed_bytes_of_its_simulation(policy):
    layers = [nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(8)]
    model, x = nn.Sequential(*layers), torch.randn(64, 32)
    planned = ackpt.compile(model, x, policy=policy, budget=0.6 if policy == "rotor" else None)
    measured = ackpt.measure(step(planned, x), resident=[model, x])

    def changes(timeline):
        series = timeline.categories["recomputed"]
        return [now - before for before, now in zip(series, series[1:]) if now != before]

    assert changes(measured.timeline) == changes(planned.plan.timeline)
    assert sum(size > 0 for size in changes(measured.timeline)) > 4
