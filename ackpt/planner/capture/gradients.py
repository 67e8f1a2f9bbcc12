"""Correct the storages of gradients in the captured graph, which differ from those that autograd uses.

The gradient that a caller passes for an output has a storage of its own, but torch's tangents, which represent these
gradients in the graph, share the storages of the outputs. Returned gradients: a leaf without a gradient keeps the
tensor that backward returns for it if nothing else references this tensor and its strides are the leaf's; otherwise
autograd clones it. That clone becomes an operation at the end of the backward, so that plans count it.

Source: the gradient layout contract in ``torch/csrc/autograd/functions/accumulate_grad.h``.
"""

from __future__ import annotations

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten


def move_tangents(module: fx.GraphModule) -> None:
    """Give every tangent of `module`, and the views of it, a storage of their own, which has no other tensors."""
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
    """Make every gradient of a leaf that `module` returns a tensor of its own, as autograd does by cloning."""
    output = next(node for node in module.graph.nodes if node.op == "output")
    placeholders = module.graph.find_nodes(op="placeholder")
    takers = {node.meta["desc"]: node for node in placeholders}
    gradients = list(output.args[0])
    uncopied: set[fx.Node] = set()
    copied: list[tuple[int, fx.Node]] = []
    # Of several leaves with the same gradient, the last one keeps it, since it drops the last reference.
    for index in reversed(range(len(gradients))):
        described, gradient = output.meta["desc"][index], gradients[index]
        leaf = takers.get(getattr(described, "grad_of", None))
        if gradient is None or leaf is None or not leaf.meta.get("is_leaf", True):
            continue
        if gradient in uncopied or not _is_backwards_own(gradient) or not _can_be_kept(gradient, leaf):
            copied.append((index, leaf))
        else:
            uncopied.add(gradient)
    if not copied:
        return
    nodes = (*uncopied, *(node for node in module.graph.nodes if not _is_backwards_own(node)))
    held = {storage for node in nodes for storage in _storages(node)}
    # Copy first where the copy is the last use of the original.
    for index, leaf in sorted(copied, key=lambda copy: (_storages(gradients[copy[0]])[0] in held, copy[0])):
        with module.graph.inserting_before(output):
            gradients[index] = _copied(module.graph, gradients[index], leaf)
    output.args = (type(output.args[0])(gradients),)


def summed(module: fx.GraphModule) -> dict[str, torch.dtype]:
    """The tensors that the step uses several times, in words, with the dtype in which `module` sums their gradients."""
    output = next(node for node in module.graph.nodes if node.op == "output")
    found = {}
    for gradient, what in zip(output.args[0], output.meta["desc"]):
        if gradient is None or not hasattr(what, "grad_of"):
            continue
        while gradient.target is aten.clone.default or getattr(gradient.target, "is_view", False):
            gradient = gradient.args[0]
        if gradient.target is aten.add.Tensor and all(map(_is_backwards_own, gradient.all_input_nodes)):
            found[getattr(what.grad_of, "target", "an argument")] = gradient.meta["val"].dtype
    return found


def _is_backwards_own(gradient: fx.Node) -> bool:
    """Whether the backward computed it: tangents, parameters and results of the forward are referenced elsewhere."""
    return gradient.op == "call_function" and gradient.meta.get("partitioner_tag") == "is_backward"


def _storages(node: fx.Node) -> list[int]:
    values = tree_leaves(node.meta.get("val"))
    return [value.untyped_storage()._cdata for value in values if isinstance(value, torch.Tensor)]


def _can_be_kept(gradient: fx.Node, leaf: fx.Node) -> bool:
    """Whether the gradient has the strides that autograd requires."""
    value, wanted = gradient.meta["val"], leaf.meta["val"]
    if not wanted.numel():
        return True
    if in_memory(wanted) is None:
        return value.is_contiguous()
    strides = zip(wanted.shape, value.stride(), wanted.stride())
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
