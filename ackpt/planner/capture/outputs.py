"""Decide which outputs of a captured step are differentiated, and refuse gradients that were not planned."""

from __future__ import annotations

import copy
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import register_pytree_node, tree_flatten, tree_map

from ackpt.checkpointing.guards import BACKWARD_FIRST, Watch
from ackpt.core.autograd_state import version
from ackpt.core.errors import CheckpointError, TraceError
from ackpt.metering.meter import memory_format

from .analysis import Analysis, once_per_graph
from .joint_graph import JointGraph

_DIFFERENTIATE = ("loss", "all")
_OUTPUTS = ("drop", "keep")
ARGUMENT = "an argument"  # what errors call an input that is neither a parameter nor a buffer
_ALWAYS = -1  # represents an output that backward always reaches


def check_differentiate(differentiate) -> str:
    if differentiate not in _DIFFERENTIATE:
        raise ValueError(f"differentiate must be 'loss' or 'all', got {differentiate!r}")
    return differentiate


def check_outputs(outputs) -> str:
    if outputs not in _OUTPUTS:
        raise ValueError(f"outputs must be 'drop' or 'keep', got {outputs!r}")
    return outputs


def without_gradient(outputs, differentiate) -> tuple[int, ...]:
    """Indices of the outputs that get no gradient: all but the loss, if exactly one that requires grad is a scalar."""
    places = [index for index, value in enumerate(outputs) if isinstance(value, torch.Tensor) and value.requires_grad]
    scalars = [index for index in places if outputs[index].dim() == 0]
    return tuple(p for p in places if p not in scalars) if differentiate == "loss" and len(scalars) == 1 else ()


def refuse_overlaps(outputs, inputs, without=()) -> None:
    """Refuse outputs that overlap themselves in memory: torch would sum their gradients twice.

    Args:
        outputs: what the model returns; `without`: indices of those that get no gradient.
        inputs: of the model; autograd itself makes views of these, and of what is returned too.
    """
    storages, given = [_storage(value) for value in outputs], {_storage(value) for value in inputs}
    for index, (value, storage) in enumerate(zip(outputs, storages)):
        if storage is None or index in without or storage in given or storages.count(storage) > 1:
            continue
        if value.requires_grad and _overlaps(value):
            raise TraceError(
                f"output {index} of the model, of shape {tuple(value.shape)} and strides {value.stride()}, overlaps "
                "itself in memory, as after unfold or as_strided: torch gives wrong gradients for such an output of a "
                "captured step. Return output.clone()."
            )


def refuse_views_of_changed(outputs, inputs) -> None:
    """Refuse views of an input that shares memory with another input, if the model changes one of them in place.

    Torch makes such an output from the wrong part of that memory.

    Args:
        outputs: what the model returns; ``inputs``: the tensors of the capture, and their versions before the call.
    """
    inputs = {id(tensor): (tensor, before) for tensor, before in inputs}
    storages = Counter(_storage(tensor) for tensor, _ in inputs.values())
    changed = {_storage(tensor) for tensor, before in inputs.values() if version(tensor) != before}
    for index, value in enumerate(outputs):
        storage = _storage(value)
        if storage in changed and storages[storage] > 1 and id(value) not in inputs:
            raise TraceError(
                f"output {index} of the model is a view of an input that shares memory with another input, and the "
                "model changes one of them in place: torch returns the wrong part of this memory from a captured "
                "step. Return output.clone(), or pass a clone of one of the inputs."
            )


def _storage(value) -> int | None:
    is_dense = isinstance(value, torch.Tensor) and value.layout is torch.strided
    return value.untyped_storage()._cdata if is_dense else None


def _overlaps(value) -> bool:
    """Whether elements share memory other than by ``expand``."""
    reach = 0
    for stride, size in sorted(zip(value.stride(), value.shape)):
        if stride and size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


class _NoGradient(torch.autograd.Function):
    """The identity, for an output whose gradient is not part of the plan."""

    @staticmethod
    def forward(ctx, value):
        ctx.set_materialize_grads(False)
        return value.detach()  # torch lets the caller change it in place, unlike a view that is made here

    @staticmethod
    def backward(ctx, *gradients):
        if gradients == (None,):  # of an output that something, such as DDP, has passed on together with the loss
            return None
        raise RuntimeError(
            "backward reaches an output other than the loss, but this step was planned for the loss alone and saves "
            'nothing for that gradient. Plan with differentiate="all", or detach what you compute from that output.'
        )


def no_gradient(value):
    """`value` as an output that requires grad, but whose backward raises an error."""
    return _NoGradient.apply(value.requires_grad_())


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


