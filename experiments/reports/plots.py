"""The figure of a timeline, the colors of the categories, and PNG files, for light and dark pages.

The ground is white: no gray has a contrast of 4.5 on a white page and on a dark one. For dark pages, the book makes a
second picture without the ground, with grays inverted and the same colors. The legend is below the axes, and a figure
is narrow enough for a phone. The caller passes a title that states the finding, or "" where a caption does. Sizes are
given in bytes and drawn in MiB.
"""

from __future__ import annotations

import io
import os
import textwrap
from collections.abc import Mapping
from pathlib import Path

from ackpt.core.files import write_bytes_atomic
from ackpt.metering.timeline import CATEGORIES, Timeline

try:
    from matplotlib import style
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import StrMethodFormatter
except ImportError as error:
    raise ImportError(f'figures need matplotlib ({error}): pip install "ackpt[plots]"') from error

MIB = 2**20
DPI = 144
GROUND = "#ffffff"
TEXT = "#4d535c"  # its contrast on the ground is above 7
# `ackpt.planner.explain.page`, ``common.js`` and ``frontier.css`` in ``book/_explorer`` repeat these colors.
COLORS = {
    "resident": "#4a6fc4",
    "parameters": "#4a6fc4",
    "buffers": "#8fa8dd",
    "inputs": "#55b3d9",
    "optimizer": "#8e5cc4",
    "gradients": "#d1568f",
    "activations": "#eb9a2d",
    "recomputed": "#a8552a",
    "temporaries": "#2fa58c",
    "other": "#8b8d98",
}


class _Figure(Figure):
    """A Figure that a notebook shows as the bytes that `save` writes."""

    def _repr_png_(self) -> bytes:
        return png(self)


def timeline_plot(timeline: Timeline, title: str, resident_bytes: int = 0) -> Figure:
    """Live bytes of a step over its allocations and frees, stacked by category.

    Args:
        timeline: of a Measurement; ``thinned(1000)`` draws the same picture faster.
        title: the finding.
        resident_bytes: drawn below everything else, if given.

    Returns:
        A Figure with the peak marked by its value, and a line where backward begins.

    Example:
        >>> from experiments.reports.plots import timeline_plot
        >>> from ackpt.metering.timeline import Timeline
        >>> live = (0, 2**20, 2**21, 0)
        >>> step = Timeline(live, {"activations": live}, boundary=2)
        >>> figure = timeline_plot(step, "The peak is where backward begins")
        >>> figure.axes[0].get_ylabel()
        'live memory (MiB)'
    """
    with style.context("default"):
        figure, axes = _axes(title, "allocations and frees, in order", "live memory (MiB)")
        axes.set_xlim(0, max(1, len(timeline.live) - 1))
        axes.set_ylim(0, (resident_bytes + timeline.peak_bytes) / MIB * 1.2 or 1)
        handles = draw_step(axes, timeline, resident_bytes, len(timeline.live))
        shown = as_stacked(handles)
        return _finished(figure, [*shown.values()], [*shown])


def as_stacked(handles: Mapping[str, object]) -> dict:
    """The handles of stacks in the order in which the categories are stacked, from the top to the bottom."""
    return {name: handles[name] for name in (*reversed(CATEGORIES), "resident") if name in handles}


def draw_step(axes, timeline: Timeline, resident_bytes: int, width: int, start: int = 0) -> dict:
    """Draw a step from the event `start` of an axis of `width` events; return the handles of its stack by category."""
    handles = stack(axes, start, timeline, resident_bytes)
    at = start + timeline.peak_index
    _mark_peak(axes, at, (resident_bytes + timeline.peak_bytes) / MIB, "right" if at > width / 2 else "left")
    if timeline.boundary is not None:
        _mark_backward(axes, start + timeline.boundary, width)
    return handles


