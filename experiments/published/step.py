"""`PublishedStep`: one step of a published measurement, with the tensors that are live before and after it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class PublishedStep(NamedTuple):
    """One step; modules, optimizers and tensors that are live before and after it; a function that runs once before.

    `added`: the published figure is the number of bytes that the step adds.
    """

    run: Callable[[], object]
    resident: tuple
    setup: Callable[[], object] | None = None
    added: bool = False


def in_mode(mode: str, forward: Callable[[], Tensor], *tensors: Any, fill=torch.randn_like) -> PublishedStep:
    """The step that a benchmark script measures in a mode: forward, backward or both; the graph is retained.

    The scripts measure all modes in one process, so a forward step, too, starts with the workspaces of both threads. A
    backward step starts with the tensors that the forward left, and with the gradient of its result.
    """
    left: list[Tensor] = []

    def multiply_in_both_threads():
        small = torch.empty(2, 2, requires_grad=True)
        (small @ small).sum().backward()

    def run_forward():
        y = forward()
        left.extend((y, fill(y)))

    def run():
        y = forward()
        if mode == "full":
            y.backward(fill(y), retain_graph=True)

    if mode == "backward":
        return PublishedStep(lambda: left[0].backward(left[1], retain_graph=True), tensors, run_forward)
    return PublishedStep(run, tensors, multiply_in_both_threads if mode == "forward" else None)


def given_gradient(module: nn.Module, x: Tensor, *others: Any) -> PublishedStep:
    """Forward and backward from an existing gradient; `others` are live during the step."""
    grad = torch.empty_like(x)

    def run():
        y = module(x)
        y.backward(grad, retain_graph=True)

    return PublishedStep(run, (module, x, grad, *others))


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype):
    """Inside, new parameters have this dtype: torch cannot convert modules of fake tensors."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