def leave_undefined(outputs, depends) -> None:
    """Return no gradient where eager returns none: for inputs that only influence outputs without a gradient.

    Torch passes zeros for such outputs, so parameters would get zero gradients, which an optimizer with weight decay or
    momentum applies. ``outputs``: what the step returns; ``depends``: from `depends_on`.
    """
    everything = frozenset().union(*filter(None, depends))
    node = _node_of(outputs)
    if node is None or all(needs is None or needs == everything for needs in depends):
        return
    numbers = {v.output_nr: at for at, v in enumerate(outputs) if isinstance(v, torch.Tensor) and v.grad_fn is node}

    def undefined(gradients, incoming):
        reached = {_ALWAYS, *(at for number, at in numbers.items() if incoming[number] is not None)}
        return tuple(g if needs is None or needs & reached else None for g, needs in zip(gradients, depends))

    node.register_hook(undefined)


def plain_backward(outputs) -> None:
    """Raise an error if the backward of a planned step with these outputs builds a graph or runs in autocast."""
    if (node := _node_of(outputs)) is not None:
        node.register_prehook(_refuse_create_graph)
        node.register_prehook(_refuse_autocast)


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


def gradients_as_planned(outputs, strides: Mapping[int, Sequence[int]]) -> None:
    """Refuse gradients that arrive in a different memory layout than the captured one.

    Torch would copy them into the captured layout. The copy would exceed the plan's peak, and sums over it would round
    differently than in eager. ``outputs``: what the step returned; ``strides``: from `gradient_strides`.
    """
    if (node := _node_of(outputs)) is None:
        return
    planned = {
        outputs[at].output_nr: wanted
        for at, wanted in strides.items()
        if isinstance(outputs[at], torch.Tensor) and outputs[at].grad_fn is node
    }

    def check(gradients) -> None:
        for number, wanted in planned.items():
            gradient = gradients[number]
            if gradient is not None and not _in_one_order(gradient, wanted):
                raise RuntimeError(
                    f"the gradient of an output of shape {list(gradient.shape)} has the strides {gradient.stride()}, "
                    f"but this step was planned for {wanted}: a copy would exceed the plan's peak and change the "
                    "last bits. Compute the loss in the model, or let it return output.contiguous()."
                )

    node.register_prehook(check)


def _in_one_order(gradient, wanted) -> bool:
    """Whether the strides are equal where they matter: not in dimensions of size 1 or expanded ones."""
    return all(
        size <= 1 or not its or its == stride for size, its, stride in zip(gradient.shape, gradient.stride(), wanted)
    )


def unchanged_until_backward(outputs, inputs, read) -> None:
    """Raise an error that names an input if `Watch` finds that it changed between forward and backward.

    ``outputs``: what the step returned for ``inputs``; ``read``: index and description of inputs that backward reads.
    """
    if (node := _node_of(outputs)) is None:
        return
    # Arguments may be freed early in backward.
    watch = Watch(
        (weakref.ref(inputs[index]) if description == ARGUMENT else inputs[index], description)
        for index, description in read
    )

    def check(gradients) -> None:
        for tensor, description, how in watch.changes():
            if how == "changed":  # a frozen one gets no gradient, as in eager mode
                raise CheckpointError(
                    f"{description} of shape {list(tensor.shape)} was changed between the forward of this planned step "
                    f"and its backward, which reads it. {BACKWARD_FIRST}"
                )

    node.register_prehook(check)


def unchanged_outputs(outputs, places: Sequence[int]) -> None:
    """Raise an error if backward reads an output that was changed in place, which torch does not detect for all views.

    `places`: indices of the outputs whose memory backward reads.
    """
    if (node := _node_of(outputs)) is None:
        return
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

    node.register_prehook(check)


def nodes_of(outputs) -> list[Any]:
    """The autograd node of the step in a list, which is empty if no output has it."""
    return [node for node in [_node_of(outputs)] if node is not None]


def _node_of(outputs):
    """The autograd node of the step, which is one node; None if no output has it."""
    nodes = (value.grad_fn for value in outputs if isinstance(value, torch.Tensor))
    return next((node for node in nodes if type(node).__name__ == "CompiledFunctionBackward"), None)


def _refuse_create_graph(gradients) -> None:
    if torch.is_grad_enabled():
        raise RuntimeError(
            "create_graph=True: a planned step cannot be differentiated twice, because its backward builds no graph. "
            "Call the model itself for such a step."
        )


def _refuse_autocast(gradients) -> None:
    devices = {gradient.device.type for gradient in gradients if isinstance(gradient, torch.Tensor)}
    if any(map(torch.is_autocast_enabled, devices)):
        raise CheckpointError(
            "backward runs inside torch.autocast, where eager mode also casts the operations of the backward pass, and "
            "a planned step does not: call backward() after the autocast region, as PyTorch recommends"
        )


def before_backward(nodes, check: Callable[[], None]) -> None:
    """Call `check` when a backward reaches the first of `nodes`."""
    last = None

    def first(gradients) -> None:
        nonlocal last
        backward = torch._C._current_graph_task_id()
        if backward != last:
            last = backward
            check()

    for node in nodes:
        node.register_prehook(first)


