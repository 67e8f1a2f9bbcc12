"""`ackpt.compile`: a model whose step keeps a budget."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from ackpt.capture.inspection.model_checks import check_keywords, forward_names
from ackpt.planning.plan import Plan
from ackpt.planning.plan_check import check_applies
from ackpt.planning.planned_step import PlannedStep

from .budget import dynamic_limit
from .errors import TraceError, did_you_mean
from .planner import check_runs, options_of
from .planner import plan as make_plan
from .policies import POLICIES

_KEYWORDS = ("budget", "policy", "plan", "differentiate", "optimizer", "options")


def compile(
    model: nn.Module,
    *args: Any,
    budget: float | str | None = None,
    policy: str = "auto",
    plan: Plan | None = None,
    differentiate: Literal["loss", "all"] = "loss",
    optimizer: torch.optim.Optimizer | None = None,
    options: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> PlannedStep:
    """`model` as a module whose training step runs as planned.

    Args:
        model: an ``nn.Module``; its parameters and buffers are shared, not copied.
        args, kwargs: what it will be called with; the plan is made for them now, before anything runs. Called with
            other shapes later, as by a last batch that is smaller, or in another mode with gradients on, the step is
            captured and planned anew under the same budget. A fraction is then one of what that call allocates.
        budget, policy: as in `ackpt.plan`: ``0.5`` or ``"50%"``, ``"6GiB"``.
        options: a dict of options of the policy, such as ``{"fates": {"relu": "recomputed"}}`` for ``"manual"``.
        plan: a `Plan` to run instead, made for this model and these arguments. It holds for no others: a last batch
            that is smaller is a `PlanError` when it comes. Leave it out (``drop_last=True`` in a DataLoader), or make
            a second step with a plan for it.
        differentiate: ``"loss"`` or ``"all"``, as in `ackpt.trace`.
        optimizer: what trains the model; its state and step are then part of the budget.

    Returns:
        A `PlannedStep`; its ``plan`` is the `Plan`. It returns what the model returns, with the same gradients, and
        runs the model itself where no gradient is asked for.

    Raises:
        BudgetError: if the budget cannot be kept; names the smallest that can.
        TraceError: if the model cannot be captured as one graph.
        TypeError: for keywords that are nearly those of `compile` and that the model's forward does not name.
        PlanError: if `plan` was made for another model, other arguments or another version of torch, or if the plan
            offloads and the model is on the CPU; says what differs.

    Example:
        >>> import torch, ackpt
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> step = ackpt.compile(model, torch.ones(4, 8), policy="full")
        >>> step(torch.ones(4, 8)).sum().backward()
        >>> step.plan.policy
        'full'
    """
    if plan is not None and not isinstance(plan, Plan):
        raise TypeError(
            f"plan must be an ackpt.Plan, got {type(plan).__name__}; read a file with ackpt.Plan.load(path)"
        )
    if plan is not None and budget is not None:
        raise ValueError("give either a budget or a plan; a plan has its budget")
    if plan is not None and policy not in ("auto", plan.policy):
        raise ValueError(f"give either a policy or a plan; this plan was made by policy {plan.policy!r}")
    if policy not in list(POLICIES):
        close = did_you_mean(policy, POLICIES)
        raise ValueError(f"policy {policy!r} is not known{close}; the policies are {', '.join(POLICIES)}")
    _check_options(options, plan)
    _check_keywords(model, kwargs, policy)
    dynamic_limit(budget, 0, 0)  # what is no budget is found before the work
    step = PlannedStep(model, _Planner(budget, policy, dict(options or {}), plan), differentiate, optimizer)
    try:
        step.prepare(*args, **kwargs)
    except TraceError as error:
        if "unexpected keyword argument" not in str(error):
            raise
        raise TraceError(
            f"{error}. The model is called with all keywords but those of ackpt.compile: {', '.join(_KEYWORDS)}, "
            "a dict of options of the policy."
        ) from error
    return step


def _check_keywords(model, kwargs, policy: str) -> None:
    """Refuse keywords that were hardly meant for the model; what its forward names is the model's."""
    check_keywords(model, kwargs, _KEYWORDS, "ackpt.compile")
    if own := sorted((set(kwargs) - forward_names(model)) & set(options_of(policy))):
        raise TypeError(f"{own[0]!r} is an option of policy {policy!r}: give it as options={{{own[0]!r}: ...}}")


def _check_options(options, plan) -> None:
    if options is not None and not isinstance(options, Mapping):
        raise TypeError(
            f"options must be a dict of options of the policy, such as {{'time_limit': 60}}, got "
            f"{type(options).__name__}"
        )
    if own := sorted({"budget", "policy", "graph"} & set(options or ())):
        raise TypeError(f"{own[0]!r} is no option of a policy: give it beside the options")
    if foreign := sorted({"compiler", "on_plan"} & set(options or ())):
        raise TypeError(f"{foreign[0]!r} is an option of torch.compile(model, backend='ackpt', options=...)")
    if options and plan is not None:
        raise ValueError("give either options or a plan; a plan is made already")


@dataclass(frozen=True)
class _Planner:
    """What plans a graph that was captured, as `compile` was told to."""

    budget: float | str | None
    policy: str
    options: dict[str, Any]
    plan: Plan | None

    def __call__(self, graph) -> Plan:
        if self.plan is None:
            return check_runs(graph, make_plan(graph, self.budget, self.policy, **self.options))
        check_applies(graph, self.plan)
        return check_runs(graph, self.plan)
