"""Policy ``min-cut``: what PyTorch's own partitioner would save, as a peer beside the others.

`torch._functorch.partitioners.min_cut_rematerialization_partition` on a copy of the joint graph, without decompositions
and without merging equal operations. Its knob is ``activation_memory_budget``, a fraction between saving nothing but
inputs (0) and what backward needs (1): a bound on saved bytes, not on the peak. So all settings in steps of a tenth are
tried, and the cheapest that the simulator finds within the budget is taken; without a budget it is torch's default, 1.

``order="late"`` recomputes in the order of `lower`: each value right before its first use. ``order="torch"`` keeps the
order of torch's backward graph, which may raise the peak. In both, what one operation brings along has one fate, what
cannot run again is saved, views are rebuilt, random numbers are replayed, and what of the backward torch would compute
in its forward stays in the backward.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import fx
from torch._functorch import config
from torch._functorch.partitioners import min_cut_rematerialization_partition

from ackpt.capture.analysis import facts, once_per_graph
from ackpt.capture.joint_graph import JointGraph
from ackpt.costs.profiles import Profile
from ackpt.planning.schedule import Schedule, lower, missing, scheduled
from ackpt.policies.search.frontier import cheapest

_SETTINGS = [tenth / 10 for tenth in range(11)]


class Partition(NamedTuple):
    """``saved``: storages that torch hands to its backward; ``backward``: nodes of that in their order."""

    saved: frozenset[int]
    backward: tuple[int, ...]


def schedule(
    graph: JointGraph,
    profile: Profile,
    limit_bytes: int | None,
    *,
    order: str = "late",
    activation_memory_budget: float | None = None,
) -> Schedule:
    """What torch's partitioner saves, at the cheapest of its settings that fits, or at one of them.

    Args:
        order: ``"late"`` or ``"torch"``, see above.
        activation_memory_budget: the one setting to take, whatever it needs.

    Raises:
        ValueError: for an unknown order, or a setting that is not between 0 and 1.

    Example:
        >>> import torch, ackpt
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> graph = ackpt.trace(model, torch.ones(4, 8))
        >>> ackpt.plan(graph, policy="min-cut", order="torch", activation_memory_budget=1).fates
        {'tanh': 'saved'}
    """
    if order not in _ORDERS:
        raise ValueError(f"order must be {' or '.join(map(repr, _ORDERS))}, got {order!r}")
    candidates, lowered = _ORDERS[order]
    if activation_memory_budget is None and limit_bytes is not None:
        return cheapest(graph, profile, limit_bytes, candidates)
    setting = 1.0 if activation_memory_budget is None else activation_memory_budget
    if isinstance(setting, bool) or not isinstance(setting, (int, float)) or not 0 <= setting <= 1:
        raise ValueError(f"activation_memory_budget is a number between 0 and 1, got {setting!r}")
    return lowered(graph, partition(graph, setting))


@once_per_graph
def partition(graph: JointGraph, setting: float) -> Partition:
    """What torch's partitioner decides for an ``activation_memory_budget``."""
    known = facts(graph)
    copied = fx.Graph()
    copied.output(copied.graph_copy(graph.module.graph, {}))
    for node, original in zip(copied.nodes, graph.module.graph.nodes):
        node.meta = dict(original.meta)
    inputs = [place for place in known.placeholders if place not in known.tangents]
    owned = {s.id for s in graph.storages if s.category in ("parameter", "buffer")}
    static = [at for at, place in enumerate(inputs) if set(graph.nodes[place].storages) & owned]
    outputs = len(known.outputs)
    with config.patch(activation_memory_budget=float(setting), cse=False):
        forward, backward = min_cut_rematerialization_partition(
            fx.GraphModule(graph.module, copied), None, num_fwd_outputs=outputs, static_lifetime_input_indices=static
        )
    (returned,) = forward.graph.find_nodes(op="output")
    handed = [node.meta["ackpt_id"] for node in returned.args[0][outputs:] if isinstance(node, fx.Node)]
    saved = frozenset(s for place in handed for s in graph.nodes[place].storages if s in known.savable)
    given = set(known.given)
    order = [node.meta["ackpt_id"] for node in backward.graph.nodes if node.op == "call_function"]
    return Partition(saved, tuple(place for place in order if place not in given))


def _late(graph: JointGraph, found: Partition) -> Schedule:
    return lower(graph, found.saved | _there_anyway(graph))


def _as_torch(graph: JointGraph, found: Partition) -> Schedule:
    known = facts(graph)
    live = set(known.given)
    for producer in {graph.storages[storage].producer for storage in found.saved | _there_anyway(graph)}:
        live |= {known.cover[storage] for storage in known.born[producer] if storage in known.cover}
    order: list[int] = []
    for place in (*found.backward, *known.needed_backward):
        for node in missing(known, place, live):
            order.append(node)
            live.add(node)
    return scheduled(graph, None, _without_unread(graph, order))


def _without_unread(graph: JointGraph, order: list[int]) -> list[int]:
    """`order` without recomputations that nothing after them reads: their readers are saved with their siblings."""
    known = facts(graph)
    read: set[int] = set()
    kept = []
    for place in reversed(order):
        again = place < graph.boundary
        if not again or place in read:
            kept.append(place)
            read.update(known.reads(place, again))
    return kept[::-1]


def _there_anyway(graph: JointGraph) -> set[int]:
    """What cannot be computed again, and what the caller holds."""
    known = facts(graph)
    places = [*known.fixed, *(place for place in known.outputs if place is not None)]
    return {s for place in places for s in graph.nodes[place].storages if s in known.savable}


def _late_candidates(graph: JointGraph, profile) -> list[Schedule]:
    return [_late(graph, partition(graph, setting)) for setting in _SETTINGS]


def _torch_candidates(graph: JointGraph, profile) -> list[Schedule]:
    return [_as_torch(graph, partition(graph, setting)) for setting in _SETTINGS]


_ORDERS = {"late": (_late_candidates, _late), "torch": (_torch_candidates, _as_torch)}
