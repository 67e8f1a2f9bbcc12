"""Export an explained step in the format of `torch.cuda.memory._snapshot`, for pytorch.org/memory_viz.

Times count allocations and frees. Addresses are simulated: every block takes the first gap that is large enough, so
that the one segment is about as large as the peak.
"""

from __future__ import annotations

from typing import Any

from ackpt.planner.schedule.allocations import Allocation, described

from .step_memory import StepMemory

START = 0x7F0000000000  # of the segment


def snapshot(explanation: StepMemory) -> dict[str, Any]:
    """Segments and events of the step; resident blocks are allocated first."""
    frames = {id(block): _frames(explanation, block) for block in explanation.allocations}
    events: list[tuple[int, bool, Allocation]] = []
    for block in explanation.allocations:
        if block.bytes:
            events.append((block.begin, True, block))
            if block.end is not None:
                events.append((block.end, False, block))
    events.sort(key=lambda event: event[0])  # stable: at the same time in the order of allocation
    gaps = _Gaps()
    address: dict[int, int] = {}
    trace = []
    for time, is_allocation, block in events:
        if is_allocation:
            address[id(block)] = gaps.take(block.bytes)
        place = address[id(block)] if is_allocation else address.pop(id(block))
        for action in ("alloc",) if is_allocation else ("free_requested", "free_completed"):
            trace.append(_event(action, place, block.bytes, frames[id(block)], time))
        if not is_allocation:
            gaps.give(place, block.bytes)
    left = sorted((address[id(b)], b) for b in explanation.allocations if id(b) in address)
    blocks, end = [], 0
    for place, block in [*left, (gaps.end, None)]:
        if place > end:
            blocks.append(_block(end, place - end, "inactive", []))
        if block is not None:
            blocks.append(_block(place, block.bytes, "active_allocated", frames[id(block)]))
            end = place + block.bytes
    used = sum(block.bytes for _, block in left)
    segment = {
        "device": 0,
        "address": START,
        "total_size": gaps.end,
        "allocated_size": used,
        "active_size": used,
        "requested_size": used,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": blocks,
    }
    trace.insert(0, _event("segment_alloc", 0, gaps.end, [], 0))
    return {
        "segments": [segment],
        "device_traces": [trace],
        "allocator_settings": {},
        "external_annotations": [],
    }


def _event(action: str, place: int, size: int, frames, time: int) -> dict[str, Any]:
    event = {"action": action, "addr": START + place, "size": size, "stream": 0, "frames": frames, "time_us": time}
    return {**event, "device": 0}


def _block(place: int, size: int, state: str, frames) -> dict[str, Any]:
    return {"address": START + place, "size": size, "requested_size": size, "state": state, "frames": frames}


def _frames(explanation: StepMemory, block: Allocation) -> list[dict[str, Any]]:
    """The frames of a block: its content as the innermost one, then the user's line, then the module."""
    name = f"{block.kind}: {described(explanation.graph, block)}"
    if block.node is None:
        return [{"name": name, "filename": "optimizer", "line": 0}]
    node = explanation.graph.nodes[block.node]
    file, _, line = node.source.rpartition(":")
    module = node.module or "the model itself"
    return [{"name": name, "filename": file or module, "line": int(line) if file else 0}]


class _Gaps:
    """Free addresses below ``end``, as [start, size] in rising order."""

    def __init__(self):
        self.free: list[list[int]] = []
        self.end = 0

    def take(self, size: int) -> int:
        for number, gap in enumerate(self.free):
            if gap[1] >= size:
                place = gap[0]
                self.free[number] = [place + size, gap[1] - size]
                if gap[1] == size:
                    del self.free[number]
                return place
        place = self.end
        if self.free and sum(self.free[-1]) == self.end:  # the last gap grows
            place = self.free.pop()[0]
        self.end = place + size
        return place

    def give(self, place: int, size: int) -> None:
        number = next((n for n, gap in enumerate(self.free) if gap[0] > place), len(self.free))
        self.free.insert(number, [place, size])
        for n in (number, number - 1):  # join with the gaps after and before
            if 0 <= n < len(self.free) - 1 and sum(self.free[n]) == self.free[n + 1][0]:
                self.free[n][1] += self.free.pop(n + 1)[1]
