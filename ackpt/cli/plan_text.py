"""The output of ``ackpt plan``: text, and with --json plain data."""

from __future__ import annotations

import dataclasses

import torch

from ackpt.budget import readable
from ackpt.errors import BudgetError
from ackpt.explaining.explanation import Explanation, explained
from ackpt.metering.meter import memory_format
from ackpt.workloads.optimizers import optimizer_kind
from ackpt.workloads.planned_shapes import FULL, PlanConfig, Planned
from ackpt.workloads.step_request import TrainingStep

LARGEST = 10
ON_A_GPU = (
    "captured on CPU tensors with the attention, dropout and autocast of a GPU; blocks are multiples of 512 bytes; "
    "not included: workspaces of convolutions, of sorting and of memory-efficient attention"
)
ON_A_CPU = "as the CPU runs it; not included: workspaces of operations"


def text(planned: Planned) -> str:
    """The step, its peak by category, the plan, the ten largest activations, and whether the step fits the device."""
    config, plan = planned.config, planned.plan
    dtype = dtype_name(config.step.dtype)
    mixed = "" if config.autocast == "float32" else f", autocast to {config.autocast}"
    optimizer = "" if config.optimizer == "none" else f" and {config.optimizer}"
    optimizer += ", clipped gradients" if config.clipping else ""
    optimizer += ", a scaled loss" if config.scaling else ""
    optimizer += ", earlier gradients exist" if config.accumulation else ""
    lines = [
        f"model             {config.step.model}: {type(planned.step.model).__name__.removeprefix('_')}, "
        f"{planned.step.parameters:,} parameters in {dtype}{mixed}",
        f"inputs            {', '.join(f'{name} {shape}' for name, shape in _inputs(planned.step).items())}",
        f"step              forward, backward{optimizer}, {note(planned)}",
        f"at the peak       {sizes_text(planned.at_peak())}",
        f"peak by phase     {sizes_text(planned.by_phase())}",
        *_modelled(planned),
        plan.table(),
    ]
    return "\n".join([*lines, *_verdict(planned)])


def how_it_runs(planned: Planned, path: str) -> str:
    """The file of the plan, and the call that runs it; `ackpt.compile` runs no plan for the profile of a GPU."""
    if planned.device is not None:
        return (
            f"written to {path}: the plan of a step on {planned.device.name}, for reading and comparing; ackpt.compile "
            "runs only plans written without --device-profile"
        )
    inputs = {name: "..." if isinstance(value, torch.Tensor) else value for name, value in planned.step.inputs.items()}
    given = ", ".join(f"{name}={value}" for name, value in inputs.items())
    cast = planned.config.autocast
    where = "" if cast == "float32" else f", within torch.autocast('cpu', torch.{cast})"
    return f"written to {path}; run it by ackpt.compile(model, plan=ackpt.Plan.load({path!r}), {given}){where}"


def explanation(planned: Planned) -> Explanation:
    """The memory of the planned step by category."""
    kind, model = optimizer_kind(planned.config.optimizer), planned.step.model
    optimizer = None if kind is None else kind(model.parameters())
    return explained(planned.graph, planned.profile, planned.plan, model, optimizer)


