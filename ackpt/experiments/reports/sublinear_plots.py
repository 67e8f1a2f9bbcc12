"""Figures of sublinear memory: curves over the depth of a chain, a schedule of Revolve, cost over memory."""

from __future__ import annotations

from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter

from ackpt import plots


def curves_plot(measured: dict, predicted: dict, title: str, *, xlabel: str, ylabel: str, logs=("x",)):
    """Points and lines of the same colour; an axis in `logs` is logarithmic, the other begins at 0.

    Args:
        measured, predicted: ``{name: {x: y}}``; measured values are markers, predicted ones broken lines.
        title: the finding.
    """
    with plots.style.context("default"):
        figure, axes = plots._axes(title, xlabel, ylabel)
        handles = []
        for place, name in enumerate(dict.fromkeys((*predicted, *measured))):
            color, marker = plots.SERIES[place % len(plots.SERIES)], plots.MARKERS[place % len(plots.MARKERS)]
            line, points = predicted.get(name, {}), measured.get(name, {})
            axes.plot(list(line), list(line.values()), color=color, linestyle=(0, (4, 2)), linewidth=1.6)
            axes.plot(list(points), list(points.values()), color=color, linestyle="none", marker=marker, markersize=6.5)
            handles.append(Line2D([], [], color=color, marker=marker, markersize=6, linewidth=1.6, label=name))
        handles.append(Line2D([], [], color=plots.TEXT, linestyle=(0, (4, 2)), linewidth=1.6, label="predicted"))
        handles.append(Line2D([], [], color=plots.TEXT, linestyle="none", marker="o", markersize=6, label="measured"))
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


def schedule_plot(actions, steps: int, title: str):
    """A schedule of `revolve.schedule`: states from the bottom to the top, actions from left to right.

    Every advance takes as long as it has steps, every reversal one; loads and saves take no time. A snapshot is drawn
    while it is kept.
    """
    with plots.style.context("default"):
        figure, axes = plots._axes(title, "steps that were run, forward or reversed", "state of the chain")
        forward, reverse, kept = plots.SERIES[0], plots.SERIES[1], plots.SERIES[2]
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
                for place in [place for place in since if place >= state - 1]:  # the reversal that starts from it
                    axes.plot([since.pop(place), now], [place, place], color=kept, linewidth=1, zorder=0)
        axes.set_xlim(0, now)
        axes.set_ylim(-0.3, steps + 0.3)
        looks = {"forward": (forward, 1.8), "reversed": (reverse, 2.6), "snapshot kept": (kept, 1)}
        handles = [Line2D([], [], color=color, linewidth=width) for color, width in looks.values()]
        return plots._finished(figure, handles, list(looks))
