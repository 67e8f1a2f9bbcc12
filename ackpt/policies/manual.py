"""Given fates: every activation by the name of its node."""

from __future__ import annotations

from collections.abc import Mapping

from ackpt.capture.analysis import facts
from ackpt.capture.joint_graph import JointGraph
from ackpt.costs.profiles import Profile
from ackpt.planning.offload_steps import offloadable, offloaded
from ackpt.planning.plan import OFFLOADED, RECOMPUTED, SAVED
from ackpt.planning.schedule import Schedule, everything, lower


def schedule(graph: JointGraph, profile: Profile, limit_bytes: int | None, *, fates: Mapping[str, str]) -> Schedule:
    """Save what `fates` says; what it does not name is saved if backward reads it, or if it cannot be recomputed.

    Raises:
        TypeError: if `fates` is no mapping.
        ValueError: for unknown names and fates, for siblings of one operation of which only some are recomputed, and
            for what cannot be recomputed or offloaded.

    Example:
        >>> import torch, ackpt
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> graph = ackpt.trace(model, torch.ones(4, 8))
        >>> ackpt.plan(graph, policy="manual", fates={"tanh": "recomputed"}).saved_bytes
        0
    """
    if not isinstance(fates, Mapping):
        raise TypeError(f"fates must be a dict {{name of an activation: fate}}, got {type(fates).__name__}")
    known = facts(graph)
    names = {graph.nodes[known.cover[storage]].name: storage for storage in known.savable}
    if unknown := [name for name in fates if name not in names]:
        raise ValueError(
            f"no activation is called {unknown[0]!r}; the names are those of plan.fates under policy 'none'"
        )
    if wrong := [fate for fate in fates.values() if fate not in (SAVED, RECOMPUTED, OFFLOADED)]:
        raise ValueError(f"a fate is 'saved', 'recomputed' or 'offloaded', got {wrong[0]!r}")
    kept = {names[name] for name, fate in fates.items() if fate != RECOMPUTED}
    saved = known.pinned.union(everything(graph).saved, kept)
    saved -= {names[name] for name, fate in fates.items() if fate == RECOMPUTED}
    for name, fate in fates.items():
        producer = graph.storages[names[name]].producer
        siblings = [graph.nodes[known.cover[s]].name for s in known.born[producer] if s in known.savable]
        if fate == RECOMPUTED:
            if other := next((s for s in siblings if fates.get(s, RECOMPUTED) != RECOMPUTED), None):
                raise ValueError(
                    f"{name!r} and {other!r} are results of one operation, {graph.nodes[producer].name!r}: running it "
                    "again brings both, so give them one fate"
                )
            saved -= known.born[producer]
    found = lower(graph, saved)
    away = {names[name]: name for name, fate in fates.items() if fate == OFFLOADED}
    if stay := sorted(set(away) - set(offloadable(graph, found))):
        raise ValueError(f"{away[stay[0]]!r} cannot be offloaded: backward does not read it, or the caller holds it")
    return offloaded(graph, found, away, profile, limit_bytes or 0) if away else found