def to_json(planned: Planned, shown: Explanation | None = None) -> dict:
    """The same as plain data, with the explanation if it is `shown`; sizes in bytes."""
    config, plan = planned.config, planned.plan
    largest = sorted(plan.activations, key=lambda activation: -activation.bytes)[:LARGEST]
    data = {
        **plan_step(config, planned.step),
        "note": note(planned),
        "graph": planned.graph.hash,
        "policy": plan.policy,
        "peak_bytes": plan.peak_bytes,
        "resident_bytes": plan.resident_bytes,
        "dynamic_peak_bytes": plan.dynamic_peak_bytes,
        "baseline_peak_bytes": plan.baseline_peak_bytes,
        "saved_bytes": plan.saved_bytes,
        "flops": plan.flops,
        "recompute_flops": plan.recompute_flops,
        "peak_node": plan.peak_node,
        "at_peak": planned.at_peak(),
        "by_phase": planned.by_phase(),
        "largest": [dataclasses.asdict(activation) for activation in largest],
        "device": None,
        "fsdp": None,
    }
    if shown is not None:
        data["live_at_peak"] = shown.at_peak
        data["saved"] = [dataclasses.asdict(line) for line in shown.saved]
        data["suggestions"] = [dataclasses.asdict(suggestion) for suggestion in shown.suggestions]
        data["not_computed"] = list(shown.not_computed)
    if planned.device is not None:
        data["device"] = {
            "name": planned.device.name,
            "memory_bytes": planned.device.memory_bytes,
            "modelled_seconds": planned.seconds(),
            "fits": planned.memory is not None and planned.memory.fits,
            "memory": None if planned.memory is None else dataclasses.asdict(planned.memory),
            "smallest_budget_of_full": planned.least_bytes,
        }
    return data


def plan_step(config: PlanConfig, step: TrainingStep) -> dict:
    """The planned step as plain data: the step and the options of its plan."""
    return {
        "model": config.step.model,
        "class": type(step.model).__name__.removeprefix("_"),
        "parameters": step.parameters,
        "inputs": _inputs(step),
        "fields": config.step.fields,
        "dtype": dtype_name(config.step.dtype),
        "autocast": config.autocast,
        "optimizer": config.optimizer,
        "accumulation": config.accumulation,
        "clipping": config.clipping,
        "scaling": config.scaling,
        "options": config.options,
        "budget": config.budget,
        "torch": torch.__version__,
    }


def refused(error: BudgetError) -> dict:
    """A budget that was refused, as plain data."""
    return {"refused": str(error), "smallest_budget": error.least_bytes}


def note(planned: Planned) -> str:
    """How the step was captured, and which memory the figures leave out."""
    return ON_A_CPU if planned.device is None else ON_A_GPU


def sizes_text(categories: dict[str, int]) -> str:
    """Bytes by category in one line; empty categories are left out."""
    return ", ".join(f"{name} {memory_format(size)}" for name, size in categories.items() if size)


def _modelled(planned: Planned) -> list[str]:
    seconds = planned.seconds()
    if seconds is None:
        return []
    return [f"modelled time     {seconds:.3g} s at least for forward and backward, at the peak rates of the data sheet"]


def _verdict(planned: Planned) -> list[str]:
    if planned.device is None or planned.memory is None:
        return []
    device, size, memory = planned.device, memory_format(planned.device.memory_bytes), planned.memory
    takes = memory_format(memory.reserved + memory.context)
    lines = [
        "",
        f"on {device.name}: {memory_format(memory.allocated)} allocated, {memory_format(memory.reserved)} reserved, "
        f"{memory_format(memory.context)} context, {memory_format(memory.margin)} margin",
    ]
    if planned.least_bytes is None:
        return [*lines, f"fits {device.name}: {takes} of {size}"]
    least = f"{readable(planned.least_bytes)} ({planned.least_bytes} bytes)"
    overhead = memory.reserved + memory.context - planned.plan.peak_bytes  # of the allocator and the context
    room = max(0, device.memory_bytes - overhead)
    verdict = ", which fits" if planned.least_bytes <= room else ""
    return [
        *lines,
        f"does not fit {device.name}: {takes} of {size}; the smallest budget of policy {FULL} is {least}{verdict}; for "
        f"the best plan that leaves {memory_format(overhead)} to allocator and context add --budget {room}B",
    ]


def _inputs(step: TrainingStep) -> dict[str, str]:
    tensors = {name: value for name, value in step.inputs.items() if isinstance(value, torch.Tensor)}
    return {name: f"{list(tensor.shape)} {dtype_name(tensor.dtype)}" for name, tensor in tensors.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """``"bfloat16"`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")
