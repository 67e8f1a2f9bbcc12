"""Policies of papers, as functions for ``policy=``, with their algorithms on plain numbers.

`chen` has segments and halves of a chain, `revolve` binomial snapshots, `ilp` Checkmate's integer program, `min_cut`
the partitioner of torch. `rotor` belongs to the package, whose search uses it. `PAPERS` names the functions that the
package does not have.
"""

from ackpt.planner.policies import rotor

from . import chen, ilp, min_cut, revolve

#: Name -> policy
PAPERS = {
    "chen-sqrt": chen.chen_sqrt,
    "chen-log": chen.chen_log,
    "revolve": revolve.revolve,
    "min-cut": min_cut.min_cut,
    "ilp": ilp.ilp,
}

__all__ = ["PAPERS", "rotor"]
