"""Models and tensors without data: `ackpt.from_shapes`, and fake CPU tensors in place of meta ones."""

import copy
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from ackpt.core.errors import TraceError
from ackpt.metering.resident import quantize_on_meta, with_state

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
    modules = [module for each in tree_leaves(built) if isinstance(each, nn.Module) for module in each.modules()]
    quantize_on_meta(parameter for module in modules for parameter in module._parameters.values())
    shape_of = Shapes()
    with FakeTensorMode():
        for module in modules:
            tensors: Any = module._parameters, module._buffers
            for named in tensors:
                named.update({name: shape_of(tensor) for name, tensor in named.items() if tensor is not None})
        return tree_map_only(torch.Tensor, shape_of, built)


class Shapes:
    """Copies of tensors without data, in a fake mode or on meta; tied ones stay tied. ``copies``: by ids of tensors."""

    def __init__(self, tensors: Iterable[torch.Tensor] = ()) -> None:
        self.copies: dict[int, torch.Tensor] = {}
        self._tensors: list[torch.Tensor] = []  # whose ids must not be given to others
        for tensor in tensors:
            self(tensor)

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in self.copies:
            self._tensors.append(tensor)
            shape = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
            needs_grad, is_parameter = tensor.requires_grad, isinstance(tensor, nn.Parameter)
            copied = nn.Parameter(shape, needs_grad) if is_parameter else shape.requires_grad_(needs_grad)
            self.copies[id(tensor)] = with_state(copied, tensor, self)
        return self.copies[id(tensor)]


def off_meta(model: Any, leaves, fake_mode: FakeTensorMode):
    """`model` and `leaves` with meta tensors replaced by fake CPU ones: for meta, torch picks other kernels."""
    tensors = [*model.parameters(), *model.buffers(), *leaves]
    if not any(isinstance(tensor, torch.Tensor) and tensor.is_meta for tensor in tensors):
        return model, leaves
    shape_of = Shapes()
    with fake_mode:
        leaves = [shape_of(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        of_call = set(shape_of.copies)
        own = {id(tensor): shape_of(tensor) for tensor in (*model.parameters(), *model.buffers())}
    inner = {key: copied for key, copied in shape_of.copies.items() if key not in of_call}
    # Replaced wherever a module holds them, as a recurrent layer does in a list too.
    return copy.deepcopy(model, {**inner, **own}), leaves