def gradients_before_backward(nodes, leaves, room_bytes: Callable[[], int | None]) -> None:
    """Raise an error when backward begins while `leaves` have gradients that the plan does not count.

    Args:
        nodes: of autograd, which backward reaches first.
        leaves: parameters and arguments that require grad.
        room_bytes: the bytes of such gradients with which the step still keeps the budget; None if there is no budget.
    """

    def check() -> None:
        held = [leaf.grad for leaf in leaves if leaf.grad is not None]
        if not held or (room := room_bytes()) is None or (total := sum(each.nbytes for each in held)) <= room:
            return
        raise CheckpointError(
            f"backward begins while {memory_format(total)} of gradients exist, which would exceed the budget: it "
            "counts only the gradients that this step adds. If you accumulate gradients, give accumulation=True, "
            "which counts both; otherwise call optimizer.zero_grad(), which sets them to None, before the step."
        )

    before_backward(nodes, check)


def retained_after_backward(nodes, room_bytes: Callable[[], int | None]) -> None:
    """Raise an error when a backward with ``retain_graph=True`` begins that may exceed the budget.

    Args:
        nodes: of autograd, which backward reaches first.
        room_bytes: the bytes that remain if nothing saved is freed; negative if the budget is too small for that, None
            if there is no budget.
    """

    def check() -> None:
        keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph()  # pyright: ignore[reportAttributeAccessIssue]
        if keeps_graph and (room := room_bytes()) is not None and room < 0:
            raise CheckpointError(
                "retain_graph=True: backward would free none of the activations that the plan frees, which may exceed "
                f"the budget by {memory_format(-room)}. Add the losses and call backward() once, or give a larger "
                "budget in bytes."
            )

    before_backward(nodes, check)


def dropped_before_backward(outputs, places: Sequence[int], room_bytes: Callable[[], int | None], node=None) -> None:
    """Raise an error when backward begins while the caller references outputs that the plan does not count.

    Args:
        outputs: what the step returned; ``places``: indices of those that the caller is to drop.
        room_bytes: the bytes of such outputs with which backward still keeps the budget; None if there is no budget.
        node: of autograd, which backward reaches first; by default that of the step.
    """
    if (node := node or _node_of(outputs)) is None:
        return
    storages = {}
    for place in places:
        storage = outputs[place].untyped_storage()
        storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes(), place, list(outputs[place].shape)

    def check(gradients) -> None:
        held = [(size, place, shape) for storage, size, place, shape in storages.values() if not storage.expired()]
        if not held or (room := room_bytes()) is None or (total := sum(size for size, *_ in held)) <= room:
            return
        size, place, shape = max(held)
        raise CheckpointError(
            f"backward begins while {memory_format(total)} of outputs are still referenced, which would exceed the "
            f"budget: the largest is output {place} of shape {shape}. Keep the loss only, as in "
            "loss = model(**batch).loss, delete the other outputs before backward, or plan with outputs='keep'."
        )

    node.register_prehook(check)


_PARTS = ("self_attention_cache", "cross_attention_cache")


class _Cache:
    """A cache on its way through a pytree, which gives a real one back."""

    def __init__(self, cache):
        self.tensors = [value for layer in _layers(cache) for value in (layer.keys, layer.values)]
        self.around = _with_tensors(cache, [None] * len(self.tensors))


register_pytree_node(
    _Cache,
    lambda cache: (cache.tensors, cache.around),
    lambda tensors, around: _with_tensors(around, list(tensors)),
)


def flatten_outputs(outputs):
    """`tree_flatten` of what a model returns; its unflatten puts caches of transformers together again."""
    return tree_flatten(tree_map(lambda value: _Cache(value) if _is_cache(value) else value, outputs))


def _is_cache(value) -> bool:
    """Only of keys and values: a cache that contains more cannot be rebuilt."""
    if type(value).__module__ != "transformers.cache_utils":
        return False
    parts = [getattr(value, name, None) for name in _PARTS if hasattr(value, name)] or [value]
    return all(_holds_keys_and_values(part) for part in parts)


def _holds_keys_and_values(cache) -> bool:
    layers = getattr(cache, "layers", None)
    return isinstance(layers, list) and all(
        {name for name, held in vars(layer).items() if isinstance(held, torch.Tensor)} <= {"keys", "values"}
        and hasattr(layer, "keys")
        for layer in layers
    )


def _layers(cache) -> list[Any]:
    parts = [getattr(cache, name) for name in _PARTS if hasattr(cache, name)] or [cache]
    return [layer for part in parts for layer in part.layers]


def _with_tensors(cache, tensors: list):
    """A cache like `cache`, whose layers hold the next of `tensors`."""
    filled = copy.copy(cache)
    if hasattr(cache, _PARTS[0]):
        for name in _PARTS:
            part = getattr(cache, name)
            count = 2 * len(part.layers)
            setattr(filled, name, _with_tensors(part, tensors[:count]))
            tensors = tensors[count:]
        return filled
    filled.layers = [copy.copy(layer) for layer in cache.layers]
    for number, layer in enumerate(filled.layers):
        layer.keys, layer.values = tensors[2 * number], tensors[2 * number + 1]
    return filled
