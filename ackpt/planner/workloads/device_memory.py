"""Does a step fit a GPU? `device_memory` replays a schedule's allocations in the model of the caching allocator.

The model is loaded, the optimizer's state is created at the end of a first step, and a second step is observed, which
may find the gradients of the first. State and temporaries of the optimizer are blocks as large as the parameters;
cuBLAS has a workspace in forward and backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ackpt.metering.gpus import AllocatorSettings, CachingAllocator, Gpu
from ackpt.metering.kernel_memory import MATMULS
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
    settings: AllocatorSettings | None = None,
) -> DeviceMemory:
    """The memory of a step with `schedule` on a GPU.

    `context_bytes` replaces the known size of the context, and `settings` those of the allocator in the environment.
    """
    blocks = allocations(graph, schedule, workspace_bytes)
    boundary = follow(graph, schedule, workspace_bytes).boundary
    resident = [block for block in blocks if block.kind in RESIDENT]
    dynamic = [block for block in blocks if block.kind not in RESIDENT]
    parameters = [block.bytes for block in resident if block.kind == "parameters"]
    allocator = CachingAllocator(settings or AllocatorSettings.parsed())
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
