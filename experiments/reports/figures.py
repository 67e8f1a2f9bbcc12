"""Figures that chapters of the book share: bars, lines, curves, a schedule of Revolve, ratios of mu-TWO."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter
from seaborn import color_palette

from experiments.reports import plots

from .tables import MIB

SERIES = tuple(color_palette("colorblind").as_hex()[:6])
MARKERS = "osD^vP"
DASHES = (0, (4, 2))
HIGHLIGHT = "#b5402f"  # in a stack, the color of parts that are not a category


def bar_plot(
    labels: Sequence[object],
    series: Mapping[str, Iterable[float | None]],
    title: str,
    *,
    ylabel: str = "peak memory (MiB)",
    xlabel: str = "",
    unit: float = MIB,
) -> plots.Figure:
    """Groups of bars side by side, each with its value on top.

    Args:
        labels: one per group.
        series: ``{name: values}``, in `unit`; None where nothing was measured.
        title: the finding.
        unit: what one step of the axis is worth; bytes are drawn in MiB by default.

    Example:
        >>> from experiments.reports.figures import bar_plot
        >>> figure = bar_plot(["baseline", "planned"], {"peak": [2**21, 2**20]}, "A plan halves the peak")
        >>> [float(bar.get_height()) for bar in figure.axes[0].patches]
        [2.0, 1.0]
    """
    with plots.style.context("default"):
        figure, axes = plots._axes(title, xlabel, ylabel)
        width = 0.8 / len(series)
        crowded = len(labels) * len(series) > 10
        highest = max((value / unit for values in series.values() for value in values if value is not None), default=1)
        for number, (name, values) in enumerate(series.items()):
            shift = (number - (len(series) - 1) / 2) * width
            positions = [index + shift for index in range(len(labels))]
            heights = [0 if value is None else value / unit for value in values]
            axes.bar(positions, heights, width * 0.92, color=SERIES[number % len(SERIES)], label=name)
            for x, value, height in zip(positions, values, heights):
                text = "not measured" if value is None else plots._number(height, highest)
                upright = crowded or value is None
                axes.annotate(
                    text,
                    (x, height),
                    xytext=(0, 3),
                    textcoords="offset points",
                    ha="center",
                    va="bottom",
                    rotation=90 if upright else 0,
                    fontsize=8,
                    color=plots.TEXT,
                )
        axes.set_xticks(range(len(labels)), [str(label) for label in labels])
        axes.tick_params(axis="x", length=0)
        axes.set_ylim(0, highest * (1.24 if crowded else 1.1))
        handles, labels = axes.get_legend_handles_labels()
        return plots._finished(figure, handles if len(series) > 1 else [], labels)


def line_plot(
    x: Iterable[float],
    measured: Mapping[str, Sequence[float | None]],
    predicted: Mapping[str, Sequence[float | None]],
    title: str,
    *,
    xlabel: str,
    ylabel: str = "peak memory (MiB)",
    unit: float = MIB,
) -> plots.Figure:
    """Measured values as markers, predicted ones as lines of the same colour.

    Args:
        x: positions, one tick each.
        measured, predicted: ``{name: values}``, in `unit`; None leaves a point out. Equal names share a colour.
        title: the finding.

    Example:
        >>> from experiments.reports.figures import line_plot
        >>> measured, predicted = {"peak": [2**20, None]}, {"peak": [2**20, 2**21]}
        >>> figure = line_plot([1, 2], measured, predicted, "The peak grows with the layers", xlabel="layers")
        >>> [len(line.get_xdata()) for line in figure.axes[0].lines]
        [2, 1]
    """
    with plots.style.context("default"):
        figure, axes = plots._axes(title, xlabel, ylabel)
        names = list(dict.fromkeys((*predicted, *measured)))
        handles = []
        for index, name in enumerate(names):
            color, marker = _series(index)
            for values, looks in (
                (predicted.get(name), {"linestyle": DASHES, "linewidth": 1.6, "clip_on": False, "zorder": 3}),
                (measured.get(name), {"linestyle": "none", "marker": marker, "markersize": 6.5}),
            ):
                points = [(a, b / unit) for a, b in zip(x, values or ()) if b is not None]
                if points:
                    axes.plot(*zip(*points), color=color, **looks)
            handle = Line2D([], [], color=color, marker=marker, markersize=6, linewidth=1.6, label=name)
            if all(value is None for value in measured.get(name, ())):
                handle.set(marker="", linestyle=DASHES)
            handles.append(handle)
        if any(predicted.values()) and any(measured.values()):
            handles.append(Line2D([], [], color=plots.TEXT, linestyle=DASHES, linewidth=1.6, label="predicted"))
            handles.append(
                Line2D([], [], color=plots.TEXT, linestyle="none", marker="o", markersize=6, label="measured")
            )
        axes.xaxis.set_major_locator(FixedLocator(list(x)))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_ylim(bottom=0)
        axes.margins(y=0.08)
        return plots._finished(figure, handles, [handle.get_label() for handle in handles])


def stacked_plot(
    labels, parts: dict, title: str, *, ylabel="memory at the peak", limit: int | None = None, colors=None
):
    """One bar per label, made of parts that add up.

    Args:
        labels: one per bar.
        parts: ``{name: bytes of every bar}``, from the bottom to the top; names of categories have their colors.
        title: the finding.
        limit: bytes at which a dashed line is drawn, the budget or a device's memory.
        colors: ``{name: color}`` of parts that are not categories.

    Returns:
        A Figure in MiB, or in GiB if a bar has at least 10 GiB; every bar has its sum on top.
    """
    unit, name_of_unit = (1024 * MIB, "GiB") if max(map(sum, zip(*parts.values()))) >= 10 * 1024 * MIB else (MIB, "MiB")
    with plots.style.context("default"):
        figure, axes = plots._axes(title, "", f"{ylabel} ({name_of_unit})")
        bottom = [0.0] * len(labels)
        for name, sizes in parts.items():
            heights = [size / unit for size in sizes]
            color = (plots.COLORS | (colors or {})).get(name, HIGHLIGHT)
            axes.bar(range(len(labels)), heights, 0.6, bottom, color=color, label=name)
            bottom = [low + height for low, height in zip(bottom, heights)]
        for index, total in enumerate(bottom):
            look = {"ha": "center", "va": "bottom", "fontsize": 9, "fontweight": "bold", "color": plots.TEXT}
            text = plots._number(total, max(bottom))
            axes.annotate(text, (index, total), xytext=(0, 3), textcoords="offset points", **look)
        axes.set_xticks(range(len(labels)), [label.replace("+", " +\n") for label in labels])
        axes.tick_params(axis="x", length=0)
        axes.set_ylim(0, max(bottom) * 1.1)
        if limit is not None:
            axes.axhline(limit / unit, color=plots.TEXT, linewidth=1.2, linestyle=(0, (4, 3)), label="budget")
        handles, names = axes.get_legend_handles_labels()
        return plots._finished(figure, handles[::-1], names[::-1])


def logits_plot(tokens: int, width: int, vocabulary: int, chunks: int) -> plots.Figure:
    """The hidden states and the logits of a language model, drawn to scale, with one of `chunks` chunks filled.

    Example:
        >>> from experiments.reports.figures import logits_plot
        >>> axes = logits_plot(8192, 1024, 50257, 8).axes[0]
        >>> [(patch.get_width(), patch.get_height()) for patch in axes.patches]
        [(1024, 8192), (50257, 8192), (50257, 1024)]
    """
    gap = vocabulary // 12
    with plots.style.context("default"):
        figure, axes = plots._axes("", "elements per token", "tokens")
        figure.set_size_inches(7.2, 2.4)
        axes.grid(False)
        hidden, logits = plots.COLORS["activations"], HIGHLIGHT
        axes.add_patch(Rectangle((0, 0), width, tokens, color=hidden, linewidth=0))
        axes.add_patch(Rectangle((gap, 0), vocabulary, tokens, facecolor=logits, alpha=0.25, linewidth=0))
        axes.add_patch(Rectangle((gap, 0), vocabulary, tokens // chunks, color=logits, linewidth=0))
        look: dict[str, Any] = {"ha": "center", "va": "center", "color": plots.TEXT, "fontsize": 9}
        middle = gap + vocabulary / 2
        axes.text(middle, tokens * (1 + 1 / chunks) / 2, f"logits: {tokens:,} x {vocabulary:,}", **look)
        inside: dict[str, Any] = {**look, "color": plots.GROUND}
        axes.text(middle, tokens / chunks / 2, f"one of {chunks} chunks", **inside)
        above: dict[str, Any] = {**look, "ha": "left", "va": "bottom"}
        axes.text(0, tokens * 1.05, f" hidden states: {tokens:,} x {width:,}", **above)
        axes.set_xticks([width / 2, middle], [f"{width:,}", f"{vocabulary:,}"])
        axes.set_yticks([0, tokens], ["0", f"{tokens:,}"])
        axes.set_xlim(0, gap + vocabulary)
        axes.set_ylim(0, tokens * 1.25)
        return plots._finished(figure, [], [])


def nodes_plot(seconds: Sequence[float], live: Sequence[int], boundary: int) -> plots.Figure:
    """The time of every node of a graph, and below the live bytes while it runs; a dashed line begins backward.

    Example:
        >>> from experiments.reports.figures import nodes_plot
        >>> [axes.get_ylabel() for axes in nodes_plot([1e-6, 2e-6], [2**20, 2**19], 1).axes]
        ['time (µs)', 'live memory (MiB)']
    """
    with plots.style.context("default"):
        figure, axes = plots._axes("", "", "")
        axes.remove()
        above, below = figure.subplots(2, 1, sharex=True)
        for axes in (above, below):
            plots._style(axes)
            axes.axvline(boundary - 0.5, color=plots.TEXT, linewidth=1, linestyle=DASHES)
        above.bar(range(len(seconds)), [1e6 * each for each in seconds], 1.0, color=SERIES[0])
        below.fill_between(range(len(live)), [each / MIB for each in live], step="mid", color=SERIES[2])
        above.set_ylabel("time (µs)", color=plots.TEXT, fontsize=9)
        below.set_ylabel("live memory (MiB)", color=plots.TEXT, fontsize=9)
        below.set_xlabel("node, in the order of the step", color=plots.TEXT, fontsize=9)
        below.set_ylim(bottom=0)
        return plots._finished(figure, [], [])


def curves_plot(measured: dict, predicted: dict, title: str, *, xlabel: str, ylabel: str, logs=("x",)):
    """A Figure with markers and lines of the same color; an axis in `logs` is logarithmic, the other begins at 0.

    Args:
        measured, predicted: ``{name: {x: y}}``; measured values are markers, predicted ones dashed lines.
        title: the finding.

    The legend names both kinds, if something was measured.
    """
    with plots.style.context("default"):
        figure, axes = plots._axes(title, xlabel, ylabel)
        handles = []
        for index, name in enumerate(dict.fromkeys((*predicted, *measured))):
            color, marker = _series(index)
            line, points = predicted.get(name, {}), measured.get(name, {})
            axes.plot(list(line), list(line.values()), color=color, linestyle=DASHES, linewidth=1.6)
            looks = {"color": color, "linestyle": "none", "marker": marker, "markersize": 6.5, "clip_on": False}
            axes.plot(list(points), list(points.values()), **looks)
            width = 1.6 if line else 0
            handles.append(Line2D([], [], color=color, marker=marker, markersize=6, linewidth=width, label=name))
            if not measured:
                handles[-1].set(marker="", linestyle=DASHES)
        if measured and predicted:
            handles.append(Line2D([], [], color=plots.TEXT, linestyle=DASHES, linewidth=1.6, label="predicted"))
            marks = {"linestyle": "none", "marker": "o", "markersize": 6}
            handles.append(Line2D([], [], color=plots.TEXT, label="measured", **marks))
        if "x" in logs:
            axes.set_xscale("log")
            axes.xaxis.set_major_locator(FixedLocator(sorted({x for points in measured.values() for x in points})))
            axes.xaxis.set_minor_locator(NullLocator())
            axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.10g}"))
        if "y" in logs:
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.10g}"))
        else:
            axes.set_ylim(bottom=0)
        return plots._finished(figure, handles, [handle.get_label() for handle in handles])


def losses_plot(losses: dict[str, dict[str, list[float]]], title: str):
    """A Figure with the losses of two methods for each name, and below their difference if there is one.

    Args:
        losses: ``{name: {method: the loss of every step}}``, each with the same two methods.
        title: the finding.
    """
    with plots.style.context("default"):
        figure, axes = plots._axes(title, "", "")
        axes.remove()
        pairs = {name: list(methods.items()) for name, methods in losses.items()}
        differ = any(first != second for (_, first), (_, second) in pairs.values())
        looks: dict[str, Any] = {"sharex": True, "sharey": "row", "squeeze": False}
        grid = figure.subplots(1 + differ, len(losses), height_ratios=[3, 1][: 1 + differ], **looks)
        for (name, ((first, values), (second, others))), column in zip(pairs.items(), grid.T, strict=True):
            steps = range(1, len(values) + 1)
            column[0].plot(steps, values, color=SERIES[0], linewidth=2.6, alpha=0.55, label=first)
            column[0].plot(steps, others, color=SERIES[1], linewidth=1.1, linestyle=DASHES, label=second)
            column[0].set_title(name, fontsize=9, color=plots.TEXT)
            if differ:
                differences = [other - value for value, other in zip(values, others, strict=True)]
                column[1].plot(steps, differences, color=plots.TEXT, linewidth=1.4)
            column[-1].set_xlabel("step", color=plots.TEXT, fontsize=9)
            for each in column:
                plots._style(each)
        for axes, label in zip(grid[:, 0], ("loss (nats)", "difference")):
            axes.set_ylabel(label, color=plots.TEXT, fontsize=9)
        handles, labels = grid[0, 0].get_legend_handles_labels()
        grid[0, -1].legend(handles, labels, frameon=False, labelcolor=plots.TEXT, fontsize=8.5)
        return plots._finished(figure, [], [])


def schedule_plot(actions, steps: int, title: str):
    """A Figure of a schedule of `revolve.actions`: states from bottom to top, actions from left to right.

    An advance takes as long as it has steps, a reversal takes one; loads and saves take no time. A snapshot is drawn
    for as long as it is saved.
    """
    with plots.style.context("default"):
        figure, axes = plots._axes(title, "steps that were run, forward or reversed", "state of the chain")
        forward, reverse, snapshot = SERIES[:3]
        now, since = 0, {}
        for kind, state, *to in actions:
            if kind == "save":
                since[state] = now
            elif kind == "advance":
                axes.plot([now, now + to[0] - state], [state, to[0]], color=forward, linewidth=1.8)
                now += to[0] - state
            elif kind == "step":
                axes.plot([now, now + 1], [state, state - 1], color=reverse, linewidth=2.6)
                now += 1
                for saved in [saved for saved in since if saved >= state - 1]:  # this reversal was its last reader
                    axes.plot([since.pop(saved), now], [saved, saved], color=snapshot, linewidth=1, zorder=0)
        axes.set_xlim(0, now)
        axes.set_ylim(-0.3, steps + 0.3)
        looks = {"forward": (forward, 1.8), "reversed": (reverse, 2.6), "snapshot saved": (snapshot, 1)}
        handles = [Line2D([], [], color=color, linewidth=width) for color, width in looks.values()]
        return plots._finished(figure, handles, list(looks))


def ratio_plot(points: dict[str, list[tuple[float, float]]], link: float, title: str):
    """A Figure of mu-TWO's two orders: inactive time against recompute ratio, a marker for each activation.

    Args:
        points: ``{kind: [(milliseconds, GB/s), ...]}``.
        link: GB/s that swapping frees, drawn as a line.
        title: the finding.
    """
    with plots.style.context("default"):
        figure, axes = plots._axes(title, "inactive time (ms)", "recompute ratio (GB/s)")
        handles = []
        for index, (kind, pairs) in enumerate(points.items()):
            color, marker = _series(index)
            looks = {"color": color, "linestyle": "none", "marker": marker, "markersize": 6}
            axes.plot(*zip(*pairs), **looks)
            handles.append(Line2D([], [], label=kind, **looks))
        dashed = {"color": plots.TEXT, "linewidth": 1.2, "linestyle": (0, (4, 3))}
        axes.axhline(link, **dashed)
        handles.append(Line2D([], [], label="the link, both ways", **dashed))
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.10g}"))
        return plots._finished(figure, handles, [handle.get_label() for handle in handles])


def _series(index: int) -> tuple[str, str]:
    """Color and marker of a series."""
    return SERIES[index % len(SERIES)], MARKERS[index % len(MARKERS)]
