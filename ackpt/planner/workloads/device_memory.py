"""Does a step fit a GPU? `device_memory` replays a schedule's allocations in the model of the caching allocator.

The model is loaded, the optimizer's state is created at the end of a first step, and a second step is observed, which
may find the gradients of the first. State and temporaries of the optimizer are blocks as large as the parameters;
cuBLAS has a workspace in forward and backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ackpt.metering.gpus import AllocatorSettings, CachingAllocator, Gpu
from ackpt.metering.kernel_memory import MATMULS
from ackpt.metering.timeline import Timeline
from ackpt.planner.capture.joint_graph import JointGraph
from ackpt.planner.costs.devices import Device
from ackpt.planner.schedule.allocations import RESIDENT, Allocation, allocations
from ackpt.planner.schedule.schedule import Schedule
from ackpt.planner.schedule.simulator import follow


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
    on: Gpu,
    context_bytes: int | None = None,
) -> DeviceMemory:
    """The memory of a step with `schedule` on a GPU; `context_bytes` replaces the known size of the context."""
    blocks = allocations(graph, schedule, workspace_bytes)
    boundary = follow(graph, schedule, workspace_bytes).boundary
    resident = [block for block in blocks if block.kind in RESIDENT]
    dynamic = [block for block in blocks if block.kind not in RESIDENT]
    parameters = [block.bytes for block in resident if block.kind == "parameters"]
    allocator = CachingAllocator(AllocatorSettings.parsed())
    for number, block in enumerate(resident):
        if block.kind != "optimizer":
            allocator.allocate(("resident", number), block.bytes)
    workspaces = [on.cublas_workspace_bytes] if any(node.target in _MATMULS for node in graph.nodes) else []
    _step(allocator, graph, boundary, dynamic, parameters, workspaces, _GRADIENT)
    for number, size in enumerate(_pieces(graph.optimizer_bytes, parameters)):
        allocator.allocate(("state", number), size)
    if not graph.accumulated_bytes:
        _free_all(allocator, _GRADIENT)  # zero_grad(set_to_none=True)
    allocator.reset_peaks()
    _step(allocator, graph, boundary, dynamic, parameters, [], "new gradient" if graph.accumulated_bytes else _GRADIENT)
    return _memory(allocator, where, on, context_bytes)


def rank_memory(
    timeline: Timeline,
    resident: Mapping[str, int],
    shards: list[int],
    where: Device,
    on: Gpu,
    context_bytes: int | None = None,
) -> DeviceMemory:
    """As `device_memory`, from the live bytes after every event; a free is of the latest block of its size."""
    allocator = CachingAllocator(AllocatorSettings.parsed())
    for name, size in resident.items():
        for number, block in enumerate(_pieces(size, shards) if name == "parameters" else [size] * bool(size)):
            if name != "optimizer":
                allocator.allocate((name, number), block)
    _events(allocator, timeline, [on.cublas_workspace_bytes])
    for number, block in enumerate(_pieces(resident["optimizer"], shards)):  # while the gradients exist
        allocator.allocate(("state", number), block)
    _free_all(allocator, "block")
    allocator.reset_peaks()
    _events(allocator, timeline, [])
    return _memory(allocator, where, on, context_bytes)


def _events(allocator: CachingAllocator, timeline: Timeline, workspaces: list[int]) -> None:
    """The blocks of one step; those that it does not free remain. `workspaces`: for each of forward and backward."""
    blocks: dict[int, list[tuple[int, str]]] = {}  # by size
    for event in range(1, len(timeline.live)):
        for size in workspaces * (event in (1, (timeline.boundary or 0) + 1)):
            allocator.allocate(("workspace", event), size)
        for category, live in timeline.categories.items():
            size = live[event] - live[event - 1]
            if size > 0:
                allocator.allocate(("block", event), size)
                blocks.setdefault(size, []).append((event, category))
            elif size:
                latest = max(blocks[-size], key=lambda block: (block[1] == category, block))  # noqa: B023
                blocks[-size].remove(latest)
                allocator.free(("block", latest[0]))


def _memory(allocator: CachingAllocator, where: Device, on: Gpu, context_bytes: int | None) -> DeviceMemory:
    context = on.context_bytes if context_bytes is None else context_bytes
    margin = where.memory_bytes - context - allocator.peak_reserved
    return DeviceMemory(
        allocator.peak_allocated, allocator.peak_reserved, context, margin, allocator.largest_free_block
    )


_MATMULS = {str(each) for each in MATMULS}
_GRADIENT = "gradient"


def _step(
    allocator, graph, boundary: int, dynamic: list[Allocation], parameters, workspaces, kind_of_gradients: str
) -> None:
    """One step: its blocks in order, and at its end those of the optimizer. Gradients remain, unless others exist."""
    if graph.optimizer_step_bytes:  # the last event of the simulator
        dynamic = dynamic[:-1]
    events = [(block.begin, False, number) for number, block in enumerate(dynamic)]
    events += [(block.end, True, number) for number, block in enumerate(dynamic) if block.end is not None]
    for event, is_end, number in sorted(events):
        block = dynamic[number]
        if is_end:
            allocator.free(("block", number))
            continue
        kind = kind_of_gradients if block.kind == "gradients" and block.end is None else "block"
        allocator.allocate((kind, number), block.bytes)
        for size in workspaces:
            thread = "backward" if event > boundary else "forward"
            if ("workspace", thread) not in allocator.blocks:
                allocator.allocate(("workspace", thread), size)
    _free_all(allocator, "block")  # the outputs
    if kind_of_gradients != _GRADIENT:  # added to those that exist
        _free_all(allocator, kind_of_gradients)
    pieces = list(enumerate(_pieces(graph.optimizer_step_bytes, parameters)))
    for piece, size in pieces:
        allocator.allocate(("optimizer", piece), size)
    for piece, _ in pieces:
        allocator.free(("optimizer", piece))


def _free_all(allocator: CachingAllocator, kind: str) -> None:
    for key in [key for key in allocator.blocks if isinstance(key, tuple) and key[0] == kind]:
        allocator.free(key)


def _pieces(size: int, parameters: list[int]) -> Iterator[int]:
    """`size` bytes in blocks as large as the parameters, in their order and again; what remains is one more block."""
    while parameters and size >= min(parameters):
        for block in parameters:
            if size >= block:
                size -= block
                yield block
    if size:
        yield size
