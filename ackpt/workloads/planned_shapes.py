"""``ackpt plan``: the peak of a training step of any model, planned from its shapes.

Neither the model nor its inputs have data: all of it lies on the meta device, so what fits nowhere can be planned
anywhere. With a device profile the step is captured as a GPU would run it, see `plan_cuda`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import ackpt
from ackpt.capture.inspection.calls import MACHINE
from ackpt.capture.joint_graph import JointGraph
from ackpt.capture.optimizer_state import with_optimizer
from ackpt.costs.devices import Device, device
from ackpt.costs.profiles import Profile, with_gpu_workspace
from ackpt.errors import did_you_mean
from ackpt.metering.gpus import MIB, gpu
from ackpt.metering.resident import rounded
from ackpt.planning.plan import Plan
from ackpt.planning.simulator import simulate
from ackpt.policies import POLICIES

from .cuda_capture import CapturedCudaChoices
from .device_memory import DeviceMemory, device_memory
from .named_models import training_step
from .step_request import DTYPES, StepRequest, TrainingStep, autocast

CUDA_BLOCK = 512  # bytes; CUDA's allocator rounds every block up to a multiple
OPTIMIZERS: dict[str, Any] = {
    "adamw": torch.optim.AdamW,
    "adafactor": torch.optim.Adafactor,
    "sgd": torch.optim.SGD,
    "sgd-momentum": partial(torch.optim.SGD, momentum=0.9),
    "none": None,
}
NEEDS_FATES = "manual"
FULL = "full"


@dataclass(frozen=True)
class PlanConfig:
    """What to plan: the step, autocast's dtype (float32: none), the optimizer, a device by name, budget and policy.

    The policy is none without a budget, auto with one, unless another is named. `context_mib` replaces the size of the
    CUDA context that is known for the device.
    """

    step: StepRequest
    autocast: str = "float32"
    optimizer: str = "adamw"
    device: str | None = None
    budget: float | int | str | None = None
    policy: str | None = None
    context_mib: int | None = None

    def __post_init__(self):
        if self.context_mib is not None and (self.context_mib < 0 or self.device is None):
            raise ValueError("--context-mib is the size of a GPU's context: give 0 or more, and --device-profile")
        if self.policy is not None:
            _require("policy", self.policy, [policy for policy in POLICIES if policy != NEEDS_FATES])
        _require("dtype", self.autocast, DTYPES)
        _require("optimizer", self.optimizer, OPTIMIZERS)
        if self.device is not None:
            for dtype in (str(self.step.dtype).removeprefix("torch."), self.autocast):
                _require(f"dtype of {self.device}", dtype, device(self.device).flops_per_second)


@dataclass(frozen=True)
class Planned:
    """A plan of `graph`, the graph of `step`, with the costs in `profile`. `memory`: what it takes on the device.
    `least_bytes`: the smallest peak of policy full, where the device's memory does not hold that of `plan`.
    """

    config: PlanConfig
    step: TrainingStep
    graph: JointGraph
    profile: Profile
    plan: Plan
    device: Device | None
    memory: DeviceMemory | None
    least_bytes: int | None

    def at_peak(self) -> dict[str, int]:
        """Bytes by category at the peak; the resident ones first."""
        return at_peak(self.graph, self.plan)

    def seconds(self) -> float | None:
        """The least run time of forward and backward at the device's rates; None without a device."""
        return simulate(self.graph, self.profile, self.plan.schedule).seconds


def at_peak(graph: JointGraph, plan: Plan) -> dict[str, int]:
    """Bytes by category at the peak of a plan of `graph`; the resident ones first."""
    sizes = graph.bytes()
    resident = {
        "parameters": sizes["parameter"],
        "buffers": sizes["buffer"],
        "inputs": sizes["input"],
        "optimizer": graph.optimizer_bytes,
    }
    return {**resident, **plan.timeline.at(plan.timeline.peak_index)}


def run_plan(config: PlanConfig) -> Planned:
    """Capture the step and plan it.

    Raises:
        BudgetError: if the budget cannot be kept; names the smallest that can.
        ValueError: for a step that cannot be built or captured, and what is no budget.
    """
    where = None if config.device is None else device(config.device)
    step = training_step(config.step)
    graph = captured(step, config, where)
    profile = ackpt.profile(graph, where)
    profile = profile if where is None else with_gpu_workspace(graph, profile)
    policy = config.policy or ("none" if config.budget is None else "auto")
    plan = ackpt.plan(graph, config.budget, policy, profile=profile)
    memory = least = None
    if where is not None:
        context = None if config.context_mib is None else config.context_mib * MIB
        memory = device_memory(graph, profile, plan, where, gpu(where.name), context)
        if not memory.fits:
            least = (plan if plan.policy == FULL else ackpt.plan(graph, policy=FULL, profile=profile)).peak_bytes
    return Planned(config, step, graph, profile, plan, where, memory, least)


def captured(step: TrainingStep, config: PlanConfig, where: Device | None) -> JointGraph:
    """The graph of the step, as `where` would run it; sizes as its allocator hands them out."""
    kind = OPTIMIZERS[config.optimizer]
    optimizer = None if kind is None else kind(step.model.parameters())
    choices = contextlib.nullcontext() if where is None else CapturedCudaChoices(gpu(where.name).capability)
    with autocast("cpu", config.autocast), choices:
        graph = ackpt.trace(step.model, optimizer=optimizer if where is None else None, **step.inputs)
    if where is None:
        return graph
    graph = dataclasses.replace(
        graph,
        made_for={**(graph.made_for or {}), MACHINE: f"{where.name} by its data sheet (--device-profile)"},
        storages=tuple(dataclasses.replace(s, bytes=rounded(s.bytes, CUDA_BLOCK)) for s in graph.storages),
        on_cpu=False,
    )
    return graph if optimizer is None else with_optimizer(graph, optimizer)


def _require(option: str, value: str, choices) -> None:
    if value not in choices:
        raise ValueError(
            f"{value!r} is not a known {option}{did_you_mean(value, choices)}: choose from {', '.join(choices)}"
        )
