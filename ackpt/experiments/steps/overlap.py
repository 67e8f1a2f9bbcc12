"""How much of the copies between a GPU and its host runs beside computing, read off torch's profiler.

A witness from outside: the offload engines time their own copies with events, peers do not.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

WAYS = {"DtoH": "out", "HtoD": "in"}


def traced(step_fn) -> dict:
    """`summary` of one step, which is run once before."""
    step_fn()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with profile(activities=activities) as profiler:
        step_fn()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        return summary(json.loads(path.read_text(encoding="utf-8"))["traceEvents"])


def summary(events: Iterable[dict]) -> dict:
    """Copies and their overlap with kernels, of the events of a Chrome trace.

    Returns:
        ``copies``, their number; seconds of the copies ``out`` of the GPU and ``in``, of ``hidden`` ones, during which
        a kernel runs, and of ``kernels`` (time in which at least one runs); ``hidden_share`` of the copies, None if
        there are none.

    Example:
        >>> from ackpt.experiments.steps.overlap import summary
        >>> kernel = {"cat": "kernel", "name": "gemm", "ts": 0, "dur": 30}
        >>> copy = {"cat": "gpu_memcpy", "name": "Memcpy DtoH (Device -> Pinned)", "ts": 20, "dur": 40}
        >>> summary([kernel, copy])["hidden_share"]
        0.25
    """
    events = list(events)
    busy = _merged((e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") == "kernel")
    copies = 0
    micros = {"out": 0.0, "in": 0.0, "hidden": 0.0, "kernels": sum(to - start for start, to in busy)}
    for event in events:
        way = next((WAYS[name] for name in WAYS if name in event.get("name", "")), None)
        if event.get("cat") != "gpu_memcpy" or way is None:
            continue
        begin, end = event["ts"], event["ts"] + event["dur"]
        copies += 1
        micros[way] += event["dur"]
        micros["hidden"] += sum(max(0, min(end, to) - max(begin, start)) for start, to in busy)
    copying = micros["out"] + micros["in"]
    share = micros["hidden"] / copying if copying else None
    return {"copies": copies, **{name: value / 1e6 for name, value in micros.items()}, "hidden_share": share}


def _merged(spans) -> list[tuple[float, float]]:
    """The same times as spans that do not overlap, in order."""
    merged: list[tuple[float, float]] = []
    for start, to in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], to)
        else:
            merged.append((start, to))
    return merged
