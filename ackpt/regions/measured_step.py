"""Run a real step to measure it or to compare results, then restore all state."""

from __future__ import annotations

import contextlib
import random
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from ackpt.capture.inspection.attributes import restored
from ackpt.capture.inspection.model_checks import own_call
from ackpt.capture.inspection.tensors import is_tensor
from ackpt.capture.inspection.transformers_caches import flatten_outputs
from ackpt.capture.outputs import without_gradient
from ackpt.checkpointing.rng import drawn_from, replay, repr_state, snapshot, stream_of
from ackpt.errors import TraceError
from ackpt.metering.meter import Measurement, measure

from .live_bytes import LiveBytes

Around = Callable[[], AbstractContextManager[Any]]


class MeasuredStep:
    """One forward and backward of a model with given arguments, which undoes its side effects.

    Tensors, gradients, random numbers and attributes of modules are restored after every run. Other effects of the
    model's code, such as printing, happen at every run.
    """

    def __init__(self, model: nn.Module, args, kwargs, differentiate: str, outputs: str):
        self.model, self.differentiate, self.keeps_outputs = model, differentiate, outputs == "keep"
        # Backward must not run into the graph that computed an argument.
        self.args, self.kwargs = tree_map(_as_leaf, (tuple(args), dict(kwargs)))
        tensors = [*model.parameters(), *model.buffers(), *tree_leaves((self.args, self.kwargs))]
        self.tensors: list[torch.Tensor] = list({id(t): t for t in tensors if is_tensor(t)}.values())
        self.on_cpu = all(tensor.device.type == "cpu" for tensor in self.tensors)
        values = [value for module in model.modules() for value in vars(module).values()]
        self.draws = False  # whether a run has drawn random numbers
        self._generators = [stream for value in values if (stream := stream_of(value)) is not None]

    @contextlib.contextmanager
    def undone(self, seed: int | None = None) -> Iterator[None]:
        """Inside, runs may change anything of the model; afterwards it is as before.

        `seed`: of the random numbers inside; by default they continue from the present states.
        """
        with _disable_current_modes(), torch.inference_mode(False), torch.enable_grad():
            with put_back(self.tensors, self._generators), restored(self.model):
                if seed is not None:
                    torch.manual_seed(seed)
                    random.seed(seed)
                    np.random.seed(seed)  # noqa: NPY002
                before = snapshot(self._generators)
                yield
                self.draws |= bool(drawn_from(before))

    def forward(self, around: Around) -> tuple[list[Any], list[torch.Tensor]]:
        """The model's outputs, and those that get a gradient; the forward runs within ``around()``.

        A `LiveBytes` that it yields counts the backward, too.
        """
        with around() as live:
            leaves, _ = flatten_outputs(own_call(self.model)(*self.args, **self.kwargs))
        if isinstance(live, LiveBytes):
            live.count_backward(leaves)
        without = without_gradient(leaves, self.differentiate)
        roots = [leaf for at, leaf in enumerate(leaves) if is_tensor(leaf) and leaf.requires_grad and at not in without]
        if not roots:
            raise TraceError("no output of the model requires grad, so there is no backward to plan")
        return leaves, roots

    def run(self, around: Around = contextlib.nullcontext) -> None:
        """Forward and backward; to be called inside of `undone`."""
        outputs, roots = self.forward(around)
        if not self.keeps_outputs:
            del outputs
        backward(roots)

    def measured(self, around: Around = contextlib.nullcontext, seed: int | None = None) -> Measurement:
        """The memory of the step."""
        with self.undone(seed):
            if not self.on_cpu:  # CUDA's libraries allocate their workspaces in the first step
                self.run(around)
                self._drop_gradients()
            return measure(lambda: self.run(around), resident=[self.model, *self.tensors], warmup=0, repeats=0)

    def results(self, around: Around = contextlib.nullcontext) -> dict[str, Any]:
        """Everything that the step computes and changes, by name: tensors, and the states of random numbers."""
        with self.undone():
            outputs, roots = self.forward(around)
            found: dict[str, Any] = {f"output {at}": out.detach() for at, out in enumerate(outputs) if is_tensor(out)}
            backward(roots)
            names = {id(parameter): f"parameter {name!r}" for name, parameter in self.model.named_parameters()}
            for at, tensor in enumerate(self.tensors):
                if tensor.is_leaf and tensor.requires_grad:
                    found[f"the gradient of {names.get(id(tensor), f'argument {at}')}"] = tensor.grad
            found |= {f"buffer {name!r}": buffer.clone() for name, buffer in self.model.named_buffers()}
            for at, (_, state) in enumerate(snapshot(self._generators)):
                found[f"random number stream {at}"] = state if is_tensor(state) else repr_state(state)
            return found

    def _drop_gradients(self) -> None:
        for tensor in self.tensors:
            if tensor.is_leaf:
                tensor.grad = None


@contextlib.contextmanager
def put_back(tensors, generators=()):
    """Run a step inside from the current RNG states, without gradients and hooks; then restore these and the tensors.

    `generators`: streams of generator objects that are restored, too.
    """
    were = [(tensor, tensor.detach().to("cpu", copy=True)) for tensor in tensors]
    leaves = [tensor for tensor in tensors if tensor.is_leaf and tensor.requires_grad]
    gradients = [(leaf, leaf.grad, leaf._post_accumulate_grad_hooks, leaf._backward_hooks) for leaf in leaves]
    try:
        for leaf, *_, backward_hooks in gradients:
            # These hooks may run an optimizer. None would leave them on.
            leaf.grad, leaf._post_accumulate_grad_hooks = None, OrderedDict()
            if backward_hooks:
                leaf._backward_hooks = None
        with replay(snapshot(generators)):
            yield
    finally:
        for leaf, gradient, hooks, backward_hooks in gradients:
            leaf.grad, leaf._post_accumulate_grad_hooks = gradient, hooks
            if backward_hooks:
                leaf._backward_hooks = backward_hooks
        for tensor, was in were:
            if not torch.equal(tensor.detach().cpu(), was):
                tensor.data.copy_(was)


def backward(roots: list[torch.Tensor]) -> None:
    torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])


def first_difference(results: dict[str, Any], others: dict[str, Any]) -> str | None:
    """The name of the first result that differs in a bit; None if all are equal."""
    return next((name for name in results if not _same(results[name], others.get(name))), None)


def _same(one, other) -> bool:
    if not is_tensor(one) or not is_tensor(other):
        return one is other or (not is_tensor(one) and not is_tensor(other) and one == other)
    if one.layout is not other.layout or one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.layout is torch.sparse_coo:
        return _same(one._indices(), other._indices()) and _same(one._values(), other._values())
    return (
        torch.equal(one, other)
        or torch.equal(one.isnan(), other.isnan())
        and torch.equal(one.nan_to_num(), other.nan_to_num())
    )


def _as_leaf(value):
    if is_tensor(value) and value.requires_grad and not value.is_leaf:
        return value.detach().requires_grad_()
    return value
