"""Dropout as eager PyTorch computes it on the CPU, so that a captured step equals it to the last bit.

Captured, torch's dropout becomes ``native_dropout``, which multiplies by 1/(1-p) at another place and rounds another
way. Eager multiplies by noise, 0 or 1/(1-p) per element, which is drawn here by one operation and nothing besides.
"""

from __future__ import annotations

import contextlib

import torch

_DROPOUT = torch.ops.aten.dropout.default
_KEY = torch._C.DispatchKey.CompositeImplicitAutograd

torch.library.define(
    "ackpt_graph::dropout_noise", "(Tensor x, float p) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,)
)


@torch.library.impl("ackpt_graph::dropout_noise", "CPU")
def _noise(x, p: float):
    return torch.empty_like(x).bernoulli_(1 - p).div_(1 - p)


@torch.library.register_fake("ackpt_graph::dropout_noise")
def _noise_shape(x, p: float):
    return torch.empty_like(x)


def _dropout(x, p: float, train: bool):
    if not train or p == 0 or x.numel() == 0:
        return x
    if p == 1:
        return x * torch.zeros((), dtype=x.dtype, device=x.device)
    if x.device.type != "cpu":
        return torch.ops.aten.native_dropout.default(x, p, train)[0]
    return x * torch.ops.ackpt_graph.dropout_noise(x.detach(), p)


@contextlib.contextmanager
def eager_dropout():
    """Inside, capturing takes dropout apart as eager does."""
    was = _DROPOUT.py_kernels.get(_KEY)
    _DROPOUT.py_kernels[_KEY] = _dropout
    _DROPOUT._dispatch_cache.clear()
    try:
        yield
    finally:
        if was is None:
            del _DROPOUT.py_kernels[_KEY]
        else:
            _DROPOUT.py_kernels[_KEY] = was
        _DROPOUT._dispatch_cache.clear()
