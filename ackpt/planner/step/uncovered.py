"""Warn, once for each planned step, of memory that its budget does not cover.

A loss outside the model allocates memory that no plan counts, and so does the optimizer without ``optimizer=``. A
global hook of torch reports every optimizer's step, so the user's objects need none. On a GPU the allocator's peak
shows at the end of backward whether the step stayed within its budget; on a CPU torch counts no bytes outside of its
profiler.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_leaves

from ackpt.core.budget import is_share
from ackpt.core.errors import warn
from ackpt.metering.gpus import MIB
from ackpt.metering.meter import memory_format
from ackpt.metering.resident import storages_of
from ackpt.planner.capture.inspection.model_checks import is_tensor
from ackpt.planner.capture.outputs import flatten_outputs
from ackpt.planner.schedule.plan import Plan

_WORKSPACES = 2 * 32 * MIB  # of cuBLAS, one for the forward's thread and one for backward's


class Uncovered:
    """The memory that the budget of a step of `model` does not cover, and the warnings about it.

    Args:
        model: of the step.
        budget: as given; None for no bound.
        optimizer: whether the plan counts one.
    """

    def __init__(self, model: nn.Module, budget: Any, optimizer: bool):
        self.model, self.budget = model, budget
        self._has_loss = True if budget is None else None  # None before the first call
        self._unplanned: tuple[str, int] | None = None  # an optimizer and the bytes of its state
        if budget is not None and not is_share(budget) and not optimizer:
            _watch(self)

    def note_outputs(self, shapes: list[tuple[int, ...]]) -> None:
        """Warn if the first call returns no scalar, from the `shapes` of the outputs that get a gradient."""
        if self._has_loss is not None:
            return
        self._has_loss = any(all(isinstance(size, int) and size == 1 for size in shape) for shape in shapes)
        if not self._has_loss:
            said = ", ".join(str(list(shape)) for shape in shapes)
            warn(
                f"no output of {type(self.model).__name__} is a scalar loss, so the budget {self.budget!r} covers the "
                f"model alone, not what a loss outside of it allocates for the outputs of shape {said}. Compute the "
                "loss in forward, or leave room for it, and check the whole step with ackpt.measure."
            )

    def call(self, run: Callable[[], Any], plan: Callable[[], Plan]) -> Any:
        """The outputs of `run`, a call of the model as planned; `plan` returns its plan."""
        if self._unplanned is not None:
            (name, size), self._unplanned = self._unplanned, None
            peak = plan().peak_bytes
            warn(
                f"the budget {self.budget!r} does not count the state of {name}, {memory_format(size)} ({size} bytes): "
                f"with it, the planned peak is {memory_format(peak + size)}, not {memory_format(peak)}. Give "
                "optimizer= where you give the budget, which then counts the state and the optimizer's step."
            )
        device = next((each.device for each in self.model.parameters()), None) if self._has_loss is False else None
        counters = _allocated(device) if device is not None and device.type == "cuda" else None
        outputs = run()
        if self._has_loss is not None and counters is None:
            return outputs
        tensors = [leaf for leaf in flatten_outputs(outputs)[0] if is_tensor(leaf) and leaf.grad_fn is not None]
        self.note_outputs([tuple(tensor.shape) for tensor in tensors])
        if counters is not None:
            at_end = torch.autograd.Variable._execution_engine.queue_callback  # pyright: ignore[reportAttributeAccessIssue]
            check = partial(self._check_peak, device, *counters, plan)
            _before_backward({tensor.grad_fn for tensor in tensors}, lambda: at_end(check))
        return outputs

    def _check_peak(self, device: torch.device, begin: int, before: int, plan: Callable[[], Plan]) -> None:
        """Warn if the peak of `device` has grown since it was `before`, and exceeds the budget."""
        (_, peak), limit = _allocated(device), plan().limit_bytes
        if self._has_loss or limit is None or peak <= max(before, begin + limit + _WORKSPACES):
            return
        self._has_loss = True  # said once
        warn(
            f"this step exceeded the budget {self.budget!r} by {memory_format(peak - begin - limit)}, with a peak of "
            f"{memory_format(peak)} on {device}: its loss is computed outside of {type(self.model).__name__}. Compute "
            "it in forward, or leave room for it."
        )

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Note the state of `optimizer`, whose step has just ended, if it has parameters of the model."""
        own = set(map(id, self.model.parameters()))
        if not any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
            return
        _WATCHING.discard(self)
        states = (state for parameter, state in optimizer.state.items() if id(parameter) in own)
        tensors = [leaf for state in states for leaf in tree_leaves(state) if is_tensor(leaf)]
        size = sum({each._cdata: each.nbytes() for tensor in tensors for each in storages_of(tensor)}.values())
        if size:
            self._unplanned = type(optimizer).__name__, size


def _before_backward(nodes, check: Callable[[], None]) -> None:
    """Call `check` when a backward reaches the first of `nodes`."""
    last = None

    def first(gradients) -> None:
        nonlocal last
        backward = torch._C._current_graph_task_id()
        if backward != last:
            last = backward
            check()

    for node in nodes:
        node.register_prehook(first)


def _allocated(device: torch.device) -> tuple[int, int]:
    """Bytes that the allocator of a GPU has allocated now, and at its peak."""
    counted = torch.cuda.memory.memory_stats_as_nested_dict(device)["allocated_bytes"]["all"]
    return counted["current"], counted["peak"]


_WATCHING: weakref.WeakSet[Uncovered] = weakref.WeakSet()


def _watch(each: Uncovered) -> None:
    _WATCHING.add(each)
    _observe_optimizers()


@cache
def _observe_optimizers() -> None:
    register_optimizer_step_post_hook(_stepped)


def _stepped(optimizer: torch.optim.Optimizer, args, kwargs) -> None:
    for each in list(_WATCHING):
        each.stepped(optimizer)
