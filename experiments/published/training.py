"""Training steps around a loss: gradient accumulation, autocast, clipping, and optimizers by name."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .step import PublishedStep


class LoopAdamW(torch.optim.Optimizer):
    """AdamW that updates one parameter after the other, as the one in transformers before version 4.30 does."""

    def __init__(self, params: Any, lr: float = 1e-3):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["first"], state["second"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
                state["first"].mul_(0.9).add_(parameter.grad, alpha=0.1)
                state["second"].mul_(0.999).addcmul_(parameter.grad, parameter.grad, value=0.001)
                denominator = state["second"].sqrt().add_(1e-8)
                parameter.addcdiv_(state["first"], denominator, value=-group["lr"])


def adafactor(parameters: Any, lr: float) -> torch.optim.Optimizer:
    """Adafactor with a given learning rate, as transformers' Trainer makes it."""
    import transformers

    return transformers.Adafactor(parameters, lr=lr, scale_parameter=False, relative_step=False)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adafactor": adafactor,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "fused-adamw": lambda parameters, lr: torch.optim.AdamW(parameters, lr=lr, fused=True),
    "loop-adamw": LoopAdamW,
    "sgd": torch.optim.SGD,
}


def trained(
    model: nn.Module,
    loss: Callable[[], Tensor],
    optimizer: str,
    tensors: tuple,
    accumulation: int = 1,
    autocast: torch.dtype | None = None,
    clip: float | None = None,
    keeps_gradients: bool = False,
) -> PublishedStep:
    """The losses and gradients of `accumulation` equal batches, and the optimizer's step.

    `keeps_gradients`: they are set to zero, not freed. Loss scaling works in place and is left out.
    """
    stepper = OPTIMIZERS[optimizer]([each for each in model.parameters() if each.requires_grad], lr=1e-3)
    context = contextlib.nullcontext if autocast is None else lambda: torch.autocast("cpu", dtype=autocast)

    def run():
        for _ in range(accumulation):
            with context():
                value = loss() / accumulation if accumulation > 1 else loss()
            value.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        stepper.step()
        stepper.zero_grad(set_to_none=not keeps_gradients)

    return PublishedStep(run, (model, stepper, *tensors))
