"""`Variant`: what runs calls of some sizes, and the checks of its backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from ackpt.planner.capture.aot import CAPTURING, Capture
from ackpt.planner.capture.call_facts import Call
from ackpt.planner.schedule.plan import Plan
from ackpt.planner.step.backward_checks import (
    dropped_before_backward,
    gradients_before_backward,
    retained_after_backward,
)

from .backward_checks import backward_node


class _Room(NamedTuple):
    """The bytes by which the budget exceeds the peak; None without a budget.

    ``step``, ``backward``: the peak of the whole step and of its backward. ``retained``: of a backward that frees
    nothing that was saved; may be negative.
    """

    step: int | None
    backward: int | None
    retained: int | None


@dataclass(frozen=True)
class Variant:
    """What runs calls of some sizes: ``run`` with the inputs of ``captured``.

    ``make_plan`` returns the `Plan`, which does not count the outputs at the places ``dropped`` during backward, and
    which counts gradients of earlier steps if ``accumulates``.
    """

    captured: Capture
    run: Callable[[Sequence[torch.Tensor]], list[Any]]
    make_plan: Callable[[], Plan]
    dropped: tuple[int, ...] = ()
    accumulates: bool = False

    def outputs(self, call: Call) -> Any:
        """The outputs of the planned step."""
        with CAPTURING:
            inputs = self.captured.inputs(call.modules, call.leaves)
        outputs = self.run(inputs)
        if (node := backward_node(outputs)) is not None:
            dropped_before_backward(node, outputs, self.dropped, lambda: self._room_bytes.backward)
            retained_after_backward(node, lambda: self._room_bytes.retained)
            if not self.accumulates:
                leaves = [tensor for tensor in inputs if tensor.is_leaf and tensor.requires_grad]
                gradients_before_backward(node, leaves, lambda: self._room_bytes.step)
        return self.captured.outputs(outputs)

    @cached_property
    def _room_bytes(self) -> _Room:
        plan = self.make_plan()
        if plan.limit_bytes is None:
            return _Room(None, None, None)
        live, boundary = plan.timeline.live, plan.timeline.boundary or 0
        backward = plan.limit_bytes - max(live[boundary:])
        return _Room(plan.limit_bytes - max(live), backward, backward - live[boundary])
