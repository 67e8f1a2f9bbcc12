"""`ackpt.compile`: wrap a model so that its training step runs a plan within a memory budget."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from ackpt.core.budget import dynamic_limit
from ackpt.core.errors import TraceError, did_you_mean, warn
from ackpt.planner.capture.dynamic_sizes import Dimension
from ackpt.planner.capture.inspection.model_checks import check_call, check_keywords, forward_names, positional_names
from ackpt.planner.capture.optimizer_state import NO_LOOP, Loop, loop_with
from ackpt.planner.choose import check_runs, default_profile, device_of_costs, options_of
from ackpt.planner.choose import plan as make_plan
from ackpt.planner.costs.devices import Device
from ackpt.planner.dynamic_plans import DynamicPlans
from ackpt.planner.parts.planned_regions import PlannedRegions
from ackpt.planner.policies import POLICIES
from ackpt.planner.policies.search.schedule_cache import Cache, cache_folder
from ackpt.planner.saved_plan import SavedPlan, saved_dimensions
from ackpt.planner.schedule.plan import Plan, check_applies
from ackpt.planner.step.call_facts import Call
from ackpt.planner.step.choices import Choose, Planner
from ackpt.planner.step.dynamic_dimensions import DynamicArgument
from ackpt.planner.step.dynamic_step import DynamicStep
from ackpt.planner.step.planned_step import PlannedStep
from ackpt.planner.step.variants import Variants

_KEYWORDS = ("budget", "policy", "plan", "differentiate", "outputs", "optimizer", "accumulation", "scaler", "dynamic")
_WORDS = ("policy", "differentiate", "outputs", "costs", "on_exceed")  # whose values are strings
_IN_PARTS = ("auto", "none", "full")  # policies of models with a scripted or compiled submodule
_KEYWORDS += ("cache", "device_profile", "costs", "regions", "on_exceed", "options")


def compile(
    model: nn.Module,
    *args: Any,
    budget: float | str | None = None,
    policy: str = "auto",
    plan: Plan | None = None,
    differentiate: Literal["loss", "all"] = "loss",
    outputs: Literal["drop", "keep"] = "drop",
    optimizer: torch.optim.Optimizer | str | None = None,
    accumulation: bool = False,
    scaler: torch.amp.GradScaler | None = None,
    options: Mapping[str, Any] | None = None,
    dynamic: DynamicArgument = None,
    cache: Cache | None = None,
    device_profile: Device | str | None = None,
    costs: Literal["rates", "measured"] = "rates",
    regions: bool | None = None,
    on_exceed: Literal["raise", "warn"] = "raise",
    **kwargs: Any,
) -> PlannedStep:
    """Return a module that runs `model`'s training step according to a plan.

    Args:
        model: an ``nn.Module``; its parameters and buffers are shared, not copied.
        args, kwargs: example inputs. They are planned for at once, before anything runs. A later call with other
            shapes, or in another mode with gradients enabled, replans under the same budget; a fraction is then
            relative to the baseline of that call.
        budget, policy: as in `ackpt.plan`; a budget is, for example, ``0.5``, ``"50%"`` or ``"6GiB"``. On a GPU, policy
            ``"auto"`` also offloads activations whose copies overlap with compute.
        options: the options of the policy, a dict such as ``{"fates": {"relu": "recomputed"}}`` for ``"manual"``.
        plan: a `Plan` of this model to run instead, made for arguments of these or other sizes. Its schedule runs at
            all sizes, within the bytes that its budget allows.
        differentiate: ``"loss"`` or ``"all"``, as in `ackpt.trace`.
        outputs: ``"drop"`` or ``"keep"``, as in `ackpt.trace`. With ``"drop"``, backward raises an error if outputs
            that are still referenced would exceed the budget.
        optimizer: the optimizer that trains the model, or the name of one in ``torch.optim`` with its default options,
            such as ``"adamw"``; its state and its step then count toward the budget.
        accumulation: whether gradients of earlier steps exist when the step runs, as in gradient accumulation; they
            then count toward the budget, in addition to those of the step. Without it, backward raises an error if
            existing gradients would exceed the budget.
        scaler: the scaler of the loss, as in ``scaler.scale(loss).backward()``; its state, the scaled loss and what it
            allocates in the optimizer's step then count toward the budget.
        dynamic: which sizes may change without a new capture. With None, the dimensions in which a second call differs
            from the first become dynamic, as in ``torch.compile``; so do those that ``torch._dynamo.mark_dynamic``
            marks. True makes all dimensions of all tensors dynamic at once, False none. A dict names dimensions of
            arguments, with bounds or None: ``{"input_ids": {1: (16, 512)}}``. The search then uses the largest sizes,
            and a training step with a size outside of the bounds raises a ValueError.
            Integers among the arguments become dynamic when they change, except with False.
        cache: a folder that stores results of searches, as in `ackpt.plan`. A second run of the same script captures
            the step, but does not search again.
        device_profile: the device whose times are minimized: a name such as ``"h200"``, or a `Device`, see
            `ackpt.planner.costs.devices`. By default the GPU that holds the tensors, or this CPU, whose rates are
            measured once per machine, see `ackpt.calibrate`.
        costs: ``"rates"`` models the time of every operation by the rates of the device. ``"measured"`` times every
            distinct operation of the model on its device in a fraction of a second; two runs may give two plans.
        regions: whether to plan the model in parts, for models that branch on values or contain a scripted or compiled
            module. None plans in parts if there is a budget and the model cannot be captured as one graph, and always
            if it contains such a module, with policy ``"auto"``, ``"none"`` or ``"full"``. True always does, False
            never. The plan is then a `RegionsPlan`: the first training step checkpoints all blocks, and from the second
            one on, as many blocks as fit are saved. A fraction is relative to the baseline that is predicted from the
            first step.
        on_exceed: with regions, what happens if a step needs more memory than its budget allows: ``"raise"`` a
            `BudgetError`, in the forward at once and in backward at its end, or ``"warn"``.

    Returns:
        A `PlannedStep`, whose ``plan`` is the `Plan`. It returns the model's outputs, with the same gradients. If no
        gradient is needed, it runs the model itself.

    Raises:
        BudgetError: if the budget is infeasible; names the smallest feasible one. Also if `plan` would exceed its own
            budget at the sizes of a call.
        TraceError: if the model cannot be captured as one graph, and is not planned in parts.
        RecordError: if the folder `cache` cannot be written.
        TypeError: for a keyword that looks like a misspelled keyword of `compile` and that the model's forward does not
            have; for a tensor or a number that was probably meant for the model, but is the value of a keyword of
            `compile`. If the model's forward has a parameter of the same name as a keyword, a warning says so.
        PlanError: if `plan` was made for another model, other arguments or another version of torch, or if it offloads
            and the model is on the CPU; names the difference.

    Example:
        >>> import torch, ackpt
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> step = ackpt.compile(model, torch.ones(4, 8), policy="full")
        >>> step(torch.ones(4, 8)).sum().backward()
        >>> step.plan.policy
        'full'
    """
    values = locals()
    _check_shared(model, args, {name: values[name] for name in _KEYWORDS})
    step = planned_step(
        model,
        budget,
        policy,
        plan,
        differentiate=differentiate,
        outputs=outputs,
        loop=loop_with(optimizer, accumulation, scaler),
        options=options,
        dynamic=dynamic,
        cache=cache,
        device_profile=device_profile,
        costs=costs,
        regions=regions,
        on_exceed=on_exceed,
    )
    _check_keywords(model, args, kwargs, policy)
    step.prepare(*args, **kwargs)
    return step


def planned_step(
    model: nn.Module,
    budget: float | str | None,
    policy: str,
    plan: Plan | None = None,
    *,
    differentiate: str = "loss",
    outputs: str = "drop",
    loop: Loop = NO_LOOP,
    options: Mapping[str, Any] | None = None,
    dynamic: DynamicArgument = None,
    cache: Cache | None = None,
    device_profile: Device | str | None = None,
    costs: Literal["rates", "measured"] = "rates",
    regions: bool | None = None,
    on_exceed: str = "raise",
    on_plan: Callable[[Plan], Any] | None = None,
) -> PlannedStep:
    """The planned step that `compile` describes, before it has seen example inputs; refuses invalid arguments.

    `on_plan`: called with every new plan before it runs.
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
    _check_regions(regions, on_exceed, plan, policy)
    dynamic_limit(budget, 0, 0)  # refuse an invalid budget before the work
    device = device_of_costs(device_profile, costs)
    planner = _Planner(budget, policy, dict(options or {}), plan, cache_folder(cache), device, regions, on_exceed)
    return PlannedStep(model, planner, differentiate, outputs, loop, dynamic, on_plan)


