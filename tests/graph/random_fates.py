"""Manual plans with random fates, and what a step leaves behind."""

from __future__ import annotations

import random

import torch

import ackpt
from ackpt.graph.facts import facts


def random_fates(graph, seed: int) -> dict[str, str]:
    """A fate for every activation that may be recomputed, drawn for the results of one operation together."""
    known, draw, fates = facts(graph), random.Random(seed), {}
    for place in sorted({graph.storages[storage].producer for storage in known.savable}):
        siblings = sorted(known.born[place] & known.savable)
        names = {graph.nodes[known.cover[storage]].name for storage in siblings}
        lies_in = {node for storage in siblings for node in graph.storages[storage].nodes}
        if not lies_in & known.fixed.keys() and draw.random() < 0.5:
            fates.update(dict.fromkeys(names, "recomputed"))
    return fates


def manual(model, *args, seed: int, **kwargs) -> ackpt.Plan:
    """A plan with random fates for `model` called like this."""
    graph = ackpt.trace(model, *args, **kwargs)
    return ackpt.plan(graph, policy="manual", fates=random_fates(graph, seed))


def planned(model, policy, *args, **kwargs):
    """`model` as a step under a policy: "eager" for the model itself, "manual 3" for random fates with seed 3."""
    name, _, seed = policy.partition(" ")
    if name == "eager":
        return model
    if name == "manual":
        return ackpt.compile(model, *args, plan=manual(model, *args, seed=int(seed), **kwargs), **kwargs)
    return ackpt.compile(model, *args, policy=name, **kwargs)


def tensors_of(args, kwargs) -> list[torch.Tensor]:
    return [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
