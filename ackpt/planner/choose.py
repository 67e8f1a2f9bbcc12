"""`ackpt.plan`: runs a policy, simulates its schedule, and refuses it if it breaks the budget."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from ackpt.core.budget import dynamic_limit, is_share, least_share, readable, unit_hint
from ackpt.core.errors import BudgetError, did_you_mean
from ackpt.core.progress import shown, stage
from ackpt.metering.cpu_meter import no_collection
from ackpt.metering.meter import memory_format
from ackpt.planner.capture import as_compiled
from ackpt.planner.capture.analysis import once_per_graph
from ackpt.planner.capture.gradients import summed
from ackpt.planner.capture.joint_graph import JointGraph
from ackpt.planner.costs.devices import Device
from ackpt.planner.costs.operation_runs import device_of, measured_rates
from ackpt.planner.costs.profiles import Profile, default_rates, rates
from ackpt.planner.costs.profiles import profile as profiled
from ackpt.planner.costs.workspace import has_users_kernel
from ackpt.planner.policies import POLICIES, auto
from ackpt.planner.policies.search.frontier import added_cost, cheapest, costs, packing_cost, step_cost
from ackpt.planner.policies.search.refinement import decisions
from ackpt.planner.policies.search.schedule_cache import Cache, CachedCandidates, cache_folder, cached
from ackpt.planner.schedule.allocations import allocations, peak_in_words
from ackpt.planner.schedule.host_copies import copies
from ackpt.planner.schedule.plan import Plan, PlanError, activations
from ackpt.planner.schedule.schedule import Schedule, everything
from ackpt.planner.schedule.simulator import Simulation, simulate
from ackpt.planner.step.eager_step import eager_peak

MEASURED = "measured"
_KEYWORDS = ("budget", "policy", "profile", "cache")


def plan(
    graph: JointGraph,
    budget: float | str | None = None,
    policy: str = "auto",
    *,
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
        policy: the policy that decides. Each takes the cheapest of its schedules whose simulated peak is within the
            budget.

            ``"auto"``, the default, searches for the cheapest plan. It recomputes activations, packs dropout masks
            where that is cheaper than drawing them again, and offloads if `profile` has times of copies to the host and
            the copies overlap with compute. ``"none"`` saves everything that backward reads. ``"full"`` is per-block
            checkpointing: it saves single tensors between blocks. ``"manual"`` takes fates by the names of nodes:
            ``fates={"relu": "recomputed", "addmm": "saved"}``. It also takes ``"packed"`` for dropout masks, and
            ``"offloaded"`` if `profile` has times of copies to the host.

            ``"selective"`` checkpoints repeated blocks as transformers and torchtitan do, without a search. For its
            options ``every_n_layers``, ``save`` and ``offload`` see `ackpt.planner.policies.selective`.

            Four policies from papers treat the graph as a chain of blocks with single tensors between them:
            ``"chen-sqrt"`` saves the boundaries of segments, ``"chen-log"`` splits the chain recursively in half,
            ``"revolve"`` follows binomial coefficients, and ``"rotor"`` uses dynamic programming.

            Three policies take any graph. ``"min-cut"`` saves what PyTorch's partitioner would save; for its options
            see `ackpt.planner.policies.min_cut`. ``"mu-two"`` drops one activation after the other, or offloads it if
            `profile` has times of copies. ``"ilp"`` proves that no plan is cheaper, on graphs of up to 160 operations;
            after ``time_limit=`` seconds (60) it warns how large the optimality gap may be. It needs ``pip install
            "ackpt[plan]"``.
        profile: costs per node, from `ackpt.profile`. By default, times at the rates of the GPU or CPU that holds the
            tensors; see `ackpt.calibrate` for a CPU. For real tensors on the CPU, the workspace of every operation is
            measured by running each distinct operation once. Without data it counts as 0, so that the peak on a CPU may
            be higher by some bytes: give ``ackpt.profile(graph, workspace="measured")``.
        cache: a folder that stores the result of the search. Later calls for an equal graph and profile read it, in any
            process. The plan is the same with and without it. Damaged files are replaced with a warning.
        options: the options of the policy.

    Raises:
        BudgetError: if the budget is infeasible for the policy; names the smallest feasible one. Also for a fraction if
            the model has no data and was captured as ``torch.compile`` runs it: its own peak is then unknown.
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
    if policy not in list(POLICIES):
        close = did_you_mean(policy, POLICIES)
        raise ValueError(f"policy {policy!r} is not known{close}; the policies are {', '.join(POLICIES)}")
    if not isinstance(profile, (Profile, type(None))):
        raise TypeError(f"profile must come from ackpt.profile(graph, ...), got {type(profile).__name__}")
    folder = cache_folder(cache)
    _check_options(policy, options)
    with shown():
        profile = default_profile(graph) if profile is None else profile
        baseline = baseline_of(graph, profile, budget)
        schedule = _searched(graph, profile, baseline.limit_bytes, policy, options, folder)
        return plan_of(graph, profile, schedule, baseline, budget, policy)


def _searched(graph: JointGraph, profile: Profile, limit, policy: str, options, folder: Path | None) -> Schedule:
    """The policy's schedule; from the cache in `folder`, if it is there."""
    stage(f"searching with policy {policy!r}")
    schedule_function = _schedule_function(policy)
    with no_collection():
        if folder is None:
            return schedule_function(graph, profile, limit, **options)
        if policy == "auto":
            return cheapest(graph, profile, limit, CachedCandidates(folder, auto.candidates))
        about = {"policy": policy, "options": options, "limit": limit}
        return cached(folder, graph, profile, about, lambda: [schedule_function(graph, profile, limit, **options)])[0]