def _check_shared(model, args, given: Mapping[str, Any]) -> None:
    """Refuse values of keywords of `compile` that are meant for the model; warn if its forward has the same name."""
    names = forward_names(model) - set(positional_names(model, args))
    for name, value in given.items():
        default = inspect.signature(compile).parameters[name].default
        if value is default or (isinstance(value, str) and value == default):
            continue
        instead = f"pass it by position, or call ackpt.apply_budget(model, {{{name!r}: value, ...}}, budget)"
        if isinstance(value, torch.Tensor) or (name in names and name in _WORDS and not isinstance(value, str)):
            got = "a tensor" if isinstance(value, torch.Tensor) else repr(value)
            raise TypeError(
                f"{name}= is a keyword of ackpt.compile, and got {got}. If the model's forward has an argument "
                f"{name!r}, {instead}"
            )
        if name in names:
            warn(
                f"{name}={value!r} is the keyword of ackpt.compile, and the model's forward has an argument {name!r}, "
                f"too, which keeps its default: if you mean that one, {instead}"
            )


def _check_keywords(model, args, kwargs, policy: str) -> None:
    """Refuse keywords that are probably not meant for the model; every name in its forward is allowed."""
    check_keywords(model, kwargs, _KEYWORDS, "ackpt.compile")
    if misplaced := sorted((set(kwargs) - forward_names(model)) & set(options_of(policy))):
        name = misplaced[0]
        raise TypeError(f"{name!r} is an option of policy {policy!r}: give it as options={{{name!r}: ...}}")
    advice = f". The model is called with all keywords but those of ackpt.compile: {', '.join(_KEYWORDS)}."
    check_call(model, args, kwargs, advice)


