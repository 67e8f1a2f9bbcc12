"""The public functions of the planner: `compile`, `apply_budget`, `remove_budget` and `plan`.

All but `remove_budget` make a `Request` from their keywords, and the `Request` checks them. `compile` and
`apply_budget` pass it to a `PlannedStep`, `plan` to `ackpt.planner.choose.plan_by_policy`.
"""

from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any, Literal

import torch
from torch import nn

from ackpt.checkpointing.standing_in import remove_from
from ackpt.core.errors import did_you_mean, warn
from ackpt.planner.capture.inspection.calls import as_trainer_calls, call_arguments
from ackpt.planner.capture.inspection.model_checks import forward_names, is_sharded
from ackpt.planner.capture.joint_graph import JointGraph
from ackpt.planner.capture.optimizer_state import OutsideLoss, inputs_of
from ackpt.planner.choose import plan_by_policy
from ackpt.planner.costs.devices import Device
from ackpt.planner.costs.profiles import Profile
from ackpt.planner.policies import Policy
from ackpt.planner.policies.search.schedule_cache import Cache
from ackpt.planner.request import DynamicArgument, Request, refuse_misplaced_keywords, refuse_values_for_the_model
from ackpt.planner.schedule.plan import Plan
from ackpt.planner.step.planned_step import PlannedStep, in_place_of, put_in_place, without_budget

_MISSING: Any = object()


