"""Time every distinct operation of a graph on its device, alone and with made-up arguments.

`ackpt.profile` with ``mode="measured"`` runs the whole graph instead, with the values that it computes. Here, an
operation that all layers repeat runs only once, so the time grows with the kinds of layers, not their number.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from ackpt.core.progress import stage
from ackpt.metering import cpu_meter, cuda_meter
from ackpt.metering.run_alone import in_own_thread, stand_in
from ackpt.planner.capture.joint_graph import JointGraph, once_per_graph

from .devices import Device, call_of, operation_name
from .operation_costs import dtype, elements, flops
from .operation_runs import device_of
from .workspace import runs_alone, value_of

_FILLS = (0, 1)  # of integers, as in `workspace`
_SECONDS = 0.001  # per operation, after one call to warm up; at least one call


def measured_rates(graph: JointGraph, base: Device) -> Device:
    """`base` with the times of the operations of `graph`, measured on the device that holds its tensors.

    Operations of the same shapes have the measured time. For other shapes, the average rate of the operation counts,
    so that plans for other sizes need no new measurement. An operation that does not run with made-up arguments has the
    rates of `base`.

    Raises:
        ValueError: if the graph was captured from a model without data.
    """
    if not graph.has_data:
        raise ValueError(
            "costs='measured' times operations on the model's device, but this model has no data: give real tensors, "
            "or name a device with device_profile="
        )
    timed = _timed(graph)
    totals: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for each in timed.values():
        totals[each.operation, each.dtype][0] += each.work
        totals[each.operation, each.dtype][1] += max(each.seconds - base.seconds_per_call, 0.1 * each.seconds)
    rates: dict[str, dict[str, float]] = {name: dict(known) for name, known in base.by_operation.items()}
    for (name, kind), (work, seconds) in totals.items():
        if work:
            rates.setdefault(name, {})[kind] = work / seconds
    by_call = {key: each.seconds for key, each in timed.items()}
    return replace(base, name=f"{base.name}, measured", by_operation=rates, seconds_by_call=by_call)


class _Timed(NamedTuple):
    """A call that was timed; ``work``: FLOPs, or elements if it has none."""

    operation: str
    dtype: str
    work: int
    seconds: float


@once_per_graph
def _timed(graph: JointGraph) -> dict[str, _Timed]:
    """The distinct calls of `graph` by `call_of`."""
    stage("timing the operations of the model")
    device = device_of(graph)

    def run() -> dict[str, _Timed]:
        timed: dict[str, _Timed] = {}
        for node in graph.analysis.fx.values():
            if node.op != "call_function" or not runs_alone(node):
                continue
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda argument: value_of(graph, argument))
            key = call_of(node.target, args, kwargs)
            if key not in timed and (seconds := _seconds(node.target, args, kwargs, device)) is not None:
                result = node.meta.get("val")
                work = flops(node, args, kwargs, result) or elements(args, kwargs, result)
                timed[key] = _Timed(operation_name(node.target), dtype(args, kwargs), work, seconds)
        return timed

    return in_own_thread(run, [device] if device.type == "cuda" else [])


def _seconds(target, args, kwargs, device: torch.device) -> float | None:
    """Seconds of the fastest of a few calls; None if the operation does not run with made-up arguments."""
    leaves, spec = tree_flatten((args, kwargs))
    clock = cuda_meter.clock if device.type == "cuda" else cpu_meter.clock
    for fill in _FILLS:
        try:
            made, options = tree_unflatten([_made(leaf, fill) for leaf in leaves], spec)
            return _fastest(lambda: target(*made, **options), clock, device)  # noqa: B023
        except (RuntimeError, IndexError):
            continue
    return None


def _fastest(call: Callable[[], Any], clock, device: torch.device) -> float:
    call()
    times: list[float] = []
    while sum(times) < _SECONDS and len(times) < 20:
        times.append(clock(call, device))
    return min(times)


def _made(leaf, fill: int):
    if isinstance(leaf, torch.Tensor):
        return stand_in(leaf, fill, str(leaf.device))
    return leaf.clone_state() if isinstance(leaf, torch.Generator) else leaf
