"""What an optimizer adds to the account of a training step: its state, and what its step takes and gives back.

Found by running its step on tensors without data, so that neither the optimizer nor the model changes.
"""

from __future__ import annotations

import copy
from collections import defaultdict

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ..predict import predict
from .joint import TraceError


def optimizer_bytes(optimizer: torch.optim.Optimizer) -> tuple[int, int]:
    """Bytes of the state of `optimizer` after its first step, and the most its step takes beyond gradients and state.

    Raises:
        TypeError: if it is no ``torch.optim.Optimizer``.
        TraceError: if its step needs the values of tensors or more than gradients, as LBFGS does.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
    stand_in = copy.copy(optimizer)
    try:
        with FakeTensorMode():
            stand_in.param_groups = [
                {**group, "params": [_without_data(parameter) for parameter in group["params"]]}
                for group in optimizer.param_groups
            ]
            stand_in.state = defaultdict(dict)
            trained = [p for group in stand_in.param_groups for p in group["params"] if p.grad is not None]
            found = predict(stand_in.step, resident=(stand_in, *trained), device="cpu")
    except (RuntimeError, TypeError, AttributeError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise TraceError(
            f"the step of {type(optimizer).__name__} cannot be followed without data: {reason}. Leave it out, and give "
            "a budget that leaves room for its state."
        ) from error
    gradients = sum(p.grad.numel() * p.grad.element_size() for p in trained)
    return found.categories.get("optimizer", 0), found.dynamic_peak_bytes - gradients


def _without_data(parameter):
    value = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype)
    value = torch.nn.Parameter(value, parameter.requires_grad)
    value.grad = torch.empty_like(value) if parameter.requires_grad else None
    return value
