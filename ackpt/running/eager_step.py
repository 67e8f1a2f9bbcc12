"""Simulate the peak of the model's eager step, and an upper bound on it.

Eager mode differs from the captured graph in two ways. It writes in place what the graph computes out of place
(`ackpt.capture.in_place`), and an autograd node releases its saved tensors when it is done, not after the last
operation that reads them (``release_variables`` in torch/csrc/autograd/engine.cpp, called after ``validate_outputs``).
"""

from __future__ import annotations

from dataclasses import replace

from ackpt.capture.in_place import autograd_node, eager_graph
from ackpt.capture.joint_graph import FORWARD, JointGraph
from ackpt.planning.schedule import COMPUTE, FREE, Schedule, Step, everything
from ackpt.planning.simulator import peak_of


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
    """The dynamic peak of the model in eager mode, in bytes."""
    eager = eager_graph(graph)
    return peak_of(eager, eager_schedule(eager), workspace_bytes)


def eager_peak_bound(graph: JointGraph, schedule: Schedule, workspace_bytes) -> int:
    """Bytes that the model's own step never exceeds, even if its code keeps all tensors until the forward returns.

    The caller may hold all outputs during backward.

    `schedule`: `eager_schedule` of this graph, or of an instance of it at other sizes.
    """
    analysis = graph.analysis
    forward = [node.id for node in graph.nodes if node.phase == FORWARD and node.id in analysis.allocated]
    computed = [node for node in forward if node not in analysis.sources]
    workspace = max((workspace_bytes[node] for node in computed), default=0)
    everything_at_once = sum(analysis.allocated_bytes[node] for node in computed) + workspace
    dropped = set().union(*analysis.dropped_outputs.values()).difference(schedule.saved)
    held = sum(analysis.bytes[storage] for storage in dropped)
    return max(everything_at_once, peak_of(graph, schedule, workspace_bytes) + held)
