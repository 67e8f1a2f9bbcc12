"""Policy ``manual``: the caller gives the fate of each activation by the name of its node."""

from collections.abc import Mapping

from ackpt.planner.capture.joint_graph import JointGraph
from ackpt.planner.costs.profiles import Profile
from ackpt.planner.schedule.offload_steps import offloadable, offloaded, packed
from ackpt.planner.schedule.plan import OFFLOADED, PACKED, RECOMPUTED, SAVED
from ackpt.planner.schedule.schedule import Schedule, everything, lower


def schedule(graph: JointGraph, profile: Profile, limit_bytes: int | None, *, fates: Mapping[str, str]) -> Schedule:
    """A schedule with the given `fates`; other activations are saved if backward reads them or they are fixed.

    Raises:
        TypeError: if `fates` is not a mapping.
        ValueError: for unknown names and fates, for results of one operation with different fates, and for activations
            that cannot be recomputed, packed or offloaded.

    Example:
        >>> import torch, ackpt
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> graph = ackpt.trace(model, torch.ones(4, 8))
        >>> ackpt.plan(graph, policy="manual", fates={"tanh": "recomputed"}).saved_bytes
        0
    """
    if not isinstance(fates, Mapping):
        raise TypeError(f"fates must be a dict {{name of an activation: fate}}, got {type(fates).__name__}")
    analysis = graph.analysis
    storage_of = {graph.nodes[analysis.base_of[storage]].name: storage for storage in analysis.savable}
    if unknown := [name for name in fates if name not in storage_of]:
        raise ValueError(
            f"no activation is called {unknown[0]!r}; the names are those of plan.fates under policy 'none'"
        )
    if wrong := [fate for fate in fates.values() if fate not in (SAVED, PACKED, RECOMPUTED, OFFLOADED)]:
        raise ValueError(f"a fate is 'saved', 'packed', 'recomputed' or 'offloaded', got {wrong[0]!r}")
    not_recomputed = {storage_of[name] for name, fate in fates.items() if fate != RECOMPUTED}
    saved = analysis.must_be_saved.union(everything(graph).saved, not_recomputed)
    saved -= {storage_of[name] for name, fate in fates.items() if fate == RECOMPUTED}
    for name, fate in fates.items():
        producer = graph.storages[storage_of[name]].producer
        siblings = [
            graph.nodes[analysis.base_of[s]].name for s in analysis.allocated[producer] if s in analysis.savable
        ]
        if fate == RECOMPUTED:
            if other := next((s for s in siblings if fates.get(s, RECOMPUTED) != RECOMPUTED), None):
                raise ValueError(
                    f"{name!r} and {other!r} are outputs of one operation, {graph.nodes[producer].name!r}, whose "
                    "recomputation produces both: give them the same fate"
                )
            saved -= analysis.allocated[producer]
    recomputing = lower(graph, saved)
    to_bits = {storage_of[name]: name for name, fate in fates.items() if fate == PACKED}
    if refused := sorted(set(to_bits) - (analysis.masks.keys() & recomputing.saved)):
        raise ValueError(
            f"{to_bits[refused[0]]!r} cannot be packed: only dropout masks that backward reads can, such as "
            f"{[graph.nodes[analysis.base_of[s]].name for s in sorted(analysis.masks)][:1]}"
        )
    if to_bits:
        recomputing = packed(graph, recomputing, to_bits)
    to_host = {storage_of[name]: name for name, fate in fates.items() if fate == OFFLOADED}
    if refused := sorted(set(to_host) - set(offloadable(graph, recomputing))):
        raise ValueError(
            f"{to_host[refused[0]]!r} cannot be offloaded: backward does not read it, or the caller holds it"
        )
    return offloaded(graph, recomputing, to_host, profile, limit_bytes or 0) if to_host else recomputing
