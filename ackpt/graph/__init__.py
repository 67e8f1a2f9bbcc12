"""Part II: the graph of a training step, captured once, and what is computed from it.

``import ackpt`` does not load it; ``ackpt.trace`` and ``ackpt.graph`` do when they are first used.
"""

from .compile import PlannedStep
from .joint import AsCompiled, JointGraph, Node, Storage, TraceError
from .plan import Activation, Plan, PlanError
from .profile import Profile, ProfileError, profile
from .proof import RewriteError
from .rewrite import Rewritten, rewrite
from .schedule import Schedule, ScheduleError, Step, lower, scheduled
from .simulate import Simulation, simulate
from .trace import trace

__all__ = [
    "Activation",
    "AsCompiled",
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
