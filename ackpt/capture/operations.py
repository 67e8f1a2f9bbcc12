"""`Node` and `Storage`: the operations of a joint graph, and the memory that holds their results.

A node's id is its place in the order of execution, given once; whatever is said about a node later (its cost, its
fate, when it runs) refers to this id, never to a name, a shape or an address. What can be saved or freed is not a node
but a *storage*: views, and results of one operation that share memory, are one storage.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch._higher_order_ops.effects import _get_effect

FORWARD, BACKWARD = "forward", "backward"
CATEGORIES: tuple[str, ...] = (
    "parameter",
    "buffer",
    "input",
    "activation",
    "gradient",
    "optimizer state",
    "temporary",
)


@dataclass(frozen=True)
class Node:
    """One operation, or one input of the step.

    ``inputs``: ids of the nodes it reads, in the order of its arguments. ``storages``: ids of those that its result
    uses. ``module``: the qualified name of the module that called it (``""``: the model itself), ``source``: file and
    line; a backward node has those of the forward operation it belongs to. ``is_random``: it draws random numbers.

    Example:
        >>> import torch, ackpt
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh())
        >>> graph = ackpt.trace(model, torch.ones(4, 8))
        >>> (tanh,) = (node for node in graph.nodes if node.target == "aten.tanh.default")
        >>> tanh.phase, tanh.module, [graph.nodes[place].target for place in tanh.inputs]
        ('forward', '1', ['aten.addmm.default'])
    """

    id: int
    name: str
    target: str
    phase: str
    inputs: tuple[int, ...]
    storages: tuple[int, ...]
    module: str
    source: str
    is_random: bool


@dataclass(frozen=True)
class Storage:
    """Memory that is allocated and freed as one.

    ``bytes``: its size. ``producer``: the node that allocates it. ``nodes``: all nodes whose results use it.
    ``last_fw_access``, ``first_bw_access``, ``last_bw_access``: nodes that read or write it, in the words of
    Purandare et al. 2023, mu-TWO; None where there is none.

    Example:
        >>> import torch, ackpt
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh())
        >>> graph = ackpt.trace(model, torch.ones(4, 8))
        >>> (kept,) = (storage for storage in graph.storages if storage.category == "activation")
        >>> kept.bytes, graph.nodes[kept.producer].target
        (128, 'aten.tanh.default')
    """

    id: int
    bytes: int
    category: str
    producer: int
    nodes: tuple[int, ...]
    last_fw_access: int | None
    first_bw_access: int | None
    last_bw_access: int | None


def has_effect(target) -> bool:
    """Whether an operation has an effect besides its results, such as an error, as all have that return nothing."""
    is_operation = isinstance(target, torch._ops.OpOverload)
    return is_operation and (not target._schema.returns or _get_effect(target) is not None)
