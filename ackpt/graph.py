"""The public names of graphs, profiles, schedules and plans in one place; this module only re-exports them.

``import ackpt`` does not load it; ``ackpt.trace`` and ``ackpt.graph`` do when they are first used.
"""

from ackpt.capture.joint_graph import JointGraph, Node, Storage
from ackpt.capture.tracing import trace
from ackpt.costs.profiles import Profile, ProfileError, profile
from ackpt.planning.plan import Activation, Plan, PlanError
from ackpt.planning.proof import RewriteError
from ackpt.planning.rewriting import Rewritten, rewrite
from ackpt.planning.schedule import Schedule, ScheduleError, Step, lower, scheduled
from ackpt.planning.simulator import Simulation, simulate
from ackpt.running.planned_step import PlannedStep

from .errors import TraceError

__all__ = [
    "Activation",
    "JointGraph",
    "Node",
    "Plan",
    "PlanError",
    "PlannedStep",
    "Profile",
    "ProfileError",
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
