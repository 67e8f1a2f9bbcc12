"""Compute the memory of a loss that the training loop computes from a model's outputs, by running it without data."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from ackpt.core.errors import TraceError
from ackpt.metering.prediction import predict
from ackpt.metering.resident import rounded

from .inspection.calls import call_arguments
from .inspection.model_checks import forward_names
from .joint_graph import JointGraph
from .optimizer_state import CUDA_BLOCK, no_autocast


class OutsideLoss:
    """``function(outputs, batch)``, the loss of a training loop, and what it adds to the step of a model.

    It runs once at each size; a batch of other sizes than `batch` has those by which the outputs differ.
    ``step_bytes``: the peak of its forward and backward beyond outputs and batch. ``held_bytes``: of the loss itself.
    """

    def __init__(self, function: Callable[[Any, Any], torch.Tensor], batch: Any, inputs: Any):
        """`inputs`: the part of `batch` that the model gets; the other tensors count as resident."""
        if not callable(function):
            raise TypeError(f"loss must be a function of outputs and batch, got {type(function).__name__}")
        self.function = function
        self.batch: Any = tree_map(lambda leaf: _empty(leaf, "meta"), batch)  # without the user's tensors
        given, tensors = {id(leaf) for leaf in tree_leaves(inputs)}, tree_leaves(batch)
        targets = [each for each in tensors if isinstance(each, torch.Tensor) and id(each) not in given]
        storages = {each._cdata: each.nbytes() for each in map(torch.Tensor.untyped_storage, targets)}
        self.target_bytes: int = sum(storages.values())
        self.step_bytes: int = 0
        self.held_bytes: int = 0
        self._shapes: list[tuple[int, ...]] = []  # of the outputs that go with `batch`

    def counted(self, graph: JointGraph, outputs: Callable[[Sequence[Any]], Any]) -> JointGraph:
        """`graph` with the bytes of this loss; `outputs` makes what the model returns from a list of tensors."""
        fx = graph.analysis.fx
        values = [None if node is None else fx[node].meta["val"] for node in graph.analysis.outputs]
        shapes = [tuple(each.shape) for each in values if isinstance(each, torch.Tensor)]
        sizes = dict(zip(_flat(self._shapes or shapes), _flat(shapes)))
        batch = tree_map(lambda leaf: _resized(leaf, sizes), self.batch)
        ratio = sum(map(math.prod, shapes)) / max(1, sum(map(math.prod, self._shapes or shapes)))
        step, held = _bytes_of(self.function, outputs, values, batch, graph.on_cpu)
        if not self._shapes:
            self.step_bytes, self.held_bytes, self._shapes = step, held, shapes
        return replace(
            graph,
            outside_loss_bytes=step,
            target_bytes=math.ceil(ratio * self.target_bytes),
            scaled_loss_bytes=graph.scaled_loss_bytes + held,
        )


def _flat(shapes) -> list[int]:
    return [size for shape in shapes for size in shape]


def _resized(leaf, sizes: dict[int, int]):
    """`leaf`, a part of the batch, for outputs whose sizes have changed as `sizes` says."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return torch.empty([sizes.get(size, size) for size in leaf.shape], dtype=leaf.dtype, device="meta")


def inputs_of(model, batch):
    """The part of `batch` that the model's forward takes: the other keys, or positions, are for the loss."""
    args, kwargs = call_arguments(batch)
    names = forward_names(model)
    return args[: max(1, len(names))] if not kwargs else {name: kwargs[name] for name in kwargs if name in names}


def cross_entropy_bytes(outputs: Sequence[torch.Tensor]) -> int | None:
    """What a cross-entropy on the largest of `outputs` allocates; None if none can be the logits of one."""
    logits = [each for each in outputs if each.dim() > 1 and all(isinstance(size, int) for size in each.shape)]
    logits = [each for each in logits if each.is_floating_point()]
    if not logits:
        return None
    largest = max(logits, key=torch.Tensor.numel)
    targets = torch.empty(largest.shape[:-1], dtype=torch.int64, device="meta")

    def loss(outputs, targets):
        return torch.nn.functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())

    on_cpu = largest.device.type in ("cpu", "meta")
    return _bytes_of(loss, lambda tensors: tensors[0], [largest], targets, on_cpu)[0]


def _bytes_of(function, outputs, values, batch, on_cpu: bool) -> tuple[int, int]:
    """The dynamic peak of `function`, forward and backward, and the bytes of the loss that it returns."""
    held = []
    active = next((kind for kind in ("cuda", "cpu") if torch.is_autocast_enabled(kind)), None)
    autocast = nullcontext() if active is None else torch.autocast("cpu", torch.get_autocast_dtype(active))
    with _disable_current_modes(), torch.enable_grad(), FakeTensorMode(allow_non_fake_inputs=True):
        tensors = [_empty(value, "cpu") for value in values]
        for each in tensors:
            if isinstance(each, torch.Tensor):
                each.requires_grad_(each.is_floating_point())
        returned, batch = outputs(tensors), tree_map(lambda leaf: _empty(leaf, "cpu"), batch)

        def step():
            with autocast:  # for the loss alone: `predict` refuses it around its own tensors
                loss = function(returned, batch)
            held[:] = [loss.untyped_storage().nbytes()]
            loss.backward()

        resident = [each for each in tree_leaves((tensors, batch)) if isinstance(each, torch.Tensor)]
        device, block = ("cpu", 1) if on_cpu else ("cuda", CUDA_BLOCK)
        try:
            with no_autocast():
                found = predict(step, resident=resident, warmup=0, device=device, round_to=block)
        except Exception as error:  # of the user's function
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise TraceError(
                f"loss= cannot run without data: {reason}. It gets the outputs and the batch, whose sizes change as "
                "those of the outputs do, and must return a scalar without reading values; leave it out to plan the "
                "model alone."
            ) from error
    return found.dynamic_peak_bytes, rounded(held[0], block)


def _empty(leaf, device: str):
    """A tensor like `leaf` without data on `device`; what is no tensor stays as it is."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=device)
