"""Capture random operations with the arithmetic of eager mode, so that results are bit-equal.

Captured, torch's dropout becomes ``native_dropout``, which multiplies by 1/(1-p) at another place and so rounds
differently. Eager multiplies by a mask of 0 and 1/(1-p), which one operation draws here. A tensor that is filled in
place becomes a new contiguous tensor when captured; eager fills it in the order of its memory.

Torch: ``dropout`` in ``torch/_decomp/decompositions.py``; in eager, ``_dropout_impl`` in
``aten/src/ATen/native/Dropout.cpp``. Versions: 2.11 to 2.13. Test: ``tests/planner/capture/test_draws.py``.
"""

from __future__ import annotations

import torch
from torch._subclasses.functional_tensor import FunctionalTensor

from .python_kernels import put

aten = torch.ops.aten
_KEY = torch._C.DispatchKey.CompositeImplicitAutograd

torch.library.define(
    "ackpt_graph::dropout_noise",
    "(Tensor x, float p) -> Tensor",
    tags=(torch.Tag.nondeterministic_seeded, torch.Tag.pointwise),
)
torch.library.define(
    "ackpt_graph::filled",
    "(Tensor x, str operation, Scalar[] numbers, Tensor[] tensors, *, Generator? generator=None) -> Tensor",
    tags=(torch.Tag.nondeterministic_seeded,),
)


@torch.library.impl("ackpt_graph::dropout_noise", "CompositeExplicitAutograd")
def _noise(x, p: float):
    return torch.empty_like(x).bernoulli_(1 - p).div_(1 - p)


@torch.library.register_fake("ackpt_graph::dropout_noise")
def _noise_shape(x, p: float):
    return torch.empty_like(x)


@torch.library.impl("ackpt_graph::filled", "CompositeExplicitAutograd")
def _filled(x, operation: str, numbers, tensors, generator=None):
    """A tensor like `x` after the in-place `operation`."""
    name, _, overload = operation.partition(".")
    fill = getattr(getattr(aten, name), overload)
    return fill(torch.empty_like(x), *tensors, *numbers, generator=generator)


@torch.library.register_fake("ackpt_graph::filled")
def _filled_shape(x, operation: str, numbers, tensors, generator=None):
    return torch.empty_like(x)


def _dropout(x, p: float, train: bool):
    if not train or p == 0 or x.numel() == 0:
        return x
    if p == 1:
        return x * torch.zeros((), dtype=x.dtype, device=x.device)
    if x.device.type != "cpu":
        return aten.native_dropout.default(x, p, train)[0]
    return x * torch.ops.ackpt_graph.dropout_noise(x.detach(), p)


def _dropout_in_place(x, p: float, train: bool):
    if not train or p == 0 or x.numel() == 0:
        return x
    if p == 1:
        return x.mul_(torch.zeros((), dtype=x.dtype, device=x.device))
    return x.mul_(torch.ops.ackpt_graph.dropout_noise(x.detach(), p))


def _in_order_of_memory(operation):
    def fill(x, *args, generator=None):
        if not isinstance(x, FunctionalTensor) or x.is_contiguous():
            return NotImplemented  # torch goes on as it would have
        tensors = [argument for argument in args if isinstance(argument, torch.Tensor)]
        numbers = [argument for argument in args if not isinstance(argument, (torch.Tensor, type(None)))]
        name = str(operation).removeprefix("aten.")
        return x.copy_(torch.ops.ackpt_graph.filled(x, name, numbers, tensors, generator=generator))

    return fill


_FILLS = (
    *(aten.bernoulli_.float, aten.bernoulli_.Tensor, aten.uniform_.default, aten.normal_.default),
    *(aten.random_.default, getattr(aten.random_, "from"), aten.random_.to, aten.exponential_.default),
    *(aten.cauchy_.default, aten.geometric_.default, aten.log_normal_.default),
)
_KERNELS = {aten.dropout.default: _dropout, aten.dropout_.default: _dropout_in_place}
_KERNELS |= {operation: _in_order_of_memory(operation) for operation in _FILLS}


def eager_draws():
    """Inside, capturing takes random operations apart as eager does."""
    return put({(operation, _KEY): kernel for operation, kernel in _KERNELS.items()})
