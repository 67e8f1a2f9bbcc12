"""Every allocation of a schedule with its lifetime and kind, and the memory of a GPU whose allocator serves them."""

import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from ackpt.core.budget import readable
from ackpt.metering.gpus import AllocatorSettings, CachingAllocator, gpu
from ackpt.metering.kernel_memory import MATMULS
from ackpt.metering.meter import memory_format
from ackpt.planner.capture.joint_graph import FORWARD, JointGraph, once_per_graph
from ackpt.planner.capture.short_names import operation, short_source
from ackpt.planner.costs.devices import Device
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


@dataclass(frozen=True)
class DeviceMemory:
    """Peaks of a step on a device, in bytes.

    ``allocated`` and ``reserved``: as ``torch.cuda.max_memory_allocated`` and ``max_memory_reserved`` return them.
    ``context``: of CUDA, outside of both. ``margin``: what remains of the device's memory; negative if the step does
    not fit. ``largest_free_block``: at the end of the step.
    """

    allocated: int
    reserved: int
    context: int
    margin: int
    largest_free_block: int

    @property
    def fits(self) -> bool:
        return self.margin >= 0


def device_memory(
    graph: JointGraph,
    workspace_bytes: Sequence[int],
    schedule: Schedule,
    where: Device,
    context_bytes: int,
    settings: AllocatorSettings | None = None,
) -> DeviceMemory:
    """The memory of a step with `schedule` on a GPU; by default with the allocator's settings in the environment.

    The model is loaded, the optimizer's state is created at the end of a first step, and a second step is observed,
    which may find the gradients of the first. State and temporaries of the optimizer are blocks as large as the
    parameters; cuBLAS has a workspace in forward and backward.
    """
    blocks = allocations(graph, schedule, workspace_bytes)
    boundary = follow(graph, schedule, workspace_bytes).boundary
    resident = [block for block in blocks if block.kind in RESIDENT]
    dynamic = [block for block in blocks if block.kind not in RESIDENT]
    if graph.optimizer_step_bytes:  # the last event of the simulator
        dynamic = dynamic[:-1]
    parameters = [block.bytes for block in resident if block.kind == "parameters"]
    events = [(block.begin, False, number) for number, block in enumerate(dynamic)]
    events += [(block.end, True, number) for number, block in enumerate(dynamic) if block.end is not None]
    events.sort()
    multiplies = any(node.target in _MATMULS for node in graph.nodes)
    allocator = CachingAllocator(settings or AllocatorSettings.parsed())

    def free_all(kind: str) -> None:
        for key in [key for key in allocator.blocks if isinstance(key, tuple) and key[0] == kind]:
            allocator.free(key)

    def step(gradient: str) -> None:
        """All blocks in order, and then those of the optimizer; gradients remain."""
        for event, is_end, number in events:
            block = dynamic[number]
            if is_end:
                allocator.free(("block", number))
                continue
            kind = gradient if block.kind == "gradients" and block.end is None else "block"
            allocator.allocate((kind, number), block.bytes)
            workspace = "workspace", "backward" if event > boundary else "forward"
            if multiplies and workspace not in allocator.blocks:
                allocator.allocate(workspace, gpu(where.name).cublas_workspace_bytes)
        free_all("block")  # the outputs
        free_all("added gradient")  # to those that exist
        for number, size in enumerate(pieces(graph.optimizer_step_bytes, parameters)):
            allocator.allocate(("optimizer", number), size)
        free_all("optimizer")

    for number, block in enumerate(resident):
        if block.kind != "optimizer":
            allocator.allocate(("resident", number), block.bytes)
    step("gradient")
    for number, size in enumerate(pieces(graph.optimizer_bytes, parameters)):
        allocator.allocate(("state", number), size)
    if not graph.accumulated_bytes:
        free_all("gradient")  # zero_grad(set_to_none=True)
    allocator.reset_peaks()
    step("added gradient" if graph.accumulated_bytes else "gradient")
    reserved = allocator.peak_reserved
    margin = where.memory_bytes - context_bytes - reserved
    return DeviceMemory(allocator.peak_allocated, reserved, context_bytes, margin, allocator.largest_free_block)


_MATMULS = {str(each) for each in MATMULS}


def pieces(size: int, parameters: list[int]) -> Iterator[int]:
    """`size` bytes in blocks as large as the parameters, in their order and again; what remains is one more block."""
    while parameters and size >= min(parameters):
        for block in parameters:
            if size >= block:
                size -= block
                yield block
    if size:
        yield size
