"""`ackpt.explain`: where the memory of a training step goes, and what would reduce it; its snapshot for memory_viz."""

import os
import pickle
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from ackpt.core.files import write_bytes_atomic, write_text_atomic
from ackpt.core.progress import shown, stage
from ackpt.metering.gpus import CachingAllocator
from ackpt.planner.capture.chunked_head import chunked
from ackpt.planner.capture.inspection.calls import call_arguments, sliced
from ackpt.planner.capture.joint_graph import JointGraph
from ackpt.planner.capture.optimizer_state import optimizer_of
from ackpt.planner.capture.tracing import trace
from ackpt.planner.choose import default_profile, plan_by_policy
from ackpt.planner.costs.devices import Device
from ackpt.planner.costs.profiles import Profile
from ackpt.planner.costs.profiles import profile as profiled
from ackpt.planner.request import Request
from ackpt.planner.schedule.allocations import Allocation, allocations, described
from ackpt.planner.schedule.plan import Plan
from ackpt.planner.step.planned_step import without_budget

from .page import page
from .saved import StepMemory, saved_lines, text
from .suggestions import InChunks, suggestions

RANKS = 8


@dataclass(frozen=True, repr=False)
class Explanation(StepMemory):
    """Where the memory of a planned step goes; ``print(explanation)`` shows it.

    ``plan``: the plan of the step. ``saved``: a `SavedLine` for every module and source line that saves something for
    backward, whose bytes add up to what the baseline saves. ``allocations``: every block of memory of the step.
    ``suggestions``: the changes that would reduce the peak, the best first. ``not_computed``: changes whose peak was
    not computed, with the reason. ``types``: the classes of the modules, by their names.
    ``views``: the arguments that are smaller than their storage, which counts, in words; "" if there are none.

    Example:
        >>> import torch, ackpt
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> explanation = ackpt.explain(model, torch.ones(4, 8))
        >>> sum(line.bytes for line in explanation.saved) == explanation.plan.saved_bytes
        True
        >>> sum(explanation.at_peak.values()) == explanation.plan.peak_bytes
        True
    """

    def __repr__(self) -> str:
        return text(self)

    def to_html(self, path: str | os.PathLike[str]) -> Path:
        """Write the explanation as one HTML page, which needs no network, and return its path.

        Raises:
            RecordError: if it cannot be written there.
        """
        return write_text_atomic(path, page(self))

    def to_memory_viz(self, path: str | os.PathLike[str]) -> Path:
        """Write the step as a snapshot that pytorch.org/memory_viz opens, and return its path.

        The file has the format of ``torch.cuda.memory._dump_snapshot``. Its addresses are those of a model of PyTorch's
        caching allocator.

        Raises:
            RecordError: if it cannot be written there.
        """
        # The page reads protocols up to 4 (torch/utils/viz/MemoryViz.js, unpickle).
        return write_bytes_atomic(path, pickle.dumps(snapshot(self), protocol=4))


def explain(
    model: nn.Module,
    batch: Any,
    budget: float | str | None = None,
    *,
    policy: str | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    device: str | Device | None = None,
    ranks: int = RANKS,
    differentiate: Literal["loss", "all"] = "loss",
    outputs: Literal["drop", "keep"] = "drop",
) -> Explanation:
    """Return what a training step of `model` saves for backward, what is live at its peak, and how to reduce the peak.

    Args:
        model: an ``nn.Module`` with real, fake or meta parameters; it is not changed. Its budget, if any, is ignored.
        batch: example inputs: a dict of keyword arguments, a tuple or list of positional ones, or one tensor.
        budget, policy: the plan to explain, as in `ackpt.plan`. The default policy is ``"none"`` without a budget and
            ``"auto"`` with one. On a CPU, the model's own step allocates 8 bytes more for each product of an activation
            and a Python number, because autograd saves the number as a tensor. It may also free temporaries later.
        optimizer: the optimizer that trains the model; its state and its step then count toward the peak.
        device: a device of `ackpt.planner.costs.devices`, such as ``"h200"``, whose rates give the seconds of
            recomputation. By default the one that holds the tensors. If its rates are unknown, FLOPs replace seconds.
        ranks: the number of processes over which the suggestion to shard distributes the model.
        differentiate, outputs: as in `ackpt.trace`.

    Raises:
        TraceError: if the model cannot be captured as one graph; `ackpt.print_saved` needs no capture.
        BudgetError: if the budget is infeasible.
        ValueError, TypeError: for invalid arguments.

    Example:
        >>> import torch, ackpt
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> explanation = ackpt.explain(model, torch.ones(4, 8))
        >>> explanation.by_type, explanation.at_peak["parameters"]
        ({'Tanh': 128}, 324)
    """
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 2:
        raise ValueError(f"ranks must be a whole number of at least 2, got {ranks!r}")
    args, kwargs = call_arguments(batch)
    with shown():
        with without_budget(model):
            graph = trace(model, *args, differentiate=differentiate, outputs=outputs, optimizer=optimizer, **kwargs)

        def costs(graph: JointGraph) -> Profile:
            profile = default_profile(graph)
            if device is None:
                return profile
            return replace(profiled(graph, device), workspace_bytes=profile.workspace_bytes)  # of the same peak

        def in_chunks(count: int) -> tuple[JointGraph, Profile]:
            head = chunked(graph, count)
            return head, costs(head)

        profile = costs(graph)
        plan = plan_by_policy(graph, Request(budget, policy=policy or ("none" if budget is None else "auto")), profile)
        explanation = explained(graph, profile, plan, model, optimizer_of(model, optimizer), in_chunks, ranks)
    return replace(explanation, views=sliced(args, kwargs))


