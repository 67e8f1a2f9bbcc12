"""What is cheap to recompute depends on the device, in every way to give a budget."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import ackpt
from ackpt.planner.costs.devices import Device

X = torch.randn(256, 64, generator=torch.Generator().manual_seed(0))
FAST_MEMORY = Device("computes slowly", 10**9, {"float32": 1e9}, 1e15, 1e9, "made up")
SLOW_MEMORY = Device("reads slowly", 10**9, {"float32": 1e15}, 1e6, 1e9, "made up")


def model():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)) for _ in range(4)))


def as_compiled(net, device):
    return ackpt.compile(net, X, budget=0.75, device_profile=device).plan


def in_place(net, device):
    return ackpt.apply_budget(net, X, budget=0.75, device_profile=device).plan


def as_backend(net, device):
    plans = []
    options = {"budget": 0.75, "device_profile": device, "on_plan": plans.append}
    torch.compile(net, backend="ackpt", options=options)(X)
    return plans[0]


def of_graph(net, device):
    graph = ackpt.trace(net, X)
    profile = ackpt.profile(graph, device, workspace="measured")
    return ackpt.plan(graph, 0.75, profile=replace(profile, swap_seconds=None))  # a compiled step does not offload


@pytest.mark.parametrize("planned", [as_compiled, in_place, as_backend])
def test_the_device_decides_what_is_recomputed(planned):
    compute, memory = planned(model(), FAST_MEMORY), planned(model(), SLOW_MEMORY)
    assert compute.recompute_flops < memory.recompute_flops or compute.fates != memory.fates
    assert (compute.device, memory.device) == ("computes slowly", "reads slowly")
    assert "of the step, in times of computes slowly" in compute.table()
    assert compute.schedule == of_graph(model(), FAST_MEMORY).schedule


def test_other_lengths_and_saved_plans_keep_the_device(tmp_path):
    step = ackpt.compile(model(), X, budget=0.75, device_profile="t4")
    step.prepare(X[:128].clone())
    assert step.plan.device == "t4"
    step.plan.save(tmp_path / "plan.json")
    assert ackpt.Plan.load(tmp_path / "plan.json").device == "t4"


def test_on_the_cpu_calibrated_rates_decide():
    plan = ackpt.compile(model(), X, budget=0.75).plan
    assert plan.device == "cpu" and "of the step, in times of cpu" in plan.table()
    assert plan.schedule == of_graph(model(), "cpu").schedule
    counted = ackpt.plan(ackpt.trace(model(), X), 0.75, profile=ackpt.profile(ackpt.trace(model(), X)))
    assert counted.device == "any" and "in times of" not in counted.table()


def test_an_unknown_device_is_refused():
    with pytest.raises(ValueError, match="no rates are known for device 'h20'.*h200"):
        ackpt.compile(model(), X, budget=0.75, device_profile="h20")
    with pytest.raises(TypeError, match="device must be a name or a Device"):
        ackpt.apply_budget(model(), X, budget=0.75, device_profile=3)
