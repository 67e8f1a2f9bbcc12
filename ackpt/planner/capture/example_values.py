"""Make input values for a graph: the given model and arguments, or synthetic values from shapes and dtypes."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ackpt.metering.run_alone import stand_in
from ackpt.metering.timeline import MeterError

from .joint_graph import BACKWARD, JointGraph


def random_like(value: torch.Tensor, low: float = 0.0, high: float = 1.0, seed: int = 0) -> torch.Tensor:
    """A tensor like `value` on the CPU, its floats drawn from [low, high) without the global generator."""
    made = stand_in(value)
    if value.is_floating_point() or value.is_complex():
        flat = torch.empty(0, dtype=made.dtype).set_(made.untyped_storage())
        generator = torch.Generator().manual_seed(seed)
        flat.copy_(torch.rand(flat.numel(), generator=generator) * (high - low) + low)
    return made


def made_up(graph: JointGraph) -> list:
    """Made-up values for all inputs of `graph`, on the CPU.

    Parameters are drawn from [-0.05, 0.05), other floats from [0, 1); bools are True, integers 0; the gradients of
    the outputs are 1.
    """
    return [_made_up(graph, node) for node in _placeholders(graph)]


def _made_up(graph: JointGraph, node: torch.fx.Node):
    value, graph_node = node.meta["val"], graph.nodes[node.meta["ackpt_id"]]
    if not isinstance(value, torch.Tensor):
        return value
    if graph_node.phase == BACKWARD:
        return stand_in(value).fill_(1)
    is_parameter = any(graph.storages[storage].category == "parameter" for storage in graph_node.storages)
    return random_like(value, *((-0.05, 0.05) if is_parameter else ()), seed=graph_node.id)


def given(graph: JointGraph, inputs) -> list:
    """The values in `inputs` for all inputs of `graph`; the gradients of the outputs are 1.

    `inputs`: the model and the arguments it was traced with, in any nesting, such as ``(model, args, kwargs)``. Of
    modules, parameters and buffers are found by their names; the other tensors are taken in order. What the graph
    writes into is copied.
    """
    leaves = tree_leaves(inputs)
    named = {}
    for module in (leaf for leaf in leaves if isinstance(leaf, nn.Module)):
        named.update(module.named_parameters(remove_duplicate=False))
        named.update(module.named_buffers(remove_duplicate=False))
    rest = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if len(rest) > sum(_is_argument(graph, node) for node in _placeholders(graph)):
        rest = list({id(tensor): tensor for tensor in rest}.values())  # one passed twice is one input of the graph
    rest.reverse()
    values = []
    for node in _placeholders(graph):
        graph_node, expected = graph.nodes[node.meta["ackpt_id"]], node.meta["val"]
        if graph_node.phase == BACKWARD or not isinstance(expected, torch.Tensor):
            values.append(_made_up(graph, node))
            continue
        name = getattr(node.meta["desc"], "target", None)
        value = named.get(name) if name is not None else rest.pop() if rest else None
        label = f"argument {node.name}" if name is None else repr(name)
        if value is None:
            raise MeterError(f"inputs lack {label}: give the model and the arguments it was traced with")
        if _like(value) != _like(expected):
            raise MeterError(
                f"{label} is {_said(value)}, but the graph was traced with {_said(expected)}: trace the model again, "
                "or give the arguments it was traced with"
            )
        value = value.detach()
        values.append(value.clone() if graph_node.id in graph.analysis.mutated else value)
    if rest:
        raise MeterError(f"inputs hold {len(rest)} tensors more than the model was traced with")
    return values


def _is_argument(graph: JointGraph, node: torch.fx.Node) -> bool:
    """Whether this input of the graph is a tensor among the arguments."""
    is_forward = graph.nodes[node.meta["ackpt_id"]].phase != BACKWARD
    is_of_model = getattr(node.meta["desc"], "target", None) is not None
    return is_forward and isinstance(node.meta["val"], torch.Tensor) and not is_of_model


def _placeholders(graph: JointGraph) -> list[torch.fx.Node]:
    return graph.module.graph.find_nodes(op="placeholder")


def _like(value: torch.Tensor):
    return value.shape, value.dtype, value.device.type


def _said(value: torch.Tensor) -> str:
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)} on {value.device.type}"
