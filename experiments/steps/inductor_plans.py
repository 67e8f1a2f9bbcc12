"""Runs of plans whose steps Inductor compiles: the backend ``"ackpt"`` of ``torch.compile`` plans and compiles them."""

from __future__ import annotations

import torch

from ackpt.core.errors import BudgetError
from ackpt.planner.costs.devices import Device, with_all_dtypes
from ackpt.planner.policies.search.frontier import FLOPS_PER_BYTE
from ackpt.planner.schedule.plan import Plan
from experiments.steps.workload import Workload

from .frontier_runs import Runs, promised
from .peers import fresh_dynamo

# Plans for Inductor have rates; at these, a byte of traffic takes as long as ten FLOPs.
_COUNTED = with_all_dtypes(Device("ten FLOPs a byte", 0, {"float32": float(FLOPS_PER_BYTE)}, 1.0, 1.0, "a unit"))


def planned_by_inductor(work: Workload, runs: Runs, limit: int | None, policy: str, costs: str) -> dict:
    """The results of a plan within `limit` bytes of memory, or only its ``least_bytes`` if the budget is infeasible.

    Args:
        costs: ``"counted"`` or ``"rates"``, as in the experiment ``frontier``.
    """
    plans: list[Plan] = []
    options = {"compiler": "inductor", "budget": limit, "policy": policy, "on_plan": plans.append}
    options["device_profile"] = _COUNTED if costs == "counted" else None
    with fresh_dynamo():
        try:
            results = runs.generated(torch.compile(work.model, backend="ackpt", options=options))
        except BudgetError as error:
            return {"least_bytes": error.least_bytes}
    (planned,) = plans
    return promised(planned) | results
