"""Steps under any policy, also under manual plans with random fates."""

from __future__ import annotations

import random

import torch

import ackpt
from ackpt.graph import PlannedStep
from ackpt.graph.facts import facts


def random_fates(graph, seed: int) -> dict[str, str]:
    """Recompute about half of what may be recomputed, with one fate for the results of one operation."""
    known, draw, fates = facts(graph), random.Random(seed), {}
    for place in sorted({graph.storages[storage].producer for storage in known.savable}):
        siblings = sorted(known.born[place] & known.savable)
        lies_in = {node for storage in siblings for node in graph.storages[storage].nodes}
        if not lies_in & known.fixed.keys() and draw.random() < 0.5:
            fates.update({graph.nodes[known.cover[storage]].name: "recomputed" for storage in siblings})
    return fates


def planned(model, policy: str, *args, differentiate="loss", **kwargs):
    """`model` as a step under a policy: "eager" for the model itself, "manual 3" for random fates drawn by seed 3."""
    name, _, seed = policy.partition(" ")
    if name == "eager":
        return model

    def planner(graph):
        return ackpt.plan(graph, policy=name, **({"fates": random_fates(graph, int(seed))} if seed else {}))

    step = PlannedStep(model, planner, differentiate)
    step.prepare(*args, **kwargs)
    return step


def tensors_of(args, kwargs) -> list[torch.Tensor]:
    return [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
