"""The public names of graphs, profiles, schedules and plans in one place; this module only re-exports them.

``import ackpt`` does not load it; ``ackpt.trace`` and ``ackpt.graph`` do when they are first used.
"""

from ackpt.core.errors import TraceError
from ackpt.planner.capture.joint_graph import JointGraph, Node, Storage
from ackpt.planner.capture.tracing import trace
from ackpt.planner.costs.profiles import Profile, profile
from ackpt.planner.schedule.plan import Activation, Plan, PlanError
from ackpt.planner.schedule.proof import RewriteError
from ackpt.planner.schedule.rewriting import Rewritten, rewrite
from ackpt.planner.schedule.schedule import Schedule, ScheduleError, Step, lower, scheduled
from ackpt.planner.schedule.simulator import Simulation, simulate
from ackpt.planner.step.planned_step import PlannedStep

__all__ = [
    "Activation",
    "JointGraph",
    "Node",
    "Plan",
    "PlanError",
    "PlannedStep",
    "Profile",
    "RewriteError",
    "Rewritten",
    "Schedule",
    "ScheduleError",
    "Simulation",
    "Step",
    "Storage",
    "TraceError",
    "lower",
    "profile",
    "rewrite",
    "scheduled",
    "simulate",
    "trace",
]
