"""The times of operations that a compiler fuses: a chain of elementwise operations reads once and writes once.

Alone, each operation of the chain reads its arguments from memory and writes its result. In one kernel, a result that
only elementwise operations read remains in registers. The recomputation of a chain therefore costs one read, one write
and the arithmetic of its operations.
"""

from __future__ import annotations

import operator
from dataclasses import replace

import torch
from torch.utils._pytree import tree_leaves

from ackpt.planner.capture.joint_graph import JointGraph

from .devices import Device
from .profiles import Profile


def fused(graph: JointGraph, costs: Profile, rates: Device) -> Profile:
    """`costs` of `graph` with the seconds of elementwise operations as Inductor fuses them.

    Args:
        costs: at these `rates`, from `ackpt.profile`.

    Example:
        >>> import torch, ackpt
        >>> from ackpt.planner.costs.devices import device
        >>> from ackpt.planner.costs.fusion import fused
        >>> model = torch.nn.Sequential(torch.nn.GELU(), torch.nn.Tanh(), torch.nn.Linear(8, 8))
        >>> graph = ackpt.trace(model, torch.ones(4, 8))
        >>> costs = ackpt.profile(graph, "h200")
        >>> sum(fused(graph, costs, device("h200")).seconds) < sum(costs.seconds)
        True
    """
    if costs.seconds is None:
        return costs
    seconds = list(costs.seconds)
    for node_id, node in graph.analysis.fx.items():
        if not _is_elementwise(node):
            continue
        moved = sum(_bytes(source) for source in _sources(node) if not _is_elementwise(source))
        is_written = any(not _is_elementwise(reader) for reader in _readers(node))
        alone = costs.bytes_in[node_id] + costs.bytes_out[node_id]
        computing = seconds[node_id] - rates.seconds_per_call - alone / rates.memory_bytes_per_second
        seconds[node_id] = max(0.0, computing) + (moved + is_written * costs.bytes_out[node_id]) / (
            rates.memory_bytes_per_second
        )
        seconds[node_id] += is_written * rates.seconds_per_call
    return replace(costs, seconds=tuple(seconds))


def _is_elementwise(node: torch.fx.Node) -> bool:
    return torch.Tag.pointwise in getattr(node.target, "tags", ())


def _is_view(node: torch.fx.Node) -> bool:
    return node.target is operator.getitem or getattr(node.target, "is_view", False)


def _sources(node: torch.fx.Node) -> set[torch.fx.Node]:
    """The nodes whose memory `node` reads: its arguments, or what they are views of."""
    sources = set()
    for argument in node.all_input_nodes:
        while _is_view(argument) and argument.all_input_nodes:
            argument = argument.all_input_nodes[0]
        sources.add(argument)
    return sources


def _readers(node: torch.fx.Node) -> set[torch.fx.Node]:
    """The nodes that read the memory of `node`, through views as well."""
    readers = set()
    for user in node.users:
        readers |= _readers(user) if _is_view(user) else {user}
    return readers


def _bytes(node: torch.fx.Node) -> int:
    values = tree_leaves(node.meta.get("val"))
    return sum(v.numel() * v.element_size() for v in values if isinstance(v, torch.Tensor))
