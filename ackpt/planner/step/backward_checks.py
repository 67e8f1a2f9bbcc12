"""Check the backward of a planned step when it begins, and leave gradients undefined where eager mode does.

``node`` is the autograd node of the step, from `backward_node`. Most functions here are or return a `Check`; those of
one step run in one hook, `before_backward`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ackpt.checkpointing.guards import BACKWARD_FIRST, Watch
from ackpt.core.autograd_state import version
from ackpt.core.errors import CheckpointError
from ackpt.planner.capture.joint_graph import Analysis, JointGraph, once_per_graph

ARGUMENT = "an argument"  # what errors call an input that is neither a parameter nor a buffer
Check = Callable[[Sequence[torch.Tensor | None]], None]  # raises an error, given the gradients of the outputs
_ALWAYS = -1  # represents an output that backward always reaches


def backward_node(outputs) -> Any:
    """The autograd node of the step that returned `outputs`, which is one node; None if no output has it."""
    nodes = (value.grad_fn for value in outputs if isinstance(value, torch.Tensor))
    return next((node for node in nodes if type(node).__name__ == "CompiledFunctionBackward"), None)


def before_backward(node, checks: Sequence[Check]) -> None:
    """Run `checks` when the backward of `node` begins."""

    def run(gradients) -> None:
        for check in checks:
            check(gradients)

    node.register_prehook(run)


@once_per_graph
def depends_on(graph: JointGraph) -> tuple[frozenset[int] | None, ...]:
    """For every input of the step, the outputs on whose gradients its own depends; None if it has none.

    A gradient that is always zero, such as that of `torch.copysign` for the sign, depends on all outputs.
    """
    analysis = graph.analysis
    outputs_of: dict[int, frozenset[int]] = {}
    for node in graph.nodes:
        # A tangent that is not that of one output, such as of the base of several outputs, always has a gradient.
        output = getattr(getattr(analysis.fx[node.id].meta.get("desc"), "output", None), "idx", _ALWAYS)
        outputs_of[node.id] = frozenset({output} if node.id in analysis.tangents else ()).union(
            *(outputs_of[i] for i in node.inputs)
        )
    everything = frozenset().union(*(outputs_of[node_id] for node_id in analysis.bw_outputs if node_id is not None))
    return tuple(None if node_id is None else outputs_of[node_id] or everything for node_id in analysis.bw_outputs)


def leave_undefined(node, outputs, depends) -> None:
    """Return no gradient where eager returns none: for inputs that only influence outputs without a gradient.

    Torch passes zeros for such outputs, so parameters would get zero gradients, which an optimizer with weight decay or
    momentum applies. ``outputs``: what the step returns; ``depends``: from `depends_on`.
    """
    everything = frozenset().union(*filter(None, depends))
    if all(needs is None or needs == everything for needs in depends):
        return
    numbers = _numbers(node, outputs)

    def undefined(gradients, incoming):
        reached = {_ALWAYS, *(at for at, number in numbers.items() if incoming[number] is not None)}
        return tuple(g if needs is None or needs & reached else None for g, needs in zip(gradients, depends))

    node.register_hook(undefined)


def _numbers(node, outputs) -> dict[int, int]:
    """The number that autograd gives each of `outputs`, by its index."""
    tensors = {at: value for at, value in enumerate(outputs) if isinstance(value, torch.Tensor)}
    return {at: value.output_nr for at, value in tensors.items() if value.grad_fn is node}


def refuse_other_modes(gradients) -> None:
    """A `Check` that backward builds no graph and does not run in autocast."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "create_graph=True: a planned step cannot be differentiated twice, because its backward builds no "
            "graph. Call the model itself for such a step."
        )
    devices = {gradient.device.type for gradient in gradients if isinstance(gradient, torch.Tensor)}
    if any(map(torch.is_autocast_enabled, devices)):
        raise CheckpointError(
            "backward runs inside torch.autocast, where eager mode also casts the operations of the backward pass, "
            "and a planned step does not: call backward() after the autocast region, as PyTorch recommends"
        )


def gradient_strides(analysis: Analysis, nodes: Mapping[int, fx.Node] | None = None) -> dict[int, tuple[Any, ...]]:
    """By output number, the strides with which its gradient was captured; torch copies all other gradients anyway.

    `nodes`: those of a module whose sizes are expressions, by the ids of the graph.
    """
    nodes = analysis.fx if nodes is None else nodes
    strides = {}
    for node_id in analysis.tangents:
        output: Any = getattr(nodes[node_id].meta["desc"], "output", None)
        if node_id not in analysis.restrided and type(output).__name__ == "PlainAOTOutput":
            strides[output.idx] = nodes[node_id].meta["val"].stride()
    return strides


def gradients_as_planned(node, outputs, strides: Mapping[int, Sequence[int]]) -> Check:
    """Refuse gradients that arrive in a different memory layout than the captured one.

    Torch would copy them into the captured layout. The copy would exceed the plan's peak, and sums over it would round
    differently than in eager. ``outputs``: what the step returned; ``strides``: from `gradient_strides`.
    """
    numbers = _numbers(node, outputs)
    planned = {numbers[at]: wanted for at, wanted in strides.items() if at in numbers}

    def check(gradients) -> None:
        for number, wanted in planned.items():
            gradient = gradients[number]
            if gradient is not None and not _in_one_order(gradient, wanted):
                raise RuntimeError(
                    f"the gradient of an output of shape {list(gradient.shape)} has the strides {gradient.stride()}, "
                    f"but this step was planned for {wanted}: a copy would exceed the plan's peak and change the "
                    "last bits. Compute the loss in the model, or let it return output.contiguous()."
                )

    return check


def _in_one_order(gradient, wanted) -> bool:
    """Whether the strides are equal where they matter: not in dimensions of size 1 or expanded ones."""
    return all(
        size <= 1 or not its or its == stride for size, its, stride in zip(gradient.shape, gradient.stride(), wanted)
    )


def unchanged_until_backward(inputs, read) -> Check:
    """Raise an error that names an input of the step if `Watch` finds that it changed between forward and backward.

    ``read``: index and description of the inputs that backward reads.
    """
    # Arguments may be freed early in backward.
    items = [weakref.ref(inputs[index]) if description == ARGUMENT else inputs[index] for index, description in read]
    watch = Watch(items, [description for _, description in read])

    def check(gradients) -> None:
        for tensor, description, how in watch.changes():
            if how == "changed":  # a frozen one gets no gradient, as in eager mode
                raise CheckpointError(
                    f"{description} of shape {list(tensor.shape)} was changed between the forward of this planned step "
                    f"and its backward, which reads it. {BACKWARD_FIRST}"
                )

    return check


def unchanged_outputs(outputs, places: Sequence[int]) -> Check:
    """Raise an error if backward reads an output that was changed in place, which torch does not detect for all views.

    `places`: indices of the outputs whose memory backward reads.
    """
    tensors = [(at, outputs[at]) for at in places if isinstance(outputs[at], torch.Tensor)]
    held = [(at, tensor.detach(), version(tensor)) for at, tensor in tensors]

    def check(gradients) -> None:
        while held:  # the memory must be free after its last use in backward
            at, tensor, before = held.pop()
            if version(tensor) != before:
                raise CheckpointError(
                    f"output {at} of shape {list(tensor.shape)} was changed in place between the forward of this "
                    "planned step and its backward, which reads it. Change a copy, as in output.clone()."
                )

    return check
