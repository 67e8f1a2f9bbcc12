"""`Node` and `Storage`: the operations of a joint graph, and the memory that holds their results.

A node's id is its place in the order of execution, given once; whatever is said about a node later (its cost, its
fate, when it runs) refers to this id, never to a name, a shape or an address. What can be saved or freed is not a node
but a *storage*: views, and results of one operation that share memory, are one storage.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch._higher_order_ops.auto_functionalize import auto_functionalized, auto_functionalized_v2
from torch._higher_order_ops.effects import _get_effect
from torch.utils._pytree import tree_leaves

FORWARD, BACKWARD = "forward", "backward"
CATEGORIES: tuple[str, ...] = ("parameter", "buffer", "input", "activation", "gradient", "optimizer state", "temporary")


@dataclass(frozen=True)
class Node:
    """One operation, or one input of the step.

    ``inputs``: ids of the nodes it reads, in the order of its arguments. ``storages``: ids of those that its result
    uses. ``module``: the qualified name of the module that called it (``""``: the model itself), ``source``: file and
    line; a backward node has those of the forward operation it belongs to. ``is_random``: it may draw random numbers.

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


# The namespaces of torch's own operations, whose tags say which of them draw random numbers.
_TAGGED = {
    "aten",
    "prims",
    "mkldnn",
    "onednn",
    "quantized",
    "quantized_decomposed",
    "inductor",
    "symm_mem",
    "torch_attn",
}
_TAGGED |= {"profiler", "c10d", "c10d_functional", "_c10d_functional", "fsdp", "torchvision", "ackpt_graph"}
_TAGGED |= {"bitsandbytes"}  # whose operations draw none


def may_draw(target, *args) -> bool:
    """Whether an operation may draw random numbers: it has the tag, or is a custom one, whose tags are unreliable.

    `args`: of the call; the first one is the operation that a wrapper calls.
    """
    operation = args[0] if target in (auto_functionalized, auto_functionalized_v2) else target
    if not isinstance(operation, torch._ops.OpOverload):
        return False
    return torch.Tag.nondeterministic_seeded in operation.tags or not is_tagged(operation)


def is_tagged(operation) -> bool:
    """Whether an operation is one of torch's, whose tags can be relied on."""
    return getattr(operation, "namespace", "") in _TAGGED


def has_effect(target) -> bool:
    """Whether an operation has effects besides its results, such as errors; always true if it returns nothing."""
    is_operation = isinstance(target, torch._ops.OpOverload)
    return is_operation and (not target._schema.returns or _get_effect(target) is not None)


def memory_order(value: torch.Tensor) -> list[int] | None:
    """The dimensions of `value` from the outermost in memory inwards, None if its elements overlap or leave gaps."""
    order = sorted(range(value.dim()), key=value.stride, reverse=True)
    expected = 1
    for dim in reversed(order):
        if value.shape[dim] > 1:
            if value.stride(dim) != expected:
                return None
            expected *= value.shape[dim]
    return order


def tensors_of(node: torch.fx.Node) -> list[torch.Tensor]:
    """The tensors among the results of a node of a captured module."""
    return [value for value in tree_leaves(node.meta.get("val")) if isinstance(value, torch.Tensor)]


def storage_keys(node: torch.fx.Node) -> list[int]:
    """What identifies the storage of each of these tensors."""
    return [value.untyped_storage()._cdata for value in tensors_of(node)]


def identity(node, id_of: Callable[[torch.fx.Node], int] = lambda node: node.meta["ackpt_id"]) -> list:
    """The properties in which equal nodes agree; names are not among them."""

    def argument(value):
        if isinstance(value, torch.fx.Node):
            return {"node": id_of(value)}
        if isinstance(value, (list, tuple)):
            return [argument(item) for item in value]
        if isinstance(value, dict):
            return {str(key): argument(item) for key, item in value.items()}
        return value if value is None or isinstance(value, (bool, int, float)) else str(value)

    values = node.meta.get("val")
    values = values if isinstance(values, (list, tuple)) else [values]
    shapes = [
        [list(value.shape), list(value.stride()), str(value.dtype), str(value.device)]
        for value in values
        if isinstance(value, torch.Tensor)
    ]
    target = str(node.meta.get("desc", "")) if node.op == "placeholder" else str(node.target)
    return [node.op, target, argument(node.args), argument(node.kwargs), shapes]


_INPUTS = {"ParamAOTInput": "parameter", "BufferAOTInput": "buffer", "TangentAOTInput": "gradient"}


def with_accesses(nodes, sizes, ordered, returned, gradients):
    """The storages of these `sizes`, with the nodes that use them; ``ordered``: the fx node of each id."""
    touched: dict[int, list[int]] = {key: [] for key in sizes}
    members: dict[int, list[int]] = {key: [] for key in sizes}
    for node in nodes:
        for key in node.storages:
            members[key].append(node.id)
        read = {key for node_id in node.inputs for key in nodes[node_id].storages}
        for key in {*read, *node.storages}:
            touched[key].append(node.id)
    given_back = {key for node_id in gradients.values() for key in nodes[node_id].storages}
    returned_storages = {key for node_id in returned for key in nodes[node_id].storages}
    for key in sorted(sizes):
        producer = members[key][0]
        forward = [node_id for node_id in touched[key] if nodes[node_id].phase == FORWARD]
        backward = [node_id for node_id in touched[key] if nodes[node_id].phase == BACKWARD]
        if ordered[producer].op == "placeholder":
            category = _INPUTS.get(type(ordered[producer].meta["desc"]).__name__, "input")
        elif ordered[producer].op == "get_attr":  # a constant of the model's code, which the graph references
            category = "buffer"
        elif key in given_back:
            category = "gradient"
        else:
            category = "activation" if forward and (backward or key in returned_storages) else "temporary"
        yield Storage(
            id=key,
            bytes=sizes[key],
            category=category,
            producer=producer,
            nodes=tuple(members[key]),
            last_fw_access=forward[-1] if forward else None,
            first_bw_access=backward[0] if backward else None,
            last_bw_access=backward[-1] if backward else None,
        )
