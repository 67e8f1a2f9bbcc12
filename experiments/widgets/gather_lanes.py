"""The book's still of FSDP2's gathers: which parameters a rank has during forward, recomputation and backward.

The events are those that `ackpt.planner.sharding` predicts for a small Llama with checkpointed blocks.
"""

from __future__ import annotations

from itertools import accumulate

import torch

from ackpt.planner.capture.joint_graph import FORWARD
from ackpt.planner.sharding.sharded_model import ShardedModel
from ackpt.planner.sharding.sharding import (
    CATEGORIES_OF_A_RANK,
    COMMUNICATION,
    GATHERED,
    ROOT,
    GroupBytes,
    Sharding,
    Window,
    timeline,
)
from ackpt.planner.workloads.planned_shapes import PlanConfig
from ackpt.planner.workloads.step_request import StepRequest

from .chain_steps import SCHEMA

_RECOMPUTED, _GATHERED, _COMMUNICATION = map(CATEGORIES_OF_A_RANK.index, ("recomputed", GATHERED, COMMUNICATION))
BLOCKS = 3
SHARDING = Sharding(4, torch.float32, torch.float32)
FIELDS = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
FIELDS |= {"num_hidden_layers": BLOCKS, "vocab_size": 101, "max_position_embeddings": 64}


def gather_lanes() -> dict:
    """One rank's step, event by event.

    Returns:
        Plain JSON. ``events``: their number. ``runs``: [what, group, begin, end], in events; what is f (forward), r
        (recomputation) or b (backward); the groups are the root, 0, and the blocks. ``gathered``: [group, begin, end],
        from the allocation of a group's parameters to their free; ``buffers`` and ``reductions``: the same for the
        buffers of the gathers and of the reductions. ``live``: the bytes of each after every event.
    """
    request = StepRequest("hf:LlamaConfig", 4, 64, None, FIELDS, torch.bfloat16)
    model = ShardedModel(PlanConfig(request, optimizer="none"), whole=True)
    blocks = model.blocks
    windows = blocks.windows(blocks.uniform(blocks.choices[1]), SHARDING)  # per-block checkpointing
    live = timeline(windows)
    assert live.live == model.plan(SHARDING, policy="full").timeline.live
    sizes = [GroupBytes(group, SHARDING) for group in blocks.groups]
    reductions = [size.reduce for size in sizes]
    events = [event for window in windows for event in window.events]
    reducing = [0, *accumulate(size if _is_of(reductions, size, kind) else 0 for size, kind in events)]
    collectives = live.categories[COMMUNICATION]
    return {
        **SCHEMA,
        "kind": "gathers",
        "blocks": BLOCKS,
        "events": len(live.live) - 1,
        "runs": _runs(windows),
        "gathered": _gathered(windows),
        "buffers": _buffers(windows, [size.gather for size in sizes]),
        "reductions": _reductions(windows, reductions),
        "live": {
            "gathered parameters": list(live.categories[GATHERED]),
            "buffers of gathers": [both - one for both, one in zip(collectives, reducing, strict=True)],
            "buffers of reductions": reducing,
        },
    }


def _is_of(sizes: list[int], size: int, kind: int) -> bool:
    """Whether an event allocates or frees a buffer of one of `sizes`; each buffer is identified by its size."""
    return kind == _COMMUNICATION and abs(size) in sizes


def _starts(windows: list[Window]) -> list[int]:
    return [0, *accumulate(len(window.events) for window in windows)]


def _runs(windows: list[Window]) -> list[list]:
    """Windows by phase; a recomputation ends with the last allocation of a recomputed activation."""
    runs = []
    for window, start in zip(windows, _starts(windows)):
        end = start + len(window.events)
        again = [i for i, (size, kind) in enumerate(window.events, start + 1) if kind == _RECOMPUTED and size > 0]
        middle = again[-1] if again else start
        if middle > start:
            runs.append(["r", window.group, start, middle])
        if end > middle:
            runs.append(["f" if window.phase == FORWARD else "b", window.group, middle, end])
    return runs


def _gathered(windows: list[Window]) -> list[list[int]]:
    """FSDP2 allocates and frees a group's parameters in the group's own windows."""
    found, since = [], {}
    for window, start in zip(windows, _starts(windows)):
        for event, (size, kind) in enumerate(window.events, start + 1):
            if kind == _GATHERED:
                if size > 0:
                    since[window.group] = event
                else:
                    found.append([window.group, since.pop(window.group), event])
    return found


def _buffers(windows: list[Window], sizes: list[int]) -> list[list[int]]:
    """Gathers run in the order root, blocks, blocks in reverse."""
    numbers = range(1, BLOCKS + 1)
    order = [ROOT, *numbers, *reversed(numbers)]
    events = [event for window in windows for event in window.events]
    found = [(i, size) for i, (size, kind) in enumerate(events, 1) if _is_of(sizes, size, kind)]
    begins, ends = [i for i, size in found if size > 0], [i for i, size in found if size < 0]
    return [[group, begin, end] for group, begin, end in zip(order, begins, ends, strict=True)]


def _reductions(windows: list[Window], sizes: list[int]) -> list[list[int]]:
    """A group's reduction begins in its own window of backward, and its buffer stays until the next reduction."""
    found, since = [], {}
    for window, start in zip(windows, _starts(windows)):
        for event, (size, kind) in enumerate(window.events, start + 1):
            if _is_of(sizes, size, kind):
                if size > 0:
                    since.setdefault(size, []).append((window.group, event))
                else:
                    found.append([*since[-size].pop(0), event])
    return found
