"""``ackpt plan``: the peak of a training step of any model, planned from its shapes.

The model and its inputs have no data: they are on the meta device, so any machine can plan a step that fits no
device. With a device profile the step is captured as a GPU would run it, see `CapturedCudaChoices`.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ackpt.core.budget import dynamic_limit, split_budget
from ackpt.core.errors import BudgetError, did_you_mean
from ackpt.core.progress import shown, stage
from ackpt.metering.autograd_engine import around_backward
from ackpt.metering.cpu_meter import no_collection
from ackpt.metering.cuda_choices import CudaChoices
from ackpt.metering.gpus import BLOCK, MIB, AllocatorSettings, gpu
from ackpt.metering.resident import rounded
from ackpt.planner.capture.chunked_head import chunked
from ackpt.planner.capture.inspection.calls import MACHINE
from ackpt.planner.capture.joint_graph import JointGraph
from ackpt.planner.capture.optimizer_state import Loop, eight_bit_bytes, with_loop
from ackpt.planner.capture.tracing import trace
from ackpt.planner.choose import plan_by_policy, plan_in_chunks, within_reserved
from ackpt.planner.costs.devices import Device, device
from ackpt.planner.costs.profiles import Profile, with_gpu_workspace
from ackpt.planner.costs.profiles import profile as profiled
from ackpt.planner.policies import POLICIES
from ackpt.planner.request import Request
from ackpt.planner.schedule.allocations import DeviceMemory, device_memory
from ackpt.planner.schedule.plan import Plan
from ackpt.planner.schedule.simulator import simulate

from .step_request import DTYPES, EIGHT_BIT, StepRequest, TrainingStep, autocast, optimizer_kind, training_step

NEEDS_FATES = "manual"


@dataclass(frozen=True)
class PlanConfig:
    """A request: the step, autocast's dtype (float32: none), the optimizer, a device by name, budget and policy.

    The policy is none without a budget, auto with one, unless another is named. A budget such as "15GiB reserved"
    bounds what the device's caching allocator reserves. `context_mib` replaces the size of the CUDA context that is
    known for the device. `accumulation`: gradients of earlier batches exist. `clipping`: their norm is clipped.
    `scaling`: a ``torch.amp.GradScaler`` scales the loss. `options`: of the policy. `chunk_head`: as in
    `ackpt.compile`. `allocator`: settings as in ``PYTORCH_CUDA_ALLOC_CONF``, in place of those in the environment.
    `hold_outputs`: the loop refers to the model's outputs during the backward, and until the next forward has returned.
    """

    step: StepRequest
    autocast: str = "float32"
    optimizer: str = "adamw"
    device: str | None = None
    budget: float | int | str | None = None
    slowdown: float | str | None = None
    policy: str | None = None
    context_mib: int | None = None
    accumulation: bool = False
    clipping: bool = False
    scaling: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    chunk_head: bool | str = False
    allocator: str | None = None
    hold_outputs: bool = False

    @property
    def allocator_settings(self) -> AllocatorSettings:
        return AllocatorSettings.parsed(self.allocator)

    @property
    def context_bytes(self) -> int:
        """Bytes of the CUDA context on the device; 0 without one."""
        if self.context_mib is not None:
            return self.context_mib * MIB
        return 0 if self.device is None else gpu(self.device).context_bytes

    def __post_init__(self):
        if self.allocator is not None and self.device is None:
            raise ValueError("--allocator has settings of a GPU's allocator: give --device-profile")
        bound, is_reserved = split_budget(self.budget)
        dynamic_limit(bound, 0, 0)  # a text that is no budget is refused before the work
        if is_reserved and self.device is None:
            raise ValueError(
                f"the budget {self.budget!r} bounds what a GPU's allocator reserves: give bytes and --device-profile"
            )
        if self.context_mib is not None and (self.context_mib < 0 or self.device is None):
            raise ValueError("--context-mib is the size of a GPU's context: give 0 or more, and --device-profile")
        if self.policy is not None:
            _require("policy", self.policy, [policy for policy in POLICIES if policy != NEEDS_FATES])
        if self.slowdown is not None:
            Request(bound, self.slowdown, self.policy or "auto")  # refuses what is no slowdown before the work
        _require("dtype", self.autocast, DTYPES)
        if optimizer_kind(self.optimizer) is None and (self.clipping or self.scaling):
            raise ValueError("--clip-gradients and --grad-scaler belong to an optimizer's step: give --optimizer")
        if self.optimizer == EIGHT_BIT and (self.clipping or self.scaling):
            raise ValueError(f"--optimizer {EIGHT_BIT} is known without --clip-gradients and --grad-scaler only")
        if self.options.get("offload") and self.device is None:
            raise ValueError("--offload-blocks copies from a GPU to the host: give --device-profile")
        if self.device is not None:
            for dtype in (str(self.step.dtype).removeprefix("torch."), self.autocast):
                _require(f"dtype of {self.device}", dtype, device(self.device).flops_per_second)


@dataclass(frozen=True)
class Planned:
    """A plan of `graph`, the graph of `step`, with the costs in `profile`. `memory`: its bytes on the device.

    `whole`: the graph of the step without chunks of the head, and its profile, if they are others.
    """

    config: PlanConfig
    step: TrainingStep
    graph: JointGraph
    profile: Profile
    plan: Plan
    device: Device | None
    memory: DeviceMemory | None
    whole: tuple[JointGraph, Profile] | None = None

    @property
    def reserved_bytes(self) -> int:
        """What the device's allocator reserves; 0 without a device."""
        return 0 if self.memory is None else self.memory.reserved

    def at_peak(self) -> dict[str, int]:
        """Bytes by category at the peak; the resident ones first."""
        return at_peak(self.graph, self.plan)

    def seconds(self) -> float | None:
        """The least run time of forward and backward at the device's rates; None without a device."""
        return simulate(self.graph, self.profile, self.plan.schedule).seconds

    def by_phase(self) -> dict[str, int]:
        """The peak of forward, backward and optimizer step in bytes, resident ones included."""
        live, boundary = self.plan.timeline.live, self.plan.timeline.boundary or 0
        # The last two events are the begin and the end of the optimizer's step.
        end = len(live) - 2 if self.graph.optimizer_step_bytes else len(live)
        parts = {"forward": live[: boundary + 1], "backward": live[boundary:end], "optimizer": live[end:]}
        return {name: self.plan.resident_bytes + max(part) for name, part in parts.items() if part}

    def that_fits(self, chunk_head: bool | str = False) -> "Planned":
        """The plan of policy auto that fits the device, or a BudgetError with the least reserved bytes."""
        assert self.device is not None and self.memory is not None
        room = max(1, self.device.memory_bytes - self.memory.context)
        rounded, exact = f"{10 * room // 2**30 / 10}GiB reserved", f"{room}B reserved"
        config = dataclasses.replace(self.config, slowdown=None, policy=None, options={})
        config = dataclasses.replace(config, chunk_head=chunk_head or self.config.chunk_head)
        whole = self.whole or (self.graph, self.profile)
        with shown(), no_collection():
            if 10 * room >= 2**30:
                try:
                    return _planned(dataclasses.replace(config, budget=rounded), self.step, whole, self.device)
                except BudgetError as error:
                    if error.least_bytes is None or error.least_bytes > room:
                        raise
            return _planned(dataclasses.replace(config, budget=exact), self.step, whole, self.device)