def stack(axes, start: int, timeline: Timeline, resident_bytes: int) -> dict:
    """Draw live bytes from the event `start` of an axis, in MiB, stacked; return the handles by category."""
    events = range(start, start + len(timeline.live))
    layers = {"resident": (resident_bytes,) * len(events)} if resident_bytes else {}
    layers |= timeline.categories
    handles = {}
    bottom = [0.0] * len(events)
    for name in ("resident", *CATEGORIES):
        if name in layers:
            top = [low + value / MIB for low, value in zip(bottom, layers[name])]
            # The thin edge keeps a spike of one event visible.
            handles[name] = axes.fill_between(events, bottom, top, step="post", color=COLORS[name], linewidth=0.4)
            bottom = top
    return handles


def save(figure: Figure, path: str | os.PathLike[str]) -> Path:
    """Write a figure as PNG, in one step and with the same bytes every time; returns the path.

    Example:
        >>> import tempfile
        >>> from experiments.reports.plots import save, timeline_plot
        >>> from ackpt.metering.timeline import Timeline
        >>> figure = timeline_plot(Timeline((0, 2**20, 0), {"activations": (0, 2**20, 0)}, boundary=1), "One block")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save(figure, f"{folder}/block.png").read_bytes()[1:4]
        b'PNG'
    """
    return write_bytes_atomic(path, png(figure))


def png(figure: Figure) -> bytes:
    """The PNG of a figure: fixed resolution, no date and no version inside."""
    buffer = io.BytesIO()
    with style.context("default"):
        figure.savefig(buffer, format="png", dpi=DPI, facecolor=GROUND, metadata={"Software": None})
    return buffer.getvalue()


def _axes(title: str, xlabel: str, ylabel: str):
    # No pyplot: it would keep every figure alive and choose a backend for the process.
    figure = _Figure(figsize=(6.0, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    figure.suptitle(textwrap.fill(title, 62), x=0.01, ha="left", fontsize=11, fontweight="bold", color=TEXT)
    axes.set_xlabel(xlabel, color=TEXT, fontsize=9)
    axes.set_ylabel(ylabel, color=TEXT, fontsize=9)
    _style(axes)
    return figure, axes


def _style(axes) -> None:
    axes.tick_params(colors=TEXT, labelsize=8.5)
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.10g}"))
    axes.grid(axis="y", color=TEXT, alpha=0.25, linewidth=0.8)
    axes.set_axisbelow(True)
    for name, spine in axes.spines.items():
        spine.set_visible(name in ("left", "bottom"))
        spine.set_color(TEXT)


def _finished(figure, handles, labels):
    if handles:
        looks = {"frameon": False, "labelcolor": TEXT, "fontsize": 8.5, "handlelength": 1.6}
        columns = int(figure.get_figwidth() / (0.52 + 0.065 * max(map(len, labels))))  # inches: 0.065 a character
        figure.legend(handles, labels, loc="outside lower center", ncols=min(max(columns, 1), 4), **looks)
    # The layout is computed once: computing it again from its own result moves things by fractions of a pixel.
    figure.set_dpi(DPI)
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    return figure


def _mark_peak(axes, index: int, peak: float, side: str):
    """Mark a peak; its label is aligned at the `side` that faces the mark, or with "center" above it."""
    axes.plot([index], [peak], marker="v", markersize=6, color=TEXT, clip_on=False, zorder=5)
    axes.annotate(
        f"peak {_number(peak, peak)} MiB",
        (index, peak),
        xytext=({"right": -8, "center": 0, "left": 8}[side], 7),
        textcoords="offset points",
        ha=side,
        fontsize=9,
        fontweight="bold",
        color=TEXT,
        bbox={"facecolor": GROUND, "edgecolor": "none", "pad": 1},
    )


def _mark_backward(axes, boundary: int, events: int):
    right = boundary > events / 2
    axes.axvline(boundary, color=TEXT, linewidth=1, linestyle=(0, (4, 3)))
    axes.annotate(
        "backward begins",
        (boundary, 1),
        xycoords=("data", "axes fraction"),
        xytext=(-5 if right else 5, -2),
        textcoords="offset points",
        ha="right" if right else "left",
        va="top",
        fontsize=8,
        color=TEXT,
    )


def _number(value: float, highest: float) -> str:
    """Three digits or more: 0.123, 1.23, 12.3, 1,234."""
    digits = 0 if highest >= 100 else 1 if highest >= 10 else 2 if highest >= 1 else 3
    return f"{value:,.{digits}f}"
