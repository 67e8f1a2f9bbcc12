"""Public names of `ackpt.planner.policies`: `rotor` as functions of plain numbers.

``POLICIES`` lists the policies of `ackpt.plan`. This module only re-exports.
"""

from ackpt.planner.policies import POLICIES, rotor

__all__ = ["POLICIES", "rotor"]


def __getattr__(name: str):
    if name in ("chen", "revolve"):
        raise AttributeError(f"{name!r} belongs to the repository's study: from experiments.policies import {name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
