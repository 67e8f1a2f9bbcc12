"""The book's animated lanes: compute and copies of a step that offloads, in time, as data for a page.

The model is captured from shapes. The planner places the copies, and its clock gives the times, for a device's rates.
"""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import accumulate

import torch

import ackpt
from ackpt.models import Transformer, TransformerConfig
from ackpt.planner.capture.joint_graph import FORWARD, JointGraph
from ackpt.planner.costs.profiles import Profile
from ackpt.planner.schedule.offload_steps import offloadable, offloaded
from ackpt.planner.schedule.schedule import COMPUTE, OFFLOAD, PREFETCH, WAIT, Schedule, everything, lower
from ackpt.planner.schedule.simulator import follow, simulate, timed

from .chain_steps import SCHEMA

CONFIG = TransformerConfig(dim=256, ff_dim=1024, layers=12, head_dim=64)
TOKENS = 16384
DEVICE = "h200"
BUCKETS = 160  # of time, of which each has the most live bytes
VARIANTS = {
    "overlap": ["block inputs, copies overlap", "The inputs of the blocks are offloaded while the device computes."],
    "wait": ["block inputs, copied back when needed", "A copy back starts when its block needs it: compute waits."],
    "everything": ["all activations", "Nothing is recomputed: all activations are offloaded, within the same peak."],
}
_WAYS = {OFFLOAD: "out", PREFETCH: "in"}


def offload_lanes(config: TransformerConfig = CONFIG, tokens: int = TOKENS, device: str = DEVICE) -> dict:
    """One step of a Transformer in bf16 that offloads, on the rates of `device`: compute and copies over time.

    Returns:
        Plain JSON. Each of ``variants`` has ``compute`` (f: forward, r: recomputation, b: backward) and ``copies``
        (out, in) as [what, block, start, end] in seconds, ``waits`` as [start, end], and ``device`` and ``host``, the
        most live bytes in each of `BUCKETS` equal spans of time. ``without``: of the first schedule without offload.
    """
    with torch.device("meta"):
        model = Transformer(config).to(torch.bfloat16)
        x = torch.empty(tokens, config.dim, dtype=torch.bfloat16)
        graph = ackpt.trace(model, x, torch.empty(2, dtype=torch.int32), tokens)
    profile, analysis, baseline = ackpt.profile(graph, device), graph.analysis, everything(graph)
    outputs = [  # of every block but the last
        max(s for s in baseline.saved if graph.nodes[analysis.base_of[s]].module == f"blocks.{i}")
        for i in range(config.layers - 1)
    ]
    without = lower(graph, outputs)
    before = simulate(graph, profile, without)
    inputs = outputs[:-1]  # the last of them is not offloaded: backward reads it first
    # A copy may take until the memory is needed, as long as the peak without offload is not exceeded.
    overlap = offloaded(graph, without, inputs, profile, before.peak_bytes)
    peak_bytes = simulate(graph, profile, overlap).peak_bytes
    schedules = {
        "overlap": overlap,
        # Without times of copies, the planner starts a copy back right before its first use.
        "wait": offloaded(graph, without, inputs, replace(profile, swap_seconds=None), before.peak_bytes),
        "everything": offloaded(graph, baseline, offloadable(graph, baseline), profile, peak_bytes),
    }
    return {
        **SCHEMA,
        "kind": "lanes",
        "on": device,
        "layers": config.layers,
        "without": {"seconds": before.seconds, "peak_bytes": before.peak_bytes},
        "variants": [
            {"name": name, "label": VARIANTS[name][0], "about": VARIANTS[name][1]} | shown(graph, profile, schedule)
            for name, schedule in schedules.items()
        ],
    }


def shown(graph: JointGraph, profile: Profile, schedule: Schedule) -> dict:
    """Times, bytes and lanes of one schedule: a variant of `offload_lanes` without its name."""
    found, steps = simulate(graph, profile, schedule), [*timed(profile, schedule)]
    assert found.seconds is not None
    copies = [(_WAYS[kind], _block(graph, s), start, end) for kind, s, start, end in steps if kind in _WAYS]
    waits = [(kind, 0, start, end) for kind, _, start, end in steps if kind == WAIT and end > start]
    return {
        "seconds": found.seconds,
        "exposed_seconds": found.exposed_seconds,
        "peak_bytes": found.peak_bytes,
        "host_bytes": found.host_bytes,
        "compute": _work(graph, len(schedule.forward_arrays.computed), steps),
        "copies": _joined(copies),
        "waits": [[start, end] for *_, start, end in _joined(waits)],
        **_live(graph, profile, schedule, steps, found.seconds),
    }


def _block(graph: JointGraph, storage: int) -> int:
    """The block, counted from 1, that computes an activation; 0 for what comes after the blocks."""
    number = re.match(r"blocks\.(\d+)", graph.nodes[graph.analysis.base_of[storage]].module)
    return int(number[1]) + 1 if number else 0


def _work(graph: JointGraph, in_forward: int, steps) -> list[list]:
    """The operations with their phase and block."""
    computed, block, works = 0, 1, []
    for kind, node, start, end in steps:
        if kind != COMPUTE:
            continue
        computed += 1
        if number := re.match(r"blocks\.(\d+)", graph.nodes[node].module):
            block = int(number[1]) + 1
        phase = "f" if computed <= in_forward else "r" if graph.nodes[node].phase == FORWARD else "b"
        if end > start:  # views take no time
            works.append((phase, block, start, end))
    return _joined(works)


def _joined(works) -> list[list]:
    """Those of one kind and block in a row as one, in nanoseconds' precision; a pause between two separates them."""
    joined: list[list] = []
    for what, block, start, end in works:
        if joined and joined[-1][:2] == [what, block] and start <= joined[-1][3]:
            joined[-1][3] = end
        else:
            joined.append([what, block, start, end])
    return [[what, block, round(start, 9), round(end, 9)] for what, block, start, end in joined]


def _live(graph: JointGraph, profile: Profile, schedule: Schedule, steps, seconds: float) -> dict:
    live = follow(graph, schedule, profile.workspace_bytes)
    sizes: list[list[int | None]] = [[None] * BUCKETS, [None] * BUCKETS]
    now = 0.0
    for (kind, number, _, end), bytes_live in zip(steps, live.after, strict=True):
        workspace = profile.workspace_bytes[number] if kind == COMPUTE else 0
        now = end if kind in (COMPUTE, WAIT) else now  # a copy changes the bytes when compute submits it
        bucket = min(int(BUCKETS * now / seconds), BUCKETS - 1)
        for series, size in zip(sizes, (bytes_live[0] + workspace, bytes_live[1])):
            series[bucket] = max(series[bucket] or 0, size)
    # While an operation runs, everything that was live before it is still live.
    device, host = (list(accumulate(series, lambda before, now: before if now is None else now)) for series in sizes)
    return {"device": [size or 0 for size in device], "host": [size or 0 for size in host]}
