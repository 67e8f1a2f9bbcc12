"""Public names of `ackpt.planner.policies`: `chen`, `revolve` and `rotor` as functions of plain numbers.

``POLICIES`` lists the policies of `ackpt.plan`. This module only re-exports.
"""

from ackpt.planner.policies import POLICIES, chen, revolve, rotor

__all__ = ["POLICIES", "chen", "revolve", "rotor"]
