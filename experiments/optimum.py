"""The optimality gaps of plans: exact on small graphs, by a lower bound on large ones.

Costs are fractions of the baseline's cost. As in the policies, a cost is a weighted sum of FLOPs and memory traffic.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ackpt import plan
from ackpt.core.errors import BudgetError
from ackpt.planner.policies import auto, full, mu_two, rotor
from ackpt.planner.policies.chains.blocks import coarse_chain, long_skips
from ackpt.planner.policies.chains.substitutes import substituted
from ackpt.planner.policies.search.frontier import Point, baseline_cost, costs, frontier, pareto
from ackpt.planner.policies.search.refinement import refined
from ackpt.planner.schedule.schedule import everything
from ackpt.planner.schedule.simulator import peak_of
from experiments.policies import ilp


class MLPBlock(nn.Module):
    """x [rows, width] -> x + MLP(norm(x)): a Transformer layer without its attention."""

    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class SmallUNet(nn.Module):
    """Images [batch, 3, height, width] -> a scalar: two scales down, two up, with skip connections."""

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
    """The cost of each policy and the lower bound, for each budget.

    Args:
        graph, profile: of the step.
        budgets: fractions of the baseline's dynamic peak.
        policies: names of policies.
        exact: also solve the integer program to optimality.

    Returns:
        A row per budget: ``budget``; ``bound``, the linear program's lower bound, None if the budget is infeasible; the
        cost of each policy, None if the policy refuses the budget. If `exact`, also ``ilp``, the cost of the integer
        program's plan, and ``ilp_bound``, its lower bound; both are None if it has no plan.
    """
    baseline = plan(graph, policy="none", profile=profile)
    unit = baseline_cost(graph, profile)
    rows = []
    for budget in budgets:
        limit = math.floor(budget * baseline.dynamic_peak_bytes)
        row: dict = {"budget": budget, "bound": None}
        if exact:
            best = ilp.solve_graph(graph, profile, limit, None)
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
    """The Pareto frontier of ``auto`` after each part of its search; the last one is the frontier that it plans from.

    Each part adds plans to the part before it. ``segments``: the baseline, and segments recomputed at once or one
    activation at a time. ``blocks``: dynamic programming over the chain, with the best options of every block.
    ``levels``: the same, with blocks of which a part remains saved after their recomputation for a later block.
    ``instead``: smaller activations saved as substitutes, such as a product instead of a sum. ``policies``: the plans
    of rotor and mu-TWO. ``refined``: plans between two neighbors on the frontier. ``evicted``: plans without
    activations that are live at a peak but not used there.
    """
    candidates = [everything(graph), full.schedule(graph, profile, None), *auto.segments(graph)]
    fronts = {"segments": pareto(graph, profile, candidates)}
    fronts["blocks"] = pareto(graph, profile, [*candidates, *_by_blocks(graph, profile, 1)])
    candidates += _by_blocks(graph, profile, None)
    fronts["levels"] = pareto(graph, profile, candidates)
    for skips in {frozenset(): None, long_skips(graph): None}:
        candidates += substituted(graph, coarse_chain(graph, skips), profile)
    fronts["instead"] = pareto(graph, profile, candidates)
    candidates += [*rotor.candidates(graph, profile), *mu_two.evictions(graph, replace(profile, swap_seconds=None))]
    fronts["policies"] = pareto(graph, profile, candidates)
    points = fronts["policies"]
    candidates = [point.schedule for point in points]
    candidates += refined(graph, points, costs(graph, profile), profile.workspace_bytes)
    fronts["refined"] = pareto(graph, profile, candidates)
    fronts["evicted"] = frontier(graph, profile, auto.candidates)
    return fronts


def least_costs(graph, profile, points: list[Point], budgets) -> dict[float, float | None]:
    """``{budget: cost of the cheapest point within it}``; None if no point is."""
    unit = baseline_cost(graph, profile)
    peak = peak_of(graph, everything(graph), profile.workspace_bytes)
    cost_of: dict[float, float | None] = {}
    for budget in budgets:
        limit = math.floor(budget * peak)
        cost = min((point.cost for point in points if point.peak_bytes <= limit), default=None)
        cost_of[budget] = None if cost is None else cost / unit
    return cost_of


def _by_blocks(graph, profile, partials: int | None) -> list:
    """The schedules of auto's dynamic programming, with at most `partials` partly saved versions of each block."""
    return [
        schedule
        for skips in {frozenset(): None, long_skips(graph): None}
        for schedule in auto.chain_schedules(graph, coarse_chain(graph, skips), profile, partials)
    ]
