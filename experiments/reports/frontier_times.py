"""Measured times in records of the experiment ``frontier``: figures over the peak, and a table of several models.

Added time is relative to the baseline's step, as a median of ratios within rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.frontier import OURS
from experiments.results import DASH, Record
from experiments.steps.peers import CHECKPOINT, MEMORY_BUDGET, SELECTIVE

NAMES = {"transformer": "Transformer", "bert": "BERT with dropout", "resnet50": "ResNet-50", "unet": "U-Net"}
HALF = 0.5  # of the baseline's peak
COLUMNS = {
    "model": "model",
    "peak": "peak of per-block",
    "blocks": "its added time, %",
    "auto": "plan within its peak, %",
    "half": "plan at 0.5, %",
    "cost": "its modeled cost, %",
    "bound": "lower bound, %",
    "gap": "gap at 0.5",
}
_THEIRS = "#b5402f"
_LABELS = {
    OURS: "plan",
    f"{OURS}, rates": "plan",
    f"{OURS}, measured": "plan (measured)",
    "full": "per-block",
    "mu-two": "mu-TWO",
    CHECKPOINT: "PyTorch: per-block",
    SELECTIVE: "PyTorch: selective",
    MEMORY_BUDGET: "PyTorch's memory budget",
}


def is_by_inductor(record: Record) -> bool:
    """Whether Inductor compiled the steps: FLOPs are then not counted, and peaks not exactly as predicted."""
    return record.config.get("compiler") == "inductor"


def name_of(record: Record) -> str:
    """The name of a record's model, and of its compiler unless that is eager."""
    name = NAMES[record.config["model"]]
    if record.environment["device"] == "cuda":
        name += f" on a {record.environment['device_name']}"
    return f"{name}, Inductor" if is_by_inductor(record) else name


def largest(records: Sequence[Record]) -> list[Record]:
    """Of each model and compiler, the record with the most points."""
    chosen: dict[tuple, Record] = {}
    for record in sorted(records, key=lambda each: len(each.metrics["points"])):
        chosen[record.config["model"], record.config.get("compiler")] = record
    return list(chosen.values())


def label(policy_or_peer: str, record: Record) -> str:
    """The name of a policy or peer in figures: ``"plan (FLOPs)"`` if others of the record's plans minimize seconds."""
    if policy_or_peer == OURS and len(record.config.get("costs", ())) > 1:
        return "plan (FLOPs)"
    return _LABELS.get(policy_or_peer, policy_or_peer)


