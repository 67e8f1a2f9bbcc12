"""A schedule: the order in which a step computes, frees and copies. The set of saved storages follows from it.

Two schedules that save the same storages can have different peaks, depending on when they recompute. So every policy
returns a `Schedule`, and nothing else is simulated or run.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from ackpt.capture.analysis import Analysis
from ackpt.capture.joint_graph import BACKWARD, FORWARD, JointGraph

COMPUTE, FREE = "compute", "free"
OFFLOAD, PREFETCH, WAIT = "offload", "prefetch", "wait"


class ScheduleError(ValueError):
    """A schedule that cannot run: it reads a value that is not live, or recomputes an operation that must run once.

    Example:
        >>> import torch, ackpt
        >>> from ackpt.graph import scheduled
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> graph = ackpt.trace(model, torch.ones(4, 8))
        >>> found = scheduled(graph, forward=[], backward=range(graph.boundary + 1, len(graph.nodes)))
        >>> try:
        ...     ackpt.graph.simulate(graph, ackpt.profile(graph), found)
        ... except ackpt.ScheduleError:
        ...     print("backward reads what the forward did not compute")
        backward reads what the forward did not compute
    """


class Step(NamedTuple):
    """One step of a schedule: ``compute`` the node `id`, or do one of the following to the storage `id`.

    ``free`` releases it on the device. ``offload`` starts its copy to the host; it stays on the device until it is
    freed. ``prefetch`` allocates it on the device and starts its copy back. ``wait`` blocks until the copy is complete;
    only then may an offloaded storage be freed, or a prefetched one be read.

    Example:
        >>> from ackpt.graph import Step
        >>> Step("compute", 7)
        Step(kind='compute', id=7)
    """

    kind: str
    id: int


@dataclass(frozen=True)
class Schedule:
    """The steps of the forward and of the backward of the graph with the hash `graph`.

    A forward node among the backward's steps is a recomputation; a node may be computed several times. ``saved``:
    storages on the device between forward and backward; ``replayed``: random nodes that are recomputed, with the RNG
    state that their first run started from.

    Example:
        >>> import torch, ackpt
        >>> from ackpt.graph import lower
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> graph = ackpt.trace(model, torch.ones(4, 8))
        >>> nothing = lower(graph, ())
        >>> again = [step.id for step in nothing.backward if step.kind == "compute" and step.id < graph.boundary]
        >>> nothing.saved, "aten.tanh.default" in [graph.nodes[place].target for place in again]
        ((), True)
    """

    graph: str
    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    saved: tuple[int, ...]
    replayed: tuple[int, ...]

    @property
    def offloaded(self) -> tuple[int, ...]:
        """Storages in host memory between forward and backward."""
        left = {step.id for step in self.forward if step.kind == OFFLOAD}
        return tuple(sorted(left & {step.id for step in self.backward if step.kind == PREFETCH}))


def scheduled(graph: JointGraph, forward: Iterable[int] | None, backward: Iterable[int]) -> Schedule:
    """The schedule that computes the nodes `forward` and then `backward`, and frees every storage as early as possible.

    If `forward` is None, it consists of the nodes that the outputs, the effects and `backward` need.

    Raises:
        ScheduleError: if `backward` recomputes a node that cannot be recomputed.

    Example:
        >>> import torch, ackpt
        >>> from ackpt.graph import lower, scheduled
        >>> graph = ackpt.trace(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()), torch.ones(4, 8))
        >>> found = lower(graph, ())
        >>> forward, backward = (
        ...     [step.id for step in steps if step.kind == "compute"] for steps in (found.forward, found.backward)
        ... )
        >>> scheduled(graph, forward, backward) == found
        True
    """
    analysis = graph.analysis
    backward = list(backward)
    for node_id in backward:
        if graph.nodes[node_id].phase == FORWARD and node_id in analysis.not_recomputable:
            node = graph.nodes[node_id]
            raise ScheduleError(
                f"{node.name} ({node.target}) of module {node.module or 'the model itself'!r} cannot be recomputed: "
                f"{analysis.not_recomputable[node_id]}. Its storage must be saved."
            )
    steps, needed = _with_frees(analysis, backward, analysis.live_to_end, True)
    bw = tuple(steps)
    saved = tuple(sorted(needed - analysis.resident - {s for t in analysis.tangents for s in graph.nodes[t].storages}))
    forward = needed_forward(analysis, saved) if forward is None else list(forward)
    steps, _ = _with_frees(analysis, forward, analysis.live_to_end | analysis.dropped | set(saved), False)
    steps += [Step(FREE, storage) for storage in sorted(analysis.dropped - set(saved))]
    random = {
        node_id for node_id in backward if graph.nodes[node_id].phase == FORWARD and graph.nodes[node_id].is_random
    }
    return Schedule(graph.hash, tuple(steps), bw, saved, tuple(sorted(random)))


def lower(graph: JointGraph, saved: Iterable[int]) -> Schedule:
    """The schedule that keeps the storages `saved` for backward and recomputes what else it needs: once, and late.

    What one operation brings along has one fate: with a saved storage, its siblings are saved as far as backward
    reads them; otherwise the operation would run again and bring the saved one along a second time. Each missing
    value is recomputed right before its first use and freed right after its last. Views are rebuilt. What backward
    does not need is not run again.

    Raises:
        ScheduleError: if a value is not saved that cannot be recomputed.

    Example:
        >>> import torch, ackpt
        >>> from ackpt.graph import lower, simulate
        >>> from ackpt.planning.schedule import everything
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> graph = ackpt.trace(model, torch.ones(4, 8))
        >>> profile = ackpt.profile(graph)
        >>> [simulate(graph, profile, lower(graph, saved)).recompute_flops for saved in ((), everything(graph).saved)]
        [512, 0]
    """
    analysis = graph.analysis
    # The caller holds the outputs anyway.
    outputs = {s for node_id in analysis.outputs if node_id is not None for s in graph.nodes[node_id].storages}
    saved = {*saved, *(outputs - analysis.dropped)}
    return scheduled(
        graph, None, recompute_late(analysis, analysis.needed_backward, live_before_backward(analysis, saved))
    )


def everything(graph: JointGraph) -> Schedule:
    """The schedule of the baseline: it saves all activations that backward reads.

    Example:
        >>> import torch, ackpt
        >>> from ackpt.graph import simulate
        >>> from ackpt.planning.schedule import everything
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> graph = ackpt.trace(model, torch.ones(4, 8))
        >>> plain = simulate(graph, ackpt.profile(graph), everything(graph))
        >>> plain.saved_bytes, plain.recompute_flops
        (128, 0)
    """
    return lower(graph, graph.analysis.savable)


def recomputed(graph: JointGraph, schedule: Schedule) -> list[int]:
    """The forward nodes that run in backward, in order, each as often as it runs."""
    return [step.id for step in schedule.backward if step.kind == COMPUTE and step.id < graph.boundary]


def live_before_backward(analysis: Analysis, saved) -> set[int]:
    """Nodes whose values are live when backward begins if the storages `saved`, and their siblings, are saved."""
    live = set(analysis.sources)
    for producer in {analysis.graph.storages[storage].producer for storage in saved}:
        live |= {analysis.base_of[storage] for storage in analysis.allocated[producer] if storage in analysis.base_of}
    return live


def recompute_late(analysis: Analysis, nodes: Iterable[int], live: set[int]) -> list[int]:
    """Node ids in the order in which `nodes` run, each missing activation recomputed right before its first reader.

    `live`: nodes whose values exist; every node of the returned order is added to it.
    """
    order: list[int] = []
    for reader in nodes:
        runs = missing(analysis, reader, live)
        order += runs
        live.update(runs)
    return order


def missing(analysis: Analysis, node_id: int, live) -> list[int]:
    """`node_id` and the nodes that have to run before it, in order, if the values in `live` are live."""
    if node_id in live:
        return []
    if live.issuperset(analysis.reads(node_id, again=analysis.graph.nodes[node_id].phase == FORWARD)):
        return [node_id]
    return missing_for(analysis, [node_id], live)


def missing_for(analysis: Analysis, node_ids, live) -> list[int]:
    """`node_ids` and the nodes that have to run before them, in order, if the values in `live` are live."""
    needed = set()
    todo = list(node_ids)
    while todo:
        node = todo.pop()
        if node in live or node in needed:
            continue
        needed.add(node)
        todo += analysis.reads(node, again=analysis.graph.nodes[node].phase == FORWARD)
    return sorted(needed)


def needed_forward(analysis: Analysis, saved) -> list[int]:
    """Forward nodes that the outputs, the `saved` storages and the effects depend on, in order."""
    graph = analysis.graph
    roots = [node_id for node_id in analysis.outputs if node_id is not None]
    roots += [node_id for node_id in analysis.effects if graph.nodes[node_id].phase == FORWARD]
    roots += [analysis.base_of[storage] for storage in saved]
    given = set(analysis.sources)
    return [node for node in analysis.ancestors(roots) if node not in given]


def _with_frees(analysis: Analysis, order, live_after, is_backward: bool):
    """The steps of `order` with every free as early as possible, and the storages that must be live before it."""
    touched = analysis.accessed[BACKWARD if is_backward else FORWARD]
    computes, frees = _steps(COMPUTE, len(analysis.graph.nodes)), _steps(FREE, len(analysis.graph.storages))
    steps: list[Step] = []
    later: set[int] = set()  # storages that a later step reads or writes before they are allocated again
    for node_id in reversed(order):
        for storage in touched[node_id]:
            if storage not in later:
                later.add(storage)
                if storage not in live_after:
                    steps.append(frees[storage])
        steps.append(computes[node_id])
        if node_id in analysis.allocated:
            later -= analysis.allocated[node_id]
    steps.reverse()
    return steps, later


@functools.cache
def _steps(kind: str, count: int) -> tuple[Step, ...]:
    """Every step of one kind; cached, since planning makes hundreds of schedules."""
    return tuple(Step(kind, number) for number in range(count))
