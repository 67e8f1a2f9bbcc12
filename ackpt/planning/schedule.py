"""A schedule: the order in which a step computes, frees and copies. Which values are saved follows from it.

A plan is an order, not a set. Two schedules that save the same storages can differ in their peak by when they
recompute; so every policy ends in one of these, and nothing else is simulated or run.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from ackpt.capture.analysis import Facts, facts
from ackpt.capture.joint_graph import BACKWARD, FORWARD, JointGraph

COMPUTE, FREE = "compute", "free"
OFFLOAD, PREFETCH, WAIT = "offload", "prefetch", "wait"


class ScheduleError(ValueError):
    """A schedule that cannot run: it reads what is not there, or repeats what must run once.

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
    """``compute`` the node `id`, or do something with the storage `id`.

    ``free`` it on the device; ``offload``: start its copy to the host, it stays on the device until it is freed;
    ``prefetch``: allocate it on the device and start its copy back; ``wait`` until the copy that was started is done.
    What is copied is freed, and what is brought back read, only after that.

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
    storages that live on the device across the boundary, for backward; ``replayed``: random nodes that run again, with
    the state their first run began with.

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
        """Storages that lie in host memory across the boundary, for backward."""
        left = {step.id for step in self.forward if step.kind == OFFLOAD}
        return tuple(sorted(left & {step.id for step in self.backward if step.kind == PREFETCH}))


def scheduled(graph: JointGraph, forward: Iterable[int] | None, backward: Iterable[int]) -> Schedule:
    """The schedule that computes `forward` and then `backward`, lists of node ids, and frees at the earliest place.

    `forward` may be None: then it is what the outputs, the effects and `backward` need.

    Raises:
        ScheduleError: if a node would run again that must not.

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
    known = facts(graph)
    backward = list(backward)
    for place in backward:
        if graph.nodes[place].phase == FORWARD and place in known.fixed:
            node = graph.nodes[place]
            raise ScheduleError(
                f"{node.name} ({node.target}) of module {node.module or 'the model itself'!r} cannot be recomputed: "
                f"{known.fixed[place]}. Its storage must be saved."
            )
    steps, needed = _with_frees(known, backward, known.held, True)
    bw = tuple(steps)
    saved = tuple(sorted(needed - known.resident - {s for t in known.tangents for s in graph.nodes[t].storages}))
    forward = needed_forward(known, saved) if forward is None else list(forward)
    steps, _ = _with_frees(known, forward, known.held | known.dropped | set(saved), False)
    steps += [Step(FREE, storage) for storage in sorted(known.dropped - set(saved))]
    random = {place for place in backward if graph.nodes[place].phase == FORWARD and graph.nodes[place].is_random}
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
    known = facts(graph)
    # The caller holds the outputs anyway.
    outputs = {s for place in known.outputs if place is not None for s in graph.nodes[place].storages}
    saved = {*saved, *(outputs - known.dropped)}
    return scheduled(graph, None, recompute_late(known, known.needed_backward, at_hand(known, saved)))


def everything(graph: JointGraph) -> Schedule:
    """The schedule of a step without checkpointing: all that backward needs is saved.

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
    return lower(graph, facts(graph).savable)


def recomputed(graph: JointGraph, schedule: Schedule) -> list[int]:
    """Forward nodes that run in backward, in order, as often as they do."""
    return [step.id for step in schedule.backward if step.kind == COMPUTE and step.id < graph.boundary]


def at_hand(known: Facts, saved) -> set[int]:
    """Nodes whose values backward begins with when the storages `saved` are kept, with what was born beside them."""
    live = set(known.given)
    for producer in {known.graph.storages[storage].producer for storage in saved}:
        live |= {known.cover[storage] for storage in known.born[producer] if storage in known.cover}
    return live


def recompute_late(known: Facts, nodes: Iterable[int], live: set[int]) -> list[int]:
    """Node ids in the order in which `nodes` run, each missing activation recomputed right before its first reader.

    `live`: nodes whose values exist; every node of the returned order is added to it.
    """
    order: list[int] = []
    for reader in nodes:
        runs = missing(known, reader, live)
        order += runs
        live.update(runs)
    return order


def missing(known: Facts, place: int, live) -> list[int]:
    """`place` and what has to run before it, in order, when the values in `live` are at hand."""
    if place in live:
        return []
    if live.issuperset(known.reads(place, again=known.graph.nodes[place].phase == FORWARD)):
        return [place]
    return missing_for(known, [place], live)


def missing_for(known: Facts, places, live) -> list[int]:
    """`places` and what has to run before them, in order, when the values in `live` are at hand."""
    found = set()
    todo = list(places)
    while todo:
        node = todo.pop()
        if node in live or node in found:
            continue
        found.add(node)
        todo += known.reads(node, again=known.graph.nodes[node].phase == FORWARD)
    return sorted(found)


def needed_forward(known: Facts, saved) -> list[int]:
    """Forward nodes that the outputs, the `saved` storages and the effects depend on, in order."""
    graph = known.graph
    roots = [place for place in known.outputs if place is not None]
    roots += [place for place in known.effects if graph.nodes[place].phase == FORWARD]
    roots += [known.cover[storage] for storage in saved]
    given = set(known.given)
    return [node for node in known.ancestors(roots) if node not in given]


def _with_frees(known: Facts, order, kept, is_backward: bool):
    """The steps of `order` with every free at its earliest, and the storages that it expects to be there."""
    touched = known.touched[BACKWARD if is_backward else FORWARD]
    computes, frees = _steps(COMPUTE, len(known.graph.nodes)), _steps(FREE, len(known.graph.storages))
    steps: list[Step] = []
    later: set[int] = set()  # storages that a later step touches before it is born anew
    for place in reversed(order):
        for storage in touched[place]:
            if storage not in later:
                later.add(storage)
                if storage not in kept:
                    steps.append(frees[storage])
        steps.append(computes[place])
        if place in known.born:
            later -= known.born[place]
    steps.reverse()
    return steps, later


@functools.cache
def _steps(kind: str, count: int) -> tuple[Step, ...]:
    """Every step of one kind, made once: planning makes hundreds of schedules."""
    return tuple(Step(kind, number) for number in range(count))
