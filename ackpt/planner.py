"""From a budget to a plan: run the policy, simulate what it returns, refuse what breaks the budget."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from typing import Any

from ackpt.capture.analysis import facts, once_per_graph
from ackpt.capture.in_place import eager_graph
from ackpt.capture.joint_graph import JointGraph
from ackpt.costs.profiles import Profile
from ackpt.costs.profiles import profile as profiled
from ackpt.metering.meter import memory_format
from ackpt.planning.host_copies import copies
from ackpt.planning.plan import Plan, PlanError, activations
from ackpt.planning.schedule import Schedule, everything
from ackpt.planning.simulator import Simulation, peak_of, simulate, step_peaks
from ackpt.policies.search.decisions import decisions
from ackpt.policies.search.recompute_costs import added_cost, costs, step_cost

from .budget import dynamic_limit, is_share, least_share, readable, unit_hint
from .errors import BudgetError, did_you_mean
from .policies import POLICIES

_KEYWORDS = ("budget", "policy", "profile")


def plan(
    graph: JointGraph,
    budget: float | str | None = None,
    policy: str = "auto",
    *,
    profile: Profile | None = None,
    **options: Any,
) -> Plan:
    """A plan of `graph` that keeps its peak within `budget`.

    Args:
        graph: from `ackpt.trace`.
        budget: None for no bound; a float in (0, 1] or a string such as ``"50%"``, that fraction of the dynamic peak
            of the model's own step, without checkpointing; an int or a string such as ``"6GiB"``, bytes of the whole
            peak: parameters, buffers, inputs, optimizer state and everything the step allocates.
        policy: ``"auto"`` recomputes least within the budget, and offloads where `profile` has times of copies to the
            host that hide behind computing, ``"none"`` saves what backward needs, ``"full"`` keeps one tensor between
            two blocks, ``"manual"`` takes ``fates={"relu": "recomputed", "addmm": "saved"}`` by the names of nodes, or
            ``"offloaded"`` where `profile` has times of copies to the host. After their sources, on the chain of blocks
            between single tensors: ``"chen-sqrt"`` cuts it into segments, ``"chen-log"`` into halves of halves,
            ``"revolve"`` by binomials, ``"rotor"`` by dynamic programming. On any graph: ``"min-cut"`` saves what
            PyTorch's partitioner would, see `ackpt.policies.min_cut` for its options; ``"mu-two"`` drops results one
            after the other, or offloads them where `profile` has such times. Each takes the cheapest of its schedules
            that the simulator finds within the budget. ``"ilp"`` proves that nothing is cheaper, on graphs of up to 160
            operations, or warns after ``time_limit=`` seconds, 60, how far it may be from that; it needs
            ``pip install "ackpt[plan]"``.
        profile: costs per node, from `ackpt.profile`. If not given, FLOPs are counted, and for real tensors on the
            CPU what every operation takes within itself is measured, by running each different operation once.
        options: of the policy.

    Raises:
        BudgetError: if the policy cannot keep the budget; names the smallest that it can. Also for a fraction where the
            model could only be captured as ``torch.compile`` runs it and has no data: its own peak is not known then.
        ValueError, TypeError: for an unknown policy, what is no budget, and options the policy does not know.

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
    profile = (
        profiled(graph, workspace="measured" if graph.on_cpu and graph.has_data else "given")
        if profile is None
        else profile
    )
    every = everything(graph)
    baseline = simulate(graph, profile, every)
    baseline_bytes = _baseline_bytes(graph, profile, every, baseline, budget)
    limit = dynamic_limit(budget, baseline_bytes, baseline.resident_bytes)
    _check_options(policy, options)
    schedule = _decides(policy)(graph, profile, limit, **options)
    if copies(schedule) and profile.swap_seconds is None:
        what = "its profile" if profile.device == "any" else f"the profile of {profile.device!r}"
        raise PlanError(
            f"policy {policy!r} offloads, but {what} has no times of copies to the host: give the "
            "profile of a device with a link, such as profile=ackpt.profile(graph, 'h200'), or offload nothing"
        )
    found = simulate(graph, profile, schedule)
    if limit is not None and found.peak_bytes > limit:
        least = found.peak_bytes + found.resident_bytes
        cost = costs(graph, profile)
        longer = _added(graph, schedule, found, cost) / _plain_cost(every, cost)
        raise BudgetError(
            _refusal(policy, budget, limit, found, baseline_bytes, longer) + _captured_so(graph), least, budget
        )
    return _plan(graph, policy, limit, schedule, found, baseline_bytes, every, profile)


def _baseline_bytes(graph: JointGraph, profile: Profile, every: Schedule, simulated: Simulation, budget) -> int:
    """The dynamic peak of the model's own step: simulated, or measured where it is not the one that was captured.

    Raises:
        BudgetError: for a fraction of a peak that is not known.
    """
    if graph.as_compiled is None:
        return min(simulated.peak_bytes, _eager_peak(graph, profile.workspace_bytes))
    if graph.as_compiled.baseline_bytes is not None:
        _, backward = step_peaks(graph, every, profile.workspace_bytes)
        return max(graph.as_compiled.baseline_bytes, backward[-1] if graph.optimizer_step_bytes else 0)
    dynamic_limit(budget, 0, 0)  # what is no budget is said first
    if is_share(budget):
        raise BudgetError(
            f"the budget {budget!r} is relative to the peak of the model's own step, which is not known: the model was "
            f"captured as torch.compile runs it ({graph.as_compiled}). Give bytes, such as '6GiB', or real tensors.",
            None,
            budget,
        )
    return simulated.peak_bytes


