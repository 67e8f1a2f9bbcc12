"""Policies of papers, as functions for ``policy=``, with their algorithms on plain numbers.

`ilp` is Checkmate's integer program and `min_cut` the partitioner of torch. `chen`, `revolve` and `rotor` belong to the
package, whose searches use them. `PAPERS` names the functions that the package does not have.
"""

from ackpt.planner.policies import chen, revolve, rotor

from . import ilp, min_cut

#: Name -> policy
PAPERS = {"min-cut": min_cut.min_cut, "ilp": ilp.ilp}

__all__ = ["PAPERS", "chen", "revolve", "rotor"]
