"""Policy `min_cut`: saves what PyTorch's own partitioner would save, for comparison.

It runs `torch._functorch.partitioners.min_cut_rematerialization_partition` on a copy of the joint graph, without
decompositions and without merging equal operations. The partitioner's option ``activation_memory_budget`` is a fraction
between saving only inputs (0) and everything that backward needs (1). It bounds saved bytes, not the peak. So this
policy tries all settings in steps of a tenth, and takes the cheapest one that the simulator finds within the budget;
without a budget it takes torch's default, 1.

``order="late"`` recomputes as `lower` does: each activation right before its first reader. ``order="torch"`` keeps the
order of torch's backward graph, which may raise the peak. In both orders the results of one operation have one fate,
operations that cannot be recomputed are saved, views are rebuilt, random numbers are replayed, and the backward
operations that torch would move to its forward stay in the backward.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import fx
from torch._functorch import config
from torch._functorch.partitioners import min_cut_rematerialization_partition

from ackpt.planner.capture.joint_graph import JointGraph, once_per_graph
from ackpt.planner.costs.profiles import Profile
from ackpt.planner.policies.search.frontier import cheapest
from ackpt.planner.policies.search.refinement import without_runs
from ackpt.planner.schedule.schedule import Schedule, live_before_backward, lower, recompute_late, storages_of

_SETTINGS = [tenth / 10 for tenth in range(11)]  # steps of a tenth, since each runs torch's partitioner


class Partition(NamedTuple):
    """torch's partition: the storages that its forward saves, and the nodes of its backward in order."""

    saved: frozenset[int]
    backward: tuple[int, ...]


def min_cut(
    graph: JointGraph,
    profile: Profile,
    limit_bytes: int | None,
    *,
    order: str = "late",
    activation_memory_budget: float | None = None,
) -> Schedule:
    """A schedule that saves what torch's partitioner saves, at the cheapest setting that fits, or at a given one.

    Args:
        order: ``"late"`` or ``"torch"``, see above.
        activation_memory_budget: the setting to take, whatever its peak.

    Raises:
        ValueError: for an unknown order, or a setting that is not between 0 and 1.

    Example:
        >>> import torch, ackpt
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> graph = ackpt.trace(model, torch.ones(4, 8))
        >>> ackpt.plan(graph, policy=min_cut, order="torch", activation_memory_budget=1).fates
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
    """The partition of torch's partitioner for an ``activation_memory_budget``."""
    analysis = graph.analysis
    copied = fx.Graph()
    copied.output(copied.graph_copy(graph.module.graph, {}))
    for node, original in zip(copied.nodes, graph.module.graph.nodes):
        node.meta = dict(original.meta)
    inputs = [node for node in analysis.placeholders if node not in analysis.tangents]
    of_model = {s.id for s in graph.storages if s.category in ("parameter", "buffer")}
    static = [at for at, node in enumerate(inputs) if set(graph.nodes[node].storages) & of_model]
    outputs = len(analysis.outputs)
    with config.patch(activation_memory_budget=float(setting), cse=False):
        forward, backward = min_cut_rematerialization_partition(
            fx.GraphModule(graph.module, copied), None, num_fwd_outputs=outputs, static_lifetime_input_indices=static
        )
    (returned,) = forward.graph.find_nodes(op="output")
    returned_to_backward = [node.meta["ackpt_id"] for node in returned.args[0][outputs:] if isinstance(node, fx.Node)]
    saved = frozenset(s for node in returned_to_backward for s in graph.nodes[node].storages if s in analysis.savable)
    given = set(analysis.sources)
    order = [node.meta["ackpt_id"] for node in backward.graph.nodes if node.op == "call_function"]
    return Partition(saved, tuple(node for node in order if node not in given))


def _late(graph: JointGraph, partitioned: Partition) -> Schedule:
    return lower(graph, partitioned.saved | _always_saved(graph))


def _as_torch(graph: JointGraph, partitioned: Partition) -> Schedule:
    analysis = graph.analysis
    live = live_before_backward(analysis, partitioned.saved | _always_saved(graph))
    order = recompute_late(analysis, (*partitioned.backward, *analysis.needed_backward), live)
    # Some recomputations are read by nothing: their readers are saved together with siblings.
    return without_runs(graph, order)


def _always_saved(graph: JointGraph) -> set[int]:
    """Storages of operations that cannot be recomputed, and of outputs, which the caller holds."""
    analysis = graph.analysis
    return storages_of(graph, (*analysis.not_recomputable, *analysis.outputs)) & analysis.savable


def _late_candidates(graph: JointGraph, profile) -> list[Schedule]:
    return [_late(graph, partition(graph, setting)) for setting in _SETTINGS]


def _torch_candidates(graph: JointGraph, profile) -> list[Schedule]:
    return [_as_torch(graph, partition(graph, setting)) for setting in _SETTINGS]


_ORDERS = {"late": (_late_candidates, _late), "torch": (_torch_candidates, _as_torch)}
