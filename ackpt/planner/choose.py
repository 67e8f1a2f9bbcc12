"""Plan a graph: run a policy, simulate its schedule, and raise a BudgetError if its peak exceeds the budget."""

import importlib.util
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from ackpt.core.budget import added_share, dynamic_limit, is_share, least_share, readable, split_budget, unit_hint
from ackpt.core.errors import BudgetError, TraceError
from ackpt.core.progress import shown, stage
from ackpt.metering.cpu_meter import no_collection
from ackpt.metering.meter import memory_format
from ackpt.planner.capture.aot import compiling_note
from ackpt.planner.capture.chunked_head import Head
from ackpt.planner.capture.in_place import autograd_node, eager_graph
from ackpt.planner.capture.joint_graph import JointGraph, once_per_graph
from ackpt.planner.capture.tracing import summed
from ackpt.planner.costs.devices import Device, device
from ackpt.planner.costs.profiles import Profile, default_rates, fused
from ackpt.planner.costs.profiles import profile as profiled
from ackpt.planner.costs.workspace import has_users_kernel
from ackpt.planner.policies import auto, check_options, function_of, name_of
from ackpt.planner.policies.search.frontier import baseline_cost, cheapest, costs, lowest, whole_added_cost
from ackpt.planner.policies.search.refinement import decisions
from ackpt.planner.policies.search.schedule_cache import CachedCandidates, cached
from ackpt.planner.request import Request
from ackpt.planner.schedule.allocations import allocations, device_memory, peak_in_words
from ackpt.planner.schedule.plan import Plan, PlanError, activations
from ackpt.planner.schedule.schedule import COMPUTE, FREE, Schedule, Step, everything
from ackpt.planner.schedule.simulator import Simulation, copies, peak_of, simulate

T = TypeVar("T")


def plan_by_policy(
    graph: JointGraph,
    request: Request,
    profile: Profile | None = None,
    unchunked: tuple[JointGraph, Profile] | None = None,
) -> Plan:
    """The plan of `graph` that the policy of `request` makes within its budget and slowdown, or a BudgetError.

    `unchunked`: if the head of `graph` runs in chunks, the graph without chunks and its profile. A fraction as budget,
    and the cost of the plan, are relative to the baseline of that graph, which is the model's own step.
    """
    check_options(request.policy, request.options)
    with shown():
        profile = default_profile(graph, request.device) if profile is None else profile
        bound, is_reserved = split_budget(request.budget)
        if is_reserved and not (graph.on_cpu and profile.device in ("cpu", "any")):
            where, workspace = device(profile.device), profile.workspace_bytes

            def within(limit: int) -> tuple[Plan, int, int]:
                plan = plan_by_policy(graph, replace(request, budget=limit), profile, unchunked)
                return plan, plan.peak_bytes, device_memory(graph, workspace, plan.schedule, where, 0).reserved

            return within_reserved(bound, within)
        baseline = baseline_of(*(unchunked or (graph, profile)), request.budget)
        if unchunked is not None:
            added = baseline_cost(graph, profile) - baseline.cost
            baseline = baseline._replace(schedule=everything(graph), added=added)
        schedule = _schedule_by_policy(graph, profile, baseline.limit_bytes, request)
        plan = checked_plan(graph, profile, schedule, baseline, request.budget, name_of(request.policy))
        _check_slowdown(graph, profile, plan, request)
        return plan


