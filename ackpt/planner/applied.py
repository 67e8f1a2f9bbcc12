"""`ackpt.apply_budget`: make a model train within a memory budget without replacing the model object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import nn

from ackpt.core.errors import warn
from ackpt.planner.capture.inspection.calls import as_trainer_calls, call_arguments
from ackpt.planner.capture.optimizer_state import loop_with
from ackpt.planner.compiled import planned_step
from ackpt.planner.costs.devices import Device
from ackpt.planner.policies.search.schedule_cache import Cache
from ackpt.planner.step.dynamic_dimensions import DynamicArgument
from ackpt.planner.step.planned_step import PlannedStep, in_place_of, put_in_place, take_away, without_budget


def apply_budget(
    model: nn.Module,
    batch: Any,
    budget: float | str | None = None,
    *,
    policy: str = "auto",
    optimizer: torch.optim.Optimizer | str | None = None,
    accumulation: bool = False,
    scaler: torch.amp.GradScaler | None = None,
    differentiate: Literal["loss", "all"] = "loss",
    outputs: Literal["drop", "keep"] = "drop",
    options: Mapping[str, Any] | None = None,
    dynamic: DynamicArgument = None,
    cache: Cache | None = None,
    device_profile: Device | str | None = None,
    costs: Literal["rates", "measured"] = "rates",
    regions: bool | None = None,
    on_exceed: Literal["raise", "warn"] = "raise",
) -> PlannedStep:
    """Make `model` train within a memory budget, in place: every call that needs gradients runs as planned.

    The model keeps its class, its attributes and methods, and its state_dict. Evaluation and ``generate`` run without
    the plan, and so do copies of the model and models loaded from its pickle. In planned steps, forward hooks of the
    model and its modules run only during the capture; a hook that changes values is refused. `remove_budget` removes
    the budget, and a second budget replaces the first.

    Args:
        model: an ``nn.Module``.
        batch: example inputs: a dict of keyword arguments, a tuple or list of positional ones, or one tensor. They are
            planned for at once. Later batches may have other sizes, as in `ackpt.compile`. If the program has imported
            the Trainer of transformers, the call that the Trainer makes for this batch is planned.
        budget: the upper bound on the peak; None for no bound, of which policy ``"auto"`` warns. An int or a string
            such as ``"22GiB"``: bytes of the whole peak, that is parameters, buffers, inputs, optimizer state and
            everything that the step allocates. A float in (0, 1] or a string such as ``"50%"``: a fraction of the
            baseline's dynamic peak.
        policy, optimizer, accumulation, scaler, differentiate, outputs, options: as in `ackpt.compile`.
        dynamic, cache, device_profile, costs, regions, on_exceed: as in `ackpt.compile`.

    Returns:
        The `PlannedStep`, with its ``plan``, ``history`` and ``prepare``. Keep calling `model` itself.

    Raises:
        BudgetError, TraceError, RecordError, TypeError: as in `ackpt.compile`; the model is then unchanged.

    Example:
        >>> import torch, ackpt
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> step = ackpt.apply_budget(model, torch.ones(4, 8), budget="100%")
        >>> model(torch.ones(4, 8)).sum().backward()
        >>> step.plan.recompute_flops, type(model).__name__
        (0, 'Sequential')
    """
    args, kwargs = call_arguments(batch)
    kwargs = as_trainer_calls(model, kwargs) if isinstance(model, nn.Module) else kwargs
    with without_budget(model):
        step = planned_step(
            model,
            budget=budget,
            policy=policy,
            loop=loop_with(optimizer, accumulation, scaler),
            differentiate=differentiate,
            outputs=outputs,
            options=options,
            dynamic=dynamic,
            cache=cache,
            device_profile=device_profile,
            costs=costs,
            regions=regions,
            on_exceed=on_exceed,
        )
        step.prepare(*args, **kwargs)
    if budget is None and policy == "auto":
        warn(
            "apply_budget without a budget plans the step for any peak, and recomputes nothing: give budget='22GiB', "
            "bytes of the whole peak, or budget='50%' of what the step allocates without ackpt"
        )
    put_in_place(step)
    torch._dynamo.reset()  # what was compiled before has the model's own operations in it
    return step


def remove_budget(model: nn.Module) -> None:
    """Undo `apply_budget`: calls of `model` run the model itself again.

    Raises:
        ValueError: if `model` has no budget.

    Example:
        >>> import torch, ackpt
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> step = ackpt.apply_budget(model, torch.ones(4, 8), budget="100%")
        >>> ackpt.remove_budget(model)
        >>> model(torch.ones(4, 8)).sum().backward()
        >>> len(step.history)
        1
    """
    if in_place_of(model) is None:
        raise ValueError(
            f"this {type(model).__name__} has no budget: give the object that ackpt.apply_budget was called with, "
            "which is the one inside of a wrapper such as DistributedDataParallel"
        )
    take_away(model)