@once_per_graph
def _eager_peak(graph: JointGraph, workspace_bytes: tuple[int, ...]) -> int:
    """The dynamic peak of the model's own step, which writes in place what the graph computes out of place."""
    eager = eager_graph(graph)
    return peak_of(eager, everything(eager), workspace_bytes)


def _captured_so(graph: JointGraph) -> str:
    if graph.as_compiled is None:
        return ""
    return f" The model was captured as torch.compile runs it ({graph.as_compiled}), which may take more than its own."


def check_runs(graph: JointGraph, plan: Plan) -> Plan:
    """`plan`, if what it offloads can be offloaded where `graph` runs.

    Raises:
        PlanError: if there is no host memory beside the device's, or a compiler that knows no copies.
    """
    if copies(plan.schedule) and graph.on_cpu:
        raise PlanError(
            "this plan offloads, but the model is on the CPU, where host memory is the device's own: nothing would be "
            "saved. Move the model to a GPU, or plan with the CPU's profile, which recomputes instead."
        )
    if copies(plan.schedule) and not graph.replays_random:
        raise PlanError("this plan offloads, which Inductor does not run: use compiler='eager', or offload nothing")
    return plan


def _decides(policy: str):
    return importlib.import_module(f"ackpt.policies.{POLICIES[policy]}").schedule


def options_of(policy: str) -> dict[str, inspect.Parameter]:
    """The options of a policy by their names."""
    parameters = inspect.signature(_decides(policy)).parameters
    return {name: p for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY}


def _check_options(policy: str, options) -> None:
    own = options_of(policy)
    if unknown := sorted(set(options) - set(own)):
        knows = f"knows {', '.join(own)}" if own else "knows no options"
        hint = ": give policy='manual'" if unknown[0] == "fates" else did_you_mean(unknown[0], [*own, *_KEYWORDS])
        raise TypeError(f"{unknown[0]!r} is no option of a plan; policy {policy!r} {knows}{hint}")
    if missing := [name for name, p in own.items() if p.default is p.empty and name not in options]:
        raise TypeError(f"policy {policy!r} needs the option {missing[0]!r}: see help(ackpt.plan)")


def _plan(graph, policy, limit, schedule, found: Simulation, baseline_bytes: int, every: Schedule, profile) -> Plan:
    known = facts(graph)
    cost = costs(graph, profile)
    plain_cost = _plain_cost(every, cost)
    node = None if found.peak_node is None else graph.nodes[found.peak_node]
    where = "the optimizer's step"
    if node is not None:
        where = f"{node.name} ({node.target}), {node.phase} of {node.module or 'the model'!r}"
    return Plan(
        policy=policy,
        limit_bytes=limit,
        peak_bytes=found.peak_bytes + found.resident_bytes,
        resident_bytes=found.resident_bytes,
        baseline_peak_bytes=baseline_bytes + found.resident_bytes,
        saved_bytes=found.saved_bytes,
        flops=found.flops,
        recompute_flops=found.recompute_flops,
        peak_node=where,
        activations=activations(
            graph,
            {*every.saved, *schedule.saved, *schedule.offloaded},
            set(schedule.saved),
            set(schedule.offloaded),
            known.cover,
        ),
        schedule=schedule,
        timeline=found.timeline,
        cost=_added(graph, schedule, found, cost) / plain_cost,
        # The bound is that of schedules that recompute alone.
        lower_bound=None if limit is None or copies(schedule) else _bound(graph, cost, plain_cost, profile, limit),
        decisions=decisions(graph, schedule, cost, plain_cost, profile),
        host_bytes=found.host_bytes,
        exposed_seconds=found.exposed_seconds,
        made_for=graph.made_for,
        note=None if graph.as_compiled is None else str(graph.as_compiled),
    )


def _added(graph, schedule: Schedule, found: Simulation, cost) -> float:
    """Cost of what runs again, and the time that is waited for."""
    return added_cost(graph, schedule, cost) + (found.exposed_seconds or 0.0)


def _plain_cost(every: Schedule, cost) -> float:
    return step_cost(every, cost) or 1.0


def _bound(graph, cost, plain_cost: float, profile, limit: int) -> float | None:
    """The least added cost within the limit, as a share of the plain step's; None where scipy is not installed."""
    if importlib.util.find_spec("scipy") is None:
        return None
    from ackpt.policies.search.lower_bound import lower_bound

    bound = lower_bound(graph, cost, profile.workspace_bytes, limit)
    return None if bound is None else bound / plain_cost


def _refusal(policy, budget, limit, found: Simulation, baseline_bytes: int, cost: float) -> str:
    least = found.peak_bytes + found.resident_bytes
    share = least_share(found.peak_bytes, baseline_bytes)
    fraction = "" if share is None else f", or {share} of the plain step's dynamic peak"
    step = (
        " That peak is reached in the optimizer's step, which no checkpointing makes smaller: let it take one "
        "parameter at a time (foreach=False) or nothing beside them (fused=True), or use another optimizer."
    )
    return (
        f"policy {policy!r} cannot keep the budget {budget!r}: it leaves {memory_format(max(0, limit))} for what the "
        f"step allocates, beside {memory_format(found.resident_bytes)} of parameters, buffers, inputs and optimizer "
        f"state. {unit_hint(budget)}"
        f"The smallest budget that this policy keeps is {readable(least)} ({least} bytes){fraction}; it makes the step "
        f"{cost:.0%} longer.{step if found.peak_node is None else ''}"
    )