def default_profile(
    graph: JointGraph, device: Device | str | None = None, workspace_bytes: tuple[int, ...] | None = None
) -> Profile:
    """The profile at the rates of `device`: by default those of the GPU or CPU that holds the tensors.

    ``MEASURED`` as `device` times the operations of `graph`. The workspace is measured where the graph can run here,
    unless it is given as `workspace_bytes`. On a CPU there are no times of copies: host memory is the device's own.
    """
    is_measured = workspace_bytes is None and graph.on_cpu and graph.has_data
    profile = profiled(graph, resolved(graph, device), workspace="measured" if is_measured else "given")
    swap_seconds = None if graph.on_cpu else profile.swap_seconds
    return replace(profile, workspace_bytes=workspace_bytes or profile.workspace_bytes, swap_seconds=swap_seconds)


def resolved(graph: JointGraph, device: Device | str | None) -> Device | None:
    """The rates to plan `graph` with; see `default_profile`."""
    if device == MEASURED:
        base = default_rates(graph)
        if base is None:
            raise ValueError(
                f"the rates of {device_of(graph)} are not known, so costs='measured' has no bandwidth to begin with: "
                "give a device_profile"
            )
        return measured_rates(graph, base)
    return default_rates(graph) if device is None else rates(device)


def device_of_costs(device_profile: Device | str | None, costs: str) -> Device | str | None:
    """The device that the arguments ``device_profile`` and ``costs`` of `ackpt.compile` name: rates or ``MEASURED``.

    Raises:
        ValueError, TypeError: for an unknown device or kind of costs, or if both are given.
    """
    if costs not in ("rates", MEASURED):
        raise ValueError(f"costs must be 'rates' or 'measured', got {costs!r}")
    if costs == MEASURED and device_profile is not None:
        raise ValueError("costs='measured' times operations on the model's own device: leave device_profile out")
    return MEASURED if costs == MEASURED else rates(device_profile)


class Baseline(NamedTuple):
    """The baseline of a graph, and the bound on dynamic bytes that follows from a budget, None without one."""

    schedule: Schedule
    peak_bytes: int
    limit_bytes: int | None


def baseline_of(graph: JointGraph, profile: Profile, budget) -> Baseline:
    """The baseline of `graph`; raises for an invalid budget, and for a fraction of an unknown peak."""
    schedule = everything(graph)
    simulated = simulate(graph, profile, schedule)
    peak_bytes = _baseline_bytes(graph, profile, simulated, budget)
    return Baseline(schedule, peak_bytes, dynamic_limit(budget, peak_bytes, simulated.resident_bytes))


def plan_of(graph: JointGraph, profile: Profile, schedule: Schedule, baseline: Baseline, budget, policy: str) -> Plan:
    """The plan that runs `schedule`; raises a BudgetError if its peak exceeds the limit."""
    if copies(schedule) and profile.swap_seconds is None:
        what = "its profile" if profile.device == "any" else f"the profile of {profile.device!r}"
        raise PlanError(
            f"policy {policy!r} offloads, but {what} has no times of copies to the host: give the "
            "profile of a device with a link, such as profile=ackpt.profile(graph, 'h200'), or offload nothing"
        )
    if schedule.packed and profile.seconds is not None and profile.pack_seconds is None:
        raise PlanError(
            f"policy {policy!r} packs dropout masks, but its profile has times of operations and none of packing: give "
            "the profile of a device, such as profile=ackpt.profile(graph, 'cpu'), or pack nothing"
        )
    limit = baseline.limit_bytes
    simulated = simulate(graph, profile, schedule)
    if limit is not None and simulated.peak_bytes > limit:
        least = simulated.peak_bytes + simulated.resident_bytes
        cost = costs(graph, profile)
        added = _added_cost(graph, profile, schedule, simulated, cost) / _baseline_cost(baseline.schedule, cost)
        raise BudgetError(
            _refusal(graph, profile, schedule, policy, budget, limit, simulated, baseline.peak_bytes, added)
            + (f" The model was {as_compiled.note(graph.as_compiled)}." if graph.as_compiled else ""),
            least,
            budget,
        )
    return _plan(graph, policy, limit, schedule, simulated, baseline.peak_bytes, baseline.schedule, profile)