def time_plot(record: Record, title: str | None = None):
    """A Figure of measured peak against added time, with its quartiles: a curve for plans, a dot for each other method.

    An arrow leads from PyTorch's per-block checkpointing to the plan within its peak. PyTorch's memory budget is drawn
    only if Inductor compiled the steps: the backend that runs its graphs operation by operation adds time by itself.

    Raises:
        ValueError: if the record has no times.
    """
    from matplotlib.ticker import PercentFormatter
    from seaborn import color_palette

    from experiments.reports import plots

    metrics = record.metrics
    if "seconds_ratio" not in metrics["eager"]:
        raise ValueError("the record has no times: run the experiment with timed_rounds of at least 1 (--times)")
    base = metrics["baseline"]["measured_peak_bytes"]
    with plots.style.context("default"):
        title = _finding(record) if title is None else title
        figure, axes = plots._axes(title, "dynamic peak, fraction of the baseline's", "added time, measured")
        figure.set_size_inches(5.4, 4.0)  # its text can still be read at 360 pixels
        blocks = next((row["measured_peak_bytes"] / base for row in metrics["peers"] if row["peer"] == CHECKPOINT), 0)
        near = {"textcoords": "offset points", "fontsize": 8.5, "va": "center"}
        colors = color_palette("colorblind").as_hex()
        for (name, rows), marker in zip(_series(record).items(), "osPD^vXdhp*", strict=False):
            is_plan, is_theirs = name.startswith("plan"), name.startswith("PyTorch")
            rows = sorted(rows, key=lambda row: row["measured_peak_bytes"])
            color = _THEIRS if is_theirs else colors.pop(0)
            x, y = [row["measured_peak_bytes"] / base for row in rows], np.array([added_time(row) for row in rows])
            quartiles = np.transpose([np.quantile(row["seconds_ratio"]["samples"], (0.25, 0.75)) for row in rows]) - 1
            look: dict[str, Any] = {"color": color, "marker": marker, "markersize": 6, "linewidth": 1.6}
            look |= {"capsize": 2, "clip_on": False}
            look["linestyle"] = "-" if is_plan else ":" if len(rows) > 1 else "none"
            look |= {"markerfacecolor": "none"} if is_theirs else {}
            axes.errorbar(x, y, abs(quartiles - y), **look)
            at: Any = max(zip(y, x), default=(0.0, 0.0))[::-1]
            side: dict = {"xytext": (6, 0), "ha": "left"}
            if is_plan or at[0] > 0.75 or 0 < blocks - at[0] < 0.13:  # to the right is the edge, or the arrow
                side = {"xytext": (-8, 0 if is_plan else 6), "ha": "right"}
            text = color if is_plan or is_theirs else plots.TEXT
            axes.annotate(name, at, color=text, fontweight="bold" if is_plan else "normal", **near, **side)
        axes.plot([1], [0], "o", color=plots.TEXT, markersize=6, clip_on=False)
        axes.annotate("baseline", (1, 0), xytext=(4, 11), ha="right", color=plots.TEXT, **near)
        if (times := at_the_peak_of_blocks(record)) is not None and times[1] < times[0]:
            _arrow(axes, record, times)
        axes.axhline(0, color=plots.TEXT, linewidth=0.8)
        axes.set_xlim(0, max(1.05, axes.get_xlim()[1]))
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        return plots._finished(figure, [], [])


def _series(record: Record) -> dict[str, list[dict]]:
    """The timed points by the labels of their methods, different steps only; the plan within the peak of blocks too."""
    peers = [row for row in record.metrics["peers"] if row["peer"] != MEMORY_BUDGET or is_by_inductor(record)]
    series: dict[str, list[dict]] = {}
    for row in (*record.metrics["points"], *peers):
        if "seconds_ratio" in row:
            points = series.setdefault(label(row.get("policy") or row["peer"], record), [])
            if row["measured_peak_bytes"] not in [point["measured_peak_bytes"] for point in points]:
                points.append(row)
    ours = label(_our_policy(record), record)
    for row in peers:
        if ours in series and row["peer"] == CHECKPOINT and "auto_seconds_ratio" in row:
            within = {"measured_peak_bytes": row["auto_peak_bytes"], "seconds_ratio": row["auto_seconds_ratio"]}
            series[ours].append(within)
    return series


