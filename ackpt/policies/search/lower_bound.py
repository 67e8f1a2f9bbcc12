"""A cost that no schedule of a graph can go below within a budget: the honest side of a plan's price.

What backward reads is either kept from the forward until then, or some operation runs again; what that operation reads
is kept or runs again in turn. At every instant of backward, what is kept for later lies beside the gradients that live
then. Of all this only the sums are asked for, not an order, and fractions are allowed: a linear program, whose optimum
is at most the cost of any schedule that computes every backward node once and in the graph's order. That includes all
schedules of this package. The program is that of Checkmate (Jain et al. 2020, arXiv:1910.02653) with one run of each
operation and without the bytes that a recomputation itself takes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ackpt.capture.analysis import Facts, facts
from ackpt.capture.joint_graph import BACKWARD, JointGraph

_INSTANTS = 256  # of backward at which the bytes are bounded
_INFEASIBLE = 2  # scipy's word for how it ended


def lower_bound(
    graph: JointGraph, cost: Sequence[float], workspace_bytes: Sequence[int], limit_bytes: int
) -> float | None:
    """The least cost of what runs again, in the unit of `cost`; None if nothing fits into `limit_bytes`.

    Args:
        graph: the graph.
        cost: of every node.
        workspace_bytes: of every node.
        limit_bytes: a bound on the dynamic peak.

    Example:
        >>> import torch, ackpt
        >>> from ackpt.policies.search.lower_bound import lower_bound
        >>> from ackpt.policies.search.recompute_costs import costs
        >>> def block():
        ...     return torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8))
        >>> model = torch.nn.Sequential(block(), block(), block())
        >>> graph = ackpt.trace(model, torch.ones(64, 8))
        >>> profile = ackpt.profile(graph)
        >>> plan = ackpt.plan(graph, budget=0.7, profile=profile)
        >>> least = lower_bound(graph, costs(graph, profile), profile.workspace_bytes, plan.limit_bytes)
        >>> 0 < least < sum(costs(graph, profile))
        True
    """
    return _Program(facts(graph), cost, workspace_bytes).solve(limit_bytes)


class _Program:
    """For every storage of the forward how much of it is kept, and for every operation how much of it runs again."""

    def __init__(self, known: Facts, cost, workspace_bytes):
        self.known, self.cost = known, cost
        graph = known.graph
        self.order = known.needed_backward
        free = {s for s in known.held if s in known.savable}  # outputs, which the caller holds anyway
        self.kept = {storage: number for number, storage in enumerate(sorted(known.savable - free))}
        births = sorted({graph.storages[storage].producer for storage in self.kept})
        self.again = {birth: len(self.kept) + number for number, birth in enumerate(births)}
        self.last_read: dict[int, int] = {}
        for at, place in enumerate(self.order):
            self.last_read.update({s: at for s in known.touched[BACKWARD][place] if s in self.kept})
        self.instants = self._instants(workspace_bytes)

    def _instants(self, workspace_bytes) -> list[tuple[int | None, int]]:
        """Positions in backward, None for its beginning, and bytes that live there whatever is kept.

        Those at which most bytes live, and evenly spread ones.
        """
        known = self.known
        last = {storage: at for at, place in enumerate(self.order) for storage in known.touched[BACKWARD][place]}
        live = {s for place in known.tangents for s in known.graph.nodes[place].storages}
        live |= known.held & known.savable
        total = begin = sum(known.bytes[s] for s in live)
        found = []
        for at, place in enumerate(self.order):
            touched = known.touched[BACKWARD][place]
            for storage in touched:
                if storage not in live and storage not in self.kept:
                    live.add(storage)
                    total += known.bytes[storage]
            found.append((at, total + sum(known.bytes[s] for s in touched if s in self.kept) + workspace_bytes[place]))
            for storage in touched:
                if last[storage] == at and storage in live and storage not in known.held:
                    live.discard(storage)
                    total -= known.bytes[storage]
        spread = found[:: max(1, len(found) // (_INSTANTS // 2))]
        most = sorted(found, key=lambda pair: -pair[1])[: _INSTANTS // 2]
        return [(None, begin), *dict.fromkeys([*spread, *most])]

    def solve(self, limit_bytes: int) -> float | None:
        try:
            from scipy.optimize import linprog
            from scipy.sparse import coo_array
        except ImportError as error:
            raise ImportError(
                f"the lower bound is the solution of a linear program and needs scipy ({error}): "
                'pip install "ackpt[plan]"'
            ) from error
        scale = max((self.cost[birth] for birth in self.again), default=0.0) or 1.0
        count = len(self.kept) + len(self.again)
        objective = np.zeros(count)
        upper = np.ones(count)
        for birth, variable in self.again.items():
            objective[variable] = self.cost[birth] / scale
            upper[variable] = birth not in self.known.fixed
        rows = [*self._needs(), *self._bytes(max(1, limit_bytes))]
        if not count:  # nothing can be recomputed
            return 0.0 if all(bound >= 0 for _, bound in rows) else None
        entries = [(i, j, value) for i, (row, _) in enumerate(rows) for j, value in row.items()]
        i, j, values = zip(*entries) if entries else ((), (), ())
        matrix = coo_array((values, (i, j)), shape=(len(rows), count)).tocsr()
        bounds = np.stack([np.zeros(count), upper], axis=1)
        found = linprog(objective, A_ub=matrix, b_ub=[bound for _, bound in rows], bounds=bounds, method="highs")
        if found.status == _INFEASIBLE:
            return None
        if found.status != 0:
            raise RuntimeError(f"the lower bound was not found: {found.message}")
        return max(0.0, float(found.fun) * scale)

    def _needs(self):
        """What backward reads is kept or runs again; and so is what an operation reads that runs again."""
        known, nodes = self.known, self.known.graph.nodes
        for storage in self.last_read:
            yield {self.kept[storage]: -1.0, self.again[known.graph.storages[storage].producer]: -1.0}, -1.0
        for birth, variable in self.again.items():
            read = {s for source in known.reads_again(birth) for s in nodes[source].storages if s in self.kept}
            for storage in sorted(read):
                producer = known.graph.storages[storage].producer
                if producer != birth:
                    yield {variable: 1.0, self.kept[storage]: -1.0, self.again[producer]: -1.0}, 0.0

    def _bytes(self, limit_bytes: int):
        """At every instant what is kept for later fits beside what lives then."""
        for at, taken in self.instants:
            if at is None:
                stays = set(self.kept)
            else:
                here = self.known.touched[BACKWARD][self.order[at]]
                stays = {s for s, last in self.last_read.items() if last > at}.difference(here)
            row = {self.kept[s]: self.known.bytes[s] / limit_bytes for s in sorted(stays)}
            yield row, (limit_bytes - taken) / limit_bytes
