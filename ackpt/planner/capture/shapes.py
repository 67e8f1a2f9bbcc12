"""Models and tensors without data: `ackpt.from_shapes`, and fake CPU tensors in place of meta ones."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map

from ackpt.core.errors import TraceError

T = TypeVar("T")


def from_shapes(build: Callable[[], T]) -> T:
    """Return the result of `build`, whose tensors have shapes but no data.

    `ackpt.trace`, `ackpt.compile` and `ackpt.predict` accept the result, so a model of any size is planned without its
    memory. Unlike ``FakeTensorMode``, it also works for code that replaces parameters, such as peft's.

    Args:
        build: makes a model, or models and tensors in a tuple, list or dict; called without arguments. Constructors
            run on the meta device: nothing is allocated or initialized.

    Raises:
        TraceError: if `build` reads the values of a tensor.

    Example:
        >>> import torch, ackpt
        >>> model, x = ackpt.from_shapes(lambda: (torch.nn.Linear(50_000, 50_000), torch.empty(8, 50_000)))
        >>> graph = ackpt.trace(model, x)
        >>> graph.bytes()["parameter"], graph.gradient_bytes
        (10000200000, 10000200000)
        >>> step = lambda: model(x).sum().backward()
        >>> ackpt.predict(step, resident=(model, x)).categories["gradients"]
        10000200000
    """
    try:
        with torch.device("meta"):
            built = build()
    except RuntimeError as error:
        if "meta" not in str(error):
            raise
        raise TraceError(
            f"the model reads the values of a tensor while it is built: {str(error).splitlines()[0]} Build the tensor "
            'on the CPU, by device="cpu", or build the model with data'
        ) from error
    mode, substitutes = FakeTensorMode(), {}  # tied parameters stay tied

    def substitute(tensor: torch.Tensor) -> torch.Tensor:
        return substitutes.setdefault(id(tensor), (tensor, shape_of(tensor)))[1]

    def without_data(value):
        if isinstance(value, nn.Module):
            for module in value.modules():
                tensors: Any = module._parameters, module._buffers
                for named in tensors:
                    named.update({name: substitute(tensor) for name, tensor in named.items() if tensor is not None})
            return value
        return substitute(value) if isinstance(value, torch.Tensor) else value

    with mode:
        return tree_map(without_data, built)


def shape_of(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of `tensor` without data, a parameter if it is one; in a fake tensor mode, or ``torch.device("meta")``."""
    shape = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    needs_grad = tensor.requires_grad
    return nn.Parameter(shape, needs_grad) if isinstance(tensor, nn.Parameter) else shape.requires_grad_(needs_grad)


def off_meta(model: Any, leaves, fake_mode: FakeTensorMode):
    """`model` and `leaves` with meta tensors replaced by fake CPU ones: for meta, torch picks other kernels."""
    tensors = [*model.parameters(), *model.buffers(), *leaves]
    if not any(isinstance(tensor, torch.Tensor) and tensor.is_meta for tensor in tensors):
        return model, leaves
    replaced: dict[int, torch.Tensor] = {}  # tied parameters stay tied

    def replacement(tensor):
        if id(tensor) not in replaced:
            replaced[id(tensor)] = shape_of(tensor)
        return replaced[id(tensor)]

    with fake_mode:
        fake = {id(tensor): replacement(tensor) for tensor in (*model.parameters(), *model.buffers())}
        leaves = [replacement(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    # Replaced wherever a module holds them, as a recurrent layer does in a list too.
    return copy.deepcopy(model, fake), leaves
