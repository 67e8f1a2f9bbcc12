"""Simulate the peak of the model's eager step.

Eager mode differs from the captured graph in two ways. It writes in place what the graph computes out of place
(`ackpt.planner.capture.in_place`). And an autograd node releases its saved tensors when it is done, not after the last
operation that reads them (``release_variables`` in torch/csrc/autograd/engine.cpp, called after ``validate_outputs``).
"""

from __future__ import annotations

from dataclasses import replace

from ackpt.planner.capture.in_place import autograd_node, eager_graph
from ackpt.planner.capture.joint_graph import JointGraph
from ackpt.planner.schedule.schedule import COMPUTE, FREE, Schedule, Step, everything
from ackpt.planner.schedule.simulator import peak_of


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
    """The dynamic peak of the model in eager mode, in bytes, without the numbers that autograd saves for products."""
    eager = eager_graph(graph)
    return peak_of(eager, eager_schedule(eager), workspace_bytes)
