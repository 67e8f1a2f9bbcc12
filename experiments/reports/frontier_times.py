"""Measured times in records of the experiment ``frontier``: figures over the peak, and a table of several models.

Added time is relative to the baseline's step, as a median of ratios within rounds.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from experiments.frontier import OURS
from experiments.results import Record
from experiments.steps.peers import CHECKPOINT, PEERS

NAMES = {"transformer": "Transformer", "bert": "BERT with dropout", "resnet50": "ResNet-50", "unet": "U-Net"}
HALF = 0.5  # of the baseline's peak
COLUMNS = {
    "model": "model",
    "peak": "peak of per-block",
    "blocks": "its added time, %",
    "auto": "`auto` within its peak, %",
    "half": "`auto` at 0.5, %",
    "gap": "gap at 0.5",
}
_THEIRS = "#b5402f"


def is_by_inductor(record: Record) -> bool:
    """Whether Inductor compiled the steps: FLOPs are then not counted, and peaks not exactly as predicted."""
    return record.config.get("compiler") == "inductor"


def name_of(record: Record) -> str:
    """The name of a record's model, and of its compiler unless that is eager."""
    name = NAMES[record.config["model"]]
    return f"{name}, Inductor" if is_by_inductor(record) else name


def time_plot(record: Record, title: str | None = None):
    """A Figure of measured peak against added time, with its quartiles: policies, and torch's own tools.

    One of the points of `auto` is its plan within the peak of per-block checkpointing.

    Raises:
        ValueError: if the record has no times.
    """
    from ackpt.metering import plots

    with plots.style.context("default"):
        title = _finding(record) if title is None else title
        figure, axes = plots._axes(title, "dynamic peak, fraction of the baseline's", "added time, measured")
        handles = _draw(axes, record)
        return plots._finished(figure, [*handles.values()], [*handles])


def times_plot(records: Sequence[Record], highest: float, title: str = ""):
    """A Figure with the panel of `time_plot` for every record, two in a row, added time up to `highest`.

    Points above are drawn at the upper edge.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    from ackpt.metering import plots

    with plots.style.context("default"):
        lines = -(-len(records) // 2)
        figure = plots._Figure(figsize=(7.2, 2.6 * lines + 0.7), layout="constrained")
        FigureCanvasAgg(figure)
        if title:
            figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold", color=plots.TEXT)
        panels = figure.subplots(lines, 2, sharex=True, sharey=True, squeeze=False)
        handles = {}
        for index, (axes, record) in enumerate(zip(panels.flat, records, strict=False)):
            plots._style(axes)
            axes.set_title(name_of(record), fontsize=9.5, color=plots.TEXT)
            handles |= _draw(axes, record, highest)
            if index % 2 == 0:
                axes.set_ylabel("added time, measured", color=plots.TEXT, fontsize=9)
            if index >= len(records) - 2:
                axes.set_xlabel("dynamic peak, fraction of the baseline's", color=plots.TEXT, fontsize=9)
                axes.tick_params(labelbottom=True)
        panels.flat[0].set_ylim(top=highest)
        for axes in panels.flat[len(records) :]:
            axes.set_axis_off()
        looks = {"frameon": False, "labelcolor": plots.TEXT, "fontsize": 8.5, "handlelength": 1.6}
        figure.legend([*handles.values()], [*handles], loc="outside lower center", ncols=4, **looks)
        return plots._finished(figure, [], [])


def _draw(axes, record: Record, highest: float | None = None) -> dict:
    """Draw the points of a record, with lines through those of auto; returns ``{label: handle}``."""
    from matplotlib.ticker import PercentFormatter
    from seaborn import color_palette

    from ackpt.metering.plots import TEXT

    metrics = record.metrics
    if "seconds_ratio" not in metrics["eager"]:
        raise ValueError("the record has no times: run the experiment with timed_rounds of at least 1 (--times)")
    points = [point for point in metrics["points"] if "seconds_ratio" in point]
    policies = dict.fromkeys(point["policy"] for point in points)
    series = {name: [point for point in points if point["policy"] == name] for name in policies}
    if (ours := _our_policy(record)) in series:
        series[ours] += [
            {"measured_peak_bytes": row["auto_peak_bytes"], "seconds_ratio": row["auto_seconds_ratio"]}
            for row in metrics["peers"]
            if row["peer"] == CHECKPOINT and "auto_seconds_ratio" in row
        ]
    looks: list[dict] = [
        {"color": color, "marker": marker}
        for _, color, marker in zip(policies, color_palette("colorblind").as_hex(), "osPXvdhp", strict=False)
    ]
    series |= {f"torch: {name}": [row for row in metrics["peers"] if row["peer"] == name] for name in PEERS}
    looks += [{"color": _THEIRS, "marker": marker, "markerfacecolor": "none"} for marker in "D^s"]
    top = np.inf if highest is None else highest
    handles = {}
    for (name, rows), look in zip(series.items(), looks, strict=True):
        if not rows:
            continue
        rows = sorted(rows, key=lambda row: row["measured_peak_bytes"])
        x = [row["measured_peak_bytes"] / metrics["baseline"]["measured_peak_bytes"] for row in rows]
        samples = [row["seconds_ratio"]["samples"] for row in rows]
        y = np.array([added_time(row) for row in rows])
        shown = np.minimum(y, top)
        quartiles = np.transpose([np.quantile(each, (0.25, 0.75)) for each in samples]) - 1
        spread = abs(np.minimum(quartiles, top) - shown) * (shown == y)
        style = "-" if name.startswith(OURS) else "none"
        more = {"linestyle": style, "linewidth": 1.5, "capsize": 2, "markersize": 6, "clip_on": False}
        handles[name] = axes.errorbar(x, shown, spread, label=name, **more, **look)
    axes.axhline(0, color=TEXT, linewidth=0.8)
    axes.set_xlim(left=0)
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    return handles


def added_time(row: dict, ratio: str = "seconds_ratio") -> float:
    """The added time of a run, as a fraction of the baseline's step."""
    return row[ratio]["median"] - 1


