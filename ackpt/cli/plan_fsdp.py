"""``ackpt plan --fsdp``: the plan for each number of ranks, and its output as text or plain data (--json)."""

from __future__ import annotations

import dataclasses

from ackpt.core.errors import BudgetError
from ackpt.core.progress import about, shown, stage
from ackpt.metering.meter import memory_format
from ackpt.planner.sharding.planner import ShardedPlan
from ackpt.planner.sharding.sharded_model import ShardedModel
from ackpt.planner.sharding.sharding import Sharding
from ackpt.planner.workloads.planned_shapes import PlanConfig

from .plan_text import dtype_name, plan_fields, plan_step, refused, sizes_text

NOTE = (
    "each block and then the model given to fully_shard, parameters freed after the forward; simulated, not run; "
    "not included: memory of communication libraries and, in the peak, workspaces and fragmentation"
)

# Of the reserved bytes of one rank: predictions of published tables (pytorch/torchtitan) are from 4 % too low to 5 %
# too high. A verdict "fits" leaves room for more than that.
MEASURED_ERROR = 0.08


def run(config: PlanConfig, shardings: list[Sharding]) -> tuple[ShardedModel, list[ShardedPlan | BudgetError]]:
    """The plan for each number of ranks, or the error that refuses it; raises the last if all are refused."""
    with shown():
        stage(f"capturing {config.step.model}")
        model = ShardedModel(config)
    plans: list[ShardedPlan | BudgetError] = []
    for sharding in shardings:
        try:
            with about(f"{sharding} ranks"):
                plans.append(model.plan(sharding, config.budget, config.policy))
        except BudgetError as error:
            plans.append(error)
    if isinstance(plans[-1], BudgetError) and not any(isinstance(plan, ShardedPlan) for plan in plans):
        raise plans[-1]
    return model, plans


def text(model: ShardedModel, shardings: list[Sharding], plans) -> str:
    """The step, then each number of ranks, then the smallest number that fits, if several are asked for."""
    config, first = model.config, shardings[0]
    dtype = dtype_name(config.step.dtype)
    sharded = dtype_name(first.parameters) if first.parameters else dtype
    reduced = dtype_name(first.reduction) if first.reduction else dtype
    optimizer = "" if config.optimizer == "none" else f" and {config.optimizer}"
    lines = [
        f"model             {config.step.model}: {type(model.step.model).__name__}, {model.step.parameters:,} "
        f"parameters gathered in {dtype}, sharded in {sharded}, gradients reduced in {reduced}",
        f"blocks            {model.stands_for}: {model.groups[1].name} to {model.groups[-1].name}",
        f"step              forward, backward{optimizer}; {NOTE}",
    ]
    for sharding, plan in zip(shardings, plans):
        lines += [
            "",
            f"{sharding} ranks",
            *(_lines(model, plan) if isinstance(plan, ShardedPlan) else [f"  {plan}"]),
        ]
    if len(plans) > 1 and (config.budget is not None or model.device is not None):
        fewest = _fewest(model, shardings, plans)
        lines += ["", f"fewest that fit   {fewest} ranks" if fewest else "none of these fits"]
    return "\n".join(lines)


def fits(model: ShardedModel, plan: ShardedPlan) -> bool:
    """Whether the plan fits the device, if one is given, with the largest measured error in the reserved bytes."""
    memory = model.memory(plan)
    return memory is None or memory.margin >= MEASURED_ERROR * memory.reserved


def _fewest(model: ShardedModel, shardings: list[Sharding], plans) -> Sharding | None:
    """The smallest number of ranks for which a plan fits."""
    fit = [s for s, plan in zip(shardings, plans) if isinstance(plan, ShardedPlan) and fits(model, plan)]
    return min(fit, key=lambda each: each.replicas * each.ranks, default=None)


def to_json(model: ShardedModel, shardings: list[Sharding], plans) -> dict:
    """The same as plain data, in the format of `plan_text.to_json`; for several numbers of ranks, a sweep."""
    data = [
        {"ranks": sharding.replicas * sharding.ranks, **_data(model, sharding, plan)}
        for sharding, plan in zip(shardings, plans)
    ]
    if len(data) == 1:
        return {name: value for name, value in data[0].items() if name != "ranks"}
    fewest = _fewest(model, shardings, plans)
    return {"sweep": "fsdp", "plans": data, "fewest": fewest and fewest.replicas * fewest.ranks}


def _data(model: ShardedModel, sharding: Sharding, plan) -> dict:
    if isinstance(plan, BudgetError):
        return refused(plan)
    step, sent = plan_step(model.config, model.step), plan.communication
    device = None
    if model.device is not None:
        memory = model.memory(plan)
        device = {"name": model.device.name, "memory_bytes": model.device.memory_bytes, "fits": fits(model, plan)}
        device |= dict.fromkeys(("modelled_seconds", "smallest_budget_of_full"))
        device["memory"] = None if memory is None else dataclasses.asdict(memory)
    return {
        **step,
        "note": NOTE,
        "graph": None,
        **plan_fields(plan),
        "at_peak": plan.at_peak(),
        "by_phase": None,
        "largest": None,
        "device": device,
        "fsdp": {
            "ranks": sharding.ranks,
            "replicas": sharding.replicas,
            "all_gathers": sent.gathers,
            "received_bytes": sent.gathered_bytes,
            "reduce_scatters": sent.reduces,
            "sent_bytes": sent.reduced_bytes,
            "blocks": [
                {"count": run.count, "kept_bytes": run.kept_bytes, "recompute_flops": run.flops, "kept": [*run.names]}
                for run in plan.runs
            ],
        },
    }


def _lines(model: ShardedModel, plan: ShardedPlan) -> list[str]:
    baseline, sent = plan.flops - plan.recompute_flops, plan.communication
    lines = [
        f"  peak            {memory_format(plan.peak_bytes)} per rank, "
        f"{memory_format(plan.resident_bytes)} of it resident (baseline: {memory_format(plan.baseline_peak_bytes)})",
        f"  at the peak     {sizes_text(plan.at_peak())}",
        f"  cost            {plan.cost:.1%} of the time of a rank's baseline step, which computes {baseline:.3g} FLOPs",
    ]
    for run in plan.runs:
        lines.append(f"  {run.count:>3} blocks      save {memory_format(run.kept_bytes)} each{_again(run)}")
    lines.append(
        f"  links           a rank receives {memory_format(sent.gathered_bytes)} in {sent.gathers} all-gathers and "
        f"sends {memory_format(sent.reduced_bytes)} in {sent.reduces} reduce-scatters"
    )
    if model.device is not None:
        memory = model.memory(plan)
        assert memory is not None
        verdict = "fits" if fits(model, plan) else "may not fit" if memory.fits else "does not fit"
        lines.append(
            f"  device          {verdict} {model.device.name}: "
            f"{memory_format(memory.reserved)} reserved and {memory_format(memory.context)} context of "
            f"{memory_format(model.device.memory_bytes)}; a measured rank reserved up to {MEASURED_ERROR:.0%} "
            "more than predicted"
        )
    return lines


def _again(run) -> str:
    if not run.flops:
        return ", all that backward reads"
    saved = f": {', '.join(dict.fromkeys(run.names))};" if run.names else " in addition to their inputs;"
    return f"{saved} the rest is recomputed, {run.flops:.3g} FLOPs"
