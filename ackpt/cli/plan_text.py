"""What ``ackpt plan`` prints: lines for people, plain data for machines."""

from __future__ import annotations

import dataclasses

import torch

from ackpt.budget import readable
from ackpt.metering.meter import memory_format
from ackpt.workloads.planned_shapes import FULL, Planned

LARGEST = 10
ON_A_GPU = (
    "captured on CPU tensors with the attention, dropout and autocast of a GPU; blocks are multiples of 512 bytes; "
    "not in it: the CUDA context, workspaces of operations, fragmentation"
)
ON_A_CPU = "as the CPU runs it; not in it: workspaces of operations"


def text(found: Planned) -> str:
    """The step, its peak by category, the plan, the ten largest activations, and whether the device holds it."""
    config, plan = found.config, found.plan
    dtype = str(config.step.dtype).removeprefix("torch.")
    mixed = "" if config.autocast == "float32" else f", autocast to {config.autocast}"
    optimizer = "" if config.optimizer == "none" else f" and {config.optimizer}"
    lines = [
        f"model             {config.step.model}: {type(found.step.model).__name__.removeprefix('_')}, "
        f"{found.step.parameters:,} parameters in {dtype}{mixed}",
        f"inputs            {', '.join(f'{name} {shape}' for name, shape in _inputs(found).items())}",
        f"step              forward, backward{optimizer}, {note(found)}",
        f"at the peak       {_sizes(found.at_peak())}",
        *_modelled(found),
        plan.table(),
    ]
    return "\n".join([*lines, *_verdict(found)])


def how_it_runs(found: Planned, path: str) -> str:
    """Where the plan was written, and the call that takes it; a plan as on a GPU is none of a step on the CPU."""
    if found.device is not None:
        return (
            f"written to {path}: a plan as {found.device.name} runs the step, to be read and compared; ackpt.compile "
            "does not take it, but one that is written without --device-profile"
        )
    inputs = {name: "..." if isinstance(value, torch.Tensor) else value for name, value in found.step.inputs.items()}
    given = ", ".join(f"{name}={value}" for name, value in inputs.items())
    cast = found.config.autocast
    where = "" if cast == "float32" else f", within torch.autocast('cpu', torch.{cast})"
    return f"written to {path}; it is taken by ackpt.compile(model, plan=ackpt.Plan.load({path!r}), {given}){where}"


def to_json(found: Planned) -> dict:
    """The same as plain data; sizes in bytes."""
    config, plan = found.config, found.plan
    largest = sorted(plan.activations, key=lambda activation: -activation.bytes)[:LARGEST]
    data = {
        "model": config.step.model,
        "class": type(found.step.model).__name__.removeprefix("_"),
        "parameters": found.step.parameters,
        "inputs": _inputs(found),
        "fields": config.step.fields,
        "dtype": str(config.step.dtype).removeprefix("torch."),
        "autocast": config.autocast,
        "optimizer": config.optimizer,
        "note": note(found),
        "graph": found.graph.hash,
        "torch": torch.__version__,
        "budget": config.budget,
        "policy": plan.policy,
        "peak_bytes": plan.peak_bytes,
        "resident_bytes": plan.resident_bytes,
        "dynamic_peak_bytes": plan.dynamic_peak_bytes,
        "baseline_peak_bytes": plan.baseline_peak_bytes,
        "saved_bytes": plan.saved_bytes,
        "flops": plan.flops,
        "recompute_flops": plan.recompute_flops,
        "peak_node": plan.peak_node,
        "at_peak": found.at_peak(),
        "largest": [dataclasses.asdict(activation) for activation in largest],
        "device": None,
    }
    if found.device is not None:
        data["device"] = {
            "name": found.device.name,
            "memory_bytes": found.device.memory_bytes,
            "modelled_seconds": found.seconds(),
            "fits": found.least_bytes is None,
            "smallest_budget_of_full": found.least_bytes,
        }
    return data


def note(found: Planned) -> str:
    """How the step was captured, and what the figures leave out."""
    return ON_A_CPU if found.device is None else ON_A_GPU


def _sizes(categories: dict[str, int]) -> str:
    return ", ".join(f"{name} {memory_format(size)}" for name, size in categories.items() if size)


def _modelled(found: Planned) -> list[str]:
    seconds = found.seconds()
    if seconds is None:
        return []
    return [f"modelled time     {seconds:.3g} s at least for forward and backward, at the peak rates of the data sheet"]


def _verdict(found: Planned) -> list[str]:
    if found.device is None:
        return []
    device, size = found.device, memory_format(found.device.memory_bytes)
    if found.least_bytes is None:
        return ["", f"fits {device.name}: {memory_format(found.plan.peak_bytes)} of {size}"]
    least = f"{readable(found.least_bytes)} ({found.least_bytes} bytes)"
    verdict = ", which fits" if found.least_bytes <= device.memory_bytes else ""
    return [
        "",
        f"does not fit {device.name}: {memory_format(found.plan.peak_bytes)} of {size}; the smallest budget of policy "
        f"{FULL} is {least}{verdict}; what is best within {size} is asked for with --budget {device.memory_bytes}B",
    ]


def _inputs(found: Planned) -> dict[str, str]:
    tensors = {name: value for name, value in found.step.inputs.items() if isinstance(value, torch.Tensor)}
    return {name: f"{list(t.shape)} {str(t.dtype).removeprefix('torch.')}" for name, t in tensors.items()}
