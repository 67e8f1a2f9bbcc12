"""Steps under any policy, also under manual plans with random fates."""

import torch

import ackpt
from ackpt.graph import PlannedStep
from ackpt.planner.request import Request
from experiments.graph_profile import random_fates


def planned(model, policy: str, *args, differentiate="loss", **kwargs):
    """`model` as a step under a policy: "eager" for the model itself, "manual 3" for random fates drawn by seed 3."""
    if policy == "eager":
        return model
    step = PlannedStep(model, Request(planner=lambda graph: plan_of(graph, policy), differentiate=differentiate))
    step.prepare(*args, **kwargs)
    return step


def plan_of(graph, policy: str) -> ackpt.Plan:
    """The plan of a policy, "manual 3" for random fates drawn by seed 3."""
    name, _, seed = policy.partition(" ")
    return ackpt.plan(graph, policy=name, **({"fates": random_fates(graph, int(seed))} if seed else {}))


def tensors_of(args, kwargs) -> list[torch.Tensor]:
    return [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
