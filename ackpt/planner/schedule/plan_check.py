"""Check that a saved plan belongs to a graph, and that its stored peak and cost are correct."""

from __future__ import annotations

from ackpt.planner.capture.inspection.calls import differences
from ackpt.planner.capture.joint_graph import JointGraph

from .live_bytes import follow, saved_bytes
from .plan import Plan, PlanError
from .schedule import ScheduleError


def check_applies(graph: JointGraph, plan: Plan, is_instance: bool = False) -> None:
    """Refuse a plan of another graph, and one whose bytes are not those of its schedule.

    The peak may be higher than the simulated one, since the workspace of operations is unknown here. The resident bytes
    may be higher by the state of an optimizer that `graph` was traced without.

    `is_instance`: whether `graph` is an instance of a capture with dynamic dimensions, at the sizes of the plan.

    Raises:
        PlanError: names the field, or the two graphs.
    """
    made_for = plan.schedule.graph
    if made_for != graph.hash and is_instance and not plan.dynamic:
        raise PlanError(
            f"this plan was made for fixed sizes, and a capture for all sizes has other operations ({made_for[:12]}, "
            f"not {graph.hash[:12]}), or the model or its arguments differ otherwise. Name the dimensions that change "
            "when you make the plan, as in ackpt.compile(..., dynamic={'input_ids': {1: (16, 512)}}), or plan again."
        )
    if made_for != graph.hash:
        raise PlanError(
            f"this plan was made for another graph ({made_for[:12]}, not {graph.hash[:12]}): "
            f"{_what_differs(graph, plan)}. Plan again for this model and these arguments."
        )
    try:
        timeline = follow(graph, plan.schedule, (0,) * len(graph.nodes)).timeline()
    except (ScheduleError, LookupError, TypeError) as error:
        raise PlanError(f"the schedule of this plan cannot run: {error!r}. Plan again.") from error
    resident = graph.resident_bytes
    saved = saved_bytes(graph, plan.schedule)
    limit = plan.dynamic_peak_bytes if plan.limit_bytes is None else plan.limit_bytes
    # (field, what it says, the least and the most that it can be)
    figures = [
        ("saved_bytes", plan.saved_bytes, saved, saved),
        ("resident_bytes", plan.resident_bytes, resident, resident if graph.optimizer_bytes else None),
        ("peak_bytes", plan.peak_bytes, plan.resident_bytes + timeline.peak_bytes, plan.resident_bytes + limit),
    ]
    for name, said, least, most in figures:
        if said < least or (most is not None and said > most):
            true = f"{least}" if most == least else f"at least {least}" if said < least else f"at most {most}"
            raise PlanError(
                f"this plan says that its {name} are {said}, but with this model, and the optimizer, the "
                f"accumulated gradients and the scaler that are given, they are {true}. Plan again, with the same ones."
            )


def _what_differs(graph: JointGraph, plan: Plan) -> str:
    if plan.made_for is None or graph.made_for is None:
        return "model, arguments, dtypes or torch differ"
    clauses = differences(plan.made_for, graph.made_for)
    return "; ".join(clauses) or "the call is the same, so the model's code or configuration differs"
