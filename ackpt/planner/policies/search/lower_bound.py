"""A lower bound: a cost that no schedule of a graph can beat within a budget.

Each activation that backward reads is either saved by the forward or recomputed, and a recomputed operation reads
activations that are saved or recomputed in turn. At every instant of backward, the activations that are saved for later
are live together with the gradients of that instant. The linear program states these conditions as sums, without an
order, and allows fractions. So its optimum is at most the cost of any schedule that computes every backward node once
and in the graph's order, which includes all schedules of this package. The program is that of Checkmate (Jain et al.
2020, arXiv:1910.02653) with one run of each operation and without the memory of recomputation itself.
"""

from collections.abc import Sequence

import numpy as np

from ackpt.planner.capture.joint_graph import BACKWARD, Analysis, JointGraph

_INSTANTS = 256  # at most so many positions in backward at which the live bytes are bounded: the size of the program
_INFEASIBLE = 2  # status of scipy


def lower_bound(
    graph: JointGraph, cost: Sequence[float], workspace_bytes: Sequence[int], limit_bytes: int
) -> float | None:
    """The lower bound on the cost of recomputation, in the unit of `cost`; None if nothing fits into `limit_bytes`.

    Args:
        graph: the graph.
        cost: of every node.
        workspace_bytes: of every node.
        limit_bytes: an upper bound on the dynamic peak.

    Example:
        >>> import torch, ackpt
        >>> from ackpt.planner.policies.search.lower_bound import lower_bound
        >>> from ackpt.planner.policies.search.frontier import costs
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
    return _Program(graph.analysis, cost, workspace_bytes).solve(limit_bytes)


class _Program:
    """The linear program; a variable is the saved fraction of a storage or the recomputed fraction of an operation.

    ``saved`` and ``recomputed`` are the numbers of the variables by storage and by producer.
    """

    def __init__(self, analysis: Analysis, cost, workspace_bytes):
        self.analysis, self.cost = analysis, cost
        graph = analysis.graph
        self.order = analysis.needed_backward
        outputs = analysis.live_to_end & analysis.savable  # the caller holds them
        self.saved = {storage: number for number, storage in enumerate(sorted(analysis.savable - outputs))}
        producers = sorted({graph.storages[storage].producer for storage in self.saved})
        self.recomputed = {producer: len(self.saved) + number for number, producer in enumerate(producers)}
        self.last_read: dict[int, int] = {}
        for at, node in enumerate(self.order):
            self.last_read.update({s: at for s in analysis.accessed[BACKWARD][node] if s in self.saved})
        self.instants = self._instants(workspace_bytes)

    def _instants(self, workspace_bytes) -> list[tuple[int | None, int]]:
        """Some positions in backward (None: its beginning), and the bytes that are live there whatever is saved."""
        analysis = self.analysis
        size, touched_by = analysis.bytes, analysis.accessed[BACKWARD]
        last = {storage: at for at, node in enumerate(self.order) for storage in touched_by[node]}
        live = {s for node in analysis.tangents for s in analysis.graph.nodes[node].storages}
        live |= analysis.live_to_end & analysis.savable
        total = begin = sum(size[s] for s in live)
        instants = []
        for at, node in enumerate(self.order):
            touched = touched_by[node]
            for storage in touched:
                if storage not in live and storage not in self.saved:
                    live.add(storage)
                    total += size[storage]
            instants.append((at, total + sum(size[s] for s in touched if s in self.saved) + workspace_bytes[node]))
            for storage in touched:
                if last[storage] == at and storage in live and storage not in analysis.live_to_end:
                    live.discard(storage)
                    total -= size[storage]
        half = _INSTANTS // 2
        evenly_spaced = instants[:: max(1, len(instants) // half)]
        highest = sorted(instants, key=lambda pair: -pair[1])[:half]
        return [(None, begin), *dict.fromkeys([*evenly_spaced, *highest])]

    def solve(self, limit_bytes: int) -> float | None:
        try:
            from scipy.optimize import linprog
            from scipy.sparse import coo_array
        except ImportError as error:
            raise ImportError(
                f"the lower bound is the solution of a linear program and needs scipy ({error}): "
                'pip install "ackpt[plan]"'
            ) from error
        scale = max((self.cost[producer] for producer in self.recomputed), default=0.0) or 1.0
        count = len(self.saved) + len(self.recomputed)
        objective = np.zeros(count)
        upper = np.ones(count)
        for producer, variable in self.recomputed.items():
            objective[variable] = self.cost[producer] / scale
            upper[variable] = producer not in self.analysis.not_recomputable
        rows = [*self._needs(), *self._bytes(max(1, limit_bytes))]
        if not count:  # nothing can be recomputed
            return 0.0 if all(bound >= 0 for _, bound in rows) else None
        entries = [(i, j, value) for i, (row, _) in enumerate(rows) for j, value in row.items()]
        i, j, values = zip(*entries) if entries else ((), (), ())
        matrix = coo_array((values, (i, j)), shape=(len(rows), count)).tocsr()
        bounds = np.stack([np.zeros(count), upper], axis=1)
        result = linprog(objective, A_ub=matrix, b_ub=[bound for _, bound in rows], bounds=bounds, method="highs")
        if result.status == _INFEASIBLE:
            return None
        if result.status != 0:
            raise RuntimeError(f"the lower bound was not found: {result.message}")
        return max(0.0, float(result.fun) * scale)

    def _needs(self):
        """Rows: everything that backward or a recomputed operation reads is saved or recomputed."""
        analysis, nodes, storages = self.analysis, self.analysis.graph.nodes, self.analysis.graph.storages
        for storage in self.last_read:
            yield {self.saved[storage]: -1.0, self.recomputed[storages[storage].producer]: -1.0}, -1.0
        for reader, variable in self.recomputed.items():
            read = {s for source in analysis.recompute_reads(reader) for s in nodes[source].storages if s in self.saved}
            for storage in sorted(read):
                producer = storages[storage].producer
                if producer != reader:
                    yield {variable: 1.0, self.saved[storage]: -1.0, self.recomputed[producer]: -1.0}, 0.0

    def _bytes(self, limit_bytes: int):
        """Rows: at every instant the storages saved for later fit into the limit together with the live bytes."""
        for at, live_bytes in self.instants:
            if at is None:
                for_later = set(self.saved)
            else:
                touched = self.analysis.accessed[BACKWARD][self.order[at]]
                for_later = {s for s, last in self.last_read.items() if last > at}.difference(touched)
            row = {self.saved[s]: self.analysis.bytes[s] / limit_bytes for s in sorted(for_later)}
            yield row, (limit_bytes - live_bytes) / limit_bytes