def _arrow(axes, record: Record, times: tuple[float, float]) -> None:
    """From per-block checkpointing down to the plan within its peak, with both times."""
    from experiments.reports.plots import GROUND, TEXT

    blocks = next(row for row in record.metrics["peers"] if row["peer"] == CHECKPOINT)
    x = blocks["measured_peak_bytes"] / record.metrics["baseline"]["measured_peak_bytes"]
    look = {"arrowstyle": "-|>", "color": TEXT, "linewidth": 1.2, "shrinkA": 7, "shrinkB": 7}
    axes.annotate("", (x, times[1]), (x, times[0]), arrowprops=look)
    text = f"{100 * times[0]:.0f} % \N{RIGHTWARDS ARROW} {100 * times[1]:.0f} %\nwithin this peak".replace(
        "-", "\N{MINUS SIGN}"
    )
    middle = (x, 0.55 * times[0] + 0.45 * times[1])
    ground = {"facecolor": GROUND, "edgecolor": "none", "pad": 1}
    axes.annotate(text, middle, (6, 0), textcoords="offset points", va="center", fontsize=8.5, color=TEXT, bbox=ground)


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

    The plan is the one with the highest measured peak among all that fit: with Inductor, measured peaks differ from the
    predicted ones.
    """
    blocks = next((row for row in record.metrics["peers"] if row["peer"] == CHECKPOINT), {})
    if not {"seconds_ratio", "auto_seconds_ratio"} <= set(blocks):
        return None
    plans = [(blocks["auto_peak_bytes"], added_time(blocks, "auto_seconds_ratio"))]
    plans += [(point["measured_peak_bytes"], added_time(point)) for point in _ours(record)]
    fitting = [one for one in plans if one[0] <= blocks["measured_peak_bytes"]]
    return (added_time(blocks), max(fitting)[1]) if fitting else None


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


def choices(records: Sequence[Record]) -> list[dict]:
    """Which method when: rows with ``step``, ``use``, ``peak`` and ``time``, the ranges over the records in percent."""
    eager = [record for record in records if not is_by_inductor(record)]
    compiled = [record for record in records if is_by_inductor(record)]
    apply = "`ackpt.apply_budget(model, batch, budget=...)`"
    rows = [
        ("is compiled by Inductor", '`torch.compile(model, backend="ackpt", options=...)`', _lowest(compiled)),
        ("is compiled by Inductor, without `ackpt`", "PyTorch's memory budget, 0.5", _of_peer(compiled, MEMORY_BUDGET)),
        ("must stay within a budget", f"a plan: {apply}; here for half of the peak", _halves(eager)),
        (
            "must use the least memory",
            "the same, with the smallest feasible budget, which its error names",
            _lowest(eager),
        ),
        ("cannot be captured, and is slightly too large", "PyTorch's selective", _of_peer(eager, SELECTIVE)),
        ("cannot be captured", "per-block; here PyTorch's", _of_peer(eager, CHECKPOINT)),
    ]
    table = [{"step": "fits", "use": "no checkpointing", "peak": "100", "time": "0"}]
    for step, use, points in rows:
        peaks = [p["measured_peak_bytes"] / each.metrics["baseline"]["measured_peak_bytes"] for each, p in points]
        row = {"step": step, "use": use, "peak": _span(peaks), "time": _span([added_time(p) for _, p in points])}
        table.append(row)
    last = {"step": "does not fit with any of these", "use": "offload, a smaller batch, or shards"}
    return [*table, {**last, "peak": DASH, "time": DASH}]


def _halves(records: Sequence[Record]) -> list[tuple[Record, dict]]:
    return [(record, point) for record in records if (point := at_half(record)) is not None]


def _lowest(records: Sequence[Record]) -> list[tuple[Record, dict]]:
    """Each record's plan with the lowest peak."""
    return [(each, min(points, key=lambda p: p["measured_peak_bytes"])) for each in records if (points := _ours(each))]


def _of_peer(records: Sequence[Record], peer: str) -> list[tuple[Record, dict]]:
    """The timed point of a peer in each record that has it; of the memory budget that of the setting `HALF`."""
    found = []
    for record in records:
        rows = [row for row in record.metrics["peers"] if row["peer"] == peer and row["setting"] in (None, HALF)]
        found += [(record, row) for row in rows if "seconds_ratio" in row]
    return found


def _span(shares: Sequence[float]) -> str:
    """The lowest and the highest of some fractions, in percent."""
    ends = sorted({round(100 * share) for share in shares})
    return " to ".join(map(str, dict.fromkeys((ends[0], ends[-1])))) if ends else DASH


def gap(point: dict) -> str:
    """The optimality gap of a point's plan: of the step, and in milliseconds where the profile of the plan has them."""
    if point["lower_bound"] is None:
        return DASH
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
                "cost": DASH if half is None else f"{100 * half['cost']:.1f}",
                "bound": DASH if half is None or half["lower_bound"] is None else f"{100 * half['lower_bound']:.1f}",
                "gap": DASH if half is None else gap(half),
            }
        )
    return rows
