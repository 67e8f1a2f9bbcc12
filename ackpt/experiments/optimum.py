"""How far are plans from the least that must run again? The exact answer on small graphs, a bound on large ones.

Costs are shares of the baseline's, of FLOPs and traffic weighed against each other as the policies do.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ackpt.errors import BudgetError
from ackpt.planner import plan
from ackpt.planning.schedule import everything
from ackpt.planning.simulator import peak_of
from ackpt.policies import auto, full, ilp_graph, mu_two, rotor_chain
from ackpt.policies.chains.blocks import coarse_chain
from ackpt.policies.chains.cut_points import long_skips
from ackpt.policies.chains.substitutes import substituted
from ackpt.policies.search.frontier import Point, frontier, pareto
from ackpt.policies.search.recompute_costs import costs, step_cost
from ackpt.policies.search.refinement import refined


class MLPBlock(nn.Module):
    """x [rows, width] -> x + MLP(norm(x)), the half of a Transformer's layer that has no attention."""

    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class SmallUNet(nn.Module):
    """Images [batch, 3, height, width] -> a scalar: two scales down, two up, the way up reading the way down."""

    def __init__(self):
        super().__init__()
        self.down1, self.down2, self.middle = _conv(3, 4), _conv(4, 8), _conv(8, 8)
        self.up2, self.up1 = _conv(16, 4), _conv(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        fine = F.gelu(self.down1(x))
        coarse = F.gelu(self.down2(F.max_pool2d(fine, 2)))
        x = F.gelu(self.middle(F.max_pool2d(coarse, 2)))
        x = F.gelu(self.up2(torch.cat([F.interpolate(x, scale_factor=2.0), coarse], 1)))
        return self.up1(torch.cat([F.interpolate(x, scale_factor=2.0), fine], 1)).square().mean()


def _conv(inputs: int, outputs: int) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, padding=1)


def distances(graph, profile, budgets, policies, *, exact: bool = False) -> list[dict]:
    """What the policies pay within each budget, and what must be paid.

    Args:
        graph, profile: of the step.
        budgets: shares of the baseline's dynamic peak.
        policies: names of policies.
        exact: solve the integer program, too, until it is optimal.

    Returns:
        A row per budget: ``budget``; ``bound``, the linear program's, None where nothing fits; the cost by each policy,
        None where it refuses the budget; and, if exact, ``ilp`` with ``ilp_bound``, below which no plan of the integer
        program lies, both None where it has none.
    """
    plain = plan(graph, policy="none", profile=profile)
    unit = step_cost(everything(graph), costs(graph, profile)) or 1.0
    rows = []
    for budget in budgets:
        limit = math.floor(budget * plain.dynamic_peak_bytes)
        row: dict = {"budget": budget, "bound": None}
        if exact:
            best = ilp_graph.solve(graph, profile, limit, None)
            fits = peak_of(graph, best.schedule, profile.workspace_bytes) <= limit
            row["ilp"], row["ilp_bound"] = (best.cost / unit, best.lower_bound / unit) if fits else (None, None)
        for policy in policies:
            try:
                planned = plan(graph, budget, policy, profile=profile)
            except BudgetError:
                row[policy] = None
            else:
                row |= {policy: planned.cost, "bound": planned.lower_bound}
        rows.append(row)
    return rows


def parts_of_auto(graph, profile) -> dict[str, list[Point]]:
    """The front of ``auto`` as it grows with each part of the search; the last is the front that it plans from.

    ``segments``: the baseline, and segments run again as a whole or value by value; ``blocks``: every block by the
    best of its own options, and dynamic programming over the chain; ``levels``: the same with blocks of which a part
    stays when they are run for a later one; ``instead``: and smaller values saved instead, such as a product instead of
    a sum; ``policies``: and the plans of rotor and mu-TWO; ``refined``: and what lies between two neighbours;
    ``evicted``: and plans without the activations that only wait at a peak.
    """
    candidates = [everything(graph), full.schedule(graph, profile, None), *auto.segments(graph)]
    fronts = {"segments": pareto(graph, profile, candidates)}
    fronts["blocks"] = pareto(graph, profile, [*candidates, *_by_blocks(graph, profile, 1)])
    candidates += _by_blocks(graph, profile, None)
    fronts["levels"] = pareto(graph, profile, candidates)
    for skips in {frozenset(): None, long_skips(graph): None}:
        candidates += substituted(graph, coarse_chain(graph, skips), profile, costs(graph, profile))
    fronts["instead"] = pareto(graph, profile, candidates)
    candidates += [
        *rotor_chain.candidates(graph, profile),
        *mu_two.evictions(graph, replace(profile, swap_seconds=None)),
    ]
    fronts["policies"] = pareto(graph, profile, candidates)
    points = fronts["policies"]
    candidates = [point.schedule for point in points]
    candidates += refined(graph, points, costs(graph, profile), profile.workspace_bytes)
    fronts["refined"] = pareto(graph, profile, candidates)
    fronts["evicted"] = frontier(graph, profile, auto.candidates)
    return fronts


def least_costs(graph, profile, points: list[Point], budgets) -> dict[float, float | None]:
    """``{budget: cost of the cheapest point of a front that fits}``; None if none does."""
    unit = step_cost(everything(graph), costs(graph, profile)) or 1.0
    peak = peak_of(graph, everything(graph), profile.workspace_bytes)
    cost_of: dict[float, float | None] = {}
    for budget in budgets:
        limit = math.floor(budget * peak)
        cost = min((point.cost for point in points if point.peak_bytes <= limit), default=None)
        cost_of[budget] = None if cost is None else cost / unit
    return cost_of


def _by_blocks(graph, profile, partials: int | None) -> list:
    """The schedules of auto's dynamic programming, with at most so many partial savings of blocks."""
    memory_bytes = peak_of(graph, everything(graph), profile.workspace_bytes)
    return [
        schedule
        for skips in {frozenset(): None, long_skips(graph): None}
        for schedule in auto.chain_schedules(
            graph, coarse_chain(graph, skips), profile, costs(graph, profile), memory_bytes, partials
        )
    ]
