"""The output of ``ackpt plan``: text, and with --json plain data."""

from __future__ import annotations

import dataclasses
from functools import partial

import torch

import ackpt
from ackpt.core.budget import readable
from ackpt.core.errors import BudgetError, TraceError
from ackpt.metering.meter import memory_format
from ackpt.planner.explain.explanation import Explanation, explained
from ackpt.planner.workloads.planned_shapes import PlanConfig, Planned, in_chunks
from ackpt.planner.workloads.step_request import TrainingStep, optimizer_kind

LARGEST = 10
# Of the predicted reserved bytes: a step of vit-large reserved 5.69 GB where 4.71 GB are predicted, the largest of the
# errors of 60 published figures of whole steps (chapter 11).
MEASURED_ERROR = 0.21
ON_A_GPU = (
    "captured on CPU tensors with the attention, dropout and autocast of a GPU; blocks are multiples of 512 bytes; "
    "not included: workspaces of convolutions, of sorting and of memory-efficient attention"
)
ON_A_CPU = "as the CPU runs it; not included: workspaces of operations"


def text(planned: Planned) -> str:
    """Whether the step fits the device, the step, its peak by category, the plan and the ten largest activations."""
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
    return "\n".join([*_verdict(planned), *lines])


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
    chunks = partial(in_chunks, planned.graph, planned.device)
    return explained(planned.graph, planned.profile, planned.plan, model, optimizer, chunks)


def to_json(planned: Planned, shown: Explanation | None = None) -> dict:
    """The same as plain data, with the explanation if it is `shown`; sizes in bytes."""
    config, plan = planned.config, planned.plan
    largest = sorted(plan.activations, key=lambda activation: -activation.bytes)[:LARGEST]
    data = {
        **plan_step(config, planned.step),
        "note": note(planned),
        "graph": planned.graph.hash,
        **plan_fields(plan),
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
            "smallest_budget_of_full": _least_of_full(planned),
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


def plan_fields(plan) -> dict:
    """The figures of a plan as plain data; None for those that a sharded plan does not have."""
    names = "policy peak_bytes resident_bytes dynamic_peak_bytes baseline_peak_bytes saved_bytes flops recompute_flops"
    return {name: getattr(plan, name, None) for name in (*names.split(), "cost", "peak_node")}


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
    sizes = [
        f"on {device.name}: {memory_format(memory.allocated)} allocated, {memory_format(memory.reserved)} reserved, "
        f"{memory_format(memory.context)} context, {memory_format(memory.margin)} margin",
        "",
    ]
    if memory.margin >= MEASURED_ERROR * memory.reserved:
        return [f"fits {device.name}: {takes} of {size}", *sizes]
    if memory.fits:
        error = f"measured steps reserved up to {MEASURED_ERROR:.0%} more than predicted"
        return [f"may not fit {device.name}: {takes} of {size}; {error}", *sizes]
    verdict = f"does not fit {device.name}: {takes} of {size}"
    try:
        other = planned.that_fits()
    except BudgetError as error:
        assert error.least_bytes is not None
        room = device.memory_bytes - memory.context
        return [
            verdict,
            f"no plan fits: the one with the smallest peak reserves {readable(error.least_bytes)}, and the context "
            f"leaves {memory_format(room)}",
            *_in_chunks(planned),
            *_helps(planned, room),
            *sizes,
        ]
    return [verdict, f'add --budget "{other.config.budget}": {_that_fits(other)}', *sizes]


def _that_fits(planned: Planned) -> str:
    reserved = memory_format(planned.memory.reserved) if planned.memory is not None else ""
    return f"that plan reserves {reserved} and adds {planned.plan.cost:.1%} to the time of the step"


def _in_chunks(planned: Planned) -> list[str]:
    """The plan that fits with the head in chunks, if there is one."""
    try:
        other = planned.that_fits(chunk_head=True)
    except (BudgetError, TraceError):
        return []
    return [f'would help: --chunk-head --budget "{other.config.budget}": {_that_fits(other)}']


def _helps(planned: Planned, room: int) -> list[str]:
    """Up to three changes of the model or the loop whose simulated peak is within `room` bytes; else the best one."""
    best = sorted(explanation(planned).suggestions, key=lambda each: each.peak_bytes)
    within = [each for each in best if each.peak_bytes <= room][:3]
    return [
        f"would help: {each.title}: peak {memory_format(each.peak_bytes)}{'' if within else ', not enough'}; {each.fix}"
        for each in within or best[:1]
    ]


def _least_of_full(planned: Planned) -> int | None:
    """The peak of policy full, if the plan does not fit the device."""
    if planned.memory is None or planned.memory.fits:
        return None
    if planned.plan.policy == "full":
        return planned.plan.peak_bytes
    return ackpt.plan(planned.graph, policy="full", profile=planned.profile).peak_bytes


def _inputs(step: TrainingStep) -> dict[str, str]:
    tensors = {name: value for name, value in step.inputs.items() if isinstance(value, torch.Tensor)}
    return {name: f"{list(tensor.shape)} {dtype_name(tensor.dtype)}" for name, tensor in tensors.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """``"bfloat16"`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")
