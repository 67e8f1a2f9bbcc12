"""Public names of `ackpt.planner.policies`: `chen`, `revolve`, `rotor` and `ilp` as functions of plain numbers.

``POLICIES`` lists the policies of `ackpt.plan`. This module only re-exports.
"""

from ackpt.planner.policies import POLICIES, chen, ilp, revolve, rotor

__all__ = ["POLICIES", "chen", "ilp", "revolve", "rotor"]
