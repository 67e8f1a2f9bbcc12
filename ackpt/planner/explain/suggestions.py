"""Suggest changes that reduce the peak; each saving is planned or simulated.

Every suggestion is made to the explained plan alone, so savings do not add up; those of checkpointing and the chunked
loss are simulated together as well.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from dataclasses import dataclass
from functools import partial

import torch

from ackpt.metering.gpus import BLOCK
from ackpt.planner.capture.joint_graph import FORWARD, JointGraph
from ackpt.planner.capture.optimizer_state import eight_bit_bytes
from ackpt.planner.capture.places import block_of, modules_text, pattern, short_source
from ackpt.planner.choose import planned
from ackpt.planner.costs.profiles import Profile
from ackpt.planner.request import Request
from ackpt.planner.schedule.plan import RECOMPUTED, Plan
from ackpt.planner.schedule.schedule import Schedule
from ackpt.planner.schedule.simulator import simulate
from ackpt.planner.sharding.sharding import GroupBytes, Sharding, groups_of, peak_bytes, sharded_optimizer, step_windows

CHUNKS = 8  # of the loss, the default of ackpt.chunked_cross_entropy
_aten = torch.ops.aten
_PRODUCTS = {_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default}
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
    graph: JointGraph, profile: Profile, plan: Plan, model: torch.nn.Module, optimizer, ranks: int
) -> tuple[tuple[Suggestion, ...], tuple[str, ...]]:
    """The changes that reduce the peak, the one that saves most first; and which were not computed, with the reason."""
    made: list[Suggestion] = []
    reasons: list[str] = []
    full = planned(graph, Request(policy="full"), profile)
    made.append(
        _suggestion(
            plan,
            full.peak_bytes,
            f"checkpoint {_recomputed_blocks(full)}",
            full.cost,
            'ackpt.apply_budget(model, batch, policy="full")',
            "a plan of policy full",
        )
    )
    chunked = _ChunkedLoss.of(graph)
    if chunked is None:
        reasons.append("chunk the loss: the step has no cross-entropy of logits that a matrix product computes")
    else:
        how = f"simulated with the logits in {CHUNKS} chunks and their gradients computed in the forward"
        fix = "ackpt.chunked_cross_entropy(hidden.flatten(0, -2), head.weight, targets.flatten()) for head and loss"
        made.append(_suggestion(plan, chunked.peak(plan.schedule, profile), f"chunk {chunked.where}", None, fix, how))
        both = planned(chunked.small, Request(policy="full"), profile)
        peak = chunked.peak(both.schedule, profile)
        title = f"checkpoint {_recomputed_blocks(both)} and chunk the loss"
        if peak < min(suggestion.peak_bytes for suggestion in made):
            fix = 'chunk the loss, then ackpt.apply_budget(model, batch, policy="full")'
            made.append(_suggestion(plan, peak, title, both.cost, fix, f"{how}; a plan of policy full"))
    if graph.optimizer_step_bytes:
        peak = simulate(dataclasses.replace(graph, optimizer_step_bytes=0), profile, plan.schedule).timeline.peak_bytes
        title, fix = "an optimizer's step that allocates nothing", "fused=True for the optimizer"
        how = "simulated without the memory that the optimizer's step allocates"
        made.append(_suggestion(plan, plan.resident_bytes + peak, title, None, fix, how))
    if optimizer is None:
        reasons.append("8-bit optimizer: give optimizer= to include its state")
    elif type(optimizer).__name__ in _WITH_8_BITS:
        size = eight_bit_bytes(optimizer, graph.on_cpu)
        made.append(
            _suggestion(
                plan,
                plan.peak_bytes - graph.optimizer_bytes + size,
                "8-bit optimizer",
                None,
                f"bitsandbytes.optim.{type(optimizer).__name__}8bit(model.parameters(), ...)",
                "the state with 8 bits per element and one float32 scale per 256 elements",
            )
        )
    else:
        reasons.append(f"8-bit optimizer: none is known for {type(optimizer).__name__}")
    peak = _sharded_peak(graph, profile, plan.schedule, model, optimizer, ranks)
    if isinstance(peak, str):
        reasons.append(f"shard over {ranks} ranks: {peak}")
    else:
        fix = "torch.distributed.fsdp.fully_shard on every block, then on the model"
        how = "simulated with FSDP2's gathers and reductions, for one rank with this batch"
        made.append(_suggestion(plan, peak, f"shard over {ranks} ranks", None, fix, how))
    useful = (suggestion for suggestion in made if suggestion.saved_bytes > 0)
    return tuple(sorted(useful, key=lambda suggestion: -suggestion.saved_bytes)), tuple(reasons)


def _suggestion(plan: Plan, peak: int, title: str, cost: float | None, fix: str, how: str) -> Suggestion:
    return Suggestion(title, plan.peak_bytes - peak, peak, cost, fix, how)


def _recomputed_blocks(full: Plan) -> str:
    """The blocks that a plan recomputes, in words: those in lists, if there are some."""
    blocks = dict.fromkeys(block_of(a.module) for a in full.activations if a.fate == RECOMPUTED)
    members = [block for block in blocks if pattern(block) != block]
    return modules_text(members or blocks or [""])


@dataclass(frozen=True)
class _ChunkedLoss:
    """A graph without its logits and the tensors of their size that only the loss uses.

    ``live_bytes``: the live bytes that replace them at the end of a chunked loss's forward: the gradients of the hidden
    states and of the head's weight if it is trained, else the hidden states themselves; ``chunk_bytes``: the logits of
    one chunk and their exponentials. ``where``: the loss in words.
    """

    small: JointGraph
    live_bytes: int
    chunk_bytes: int
    where: str

    @classmethod
    def of(cls, graph: JointGraph) -> _ChunkedLoss | None:
        """The largest cross-entropy of a graph, chunked; None if no matrix product computes the logits of one."""
        fx = graph.analysis.fx
        losses = [node for node in graph.nodes if fx[node.id].target is _aten._log_softmax.default]
        if not losses:
            return None
        loss = max(losses, key=lambda node: fx[node.id].meta["val"].numel())
        logits = fx[loss.id].meta["val"]
        nodes = _of_size(graph, loss.id, logits.numel())
        products = [n for n in nodes if fx[n].target in _PRODUCTS and graph.nodes[n].phase == FORWARD]
        if not products:
            return None
        *_, factor, head = (arg for arg in fx[min(products)].args if isinstance(arg, torch.fx.Node))
        hidden, weight = factor.meta["val"], head.meta["val"]
        rows = logits.numel() // logits.shape[-1]
        chunk = -(-rows // CHUNKS)
        storages = {s for node in nodes for s in graph.nodes[node].storages}
        without = tuple(dataclasses.replace(s, bytes=0) if s.id in storages else s for s in graph.storages)
        small = dataclasses.replace(graph, storages=without)
        live = hidden.numel() * hidden.element_size()
        if _is_trained(graph, head):
            live += weight.numel() * max(4, weight.element_size())
        else:  # no gradient of the weight reads the hidden states later, but the loss does
            live *= 2
        where = f"the loss ({short_source(loss.source) or loss.module or 'in the model itself'})"
        return cls(small, live, 2 * chunk * logits.shape[-1] * max(4, logits.element_size()), where)

    def peak(self, schedule: Schedule, profile: Profile) -> int:
        """The peak of a schedule of the graph with this loss."""
        simulated = simulate(self.small, profile, schedule)
        timeline = simulated.timeline
        after_forward = timeline.live[timeline.boundary or 0] + self.live_bytes + self.chunk_bytes
        return simulated.resident_bytes + max(simulated.peak_bytes, after_forward)


def _is_trained(graph: JointGraph, weight: torch.fx.Node) -> bool:
    """Whether a weight, a view or a cast of it has a gradient, which a frozen parameter does not have."""
    while weight.op != "placeholder" and len(weight.all_input_nodes) == 1:
        weight = weight.all_input_nodes[0]
    name = getattr(weight.meta.get("desc"), "target", None)
    return name is None or name in graph.gradients


def _of_size(graph: JointGraph, loss: int, elements: int) -> set[int]:
    """The nodes of the loss whose result has as many elements as the logits, from the product that computes them on."""
    fx = graph.analysis.fx
    users: dict[int, list[int]] = {}
    for node in graph.nodes:
        for source in node.inputs:
            users.setdefault(source, []).append(node.id)

    def is_large(node: int) -> bool:
        value = fx[node].meta.get("val")
        return isinstance(value, torch.Tensor) and value.numel() == elements and node not in graph.analysis.sources

    large: set[int] = set()
    todo = [loss]
    while todo:
        node = todo.pop()
        if node in large or not is_large(node):
            continue
        large.add(node)
        if fx[node].target not in _PRODUCTS:
            todo += graph.nodes[node].inputs
        todo += [user for user in users.get(node, ()) if fx[user].target not in _PRODUCTS]
    return large


def _sharded_peak(graph: JointGraph, profile: Profile, schedule: Schedule, model, optimizer, ranks: int) -> int | str:
    """The peak of one of `ranks` over which FSDP2 shards parameters, gradients and the optimizer's state.

    Returns the reason if it cannot be simulated: a model without blocks, or blocks that FSDP2 would run in another way.
    """
    if schedule.offloaded:
        return "plans that offload are not simulated for shards"
    if schedule.packed:
        return "plans that pack dropout masks are not simulated for shards"
    sharding = Sharding(ranks, block_bytes=1 if graph.on_cpu else BLOCK)
    kind = None if optimizer is None else _like(optimizer)
    try:
        groups = groups_of(model)
        state, step = sharded_optimizer(kind, groups, sharding, graph.on_cpu)
        one_rank = dataclasses.replace(graph, optimizer_step_bytes=step)
        windows = step_windows(one_rank, schedule, profile.workspace_bytes, groups, sharding)
    except ValueError as error:  # ShardingError is one
        return re.sub(r"^--fsdp: |[;:] leave --fsdp out$", "", str(error))
    except TypeError as error:  # of the optimizer's constructor
        return f"an optimizer like the {type(optimizer).__name__} cannot be made for the shards: {error}"
    sizes = graph.bytes()
    shards = sum(GroupBytes(group, sharding).shards for group in groups)
    return shards + sizes["buffer"] + sizes["input"] + state + peak_bytes(windows)


def _like(optimizer: torch.optim.Optimizer):
    """A function of parameters that makes an optimizer with the class and the options of this one."""
    accepted = inspect.signature(type(optimizer)).parameters
    return partial(type(optimizer), **{name: value for name, value in optimizer.defaults.items() if name in accepted})