def at_peak(graph: JointGraph, plan: Plan) -> dict[str, int]:
    """Bytes by category at the peak of a plan of `graph`; the resident ones first."""
    sizes = graph.bytes()
    resident = {
        "parameters": sizes["parameter"],
        "buffers": sizes["buffer"],
        "inputs": sizes["input"],
        "optimizer": graph.optimizer_bytes,
        "accumulated gradients": graph.accumulated_bytes,
    }
    return {**resident, **plan.timeline.at(plan.timeline.peak_index)}


def run_plan(config: PlanConfig) -> Planned:
    """Capture the step and plan it; BudgetError for an infeasible budget, ValueError for other refusals."""
    with shown(), no_collection():  # of the many objects of a capture, few are garbage
        where = None if config.device is None else device(config.device)
        stage(f"building {config.step.model}")
        step = training_step(config.step)
        graph = captured(step, config, where)
        return _planned(config, step, (graph, _costs(graph, where)), where)


def _costs(graph: JointGraph, where: Device | None) -> Profile:
    profile = profiled(graph, where)
    return profile if where is None else with_gpu_workspace(graph, profile)


def in_chunks(graph: JointGraph, where: Device | None, count: int) -> tuple[JointGraph, Profile]:
    """`graph` with its head in `count` chunks, as `where` would run it, and its costs."""
    chunks = allocated_on(where, chunked(graph, count))
    return chunks, _costs(chunks, where)


def _planned(
    config: PlanConfig, step: TrainingStep, whole: tuple[JointGraph, Profile], where: Device | None
) -> Planned:
    policy = config.policy or ("none" if config.budget is None and config.slowdown is None else "auto")

    def within(limit: float | str | None) -> tuple[Planned, int, int]:
        request = Request(limit, config.slowdown, policy, config.options, chunk_head=config.chunk_head)
        graph, profile = whole
        if config.chunk_head:
            plan, graph, profile = plan_in_chunks(graph, request, profile, partial(in_chunks, graph, where))
        else:
            plan = plan_by_policy(graph, request, profile)
        context, settings = config.context_bytes, config.allocator_settings
        memory = where and device_memory(graph, profile.workspace_bytes, plan.schedule, where, context, settings)
        made = Planned(config, step, graph, profile, plan, where, memory, whole)
        return made, plan.peak_bytes, made.reserved_bytes

    budget, is_reserved = split_budget(config.budget)
    return within_reserved(budget, within) if is_reserved else within(budget)[0]


