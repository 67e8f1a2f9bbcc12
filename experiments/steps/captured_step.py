"""`CapturedStep`: a model's step that is captured once and runs by several plans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from ackpt.checkpointing.region import Autocast
from ackpt.core.progress import shown
from ackpt.planner.capture.aot import capture
from ackpt.planner.capture.call_facts import WatchedModel, call_of
from ackpt.planner.capture.optimizer_state import NO_LOOP, Loop
from ackpt.planner.capture.tracing import captured_graph
from ackpt.planner.request import Request
from ackpt.planner.schedule.plan import Plan, check_applies
from ackpt.planner.step.compiled_schedule import compiled_schedule, fates_of_outputs, gradient_strides
from ackpt.planner.step.uncovered import Uncovered
from ackpt.planner.step.variants import Variant


class CapturedStep:
    """The step of `model` with these arguments, for comparisons of plans; ``graph`` is its graph.

    A `PlannedStep` captures the model for its plan and for every change; here a plan is compiled only, and the model
    must stay as it is.
    """

    def __init__(self, model: nn.Module, *args: Any, loop: Loop = NO_LOOP, **kwargs: Any):
        self._model, self._watched, self._loop, self._autocast = model, WatchedModel(model), loop, Autocast()
        with shown(), _disable_current_modes(), capture(model, args, kwargs, outputs="drop") as self._captured:
            self.graph = captured_graph(self._captured, model, loop)

    def planned(self, plan: Plan) -> Callable[..., Any]:
        """The step as a function of the model's arguments, as `plan` says.

        Raises:
            PlanError: if the plan was made for another graph.
        """
        check_applies(self.graph, plan)
        with self._autocast.restored(), _disable_current_modes():
            step = compiled_schedule(self._captured, self.graph, plan.schedule)
        strides, fates = gradient_strides(self.graph.analysis), fates_of_outputs(self.graph, plan.schedule)
        uncovered = Uncovered(self._model, Request(plan=plan, loop=self._loop))
        variant = Variant(self._captured, lambda inputs: step(inputs, strides), lambda: plan, uncovered, fates)
        return lambda *args, **kwargs: variant.outputs(call_of(self._watched, args, kwargs))