def compile(
    model: nn.Module,
    *args: Any,
    budget: float | str | None = None,
    slowdown: float | str | None = None,
    policy: Policy = "auto",
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
    regions: bool | None = None,
    on_exceed: Literal["raise", "warn"] = "raise",
    chunk_head: bool | Literal["auto"] = False,
    **kwargs: Any,
) -> PlannedStep:
    """Return a module that runs `model`'s training step according to a plan.

    Args:
        model: an ``nn.Module``; its parameters and buffers are shared, not copied.
        args, kwargs: example inputs. The step is planned for them at once, before anything runs. A later call with
            other shapes, or in another mode with gradients enabled, replans under the same budget; a fraction is then
            relative to the baseline of that call.
        budget, policy: as in `ackpt.plan`; a budget is, for example, ``0.5``, ``"50%"`` or ``"6GiB"``. On a GPU, policy
            ``"auto"`` also offloads activations whose copies overlap with compute.
        slowdown: as in `ackpt.plan`: the time that the plan may add, such as ``0.1`` or ``"10%"`` of the baseline's.
            Without a budget, the plan has the lowest peak within it.
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
        regions: whether to plan the model in parts, for models that branch on values or contain a scripted or compiled
            module. With None, a model that contains such a module is planned in parts if the policy is ``"auto"``,
            ``"none"`` or ``"full"``, and any other model if it cannot be captured as one graph, the policy is
            ``"auto"`` and there is a budget. True always plans in parts, False never. The plan is then a
            `RegionsPlan`: the first training step checkpoints all blocks, and from the second one on, as many blocks as
            fit are saved. A fraction is relative to the baseline that is predicted from the first step.
        on_exceed: whether to ``"raise"`` a `BudgetError` or to ``"warn"`` if a step needs more memory than its budget
            allows, because of earlier forwards, outputs or gradients, or with regions because of its values. With
            regions, the error in backward is raised at its end. A fraction refers to the baseline of one forward, so
            earlier forwards that exceed it are always a warning.
        chunk_head: whether the head of a language model, from its last matrix product to the loss, runs in chunks of
            tokens, forward and backward of a chunk together: the logits then never exist as a whole, and nothing runs
            twice (except the head's forward, if a token's gradient depends on other tokens). With True, in the fewest
            chunks, at least 2, with which the policy keeps the budget; with ``"auto"``, in chunks only if the policy
            cannot keep the budget without. Loss and gradients then differ from eager's by roundings of sums over
            tokens, as ``plan.note`` says, and reading the logits that the model returns raises an error. Each size is
            captured separately.

    Returns:
        A `PlannedStep`, whose ``plan`` is the `Plan`. It returns the model's outputs, with the same gradients. If no
        gradient is needed, it runs the model itself. Hooks of the model run as in `apply_budget`.

    Raises:
        BudgetError: if the budget is infeasible; names the smallest feasible one. Also if `plan` would exceed its own
            budget at the sizes of a call.
        TraceError: if the model cannot be captured as one graph, and is not planned in parts; also if `chunk_head`
            meets an operation that combines the logits of different tokens, which the error names.
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
    given = {name: value for name, value in locals().items() if name in _DEFAULTS}
    refuse_values_for_the_model(model, args, given, _DEFAULTS)
    request = Request.from_keywords(**given)
    step = PlannedStep(model, request)
    refuse_misplaced_keywords(model, args, kwargs, request, _DEFAULTS)
    step.prepare(*args, **kwargs)
    return step


_KEYWORDS = (each for each in signature(compile).parameters.values() if each.kind is each.KEYWORD_ONLY)
_DEFAULTS = {each.name: each.default for each in _KEYWORDS}


def apply_budget(
    model: nn.Module,
    batch: Any = _MISSING,
    *others: Any,
    budget: float | str | None = None,
    slowdown: float | str | None = None,
    policy: Policy = "auto",
    plan: Plan | None = None,
    optimizer: torch.optim.Optimizer | str | None = None,
    accumulation: bool = False,
    scaler: torch.amp.GradScaler | None = None,
    differentiate: Literal["loss", "all"] = "loss",
    outputs: Literal["drop", "keep"] = "drop",
    options: Mapping[str, Any] | None = None,
    dynamic: DynamicArgument = None,
    cache: Cache | None = None,
    device_profile: Device | str | None = None,
    regions: bool | None = None,
    on_exceed: Literal["raise", "warn"] = "raise",
    chunk_head: bool | Literal["auto"] = False,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    **inputs: Any,
) -> PlannedStep:
    """Make `model` train within a memory budget, in place: every call that needs gradients runs as planned.

    This includes calls of ``forward``, from methods of the model, from a ``__call__`` of its class, and from libraries
    that replace ``forward`` on the instance or the class. The model keeps its class, its attributes and methods, and
    its state_dict. Evaluation and ``generate`` run without the plan, and so do copies of the model and models loaded
    from its pickle. Hooks of the model run in every step, outside the plan; those of its submodules run only during the
    capture. If such a hook changes values outside of tensors, the model is planned in parts. `remove_budget` removes
    the budget, and a second budget replaces the first.

    After ``fully_shard`` on blocks and model (FSDP2), call it on all ranks: each block is planned inside FSDP's hooks,
    each rank for its own batch. All ranks raise an error if one of them has no plan within the budget.

    Args:
        model: an ``nn.Module``.
        batch: example inputs of the model's forward: a dict of keyword arguments, a tuple or list of positional ones,
            or one tensor. The step is planned for them at once. Later batches may have other sizes, as in
            `ackpt.compile`. If the program has imported the Trainer of transformers, the call that the Trainer makes
            for this batch is planned.
        others: the positional inputs after the first, as in ``apply_budget(model, x, y, budget=...)``; a single number
            or string is the budget.
        budget: the upper bound on the peak; None for no bound, which gives a warning with policy ``"auto"`` if there
            is no slowdown either. An int or a string such as ``"22GiB"``: bytes of the whole peak, that is parameters,
            buffers, inputs, optimizer state and everything that the step allocates. A float in (0, 1] or a string such
            as ``"50%"``: a fraction of the baseline's dynamic peak. ``"22GiB reserved"`` bounds what the caching
            allocator of the GPU reserves, for a model planned as one graph.
        slowdown, policy, plan, optimizer, accumulation, scaler, differentiate, outputs, options: as in `ackpt.compile`.
        dynamic, cache, device_profile, regions, on_exceed, chunk_head: as in `ackpt.compile`.
        loss: the loss that the training loop computes, a function of the model's outputs and the batch; its bytes, of
            forward and backward, then count toward the budget. It runs once, on tensors without data, and may be
            any function that allocates as many bytes as yours. The model gets the part of `batch` that its forward
            takes. Each size is captured separately.
        inputs: refused; the inputs of the model are one batch.

    Returns:
        The `PlannedStep`, after ``fully_shard`` a `ShardedStep`, with its ``plan``, ``history`` and ``prepare``. Keep
        calling `model`.

    Raises:
        BudgetError, TraceError, RecordError, PlanError, TypeError: as in `ackpt.compile`; the model is then unchanged.

    Example:
        >>> import torch, ackpt
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> step = ackpt.apply_budget(model, torch.ones(4, 8), budget="100%")
        >>> model(torch.ones(4, 8)).sum().backward()
        >>> step.plan.recompute_flops, type(model).__name__
        (0, 'Sequential')
    """
    if len(others) == 1 and budget is None and isinstance(others[0], (int, float, str)):
        budget, others = others[0], ()
    given = {name: value for name, value in locals().items() if name in _DEFAULTS}
    if batch is _MISSING or inputs:
        raise TypeError(f"apply_budget() {_not_a_batch(model, inputs)}")
    batch = (batch, *others) if others else batch
    taken = batch if loss is None else inputs_of(model, batch)
    outside = None if loss is None else OutsideLoss(loss, batch, taken)
    request = Request.from_keywords(**given, loss=outside)
    args, kwargs = call_arguments(taken)
    kwargs = as_trainer_calls(model, kwargs) if isinstance(model, nn.Module) else kwargs
    with without_budget(model):
        step = step_of(model, request)
        step.prepare(*args, **kwargs)
    if budget is None and slowdown is None and plan is None and policy == "auto":
        warn(
            "apply_budget without a budget plans the step for any peak, and recomputes nothing: give budget='22GiB', "
            "bytes of the whole peak, budget='50%' of what the step allocates without ackpt, or slowdown='10%'"
        )
    put_in_place(step)
    torch._dynamo.reset()  # what was compiled before has the model's own operations in it
    return step


def step_of(model: nn.Module, request: Request) -> Any:
    """The step that `apply_budget` puts in place: a `PlannedStep`, or a `ShardedStep` after ``fully_shard``."""
    if not is_sharded(model):
        return PlannedStep(model, request)
    from ackpt.planner.sharding.sharded_step import ShardedStep  # which needs torch.distributed

    return ShardedStep(model, request)


def _not_a_batch(model, inputs: Mapping[str, Any]) -> str:
    """What is wrong with arguments of `apply_budget`, among them the keywords `inputs`, and what to do."""
    if not inputs:
        return "got no batch: write apply_budget(model, batch, budget=...)"
    foreign = [name for name in inputs if name not in forward_names(model)]
    name = next(iter([*foreign, *inputs]))
    hint = did_you_mean(name, _DEFAULTS) if foreign else ""
    hint = hint or "; pass the batch as one argument, such as a dict: apply_budget(model, batch, budget=...)"
    return f"got an unexpected keyword argument {name!r}{hint}"


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
    remove_from(model)


def plan(
    graph: JointGraph,
    budget: float | str | None = None,
    policy: Policy = "auto",
    *,
    slowdown: float | str | None = None,
    profile: Profile | None = None,
    cache: Cache | None = None,
    **options: Any,
) -> Plan:
    """Return a plan of `graph` whose peak is within `budget`.

    Args:
        graph: from `ackpt.trace`.
        budget: the upper bound on the peak; None for no bound. A float in (0, 1] or a string such as ``"50%"``: a
            fraction of the baseline's dynamic peak. An int or a string such as ``"6GiB"``: bytes of the whole peak,
            that is parameters, buffers, inputs, optimizer state and everything that the step allocates.
        policy: the policy that chooses the schedule: the cheapest of its schedules whose simulated peak is within the
            budget. The policy may also be a function of your own, ``schedule(graph, profile, limit_bytes, **options)``,
            which returns a `Schedule`; the plan has its name.

            ``"auto"``, the default, searches for the cheapest plan. It recomputes activations, packs dropout masks
            where that is cheaper than drawing them again, and offloads if `profile` has times of copies to the host and
            the copies overlap with compute. ``"none"`` saves everything that backward reads. ``"full"`` is per-block
            checkpointing: it saves single tensors between blocks. ``"manual"`` takes fates by the names of nodes:
            ``fates={"relu": "recomputed", "addmm": "saved"}``. It also takes ``"packed"`` for dropout masks, and
            ``"offloaded"`` if `profile` has times of copies to the host.

            ``"selective"`` checkpoints repeated blocks as transformers and torchtitan do, without a search. For its
            options ``every_n_layers``, ``save`` and ``offload`` see `ackpt.planner.policies.selective`.

            Two policies are from papers. ``"rotor"`` finds the best schedule of a chain of blocks with single tensors
            between them. ``"mu-two"`` takes any graph: it drops one activation after the other, or offloads it if
            `profile` has times of copies.
        slowdown: the cost that the plan may add, as a fraction of the baseline's: ``0.1`` and ``"10%"`` allow a step
            whose modeled time is 1.1 times the baseline's. Without a budget, the plan of policy ``"auto"`` with the
            lowest peak within it; with one, the budget is kept, and a plan that adds more is refused. See `Plan.cost`.
        profile: costs per node, from `ackpt.profile`. By default, times at the rates of the GPU or CPU that holds the
            tensors; see `ackpt.calibrate` for a CPU. For real tensors on the CPU, the workspace of every operation is
            measured by running each distinct operation once. Without data it counts as 0, so that the peak on a CPU may
            be higher by some bytes: give ``ackpt.profile(graph, workspace="measured")``.
        cache: a folder that stores the result of the search. Later calls for an equal graph and profile read it, in any
            process. The plan is the same with and without it. Damaged files are replaced with a warning.
        options: the options of the policy.

    Raises:
        BudgetError: if the budget is infeasible for the policy, or within the slowdown; names the smallest feasible
            one. Also for a fraction if the model has no data and was captured as ``torch.compile`` runs it: the
            model's own peak is then unknown.
        RecordError: if the folder `cache` cannot be written.
        ValueError, TypeError: for an unknown policy, an invalid budget, and options that the policy does not have.

    Example:
        >>> import torch, ackpt
        >>> graph = ackpt.trace(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()), torch.ones(4, 8))
        >>> ackpt.plan(graph).fates
        {'relu': 'saved'}
    """
    if not isinstance(graph, JointGraph):
        raise TypeError(f"graph must come from ackpt.trace(model, *args), got {type(graph).__name__}")
    request = Request.from_keywords(budget=budget, slowdown=slowdown, policy=policy, cache=cache, options=options)
    if not isinstance(profile, (Profile, type(None))):
        raise TypeError(f"profile must come from ackpt.profile(graph, ...), got {type(profile).__name__}")
    return plan_by_policy(graph, request, profile)
