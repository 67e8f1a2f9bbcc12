"""The algorithms behind the policies, as functions of plain numbers: `chen`, `revolve`, `rotor` and `ilp`.

This module only re-exports them; ``POLICIES`` lists the policies of `ackpt.plan`.
"""

from ackpt.planner.policies import POLICIES, chen, ilp, revolve, rotor

__all__ = ["POLICIES", "chen", "ilp", "revolve", "rotor"]
