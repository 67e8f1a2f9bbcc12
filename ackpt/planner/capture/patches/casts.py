"""Cast a weight once per autocast region, as eager mode does; torch's capture casts it at every use.

The gradients of several uses then add up in half precision, as they do in eager, instead of in float32.

Torch: ``disable_autocast_cache`` in ``torch/fx/experimental/proxy_tensor.py`` switches the cache of casts off while it
captures; in eager, ``cached_cast`` in ``aten/src/ATen/autocast_mode.cpp`` keeps them. Versions: 2.11 to 2.13.
Test: ``test_autocast_casts_a_weight_once_as_eager_does`` in ``tests/planner/backend/test_backend.py``.
"""

from __future__ import annotations

import contextlib
import threading

import torch

from .python_kernels import put

_TO = torch.ops.aten.to.dtype
_KEY = torch._C.DispatchKey.CompositeImplicitAutograd
_DEVICES = ("cpu", "cuda")

_weights: dict[int, torch.Tensor] = {}  # traced, by their ids
_made: dict[tuple[int, torch.dtype], torch.Tensor] = {}
_region: dict[str, bool] = {}  # whether autocast is on, by device, as the code sees that is captured


def is_weight(tensor) -> bool:
    """Whether autocast keeps what it casts this tensor to."""
    return (
        isinstance(tensor, torch.Tensor)
        and tensor.dtype == torch.float32
        and tensor.requires_grad
        and tensor.is_leaf
        and not tensor._is_view()
    )


def start(*traced: torch.Tensor) -> None:
    """From here to `stop`, autocast casts once each of the traced tensors that represent weights."""
    stop()
    _weights.update({id(tensor): tensor for tensor in traced})


def stop() -> None:
    _weights.clear()
    _made.clear()


@contextlib.contextmanager
def once(traced):
    start(*traced)
    try:
        yield
    finally:
        stop()


@contextlib.contextmanager
def kept_casts():
    """Inside, a capture obeys `start` and `stop`, and drops cached casts where autocast does."""
    clear, switch = torch.clear_autocast_cache, torch.set_autocast_enabled
    capturing_thread = threading.get_ident()

    def noting_clear():
        if threading.get_ident() == capturing_thread:
            _made.clear()
        clear()

    def noting_switch(device, enabled):
        if threading.get_ident() == capturing_thread:
            _region[device] = enabled
        switch(device, enabled)

    _region.update({device: torch.is_autocast_enabled(device) for device in _DEVICES})
    torch.clear_autocast_cache, torch.set_autocast_enabled = noting_clear, noting_switch
    try:
        with put({(_TO, _KEY): _to}):
            yield
    finally:
        torch.clear_autocast_cache, torch.set_autocast_enabled = clear, switch
        stop()


def _to(x, dtype, *args, **kwargs):
    if id(x) not in _weights or not _autocast_asks(x.device.type):
        return _TO._op_dk(_KEY, x, dtype, *args, **kwargs)
    if (id(x), dtype) not in _made:
        _made[id(x), dtype] = _TO._op_dk(_KEY, x, dtype, *args, **kwargs)
    return _made[id(x), dtype]


def _autocast_asks(device: str) -> bool:
    """Only autocast's own kernels switch autocast off while they cast."""
    return _region.get(device, False) and not torch.is_autocast_enabled(device)