def _baseline_bytes(graph: JointGraph, profile: Profile, simulated: Simulation, budget) -> int:
    """The simulated dynamic peak of the model in eager mode.

    Raises:
        BudgetError: if the budget is a fraction, but the capture may differ from eager mode.
    """
    if not graph.as_compiled:
        return min(simulated.peak_bytes, _eager_peak(graph, profile.workspace_bytes))
    dynamic_limit(budget, 0, 0)  # refuse an invalid budget first
    if is_share(budget):
        raise BudgetError(
            f"the budget {budget!r} is relative to the peak of the model's own step, which is not known: the model was "
            f"{as_compiled.note(graph.as_compiled)}. Give bytes, such as '6GiB', or a model and a batch with data.",
            None,
            budget,
        )
    return simulated.peak_bytes


@once_per_graph
def _eager_peak(graph: JointGraph, workspace_bytes: tuple[int, ...]) -> int:
    return eager_peak(graph, workspace_bytes)


def check_runs(graph: JointGraph, plan: Plan) -> Plan:
    """`plan`, if its activations can be offloaded where `graph` runs.

    Raises:
        PlanError: if the plan offloads and the model is on the CPU, or its compiler does not run copies.
    """
    if copies(plan.schedule) and graph.on_cpu:
        raise PlanError(
            "this plan offloads, but the model is on the CPU, where host memory is the device's own: nothing would be "
            "saved. Move the model to a GPU, or plan with the CPU's profile, which recomputes instead."
        )
    if copies(plan.schedule) and not graph.replays_random:
        raise PlanError("this plan offloads, which Inductor does not run: use compiler='eager', or offload nothing")
    if plan.schedule.packed and not graph.replays_random:
        raise PlanError("this plan packs dropout masks, which Inductor does not run: use compiler='eager'")
    return plan


def _schedule_function(policy: str):
    return importlib.import_module(f"ackpt.planner.policies.{POLICIES[policy]}").schedule


def options_of(policy: str) -> dict[str, inspect.Parameter]:
    """The options of a policy by their names."""
    parameters = inspect.signature(_schedule_function(policy)).parameters
    return {name: p for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY}


def _check_options(policy: str, options) -> None:
    expected = options_of(policy)
    if unknown := sorted(set(options) - set(expected)):
        knows = f"knows {', '.join(expected)}" if expected else "knows no options"
        hint = ": give policy='manual'" if unknown[0] == "fates" else did_you_mean(unknown[0], [*expected, *_KEYWORDS])
        raise TypeError(f"{unknown[0]!r} is not an option of a plan; policy {policy!r} {knows}{hint}")
    if missing := [name for name, p in expected.items() if p.default is p.empty and name not in options]:
        raise TypeError(f"policy {policy!r} needs the option {missing[0]!r}: see help(ackpt.plan)")


def _plan(
    graph, policy, limit, schedule: Schedule, simulated: Simulation, baseline_bytes: int, baseline: Schedule, profile
) -> Plan:
    cost = costs(graph, profile)
    baseline_cost = _baseline_cost(baseline, cost)
    node = None if simulated.peak_node is None else graph.nodes[simulated.peak_node]
    peak_node = "the optimizer's step"
    # The lower bound is valid only for schedules without offload.
    has_bound = limit is not None and not copies(schedule)
    if node is not None:
        peak_node = f"{node.name} ({node.target}), {node.phase} of {node.module or 'the model'!r}"
    return Plan(
        policy=policy,
        limit_bytes=limit,
        peak_bytes=simulated.peak_bytes + simulated.resident_bytes,
        resident_bytes=simulated.resident_bytes,
        baseline_peak_bytes=baseline_bytes + simulated.resident_bytes,
        saved_bytes=simulated.saved_bytes,
        flops=simulated.flops,
        recompute_flops=simulated.recompute_flops,
        peak_node=peak_node,
        activations=activations(graph, baseline, schedule),
        schedule=schedule,
        timeline=simulated.timeline,
        cost=_added_cost(graph, profile, schedule, simulated, cost) / baseline_cost,
        lower_bound=_bound(graph, schedule, cost, baseline_cost, profile, limit) if has_bound else None,
        decisions=decisions(graph, schedule, cost, baseline_cost, profile),
        host_bytes=simulated.host_bytes,
        exposed_seconds=simulated.exposed_seconds,
        made_for=graph.made_for,
        note=_note(graph),
        sizes=graph.analysis.argument_shapes,
        device=profile.device,
    )


