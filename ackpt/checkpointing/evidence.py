"""``Evidence``: what the graph of a run shows of all that gradients depend on.

The runs of a small region are compared by it once ``recorder.py`` has compared the first ones call by call.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import torch

from .guards import PLAIN_TENSORS
from .reachable import Graph
from .rng import MEMORY

# `reshape` makes the second under a dispatch mode, such as FlopCounterMode, and the first without one: its C++ in
# ``aten/src/ATen/native/TensorShape.cpp`` asks ``isTensorSubclassLike``.
SAME_GRADIENT = {"ReshapeAliasBackward0": "ViewBackward0"}
#: The bytes of the inputs and constants of a small region at most, and of each of its outputs.
SMALL_BYTES = 1 << 20


class Evidence(NamedTuple):
    """What the graph of a run shows of its path: ``kinds``, the classes of its nodes; ``links`` between them, and
    ``ends``, the tensors at which it ends; ``order``, their sequence numbers, of which the ranks count; and ``values``,
    hashes of the bytes of the outputs. ``regions``: the paths of nested regions.

    Runs with the same evidence have the same gradients, unless a number or tensor differs and changes no bit of an
    output, for example in a branch that is multiplied by zero.
    """

    kinds: list[type]
    links: list
    ends: list
    values: list
    regions: list
    order: list[int]


def evidence_of(graph: Graph, outputs: list[torch.Tensor]) -> Evidence:
    """The `Evidence` of a run whose graph of `outputs` is `graph`, with the ids of the tensors in ``ends``."""
    kinds = list(map(type, graph.nodes))
    regions = [] if REGION_NODES.isdisjoint(kinds) else [n.region.path for n in graph.nodes if type(n) in REGION_NODES]
    return Evidence(kinds, graph.links, [*map(id, graph.ends)], list(map(_hash, outputs)), regions, graph.order)


REGION_NODES: set[type] = set()  # the class of the nodes of regions, which have an attribute `region`


def names_of(graph: Graph) -> dict[int, str]:
    """The names of a graph's nodes, by their sequence number."""
    return {node._sequence_nr(): node.name() for node in graph.nodes}


def checksum(tensor: torch.Tensor) -> Any:
    """A number that tells two outputs apart, on the tensor's device; None for one without plain bytes."""
    if tensor.is_cpu or type(tensor) not in PLAIN_TENSORS or tensor.layout is not torch.strided:
        return _hash(tensor)
    words = tensor.detach().contiguous().flatten().view(torch.uint8 if tensor.element_size() == 1 else torch.int16)
    return words.sum(dtype=torch.int64)


def _hash(tensor: torch.Tensor) -> int | None:
    if type(tensor) not in PLAIN_TENSORS or not tensor.is_cpu or tensor.layout is not torch.strided:
        return None
    tensor = tensor if tensor.is_contiguous() else tensor.detach().contiguous()
    address, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    if tensor.nbytes <= SMALL_BYTES:
        return hash(MEMORY[address:end])
    return hash(tuple([hash(MEMORY[at : min(at + SMALL_BYTES, end)]) for at in range(address, end, SMALL_BYTES)]))


def is_same(before: Evidence, now: Evidence) -> bool:
    if before.kinds != now.kinds and _names(before.kinds) != _names(now.kinds):
        return False
    return before[1:5] == now[1:5] and (before.order == now.order or _ranks(before.order) == _ranks(now.order))


def _names(kinds: list[type]) -> list[str]:
    return [SAME_GRADIENT.get(kind.__name__, kind.__name__) for kind in kinds]


def difference_between(before: Evidence, now: Evidence) -> str:
    """In what two runs differ, for an error."""
    names = [_names(each.kinds) for each in (before, now)]
    if Counter(names[0]) != Counter(names[1]):
        return other_nodes(*names)
    for name, what in zip(Evidence._fields, ("operations", "arguments", "inputs", "values in its outputs", "regions")):
        if getattr(before, name) != getattr(now, name):
            return f"the same operations have other {what}"
    return "the same operations have another order"


def _ranks(order: list[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


def other_nodes(before, now) -> str:
    missing, extra = Counter(before) - Counter(now), Counter(now) - Counter(before)
    return f"only the forward has {', '.join(missing) or 'none'}, only the recompute {', '.join(extra) or 'none'}"