def captured(step: TrainingStep, config: PlanConfig, where: Device | None) -> JointGraph:
    """The graph of the step, as `where` would run it; sizes as its allocator rounds them."""
    return with_training_loop(forward_and_backward(step, config, where), step.model, config)


def forward_and_backward(step: TrainingStep, config: PlanConfig, where: Device | None) -> JointGraph:
    """As `captured`, without an optimizer and the other tensors of the training loop."""
    scaled = scaled_loss(step.model) if config.scaling else contextlib.nullcontext()
    with calls_as_on(where, config.autocast), scaled:
        graph = trace(step.model, **step.inputs, outputs="keep" if config.hold_outputs else "drop")
    return allocated_on(where, graph)


@contextlib.contextmanager
def calls_as_on(where: Device | None, dtype: str):
    """Inside, a step is captured as `where` runs it under autocast to `dtype`."""
    choices = contextlib.nullcontext() if where is None else CapturedCudaChoices(gpu(where.name).capability)
    with autocast("cpu", dtype), choices:
        yield


def allocated_on(where: Device | None, graph: JointGraph) -> JointGraph:
    """`graph` with sizes as the allocator of `where` rounds them."""
    if where is None:
        return graph
    return dataclasses.replace(
        graph,
        made_for={**(graph.made_for or {}), MACHINE: f"{where.name} by its data sheet (--device-profile)"},
        storages=tuple(dataclasses.replace(s, bytes=rounded(s.bytes, BLOCK)) for s in graph.storages),
        on_cpu=False,
    )


def with_training_loop(graph: JointGraph, model: torch.nn.Module, config: PlanConfig) -> JointGraph:
    """`graph`, of a step without an optimizer, with that of `config` and the other tensors of its training loop."""
    kind = optimizer_kind(config.optimizer)
    optimizer = None if kind is None else kind(model.parameters())
    graph = with_loop(graph, model, Loop(optimizer, config.accumulation, config.clipping, config.scaling))
    if optimizer is None or config.optimizer != EIGHT_BIT:
        return graph
    # The kernels of bitsandbytes update parameters and state in place.
    state_bytes = eight_bit_bytes(optimizer, graph.on_cpu)
    return dataclasses.replace(graph, optimizer_bytes=state_bytes, optimizer_step_bytes=0)


def _require(option: str, value: str, choices) -> None:
    if value not in choices:
        raise ValueError(
            f"{value!r} is not a known {option}{did_you_mean(value, choices)}: choose from {', '.join(choices)}"
        )


AS_ON = "h200"  # the GPU whose choice of kernels a prediction for CUDA follows
_HALF = (torch.float16, torch.bfloat16)


class CapturedCudaChoices(CudaChoices):
    """Calls as on a GPU while a step is captured; `capability`: its compute capability."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is F.rms_norm or func is torch.rms_norm:
            if torch.is_autocast_enabled("cpu"):
                args = [_widened(argument) for argument in args]
                kwargs = {name: _widened(argument) for name, argument in kwargs.items()}
            return func(*args, **kwargs)
        return super().__torch_function__(func, types, args, kwargs)


@contextlib.contextmanager
def kernels_of_a_gpu():
    """Inside, an eager step takes the operations that a captured step of a GPU has, also in recomputation."""
    choices = partial(CapturedCudaChoices, gpu(AS_ON).capability)
    with choices(), around_backward(choices):
        yield


def _widened(argument):
    low = isinstance(argument, torch.Tensor) and argument.dtype in _HALF
    return argument.float() if low else argument


@contextlib.contextmanager
def scaled_loss(model: nn.Module) -> Iterator[None]:
    """Inside, the model's scalar output is multiplied by a scale in a buffer, with the growth tracker, both scalars.

    They are those of ``_lazy_init_scale_growth_tracker`` in torch/amp/grad_scaler.py, which unscales no float16.
    """
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype == torch.float16:
            raise ValueError(
                f"--grad-scaler: torch does not unscale the gradient of {name}, which is float16. Train parameters in "
                "float32 under --autocast float16, without --dtype float16"
            )
    device = next(model.parameters()).device
    model.register_buffer(_SCALE, torch.empty((), device=device, dtype=torch.float32))
    model.register_buffer(_TRACKER, torch.empty((), device=device, dtype=torch.int32))
    handle = model.register_forward_hook(_scale)
    try:
        yield
    finally:
        handle.remove()
        del model._buffers[_SCALE], model._buffers[_TRACKER]


_SCALE, _TRACKER = "_loss_scale", "_growth_tracker"


def _scale(model: nn.Module, _, output: Any) -> Any:
    scale = model.get_buffer(_SCALE)
    if isinstance(output, Tensor):
        return output * scale
    if isinstance(output, MutableMapping):  # a ModelOutput of transformers
        output["loss"] = output["loss"] * scale
        return output
    raise ValueError(f"--grad-scaler: {type(model).__name__} returns no loss")