def _finding(record: Record) -> str:
    """The finding of the figure of times, in one sentence."""
    times = at_the_peak_of_blocks(record)
    if times is None:
        return f"What a lower peak costs in time on {record.config['model']}"
    return f"At the peak of per-block checkpointing, a plan adds {times[1]:.0%} of time instead of {times[0]:.0%}"


def at_the_peak_of_blocks(record: Record) -> tuple[float, float] | None:
    """Added time of per-block checkpointing, and of auto's plan within its peak; None if one was not timed.

    With Inductor, measured peaks are below the predicted ones, so plans with a larger budget may fit, too: the plan is
    the one with the highest measured peak among those that fit.
    """
    blocks = next((row for row in record.metrics["peers"] if row["peer"] == CHECKPOINT), {})
    if not {"seconds_ratio", "auto_seconds_ratio"} <= set(blocks):
        return None
    peak, ours = blocks["auto_peak_bytes"], added_time(blocks, "auto_seconds_ratio")
    if is_by_inductor(record):
        fitting = [point for point in _ours(record) if point["measured_peak_bytes"] <= blocks["measured_peak_bytes"]]
        peak, ours = max([(peak, ours), *((point["measured_peak_bytes"], added_time(point)) for point in fitting)])
    return added_time(blocks), ours


def at_half(record: Record) -> dict | None:
    """The point of auto at half of the baseline's peak, with the last kind of costs; None if it has none."""
    return next((point for point in _ours(record) if point["budget"] == HALF), None)


def _ours(record: Record) -> list[dict]:
    """The timed points of auto with the last kind of costs."""
    policy = _our_policy(record)
    return [point for point in record.metrics["points"] if point["policy"] == policy and "seconds_ratio" in point]


def _our_policy(record: Record) -> str:
    """The name of auto with the last kind of costs."""
    costs = record.config["costs"]
    return OURS if len(costs) == 1 else f"{OURS}, {costs[-1]}"


def gap(point: dict) -> str:
    """The optimality gap of a point's plan: of the step, and in milliseconds where the profile of the plan has them."""
    if point["lower_bound"] is None:
        return "–"
    share = f"{(1 + point['cost']) / (1 + point['lower_bound']) - 1:.1%}"
    return f"{share}, {1e3 * point['gap_seconds']:.1f} ms" if "gap_seconds" in point else share


def times_rows(records: Sequence[Record]) -> list[dict]:
    """A row per record by the keys of `COLUMNS`: the added time of per-block checkpointing, and that of auto."""
    rows = []
    for record in records:
        baseline = record.metrics["baseline"]["measured_peak_bytes"]
        blocks = next(row for row in record.metrics["peers"] if row["peer"] == CHECKPOINT)
        per_block, ours = at_the_peak_of_blocks(record) or (added_time(blocks), None)
        half, without = at_half(record), "infeasible" if HALF in record.config["budgets"] else "not run"
        rows.append(
            {
                "model": name_of(record),
                "peak": f"{blocks['measured_peak_bytes'] / baseline:.2f}",
                "blocks": f"{100 * per_block:.1f}",
                "auto": "infeasible" if ours is None else f"{100 * ours:.1f}",
                "half": without if half is None else f"{100 * added_time(half):.1f}",
                "gap": "–" if half is None else gap(half),
            }
        )
    return rows
