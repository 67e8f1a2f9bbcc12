"""Gradients that come in and gradients that autograd keeps, in the memory that they really have.

Whatever an output lies in, the gradient that the caller gives for it lies in memory of its own; torch's stand-ins for
these gradients, the tangents, lie where the outputs do. And what autograd would copy, the graph copies itself, where
plans see it: a leaf without a gradient keeps the tensor that backward returns for it, if nobody else holds this tensor
and its strides are the leaf's; otherwise autograd clones it. Such a clone, as large and as late as autograd's own, is
put at the end of the backward.

Source: the gradient layout contract in ``torch/csrc/autograd/functions/accumulate_grad.h``.
"""

from __future__ import annotations

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten


def move_tangents(module: fx.GraphModule) -> None:
    """Give every tangent of `module`, and the views of it, a storage that holds the tangent and nothing else."""
    moved: dict[fx.Node, list[int]] = {}
    for node in module.graph.nodes:
        was = _storages(node)
        if node.op == "placeholder" and node.meta.get("partitioner_tag") == "is_backward":
            value = node.meta["val"]
            node.meta["val"] = value.new_empty_strided(value.shape, value.stride())
            moved[node] = was
        elif node.op == "call_function" and any(
            set(was) & set(moved[source]) for source in node.all_input_nodes if source in moved
        ):
            with torch.no_grad():
                args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
                node.meta["val"] = node.target(*args, **kwargs)
            moved[node] = was


def own_gradients(module: fx.GraphModule) -> None:
    """Let every gradient of a leaf that `module`, a joint graph with descriptors, returns be a tensor of its own."""
    output = next(node for node in module.graph.nodes if node.op == "output")
    placeholders = module.graph.find_nodes(op="placeholder")
    takers = {node.meta["desc"]: node for node in placeholders}
    gradients = list(output.args[0])
    kept: set[fx.Node] = set()
    copied: list[tuple[int, fx.Node]] = []
    # Of several leaves with one gradient the last keeps it, as the last reference to it does.
    for place in reversed(range(len(gradients))):
        what, gradient = output.meta["desc"][place], gradients[place]
        leaf = takers.get(getattr(what, "grad_of", None))
        if gradient is None or leaf is None or not leaf.meta.get("is_leaf", True):
            continue
        if gradient in kept or not _is_backwards_own(gradient) or not _can_be_kept(gradient, leaf):
            copied.append((place, leaf))
        else:
            kept.add(gradient)
    if not copied:
        return
    nodes = (*kept, *(node for node in module.graph.nodes if not _is_backwards_own(node)))
    held = {storage for node in nodes for storage in _storages(node)}
    # First those whose originals die with the copy.
    for place, leaf in sorted(copied, key=lambda copy: (_storages(gradients[copy[0]])[0] in held, copy[0])):
        with module.graph.inserting_before(output):
            gradients[place] = _copied(module.graph, gradients[place], leaf)
    output.args = (type(output.args[0])(gradients),)


def _is_backwards_own(gradient: fx.Node) -> bool:
    """Whether the backward has computed it: tangents, parameters and what the forward computes have other holders."""
    return gradient.op == "call_function" and gradient.meta.get("partitioner_tag") == "is_backward"


def _storages(node: fx.Node) -> list[int]:
    values = tree_leaves(node.meta.get("val"))
    return [value.untyped_storage()._cdata for value in values if isinstance(value, torch.Tensor)]


def _can_be_kept(gradient: fx.Node, leaf: fx.Node) -> bool:
    """Whether the strides are those that autograd wants."""
    found, wanted = gradient.meta["val"], leaf.meta["val"]
    if not wanted.numel():
        return True
    if in_memory(wanted) is None:
        return found.is_contiguous()
    strides = zip(wanted.shape, found.stride(), wanted.stride())
    return all(mine == its if size > 1 else mine != 0 for size, mine, its in strides)


def in_memory(value: torch.Tensor) -> list[int] | None:
    """The dimensions of `value` from the outermost in memory inwards, None if its elements overlap or leave gaps."""
    order = sorted(range(value.dim()), key=value.stride, reverse=True)
    expected = 1
    for dim in reversed(order):
        if value.shape[dim] > 1:
            if value.stride(dim) != expected:
                return None
            expected *= value.shape[dim]
    return order


def _copied(graph: fx.Graph, gradient: fx.Node, leaf: fx.Node) -> fx.Node:
    """A copy of `gradient` with the strides of `leaf`, or contiguous if those leave gaps."""
    order = in_memory(leaf.meta["val"])
    along = list(range(leaf.meta["val"].dim()))
    order = along if order is None or leaf.meta["val"].is_contiguous() else order

    def call(operation, source, *args, **kwargs):
        node = graph.call_function(operation, (source, *args), kwargs)
        where = {key: source.meta[key] for key in ("custom", "stack_trace") if key in source.meta}
        with torch.no_grad():
            value = operation(source.meta["val"], *args, **kwargs)
        node.meta.update(where, val=value, partitioner_tag="is_backward")
        return node

    if order != along:
        gradient = call(aten.permute.default, gradient, order)
    gradient = call(aten.clone.default, gradient, memory_format=torch.contiguous_format)
    if order != along:
        gradient = call(aten.permute.default, gradient, [order.index(dim) for dim in along])
    return gradient
