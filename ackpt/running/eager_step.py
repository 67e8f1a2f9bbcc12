"""Simulate the peak of the model's eager step, and an upper bound on it.

Eager mode differs from the captured graph in three ways. It writes in place what the graph computes out of place
(`ackpt.capture.in_place`). An autograd node releases its saved tensors when it is done, not after the last operation
that reads them (``release_variables`` in torch/csrc/autograd/engine.cpp, called after ``validate_outputs``). And a
product with a Python number saves that number, as a tensor in host memory.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch

from ackpt.capture.in_place import autograd_node, eager_graph
from ackpt.capture.joint_graph import FORWARD, JointGraph
from ackpt.metering.timeline import Timeline
from ackpt.planning.live_bytes import follow
from ackpt.planning.schedule import COMPUTE, FREE, Schedule, Step, everything
from ackpt.planning.simulator import peak_of, step_peaks

_SAVE_NUMBERS = torch.ops.aten.mul.Tensor, torch.ops.aten.div.Tensor  # their derivatives read the second argument


class EagerStep:
    """The model's own step, without what it writes in place.

    `graph`: of the step; `peak` and `bound` also take an instance of it at other sizes. ``schedule``: the baseline's,
    with every saved activation freed when the autograd node that reads it last is done. ``number_bytes``: by node, of
    the saved numbers that are live while it runs, and after the last node.
    """

    def __init__(self, graph: JointGraph):
        self.graph = graph
        self.schedule = eager_schedule(graph)
        self.number_bytes = _number_bytes(graph)

    def peak(self, graph: JointGraph, workspace_bytes) -> int:
        """The dynamic peak in bytes."""
        forward, backward = step_peaks(graph, self.schedule, workspace_bytes)
        order = (*self.schedule.forward_arrays.computed, *self.schedule.backward_arrays.computed)
        peaks = zip((*forward, *backward[:-1]), order, strict=True)
        return max(backward[-1], *(peak + self.number_bytes[node] for peak, node in peaks))

    def bound(self, graph: JointGraph, workspace_bytes) -> int:
        """Bytes that the step never exceeds, even if the model's code keeps all tensors until the forward returns.

        The caller may hold all outputs during backward.
        """
        analysis = graph.analysis
        forward = [node.id for node in graph.nodes if node.phase == FORWARD and node.id in analysis.allocated]
        computed = [node for node in forward if node not in analysis.sources]
        workspace = max((workspace_bytes[node] for node in computed), default=0)
        everything_at_once = sum(analysis.allocated_bytes[node] for node in computed) + workspace
        dropped = set().union(*analysis.dropped_outputs.values()).difference(self.schedule.saved)
        held = sum(analysis.bytes[storage] for storage in dropped)
        peak_bytes = max(everything_at_once, peak_of(graph, self.schedule, workspace_bytes) + held)
        return peak_bytes + max(self.number_bytes)

    def timeline(self, workspace_bytes) -> Timeline:
        """Live dynamic bytes after every allocation and free."""
        live = follow(self.graph, self.schedule, workspace_bytes)
        timeline = live.timeline()
        numbers = [0]
        for (size, _), node in zip(live.events, live.owner, strict=True):
            # An operation's frees follow it, and with them the release of its autograd node.
            numbers.append(numbers[-1] if node is None else self.number_bytes[node + (size < 0)])
        if not any(numbers):
            return timeline
        activations = timeline.categories.get("activations", (0,) * len(numbers))
        categories = {**timeline.categories, "activations": tuple(map(sum, zip(activations, numbers)))}
        return replace(timeline, live=tuple(map(sum, zip(timeline.live, numbers))), categories=categories)


def eager_schedule(graph: JointGraph) -> Schedule:
    """The baseline's schedule with every saved activation freed when the autograd node that reads it last is done."""
    schedule = everything(graph)
    saved = set(schedule.saved)
    steps: list[Step] = []
    released: list[Step] = []  # frees that wait for the end of the running autograd node
    running = None
    for step in schedule.backward:
        if step.kind == COMPUTE:
            node = autograd_node(graph.analysis.fx[step.id])
            if node is None or node != running:
                steps += released
                released = []
            running = node
            steps.append(step)
        elif step.kind == FREE and step.id in saved and running is not None:
            released.append(step)
        else:
            steps.append(step)
    return replace(schedule, backward=(*steps, *released))


def eager_peak(graph: JointGraph, workspace_bytes) -> int:
    """The dynamic peak of the model in eager mode, in bytes, without saved numbers."""
    eager = eager_graph(graph)
    return peak_of(eager, eager_schedule(eager), workspace_bytes)


def _number_bytes(graph: JointGraph) -> list[int]:
    """By node, the bytes of the saved numbers that are live while it runs; 0 on a GPU, as they are in host memory.

    A number becomes live after the product, whose workspace includes it, and is released with the autograd node.
    """
    changes = [0] * (len(graph.nodes) + 2)
    if graph.on_cpu:
        ends = {autograd_node(fx): node for node, fx in graph.analysis.fx.items()}
        del ends[None]  # of the forward
        seen: set[int | None] = set()
        for node in graph.nodes[: graph.boundary]:
            fx = graph.analysis.fx[node.id]
            # That of the autograd node made last: by this operation, unless an earlier one has the same.
            made = fx.meta.get("seq_nr")
            if made in ends and made not in seen and fx.target in _SAVE_NUMBERS and (size := _bytes_of(fx.args[1])):
                changes[node.id + 1] += size
                changes[ends[made] + 1] -= size
            seen.add(made)
    return list(accumulate(changes[:-1]))


def _bytes_of(factor: Any) -> int:
    """Bytes of the tensor that torch makes of a number; 0 for a tensor."""
    value = factor.meta["val"] if isinstance(factor, torch.fx.Node) else factor
    if isinstance(value, torch.Tensor):
        return 0
    return {bool: 1, complex: 16}.get(type(value), 8)