def explained(
    graph: JointGraph,
    profile: Profile,
    plan: Plan,
    model: nn.Module,
    optimizer,
    in_chunks: InChunks,
    ranks: int = RANKS,
) -> Explanation:
    """The explanation of a plan of `graph`, which was captured from `model`."""
    stage("simulating what would reduce the peak")
    best, not_computed = suggestions(graph, profile, plan, model, optimizer, ranks, in_chunks)
    return Explanation(
        graph=graph,
        profile=profile,
        plan=plan,
        saved=saved_lines(graph, profile, plan),
        allocations=allocations(graph, plan.schedule, profile.workspace_bytes),
        suggestions=best,
        not_computed=not_computed,
        types={name: type(module).__name__ for name, module in model.named_modules()},
    )


START = 0x7F0000000000  # of the segment


def snapshot(explanation: StepMemory) -> dict[str, Any]:
    """Segments and events of the step; resident blocks are allocated first."""
    frames = {id(block): _frames(explanation, block) for block in explanation.allocations}
    events: list[tuple[int, bool, Allocation]] = []
    for block in (block for block in explanation.allocations if block.bytes):
        events.append((block.begin, True, block))
        events += [] if block.end is None else [(block.end, False, block)]
    events.sort(key=lambda event: event[0])  # stable: at the same time in the order of allocation
    allocator = CachingAllocator()
    whole = 0
    trace = []
    for time, is_allocation, block in events:
        if is_allocation:
            allocator.allocate(id(block), block.bytes)
        offset = allocator.blocks[id(block)].address
        whole = max(whole, offset + block.bytes)
        for action in ("alloc",) if is_allocation else ("free_requested", "free_completed"):
            trace.append(_event(action, offset, block.bytes, frames[id(block)], time))
        if not is_allocation:
            allocator.free(id(block))
    left = sorted((allocator.blocks[id(b)].address, b) for b in explanation.allocations if id(b) in allocator.blocks)
    blocks, end = [], 0
    for offset, block in [*left, (whole, None)]:
        if offset > end:
            blocks.append(_block(end, offset - end, "inactive", []))
        if block is not None:
            blocks.append(_block(offset, block.bytes, "active_allocated", frames[id(block)]))
            end = offset + block.bytes
    used = sum(block.bytes for _, block in left)
    segment = {
        "device": 0,
        "address": START,
        "total_size": whole,
        **dict.fromkeys(("allocated_size", "active_size", "requested_size"), used),
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": blocks,
    }
    trace.insert(0, _event("segment_alloc", 0, whole, [], 0))
    return {"segments": [segment], "device_traces": [trace], "allocator_settings": {}, "external_annotations": []}


def _event(action: str, offset: int, size: int, frames, time: int) -> dict[str, Any]:
    event = {"action": action, "addr": START + offset, "size": size, "stream": 0, "frames": frames, "time_us": time}
    return {**event, "device": 0}


def _block(offset: int, size: int, state: str, frames) -> dict[str, Any]:
    return {"address": START + offset, "size": size, "requested_size": size, "state": state, "frames": frames}


def _frames(explanation: StepMemory, block: Allocation) -> list[dict[str, Any]]:
    """The frames of a block: its content as the innermost one, then the user's line, then the module."""
    name = f"{block.kind}: {described(explanation.graph, block)}"
    if block.node is None:
        return [{"name": name, "filename": "optimizer", "line": 0}]
    node = explanation.graph.nodes[block.node]
    file, _, line = node.source.rpartition(":")
    module = node.module or "the model itself"
    return [{"name": name, "filename": file or module, "line": int(line) if file else 0}]
