"""Suggest changes that reduce the peak; each saving is planned or simulated.

Every suggestion is made to the explained plan alone, so savings do not add up; checkpointing and a head in chunks are
planned together as well.
"""

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ackpt.core.budget import readable
from ackpt.core.errors import TraceError
from ackpt.metering.gpus import BLOCK
from ackpt.planner.capture.joint_graph import JointGraph
from ackpt.planner.capture.optimizer_state import eight_bit_bytes
from ackpt.planner.capture.short_names import block_of, modules_text, pattern
from ackpt.planner.choose import plan_by_policy
from ackpt.planner.costs.profiles import Profile
from ackpt.planner.request import Request
from ackpt.planner.schedule.plan import RECOMPUTED, Plan
from ackpt.planner.schedule.schedule import Schedule
from ackpt.planner.schedule.simulator import simulate
from ackpt.planner.sharding.sharding import (
    GroupBytes,
    Sharding,
    Walk,
    groups_of,
    optimizer_like,
    sharded_optimizer,
    timeline,
)

CHUNKS = 8  # of the head
InChunks = Callable[[int], tuple[JointGraph, Profile]]  # the step with its head in so many chunks
_WITH_8_BITS = ("Adagrad", "Adam", "AdamW", "RMSprop", "SGD")  # in bitsandbytes.optim


@dataclass(frozen=True)
class Suggestion:
    """A change, the peak of the step with it, and what to type. ``saved_bytes``: the peak's decrease; ``cost``: added
    time as a fraction of the baseline step, None where it is not simulated. ``how``: how the saving was computed.

    Example:
        >>> import torch, ackpt
        >>> def block():
        ...     return torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8))
        >>> explanation = ackpt.explain(torch.nn.Sequential(block(), block(), block()), torch.ones(64, 8))
        >>> best = explanation.suggestions[0]
        >>> best.title, best.peak_bytes == explanation.plan.peak_bytes - best.saved_bytes
        ('checkpoint 2 x *', True)
    """

    title: str
    saved_bytes: int
    peak_bytes: int
    cost: float | None
    fix: str
    how: str


def suggestions(
    graph: JointGraph, profile: Profile, plan: Plan, model: torch.nn.Module, optimizer, ranks: int, in_chunks: InChunks
) -> tuple[tuple[Suggestion, ...], tuple[str, ...]]:
    """The changes that reduce the peak, the one that saves most first; and which were not computed, with the reason."""
    made: list[Suggestion] = []
    reasons: list[str] = []

    def suggest(title: str, peak: int, fix: str, how: str, cost: float | None = None) -> None:
        made.append(Suggestion(title, plan.peak_bytes - peak, peak, cost, fix, how))

    full = plan_by_policy(graph, Request(policy="full"), profile)
    title, fix = f"checkpoint {_recomputed_blocks(full)}", 'ackpt.apply_budget(model, batch, policy="full")'
    suggest(title, full.peak_bytes, fix, "a plan of policy full", full.cost)
    try:
        chunks = in_chunks(CHUNKS) if graph.head_chunks == 1 else None
    except TraceError as error:
        reasons.append(f"chunk the head: {error}")
        chunks = None
    with_optimizer = "" if optimizer is None else "optimizer=optimizer, "
    head, costs = chunks or (graph, profile)
    for policy in ("none", "full") if chunks is not None else ():
        chunked = plan_by_policy(head, Request(policy=policy), costs, (graph, profile))
        title = "chunk the head" if policy == "none" else f"checkpoint {_recomputed_blocks(chunked)} and chunk the head"
        if policy == "none" or chunked.peak_bytes < min(suggestion.peak_bytes for suggestion in made):
            budget = f'budget="{readable(chunked.peak_bytes)}"'
            fix = f"ackpt.apply_budget(model, batch, {budget}, {with_optimizer}chunk_head=True)"
            how = f"a plan of policy {policy}, with the head and the loss in {CHUNKS} chunks of tokens"
            suggest(title, chunked.peak_bytes, fix, how, chunked.cost)
    if graph.optimizer_step_bytes:
        peak = simulate(dataclasses.replace(graph, optimizer_step_bytes=0), profile, plan.schedule).timeline.peak_bytes
        title, fix = "an optimizer's step that allocates nothing", "fused=True for the optimizer"
        how = "simulated without the memory that the optimizer's step allocates"
        suggest(title, plan.resident_bytes + peak, fix, how)
    if optimizer is None:
        reasons.append("8-bit optimizer: give optimizer= to include its state")
    elif type(optimizer).__name__ in _WITH_8_BITS:
        peak = plan.peak_bytes - graph.optimizer_bytes + eight_bit_bytes(optimizer, graph.on_cpu)
        fix = f"bitsandbytes.optim.{type(optimizer).__name__}8bit(model.parameters(), ...)"
        how = "the state with 8 bits per element and one float32 scale per 256 elements"
        suggest("8-bit optimizer", peak, fix, how)
    else:
        reasons.append(f"8-bit optimizer: none is known for {type(optimizer).__name__}")
    peak = _sharded_peak(graph, profile, plan.schedule, model, optimizer, ranks)
    if isinstance(peak, str):
        reasons.append(f"shard over {ranks} ranks: {peak}")
    else:
        fix = "torch.distributed.fsdp.fully_shard on every block, then on the model"
        how = "simulated with FSDP2's gathers and reductions, for one rank with this batch"
        suggest(f"shard over {ranks} ranks", peak, fix, how)
    useful = (suggestion for suggestion in made if suggestion.saved_bytes > 0)
    return tuple(sorted(useful, key=lambda suggestion: -suggestion.saved_bytes)), tuple(reasons)


def _recomputed_blocks(full: Plan) -> str:
    """The blocks that a plan recomputes, in words: those in lists, if there are some."""
    blocks = dict.fromkeys(block_of(a.module) for a in full.activations if a.fate == RECOMPUTED)
    members = [block for block in blocks if pattern(block) != block]
    return modules_text(members or blocks or [""])


def _sharded_peak(graph: JointGraph, profile: Profile, schedule: Schedule, model, optimizer, ranks: int) -> int | str:
    """The peak of one of `ranks` over which FSDP2 shards the step's state; the reason if it cannot be simulated."""
    if schedule.offloaded:
        return "plans that offload are not simulated for shards"
    if schedule.packed:
        return "plans that pack dropout masks are not simulated for shards"
    sharding = Sharding(ranks, block_bytes=1 if graph.on_cpu else BLOCK)
    kind = None if optimizer is None else optimizer_like(optimizer)
    try:
        groups = groups_of(model)
        state, step = sharded_optimizer(kind, groups, sharding, graph.on_cpu)
        one_rank = dataclasses.replace(graph, optimizer_step_bytes=step)
        windows = Walk(one_rank, schedule, profile.workspace_bytes, groups, sharding).windows()
    except ValueError as error:  # ShardingError is one
        return re.sub(r"^--fsdp: |[;:] leave --fsdp out$", "", str(error))
    sizes = graph.bytes()
    shards = sum(GroupBytes(group, sharding).shards for group in groups)
    return shards + sizes["buffer"] + sizes["input"] + state + timeline(windows).peak_bytes
