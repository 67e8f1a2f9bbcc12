"""A figure of mu-TWO's two orders: how long an intermediate lies idle, and what recomputing it yields."""

from __future__ import annotations

from matplotlib.lines import Line2D
from matplotlib.ticker import StrMethodFormatter

from ackpt import plots


def ratio_plot(points: dict[str, list[tuple[float, float]]], link: float, title: str):
    """Idle milliseconds against GB that a second of recomputing frees, each intermediate a marker.

    Args:
        points: ``{kind: [(milliseconds, GB/s), ...]}``.
        link: GB/s that swapping frees, out and in again, drawn as a line.
        title: the finding.
    """
    with plots.style.context("default"):
        figure, axes = plots._axes(title, "inactive time (ms)", "recompute ratio (GB/s)")
        handles = []
        for place, (kind, pairs) in enumerate(points.items()):
            color, marker = plots.SERIES[place % len(plots.SERIES)], plots.MARKERS[place % len(plots.MARKERS)]
            looks = {"color": color, "linestyle": "none", "marker": marker, "markersize": 6}
            axes.plot(*zip(*pairs), **looks)
            handles.append(Line2D([], [], label=kind, **looks))
        axes.axhline(link, color=plots.TEXT, linewidth=1.2, linestyle=(0, (4, 3)))
        handles.append(
            Line2D([], [], color=plots.TEXT, linewidth=1.2, linestyle=(0, (4, 3)), label="the link, both ways")
        )
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.10g}"))
        return plots._finished(figure, handles, [handle.get_label() for handle in handles])
