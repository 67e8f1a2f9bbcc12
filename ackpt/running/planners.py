"""The interface between a `PlannedStep` and planning: `Planner` and `Choice`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from ackpt.capture.dynamic_sizes import Dimension
from ackpt.capture.joint_graph import JointGraph
from ackpt.planning.plan import Plan
from ackpt.planning.schedule import Schedule

if TYPE_CHECKING:
    from ackpt.errors import TraceError

    from .call_facts import Call
    from .dynamic_step import DynamicStep
    from .variants import Variants


class Choice(NamedTuple):
    """What runs at some sizes: ``schedule``, whose `Plan` is ``plan()``.

    ``own_peak_bytes``: the simulated dynamic peak of the model's own step if that keeps the budget whatever its code
    holds on to, so that the model may run instead; its plan is ``own_plan()``.
    """

    schedule: Schedule
    plan: Callable[[], Plan]
    own_peak_bytes: int | None = None
    own_plan: Callable[[], Plan] | None = None


# Of the sizes of the dynamic dimensions, and of the baseline's dynamic peak in bytes if it was measured.
Choose = Callable[[tuple[int, ...], int | None], Choice]


class Planner:
    """Plans each graph by a function; every call with other sizes is then a graph of its own."""

    # Whether one capture may serve several sizes, whether a choice depends on the baseline's peak, whether a model that
    # cannot be one graph is planned in parts, and whether one with a scripted or compiled submodule is.
    serves_sizes = False
    needs_baseline = False
    splits = False
    leaves_out = False

    def __init__(self, function: Callable[[JointGraph], Plan]):
        self.function = function

    def __call__(self, graph: JointGraph) -> Plan:
        return self.function(graph)

    def choice(self, graph: JointGraph) -> Choice:
        """What runs the step with this graph."""
        plan = self(graph)
        return Choice(plan.schedule, lambda: plan)

    def dimensions(self, call: Call) -> set[Dimension]:
        """The dimensions of `call` that must be dynamic for this planner to serve it."""
        return set()

    def for_sizes(self, step: DynamicStep) -> Choose:
        """The function that chooses what `step` runs at given sizes."""
        raise NotImplementedError

    def in_parts(self, variants: Variants, refused: TraceError | str | None) -> Any:
        """What replaces `variants` if the model cannot be captured as one graph; None if nothing does.

        Args:
            variants: of the step.
            refused: the error of the capture; why no capture is possible, in words; or None before the first one.
        """
        return None
