"""Uses of torch's profiler: traces and scalars for TensorBoard, and the overlap of copies with compute."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch
from torch.profiler import profile, tensorboard_trace_handler

STEPS = 3
WAYS = {"DtoH": "out", "HtoD": "in"}


class MissingPackage(ValueError):
    """An optional dependency is not installed; the message has the command that installs it."""


class Profiles:
    """Writes for ``tensorboard --logdir FOLDER``, into one sub-folder per method and sequence length.

    Raises:
        MissingPackage: if the package tensorboard is not installed.
    """

    def __init__(self, folder: Path):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise MissingPackage(
                f'--profile-dir writes TensorBoard files and needs tensorboard ({error}): pip install "ackpt[profile]"'
            ) from error
        self._writer = SummaryWriter
        self.folder = folder

    def scalars(self, name: str, losses: list[float], peak_bytes: int) -> None:
        """Write the loss of every step and the peak of one."""
        with self._writer(str(self.folder / name)) as writer:
            for step, loss in enumerate(losses):
                writer.add_scalar("loss", loss, step)
            writer.add_scalar("peak_bytes", peak_bytes, 0)

    def trace(self, name: str, step_fn) -> None:
        """Write a profiler trace of a few steps, with memory and shapes."""
        handler = tensorboard_trace_handler(str(self.folder / name), worker_name="ackpt")
        with profile(on_trace_ready=handler, profile_memory=True, record_shapes=True) as profiler:
            for _ in range(STEPS):
                step_fn()
                profiler.step()


def traced(step_fn) -> dict:
    """`summary` of one step; the step runs once before.

    The engines of `ackpt.offloading` time their own copies with events; this also measures what peers copy.
    """
    step_fn()
    with profile() as profiler:
        step_fn()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        return summary(json.loads(path.read_text(encoding="utf-8"))["traceEvents"])


def summary(events: Iterable[dict]) -> dict:
    """How long the copies in the events of a Chrome trace take, and how much of it overlaps with kernels.

    Returns:
        ``copies``, their number; the seconds of copies ``out`` of the GPU and ``in``, of copies that overlap with a
        kernel (``hidden``), and during which at least one kernel runs (``kernels``); ``hidden_share``, the fraction of
        the copies' time that overlaps, None without copies.

    Example:
        >>> from experiments.steps.profiling import summary
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
    """The union of the spans, as spans in order that do not overlap."""
    merged: list[tuple[float, float]] = []
    for start, to in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], to)
        else:
            merged.append((start, to))
    return merged
