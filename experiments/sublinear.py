"""Chains of equal and of unequal blocks, and the policies for chains on them and on any model.

`run` measures a chain of equal blocks by one policy; `within` and `lowest` plan any model.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn

from ackpt import plan
from ackpt.core.errors import BudgetError
from ackpt.metering.meter import Measurement, measure
from ackpt.planner.costs.profiles import profile as profiled
from ackpt.planner.policies.chains.blocks import fine_chain
from ackpt.planner.schedule.plan import Plan
from ackpt.planner.step.planned_step import PlannedStep
from experiments.policies import PAPERS, revolve


class Block(nn.Module):
    """x [rows, width] -> x + linear(tanh(x)); backward reads tanh(x) and the weight."""

    def __init__(self, width: int):
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)

    def forward(self, x):
        return x + self.linear(x.tanh())


class Narrowing(nn.Module):
    """Two neighbouring pairs of rows become one row of twice the width: [rows, width] -> [rows / 4, 2 width]."""

    def __init__(self, width: int):
        super().__init__()
        self.linear = nn.Linear(4 * width, 2 * width, bias=False)

    def forward(self, x):
        return self.linear(x.view(len(x) // 4, -1).tanh())


class Chain(nn.Module):
    """A sum over a sequence of blocks: a scalar loss."""

    def __init__(self, *blocks: nn.Module):
        super().__init__()
        self.blocks = nn.Sequential(*blocks)

    def forward(self, x):
        return self.blocks(x).sum()


def pyramid(stages: int, blocks: int, width: int) -> Chain:
    """Stages of `blocks` blocks; each stage has half the activation bytes of the last one and the same FLOPs."""
    layers: list[nn.Module] = []
    for stage in range(stages):
        layers += [Narrowing(width * 2 ** (stage - 1))] if stage else []
        layers += [Block(width * 2**stage) for _ in range(blocks)]
    return Chain(*layers)


class Run(NamedTuple):
    """A planned step of a chain.

    ``live``: the number of activations that fit in the peak next to the gradients of parameters; ``rest_bytes``:
    the rest of the peak; ``recomputed_blocks``: the matrix products that were recomputed.
    """

    live: int
    rest_bytes: int
    recomputed_blocks: int


def run(blocks: int, policy: str, snapshots: int | None = None, *, rows: int = 4096, width: int = 4) -> Run:
    """Measure a step of a chain of equal blocks on fp32 [rows, width] by a policy for chains.

    Args:
        snapshots: of the policy ``"revolve"``; None takes the policy's plan without a budget.
    """
    torch.manual_seed(0)
    chain, x = Chain(*(Block(width) for _ in range(blocks))), torch.randn(rows, width)
    measurement = measured(chain, PlannedStep(chain, partial(_planned, policy, snapshots)), (x,))
    gradients = measurement.timeline.at(measurement.timeline.peak_index).get("gradients", 0)
    live, rest = divmod(measurement.dynamic_peak_bytes - gradients, x.nbytes)
    assert measurement.flops is not None
    product = 2 * rows * width**2  # FLOPs of a block's forward; the first block's backward has one product
    again, left = divmod(measurement.flops - (3 * blocks - 1) * product, product)
    assert left == 0, "only matrix products of blocks count"
    return Run(live, rest, again)


def measured(model: nn.Module, step, args=(), kwargs=None) -> Measurement:
    """Bytes and FLOPs of a step ``step(*args, **kwargs).backward()`` on the CPU that begins without gradients."""
    kwargs = kwargs or {}

    def once():
        model.zero_grad()
        step(*args, **kwargs).backward()

    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
    return measure(once, "cpu", resident=(model, *tensors), repeats=0)


def _planned(policy: str, snapshots: int | None, graph) -> Any:  # whatever has a schedule
    profile = profiled(graph)
    if snapshots is None:
        return plan(graph, policy=PAPERS.get(policy, policy), profile=profile)
    return SimpleNamespace(schedule=revolve._binomial(graph, fine_chain(graph), snapshots))


def within(graph, profile, budgets: Sequence[float], policies: Sequence[str]) -> list[dict]:
    """Peak and cost of the plans of several policies for a graph within each budget.

    Args:
        budgets: fractions of the dynamic peak without checkpointing.

    Returns:
        One row for each policy and budget: ``policy``, ``budget``, ``peak``, the simulated dynamic peak as a fraction
        of the baseline's, and ``cost``, see `Plan`. The last two are None if the budget is infeasible for the policy.
    """
    rows = []
    for policy in policies:
        for budget in budgets:
            row = {"policy": policy, "budget": budget, "peak": None, "cost": None}
            try:
                planned = plan(graph, budget, PAPERS.get(policy, policy), profile=profile)
            except BudgetError:
                pass
            else:
                row |= {"peak": planned.dynamic_peak_bytes / planned.baseline_dynamic_peak_bytes, "cost": planned.cost}
            rows.append(row)
    return rows


def lowest(graph, profile, policy: str) -> Plan:
    """The plan of `policy` with the lowest peak."""
    chosen = PAPERS.get(policy, policy)
    try:
        return plan(graph, "1B", chosen, profile=profile)
    except BudgetError as error:
        return plan(graph, error.least_bytes, chosen, profile=profile)