def _note(graph: JointGraph) -> str | None:
    """The exceptions to the plan's guarantees, in words; otherwise None."""
    notes = [as_compiled.note(graph.as_compiled)] if graph.as_compiled else []
    if users := sorted({str(fx.target) for fx in graph.analysis.fx.values() if has_users_kernel(fx)}):
        notes.append(f"the temporary memory of {', '.join(users)} is not counted: planning does not run Python kernels")
    if sums := summed(graph.module):
        names, dtypes = [*sums], sorted({str(dtype).removeprefix("torch.") for dtype in sums.values()})
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        notes.append(
            f"gradients of {', '.join(names[:3])}{more} are sums over several uses in the step: if one backward "
            "reaches them by another call or from outside of the step, too, they may differ from eager's by one "
            f"rounding of {' or '.join(dtypes)}"
        )
    if (autocast := (graph.made_for or {}).get("autocast", "off")) != "off":
        notes.append(
            "eager casts a weight once under one torch.autocast: if one backward reaches the cast weight by another "
            "call or from outside of the step, too, eager sums its gradients in the lower precision, and this step "
            f"does not; they differ by one rounding of {autocast}"
        )
    whole = [fx.args[1] for fx in graph.analysis.fx.values() if str(fx.target) == "ackpt_graph.gradient.default"]
    if any(str(call).startswith("aten.prod") for call in whole):
        notes.append("the gradient of prod takes more temporary memory than counted if its argument contains zeros")
    return "; ".join(notes) or None


def _added_cost(graph, profile: Profile, schedule: Schedule, simulated: Simulation, cost) -> float:
    """The cost of recomputation, of packing and of waits for copies."""
    added = added_cost(graph, schedule, cost) + packing_cost(graph, profile, schedule)
    return added + (simulated.exposed_seconds or 0.0)


def _baseline_cost(baseline: Schedule, cost) -> float:
    return step_cost(baseline, cost) or 1.0


def _bound(graph, schedule: Schedule, cost, baseline_cost: float, profile, limit: int | None) -> float | None:
    """The lower bound within the limit as a fraction of the baseline's cost; None if scipy is not installed."""
    assert limit is not None
    if importlib.util.find_spec("scipy") is None:
        return None
    from ackpt.planner.policies.search.lower_bound import lower_bound
    from ackpt.planner.policies.search.variants import with_packed_masks

    stage("computing the lower bound")
    bounded = with_packed_masks(graph) if schedule.packed else graph
    bound = lower_bound(bounded, cost, profile.workspace_bytes, limit)
    return None if bound is None else bound / baseline_cost


def _refusal(graph, profile, schedule, policy, budget, limit, lowest: Simulation, baseline_bytes: int, cost) -> str:
    least = lowest.peak_bytes + lowest.resident_bytes
    share = least_share(lowest.peak_bytes, baseline_bytes)
    fraction = "" if share is None else f", or {share} of the baseline's dynamic peak"
    blocks = allocations(graph, schedule, profile.workspace_bytes)
    more = {"optimizer state": graph.optimizer_bytes, "accumulated gradients": graph.accumulated_bytes}
    resident = ["parameters", "buffers", "inputs", *(name for name, size in more.items() if size)]
    held = f"{memory_format(lowest.resident_bytes)} of {', '.join(resident[:-1])} and {resident[-1]}"
    leaves = f"it leaves {memory_format(limit)} for what the step allocates, in addition to {held}"
    if limit < 0:
        leaves = f"{held} alone exceed it by {memory_format(-limit)}"
    return (
        f"policy {policy!r} cannot keep the budget {budget!r}: {leaves}. {unit_hint(budget)}"
        f"The smallest feasible budget of this policy is {readable(least)} ({least} bytes){fraction}; it makes the "
        f"step {cost:.0%} longer. {peak_in_words(graph, blocks)}"
    )
