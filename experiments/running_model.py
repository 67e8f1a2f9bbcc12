"""The running model of the book: Llama 3 8B on one GPU, with the memory that each chapter's method leaves.

One captured step is planned with every method; nothing runs. `nox -s running` writes the record, chapters draw it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ackpt
from ackpt.planner.costs.devices import device
from ackpt.planner.schedule.allocations import allocations
from ackpt.planner.schedule.simulator import simulate
from ackpt.planner.workloads.planned_shapes import Planned, in_chunks, run_plan

from .calculator.choices import HALF, plan_config
from .calculator.presets import PRESETS
from .policies import PAPERS
from .reports import plots
from .reports.decision_chart import chart, questions
from .results import environment, write_text_atomic

GIB = 2**30
PRESET, GPU, BATCH, LENGTH, OPTIMIZER, BUDGET, CHUNKS = "llama-3-8b", "h100-80g", 2, 8192, "adamw-fused", "65GiB", 8
MODEL = next(preset for preset in PRESETS if preset.name == PRESET)
RECORD = Path("results/calculator/running_model.json")
SCHEMA = {"schema": "ackpt.running-model", "version": 1}
ORANGE = plots.COLORS["activations"]
COLORS = {
    "weights": plots.COLORS["parameters"],
    "optimizer state": plots.COLORS["optimizer"],
    "gradients": plots.COLORS["gradients"],
    "logits": plots.COLORS["temporaries"],
    "attention": "#b86a10",
    "MLP": ORANGE,
    "norms and residuals": "#f6cd92",
}


@dataclass(frozen=True)
class Method:
    """What a chapter adds: its number, a label for the bar, and the options of ``ackpt.plan``."""

    chapter: int
    label: str
    policy: str
    chunks: int = 1
    options: dict[str, Any] = field(default_factory=dict)

    def plan_of(self, made: Planned, chunked) -> tuple:
        graph, profile = (made.graph, made.profile) if self.chunks == 1 else chunked
        policy = PAPERS.get(self.policy, self.policy)
        return graph, profile, ackpt.plan(graph, policy=policy, profile=profile, **self.options)


METHODS = (
    Method(1, "baseline", "none"),
    Method(2, "per-block checkpointing", "selective"),
    Method(3, "per-block, every second product saved", "selective", 1, {"save": "every-second-matmul"}),
    Method(4, "per-block, head in chunks", "selective", CHUNKS),
    Method(5, "per-block, inputs of blocks offloaded", "selective", 1, {"offload": True}),
    Method(6, "segments of √L blocks, head in chunks", "chen-sqrt", CHUNKS),
    Method(8, "mu-TWO within 65 GiB, head in chunks", "mu-two", CHUNKS, {"budget": BUDGET}),
    Method(9, "plan within 65 GiB, head in chunks", "auto", CHUNKS, {"budget": BUDGET}),
)


def compute(layers: int | None = None) -> Iterator[dict]:
    """The row of each method: bytes at the peak by kind, and seconds at the rates of the GPU's data sheet."""
    made = run_plan(plan_config(MODEL, HALF, GPU, BATCH, LENGTH, layers, optimizer=OPTIMIZER))
    chunked = in_chunks(made.graph, device(GPU), CHUNKS)
    for method in METHODS:
        graph, profile, plan = method.plan_of(made, chunked)
        yield {
            "chapter": method.chapter,
            "at_peak": parts(graph, profile, plan),
            "peak_bytes": plan.peak_bytes,
            "seconds": simulate(graph, profile, plan.schedule).seconds,
            "flops": plan.flops - plan.recompute_flops,
            "recompute_flops": plan.recompute_flops,
        }


def parts(graph, profile, plan) -> dict[str, int]:
    """Bytes at the peak by the kinds of `COLORS`."""
    found = dict.fromkeys(COLORS, 0)
    for block in allocations(graph, plan.schedule, profile.workspace_bytes):
        if block.is_live(plan.timeline.peak_index):
            found[_part(graph, block)] += block.bytes
    return found


def _part(graph, block) -> str:
    named = {"parameters": "weights", "optimizer": "optimizer state", "gradients": "gradients"}
    if block.kind in named:
        return named[block.kind]
    module = "" if block.node is None else graph.nodes[block.node].module
    if ".self_attn" in module or "rotary" in module:
        return "attention"
    if ".mlp" in module:
        return "MLP"
    return "norms and residuals" if "layers." in module or module.endswith("norm") else "logits"


def record() -> dict:
    """The committed record."""
    return json.loads(RECORD.read_text(encoding="utf-8"))


def write(path: Path = RECORD) -> None:
    """Compute the rows, and write them with their sizes and machine."""
    sizes = {"preset": PRESET, "gpu": GPU, "batch": BATCH, "length": LENGTH, "optimizer": OPTIMIZER, "budget": BUDGET}
    made = {"command": "nox -s running", "environment": environment()}
    data = {**SCHEMA, "made": made, **sizes, "rows": list(compute())}
    write_text_atomic(path, json.dumps(data, indent=1) + "\n")


def decisions() -> plots.Figure:
    """The decision chart, with the thresholds of this model."""
    parameters = record()["rows"][0]["at_peak"]["weights"] // 2
    here = f"{MODEL.label} in bf16 with AdamW, {BATCH} sequences of {LENGTH:,} tokens, one GPU with 80 GB"
    return chart(questions(MODEL.fields, BATCH, LENGTH, parameters), here)


def bars(chapter: int, data: dict | None = None) -> plots.Figure:
    """The bars of the methods up to this chapter, its own in bold; the dashed line is the memory of the GPU."""
    data = data or record()
    rows = [row for row in data["rows"] if row["chapter"] <= chapter]
    room = device(data["gpu"]).memory_bytes
    labels = {method.chapter: method.label for method in METHODS}
    with plots.style.context("default"):
        figure, axes = plots._axes("", "memory at the peak (GiB)", "")
        figure.set_size_inches(6.0, 1.1 + 0.52 * len(rows))
        for place, row in enumerate(rows):
            left = 0.0
            for name, color in COLORS.items():
                width = row["at_peak"][name] / GIB
                axes.barh(place, width, 0.46, left, color=color, label=name if place == 0 else None)
                left += width
            look: dict[str, Any] = {"fontsize": 8.5, "color": plots.TEXT, "va": "center", "zorder": 5}
            look["bbox"] = {"facecolor": plots.GROUND, "edgecolor": "none", "pad": 1}
            look["fontweight"] = "bold" if row["chapter"] == chapter else "normal"
            axes.text(0, place - 0.4, labels[row["chapter"]], **look)
            axes.text(left + 1, place, f"{left:.1f} GiB, {row['seconds']:.2f} s", **look)
        axes.axvline(
            room / GIB, zorder=1, color=plots.TEXT, linewidth=1.2, linestyle=(0, (4, 3)), label="memory of the GPU"
        )
        axes.set_xlim(0, max(row["peak_bytes"] for row in rows) / GIB * 1.25)
        axes.set_ylim(len(rows) - 0.6, -0.7)
        axes.set_yticks([])
        axes.grid(False)
        axes.spines["left"].set_visible(False)
        return plots._finished(figure, *axes.get_legend_handles_labels())


if __name__ == "__main__":
    write()
