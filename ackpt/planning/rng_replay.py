"""Replay a random operation in a planned step by saving and restoring the generator's state.

Torch has higher-order operators for this, but they cannot run under dispatch modes such as a FLOP counter's.
"""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor


def run_and_save(operation, *args, **kwargs):
    """``(state of the generator before, operation(*args, **kwargs))``; the state is a uint8 tensor in host memory."""
    return _generator(args, kwargs).get_state(), operation(*args, **kwargs)


def run_again(state, operation, *args, **kwargs):
    """``operation(*args, **kwargs)`` with the generator in `state`; afterwards its own state is restored."""
    if isinstance(state, FakeTensor):
        return operation(*args, **kwargs)
    generator = _generator(args, kwargs)
    now = generator.get_state()
    try:
        generator.set_state(state)
        return operation(*args, **kwargs)
    finally:
        generator.set_state(now)


def _generator(args, kwargs) -> torch.Generator:
    """The default generator of the device that the operation draws on."""
    device = kwargs.get("device")
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
    device = torch.device(device) if device is not None else tensors[0].device if tensors else torch.device("cpu")
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return torch.default_generator
