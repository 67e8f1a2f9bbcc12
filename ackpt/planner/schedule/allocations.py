"""List every allocation of a schedule with its lifetime and kind, for `ackpt.explain` and for the error of a budget."""

import operator
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from ackpt.core.budget import readable
from ackpt.metering.meter import memory_format
from ackpt.planner.capture.joint_graph import FORWARD, JointGraph, once_per_graph
from ackpt.planner.capture.short_names import operation, short_source
from ackpt.planner.schedule.simulator import HOST, TEMPORARY, follow

from .schedule import Schedule, storages_of

#: The kinds of live bytes, resident ones first.
LIVE = ("parameters", "buffers", "inputs", "optimizer", "gradients", "saved", "outputs", "recomputed", "temporaries")
RESIDENT = LIVE[:4]
_WORDS = {
    "parameters": "are parameters",
    "buffers": "are buffers",
    "inputs": "are inputs",
    "optimizer": "are optimizer state",
    "gradients": "are gradients",
    "saved": "are saved activations",
    "outputs": "are outputs",
    "recomputed": "are recomputed activations",
    "temporaries": "are temporaries",
}
_OF_CATEGORY = {"parameter": "parameters", "buffer": "buffers", "input": "inputs"}


@dataclass(frozen=True)
class Allocation:
    """A block of device memory, live in the entries ``begin <= i < end`` of the step's timeline; end None: to its end.

    ``kind``: one of `LIVE`. ``node``: the operation or input whose result it holds; None for memory of the optimizer.
    ``storage``: the storage of that result; None for workspace, RNG states, packed masks and memory of the optimizer.

    Example:
        >>> import torch, ackpt
        >>> from ackpt.planner.schedule.allocations import allocations
        >>> graph = ackpt.trace(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()), torch.ones(4, 8))
        >>> [block.bytes for block in allocations(graph, ackpt.plan(graph).schedule, [0] * len(graph.nodes))][:3]
        [256, 32, 128]
    """

    kind: str
    bytes: int
    node: int | None
    begin: int
    end: int | None
    storage: int | None = None

    def is_live(self, index: int) -> bool:
        return self.begin <= index and (self.end is None or index < self.end)


def allocations(graph: JointGraph, schedule: Schedule, workspace_bytes) -> tuple[Allocation, ...]:
    """Every allocation of the step with this schedule, resident ones first, then in order."""
    analysis = graph.analysis
    listed = [
        Allocation(_OF_CATEGORY[storage.category], storage.bytes, storage.producer, 0, None, storage.id)
        for storage in graph.storages
        if storage.id in analysis.resident and storage.bytes
    ]
    if graph.optimizer_bytes:
        listed.append(Allocation("optimizer", graph.optimizer_bytes, None, 0, None))
    live = follow(graph, schedule, workspace_bytes)
    kind_of, moved = _kinds(graph, schedule), {*schedule.offloaded, *schedule.packed}
    opened: dict[tuple, list[list]] = {}
    blocks: list[list] = []
    for event, ((size, category), owner, storage) in enumerate(zip(live.events, live.owner, live.storage), 1):
        if category == HOST:
            continue
        key = (owner, category, abs(size)) if storage is None else (storage,)
        if size < 0:
            opened[key].pop()[4] = event
            continue
        is_late = event > live.boundary
        if storage is None:
            is_state = owner is not None and not is_late and category != TEMPORARY
            kind = "saved" if is_state else "temporaries"
        elif is_late and storage not in moved and owner is not None and graph.nodes[owner].phase == FORWARD:
            kind = "recomputed"
        else:
            kind = kind_of.get(storage, "temporaries")
        node = owner if storage is None else analysis.base_of.get(storage, owner)
        blocks.append([kind, size, node, event, None, storage])
        opened.setdefault(key, []).append(blocks[-1])
    return (*listed, *(Allocation(*block) for block in blocks))