def within_reserved(budget, within: Callable[[int], tuple[T, int, int]]) -> T:
    """The first result of `within` for which the caching allocator reserves at most `budget`.

    `within` maps a limit on the peak to its result, peak and reserved bytes. Each trial has a lower limit.
    """
    most = dynamic_limit(budget, 0, 0)
    assert most is not None
    limit = most
    while True:
        try:
            made, peak, reserved = within(limit)
        except BudgetError as error:
            if error.least_bytes is None:
                raise
            *_, least = within(error.least_bytes)
            raise BudgetError(
                f"no plan was found for which the allocator reserves at most {readable(most)}: the plan with the "
                f"smallest peak, {readable(error.least_bytes)}, reserves {readable(least)} ({least} bytes)",
                least,
                f"{budget} reserved",
            ) from None
        if reserved <= most:
            return made
        limit = max(1, peak - max(1, (reserved - most) // 2))


def _check_slowdown(graph: JointGraph, profile: Profile, plan: Plan, request: Request) -> None:
    """Raise a BudgetError if `plan`, which keeps its budget, adds more time than the request allows."""
    most = added_share(request.slowdown)
    if most is None or plan.cost <= most:
        return
    message = (
        f"to keep the budget {request.budget!r}, policy {plan.policy!r} makes the step {plan.cost:.1%} longer, and "
        f"slowdown={request.slowdown!r} allows {most:.1%}"
    )
    if request.policy != "auto" or graph.head_chunks > 1:
        more = "" if request.policy == "auto" else ", or policy='auto'"
        raise BudgetError(f"{message}: give a larger budget or slowdown{more}", None, request.budget)
    schedule = lowest(graph, profile, most, candidates_of_auto(request))
    least = peak_of(graph, schedule, profile.workspace_bytes) + graph.resident_bytes
    raise BudgetError(
        f"{message}. The smallest budget within this slowdown is {readable(least)} ({least} bytes)",
        least,
        request.budget,
    )


def _schedule_by_policy(graph: JointGraph, profile: Profile, limit: int | None, request: Request) -> Schedule:
    """The policy's schedule, from the cache if the cache has it."""
    policy, options = request.policy, request.options
    decide, name = function_of(policy), name_of(policy)
    stage(f"searching with policy {name!r}")
    most = added_share(request.slowdown)
    with no_collection():
        if most is not None and limit is None:
            return lowest(graph, profile, most, candidates_of_auto(request))
        if request.folder is None:
            schedule = decide(graph, profile, limit, **options)
            if not isinstance(schedule, Schedule):
                raise TypeError(
                    f"policy {name!r} returned a {type(schedule).__name__}: it must return a Schedule, such as "
                    "ackpt.graph.lower(graph, saved) makes"
                )
            return schedule
        if policy == "auto":
            return cheapest(graph, profile, limit, candidates_of_auto(request))
        about = {"policy": policy, "options": options, "limit": limit}
        return cached(request.folder, graph, profile, about, lambda: [decide(graph, profile, limit, **options)])[0]


def candidates_of_auto(request: Request) -> Callable[..., Any]:
    """The schedules that policy ``"auto"`` considers, from the cache of `request` if it has one."""
    return auto.candidates if request.folder is None else CachedCandidates(request.folder, auto.candidates)


def default_profile(
    graph: JointGraph, device: Device | None = None, workspace_bytes: tuple[int, ...] | None = None
) -> Profile:
    """The profile at the rates of `device`: by default those of the GPU or CPU that holds the tensors.

    If Inductor compiles the graph, elementwise operations have the times of fused kernels.
    The workspace is measured where the graph can run here, unless it is given as `workspace_bytes`. On a CPU there are
    no times of copies: host memory is the device's own.
    """
    is_measured = workspace_bytes is None and graph.on_cpu and graph.has_data
    device = device or default_rates(graph)
    profile = profiled(graph, device, workspace="measured" if is_measured else "given")
    if device is not None and not graph.replays_random:
        profile = fused(graph, profile, device)
    swap_seconds = None if graph.on_cpu else profile.swap_seconds
    return replace(profile, workspace_bytes=workspace_bytes or profile.workspace_bytes, swap_seconds=swap_seconds)


class Baseline(NamedTuple):
    """The baseline of a graph, and the bound on dynamic bytes that follows from a budget, None without one.

    ``cost``: of its step, without chunks of the head; ``added``: what chunks add to that.
    """

    schedule: Schedule
    peak_bytes: int
    limit_bytes: int | None
    cost: float
    added: float = 0.0

    def share(self, added: float) -> float:
        """The cost of what a plan adds, as a fraction of the baseline's."""
        return (added + self.added) / self.cost


def baseline_of(graph: JointGraph, profile: Profile, budget) -> Baseline:
    """The baseline of `graph`; raises for an invalid budget, and for a fraction of an unknown peak."""
    schedule = everything(graph)
    simulated = simulate(graph, profile, schedule)
    peak_bytes = _baseline_bytes(graph, profile, simulated, budget)
    limit_bytes = dynamic_limit(budget, peak_bytes, simulated.resident_bytes)
    return Baseline(schedule, peak_bytes, limit_bytes, baseline_cost(graph, profile))


def plan_in_chunks(
    graph: JointGraph, request: Request, profile: Profile, chunked: Callable[[int], tuple[JointGraph, Profile]]
) -> tuple[Plan, JointGraph, Profile]:
    """The plan that keeps the budget with the head in chunks, its graph and profile; an infeasible budget raises.

    The number of chunks doubles from 2 on until a plan keeps the budget, and then as long as plans become cheaper: with
    smaller chunks, less must be recomputed. `chunked`: the graph with so many chunks, and its profile.
    """
    refusal = None
    if request.chunk_head == "auto":
        try:
            return plan_by_policy(graph, request, profile), graph, profile
        except BudgetError as error:
            refusal = error
    try:
        head = Head(graph)
    except TraceError as error:
        if refusal is None:
            raise
        raise BudgetError(f"{refusal} {error}", refusal.least_bytes, refusal.budget) from None
    best, least, most = None, math.inf, head.sequences * head.tokens
    for count in [*(2**power for power in range(1, most.bit_length()) if 2**power < most), most]:
        one, its = chunked(count)
        try:
            plan = plan_by_policy(one, replace(request, slowdown=None), its, (graph, profile))
        except BudgetError as error:
            if best is not None:
                break
            if error.least_bytes is None or count == most or error.least_bytes >= least:
                raise
            least = error.least_bytes
            continue
        if best is not None and plan.cost >= best[0].cost:
            break
        best = plan, one, its
    assert best is not None
    _check_slowdown(best[1], best[2], best[0], request)
    return best


def checked_plan(graph, profile: Profile, schedule: Schedule, baseline: Baseline, budget, policy: str) -> Plan:
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
        added = baseline.share(whole_added_cost(graph, profile, schedule, costs(graph, profile)))
        raise BudgetError(
            _refusal(graph, profile, schedule, policy, budget, limit, simulated, baseline.peak_bytes, added)
            + (f" The model was {compiling_note(graph.as_compiled)}." if graph.as_compiled else ""),
            least,
            budget,
        )
    return _plan_of_simulated(graph, policy, schedule, simulated, baseline, profile)


def _baseline_bytes(graph: JointGraph, profile: Profile, simulated: Simulation, budget) -> int:
    """The simulated dynamic peak in eager mode; an error for a fraction if the capture may differ from that."""
    if not graph.as_compiled:
        return min(simulated.peak_bytes, eager_peak(graph, profile.workspace_bytes))
    dynamic_limit(budget, 0, 0)  # refuse an invalid budget first
    if is_share(budget):
        raise BudgetError(
            f"the budget {budget!r} is relative to the peak of the model's own step, which is not known: the model was "
            f"{compiling_note(graph.as_compiled)}. Give bytes, such as '6GiB', or a model and a batch with data.",
            None,
            budget,
        )
    return simulated.peak_bytes


@once_per_graph
def eager_peak(graph: JointGraph, workspace_bytes: tuple[int, ...]) -> int:
    """The dynamic peak of the model in eager mode, in bytes, without the numbers that autograd saves for products.

    Eager mode writes in place what the graph computes out of place (`ackpt.planner.capture.in_place`).
    """
    eager = eager_graph(graph)
    return peak_of(eager, eager_schedule(eager), workspace_bytes)


def eager_schedule(graph: JointGraph) -> Schedule:
    """The baseline's schedule as the model's eager step frees: a saved activation when its last autograd node is done.

    Eager mode releases it there, not after the last operation that reads it (``release_variables`` in
    torch/csrc/autograd/engine.cpp, called after ``validate_outputs``).
    """
    schedule = everything(graph)
    saved = set(schedule.saved)
    steps: list[Step] = []
    released: list[Step] = []  # frees that wait for the end of the running autograd node
    running = None
    for step in schedule.backward:
        if step.kind == COMPUTE:
            node = autograd_node(graph.analysis.fx[step.id])
            if node is None or node != running:
                steps += released
                released = []
            running = node
            steps.append(step)
        elif step.kind == FREE and step.id in saved and running is not None:
            released.append(step)
        else:
            steps.append(step)
    return replace(schedule, backward=(*steps, *released))


def check_runs(graph: JointGraph, plan: Plan) -> Plan:
    """`plan`, or an error if its activations cannot be offloaded or packed where `graph` runs."""
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


def _plan_of_simulated(graph, policy, schedule: Schedule, simulated: Simulation, baseline: Baseline, profile) -> Plan:
    cost, limit = costs(graph, profile), baseline.limit_bytes
    node = None if simulated.peak_node is None else graph.nodes[simulated.peak_node]
    is_before = simulated.timeline.peak_index <= (simulated.timeline.boundary or 0) + 1
    peak_node = "the loss" if is_before else "the optimizer's step"
    # The lower bound is valid only for schedules without offload.
    has_bound = limit is not None and not copies(schedule)
    if node is not None:
        peak_node = f"{node.name} ({node.target}), {node.phase} of {node.module or 'the model'!r}"
    return Plan(
        policy=policy,
        limit_bytes=limit,
        peak_bytes=simulated.peak_bytes + simulated.resident_bytes,
        resident_bytes=simulated.resident_bytes,
        baseline_peak_bytes=baseline.peak_bytes + simulated.resident_bytes,
        saved_bytes=simulated.saved_bytes,
        flops=simulated.flops,
        recompute_flops=simulated.recompute_flops,
        peak_node=peak_node,
        activations=activations(graph, baseline.schedule, schedule),
        schedule=schedule,
        timeline=simulated.timeline,
        cost=baseline.share(whole_added_cost(graph, profile, schedule, cost)),
        lower_bound=_bound(graph, schedule, cost, baseline, profile) if has_bound else None,
        decisions=decisions(graph, schedule, cost, baseline.cost, profile),
        host_bytes=simulated.host_bytes,
        exposed_seconds=simulated.exposed_seconds,
        made_for=graph.made_for,
        note=_note(graph),
        sizes=graph.analysis.argument_shapes,
        device=profile.device,
        head_chunks=graph.head_chunks,
    )


def _note(graph: JointGraph) -> str | None:
    """The exceptions to the plan's guarantees, in words; otherwise None."""
    notes = [compiling_note(graph.as_compiled)] if graph.as_compiled else []
    if graph.head_chunks > 1:
        notes.append(
            f"the head runs in {graph.head_chunks} chunks of tokens (chunk_head): the loss and the gradients differ "
            "from eager's by roundings of sums, and outputs with a row for every token, as logits, are not computed"
        )
    if users := sorted({str(fx.target) for fx in graph.analysis.fx.values() if has_users_kernel(fx)}):
        notes.append(
            f"the temporary memory of {', '.join(users)} is not counted: planning does not run these on made-up data"
        )
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


def _bound(graph, schedule: Schedule, cost, baseline: Baseline, profile) -> float | None:
    """The lower bound within the limit as a fraction of the baseline's cost; None if unknown, as without scipy."""
    limit = baseline.limit_bytes
    assert limit is not None
    if importlib.util.find_spec("scipy") is None:
        return None
    from ackpt.planner.policies.search.lower_bound import lower_bound

    stage("computing the lower bound")
    bounded = auto.with_packed_masks(graph) if schedule.packed else graph
    bound = lower_bound(bounded, cost, profile.workspace_bytes, limit)
    return None if bound is None else baseline.share(bound)


_RESIDENT = "parameters", "buffers", "inputs", "optimizer state"


def _refusal(graph, profile, schedule, policy, budget, limit, simulated: Simulation, baseline_bytes: int, cost) -> str:
    least = simulated.peak_bytes + simulated.resident_bytes
    share = least_share(simulated.peak_bytes, baseline_bytes)
    fraction = "" if share is None else f", or {share} of the baseline's dynamic peak"
    peak = simulated.timeline.peak_index
    live = [each for each in allocations(graph, schedule, profile.workspace_bytes) if each.is_live(peak)]
    more = {"optimizer state": graph.optimizer_bytes, "accumulated gradients": graph.accumulated_bytes}
    more["targets"] = graph.target_bytes
    resident = ("parameters", "buffers", "inputs", *(name for name, size in more.items() if size))
    return (
        f"policy {policy!r} {cannot_keep(budget, limit, simulated.resident_bytes, resident)}{unit_hint(budget)}"
        f"The smallest feasible budget of this policy is {readable(least)} ({least} bytes){fraction}; it makes the "
        f"step {cost:.0%} longer. {peak_in_words(graph, live)}"
    )


def cannot_keep(budget, limit: int, resident_bytes: int, resident=_RESIDENT) -> str:
    """A part of the error for an infeasible budget: how many bytes it leaves, in addition to `resident` memory."""
    held = f"{memory_format(resident_bytes)} of {', '.join(resident[:-1])} and {resident[-1]}"
    leaves = f"it leaves {memory_format(limit)} for what the step allocates, in addition to {held}"
    if limit < 0:
        leaves = f"{held} alone exceed it by {memory_format(-limit)}"
    return f"cannot keep the budget {budget!r}: {leaves}. "
