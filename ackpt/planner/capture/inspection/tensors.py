"""Check which tensors of a model and a call can be captured, and replace meta tensors by fake CPU tensors."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from ackpt.core.errors import TraceError

from .calls import named_leaves


def is_tensor(value) -> bool:
    return isinstance(value, torch.Tensor)


def tensor_facts(tensor: torch.Tensor) -> tuple:
    """The properties of a tensor of the model that a capture depends on; they compare and hash."""
    return type(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad


def public_attributes(tensor: torch.Tensor) -> tuple[str, ...]:
    """The names of a plain tensor's own Python attributes, without marks of libraries, which begin with ``_``."""
    if type(tensor) not in (torch.Tensor, nn.Parameter):
        return ()
    return tuple(sorted(name for name in vars(tensor) if name[:1] != "_"))


def require_no_attributes(args, kwargs) -> None:
    """Refuse argument tensors with Python attributes, which the tensors of a capture do not have.

    Raises:
        TraceError: naming the argument and the attribute.
    """
    for name, leaf in named_leaves(args, kwargs):
        if isinstance(leaf, torch.Tensor) and (found := public_attributes(leaf)):
            error = TraceError(
                f"argument {name} is a tensor with a Python attribute {found[0]!r}, which a plan does not see. Pass "
                "its value as an argument of its own, or plan with regions=True, which runs the model's own code."
            )
            error.reason, error.can_split = f"argument {name} has a Python attribute {found[0]!r}", True
            raise error


def has_data(model: nn.Module, leaves) -> bool:
    """Whether no tensor of the model or of the call is fake or on the meta device."""
    tensors = filter(is_tensor, (*model.parameters(), *model.buffers(), *leaves))
    return not any(isinstance(tensor, FakeTensor) or tensor.is_meta for tensor in tensors)


def require_traceable(model: nn.Module, args, kwargs) -> None:
    """Refuse NumPy arrays, nested tensors, tensor subclasses, and tensors on a device that is not there.

    Raises:
        TypeError: for a NumPy array.
        TraceError: naming the argument, parameter or buffer.
    """
    require_no_arrays(args, kwargs)
    require_no_attributes(args, kwargs)
    types = set()
    for name, tensor in _named(model, args, kwargs):
        if tensor.is_nested:
            raise TraceError(
                f"a nested tensor cannot be planned: give a padded one for {name}, by tensor.to_padded_tensor(0.0)"
            )
        require_plain(name, tensor)
        types.add(tensor.device.type)
    if "cuda" in types and not torch.cuda.is_available():  # torch would crash on fake ones
        raise TraceError(
            "the model or its inputs are on a CUDA device, but torch sees no CUDA GPU. To plan for a GPU without one, "
            "put them on the meta device."
        )


def require_no_arrays(args, kwargs) -> None:
    """Refuse NumPy arrays among the arguments of a call.

    Raises:
        TypeError: naming the argument.
    """
    for name, leaf in named_leaves(args, kwargs):
        if isinstance(leaf, numpy.ndarray):
            raise TypeError(
                f"argument {name} is a NumPy array, whose values no capture follows: give torch.from_numpy(array)"
            )


def require_plain(name: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor subclass: it changes what operations do or return, which a captured step would not do again.

    Subclasses of ``nn.Parameter`` and fake tensors change nothing, and pass.

    Raises:
        TraceError: naming the type and how to get a plain tensor.
    """
    kind = type(tensor)
    if kind is torch.Tensor or isinstance(tensor, FakeTensor):
        return
    has_torch_function = kind.__torch_function__ is not torch._C._disabled_torch_function_impl
    dispatch = getattr(kind, "__torch_dispatch__")  # noqa: B009 (pyright cannot bind torch's own)
    if not has_torch_function and dispatch is torch._C._disabled_torch_dispatch_impl:
        return
    fix = "Give a plain tensor: tensor.as_subclass(torch.Tensor), or tensor.as_tensor() of a MONAI MetaTensor."
    if kind.__name__ == "DTensor":
        fix = "Plan before sharding, as in fully_shard(ackpt.compile(model, ...)), or use tensor.to_local()."
    elif not has_torch_function:  # it holds other tensors, which only its own class can give
        fix = "Give the plain tensors that it is made of, or use ackpt.checkpoint on the model's blocks."
    raise TraceError(
        f"{name} is a {kind.__module__}.{kind.__qualname__}, a subclass of torch.Tensor, whose type and attributes a "
        f"captured step would lose. {fix}"
    )


def _named(model: nn.Module, args, kwargs) -> Iterator[tuple[str, Any]]:
    """(name, tensor) of every parameter and buffer of the model and of every tensor among the arguments."""
    yield from ((f"parameter {name!r}", tensor) for name, tensor in model.named_parameters())
    yield from ((f"buffer {name!r}", tensor) for name, tensor in model.named_buffers())
    yield from ((f"argument {name}", leaf) for name, leaf in named_leaves(args, kwargs) if is_tensor(leaf))


def shape_of(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of `tensor` without data, a parameter if it is one; to be called inside a fake tensor mode."""
    shape = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    needs_grad = tensor.requires_grad
    return nn.Parameter(shape, needs_grad) if isinstance(tensor, nn.Parameter) else shape.requires_grad_(needs_grad)


def off_meta(model: Any, leaves, spec, fake_mode: FakeTensorMode):
    """`model`, `leaves` and `spec` with meta tensors replaced by fake CPU ones: for meta, torch picks other kernels."""
    tensors = [*model.parameters(), *model.buffers(), *leaves]
    if not any(is_tensor(tensor) and tensor.is_meta for tensor in tensors):
        return model, leaves, spec
    replaced: dict[int, torch.Tensor] = {}  # tied parameters stay tied

    def replacement(tensor):
        if id(tensor) not in replaced:
            replaced[id(tensor)] = shape_of(tensor)
        return replaced[id(tensor)]

    with fake_mode:
        own = {id(tensor): replacement(tensor) for tensor in (*model.parameters(), *model.buffers())}
        leaves = [replacement(leaf) if is_tensor(leaf) else leaf for leaf in leaves]
    # Replaced wherever a module holds them, as a recurrent layer does in a list too.
    return copy.deepcopy(model, own), leaves, spec