def _check_options(options, plan) -> None:
    if options is not None and not isinstance(options, Mapping):
        raise TypeError(
            f"options must be a dict of options of the policy, such as {{'time_limit': 60}}, got "
            f"{type(options).__name__}"
        )
    if misplaced := sorted({"budget", "policy", "graph", "cache"} & set(options or ())):
        raise TypeError(f"{misplaced[0]!r} is not an option of a policy: pass it as a keyword of ackpt.compile")
    if foreign := sorted({"compiler", "on_plan"} & set(options or ())):
        raise TypeError(f"{foreign[0]!r} is an option of torch.compile(model, backend='ackpt', options=...)")
    if options and plan is not None:
        raise ValueError("give either options or a plan; a plan is made already")


def _check_regions(regions, on_exceed, plan, policy) -> None:
    if regions not in (None, True, False):
        raise TypeError(f"regions must be None, True or False, got {regions!r}")
    if on_exceed not in ("raise", "warn"):
        raise ValueError(f"on_exceed must be 'raise' or 'warn', got {on_exceed!r}")
    if regions and (plan is not None or policy != "auto"):
        raise ValueError("regions=True plans the model in parts: give a budget, and neither a plan nor a policy")


@dataclass(frozen=True)
class _Planner(Planner):
    """Plans a captured graph with the arguments of `compile`."""

    budget: float | str | None
    policy: str
    options: dict[str, Any]
    plan: Plan | None
    folder: Path | None
    device: Device | str | None
    regions: bool | None
    on_exceed: str

    def __call__(self, graph) -> Plan:
        if self.plan is not None:
            check_applies(graph, self.plan)
            return check_runs(graph, self.plan)
        profile = default_profile(graph, self.device)
        plan = make_plan(graph, self.budget, self.policy, profile=profile, cache=self.folder, **self.options)
        return check_runs(graph, plan)

    serves_sizes = True

    def dimensions(self, call: Call) -> set[Dimension]:
        return set() if self.plan is None else saved_dimensions(self.plan, call)

    def for_sizes(self, step: DynamicStep) -> Choose:
        if self.plan is not None:
            return SavedPlan(step, self.plan)
        return DynamicPlans(step, self.budget, self.policy, self.options, self.folder, self.device)

    @property
    def splits(self) -> bool:
        if self.regions is None:
            return self.budget is not None and self.policy == "auto"
        return self.regions

    @property
    def leaves_out(self) -> bool:
        return self.regions is not False and self.plan is None and self.policy in _IN_PARTS

    def in_parts(self, variants: Variants, refused: TraceError | str | None) -> PlannedRegions | None:
        error = refused if isinstance(refused, TraceError) else None
        splits = self.leaves_out if isinstance(refused, str) else self.splits
        if not splits or (error is not None and not error.can_split) or (refused is None and not self.regions):
            return None
        reason = error.reason if error is not None else refused or "regions=True"

        return PlannedRegions(variants, self.budget, self.policy, self.on_exceed == "warn", error, str(reason))