def _kinds(graph: JointGraph, schedule: Schedule) -> dict[int, str]:
    """By storage, what its first content is."""
    kinds = dict.fromkeys(storages_of(graph, graph.analysis.outputs), "outputs")
    kinds |= dict.fromkeys((*schedule.saved, *schedule.offloaded, *schedule.packed), "saved")
    return kinds | dict.fromkeys(storages_of(graph, graph.analysis.bw_outputs), "gradients")


def operation_of(graph: JointGraph, node: int) -> str:
    """The operation that computes a node's result, in words: for one of several results, the operation itself."""
    fx = graph.analysis.fx[node]
    while fx.target is operator.getitem and isinstance(fx.args[0], torch.fx.Node):
        fx = fx.args[0]
    return operation(fx.name)


def described(graph: JointGraph, block: Allocation) -> str:
    """What an allocation holds, in words: a parameter's name, or an operation with its module and source line."""
    if block.node is None:
        return "state of the optimizer" if block.kind == "optimizer" else "the optimizer's step"
    node = graph.nodes[block.node]
    if block.kind in ("parameters", "buffers", "inputs"):
        described_by = graph.analysis.fx[block.node].meta.get("desc")
        return getattr(described_by, "target", None) or f"input {getattr(described_by, 'idx', node.name)}"
    if block.kind == "gradients" and (name := _gradients(graph).get(block.storage)):
        return f"gradient of {name}"
    where = ", ".join(part for part in (node.module, short_source(node.source)) if part) or "the model itself"
    prefix = "" if block.storage is not None else "workspace of " if block.kind == "temporaries" else "random state of "
    return f"{prefix}{operation_of(graph, node.id)} ({where})"


def peak_in_words(graph: JointGraph, live: Sequence[Allocation]) -> str:
    """What the peak, at which the blocks `live` are, consists of, and what reduces it: two sentences for an error."""
    sizes = Counter(by_kind(live))
    sizes["gradients"] += graph.accumulated_bytes
    total = sum(sizes.values())
    model = {kind: sizes.get(kind, 0) for kind in ("parameters", "optimizer", "gradients")}
    kinds = [kind for kind, _ in sizes.most_common(3) if sizes[kind]]
    parts = [f"{memory_format(sizes[kind])} {_WORDS[kind]}" for kind in kinds]
    consists = f"Of its {readable(total)}, {', '.join(parts[:-1])}{' and ' if parts[1:] else ''}{parts[-1]}"
    if any(block.node is None and block.kind == "temporaries" for block in live):
        return (
            f"{consists}. That peak is reached in the optimizer's step, which no checkpointing makes smaller: let it "
            "take one parameter at a time (foreach=False) or nothing in addition to them (fused=True), or use another "
            "optimizer."
        )
    smaller_model = "freeze parameters (LoRA), use a smaller dtype or optimizer state, or shard the model (FSDP2)"
    if 4 * sum(model.values()) > 3 * total:
        return f"{consists}; activations are not the problem: {smaller_model}."
    largest = max((b for b in live if b.kind not in RESIDENT), key=lambda block: block.bytes, default=None)
    if largest is not None:
        consists += f"; the largest allocation is {described(graph, largest)}, {memory_format(largest.bytes)}"
    fixes = "use a smaller batch, shorter sequences or smaller images"
    if ("softmax" in consists or "nll_loss" in consists) and graph.head_chunks == 1:
        fixes += ", or chunk the loss (chunk_head=True, or ackpt.chunked_cross_entropy)"
    if 4 * sum(model.values()) > total:
        fixes += f", or {smaller_model}"
    return f"{consists}: {fixes}."


@once_per_graph
def _gradients(graph: JointGraph) -> dict[int | None, str]:
    """The parameters by the storages of their gradients."""
    return {s: name for name, node in graph.gradients.items() for s in graph.nodes[node].storages}


def by_kind(blocks: Iterable[Allocation]) -> dict[str, int]:
    """Bytes of `blocks` by kind, in the order of `LIVE`; kinds without bytes are left out."""
    sizes: Counter[str] = Counter()
    for block in blocks:
        sizes[block.kind] += block.bytes
    return {kind: sizes[kind] for kind in LIVE if sizes[kind]}
