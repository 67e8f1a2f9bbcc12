"""A record of the experiment ``frontier``: a table for a terminal, the comparison with the peers, the figure of FLOPs.

`frontier_times` next to it has the figures of measured times.

Peaks are fractions of the baseline's dynamic peak, FLOPs of recomputation fractions of the baseline's FLOPs.
"""

from __future__ import annotations

from ackpt.core.budget import readable
from ackpt.metering.meter import memory_format
from experiments.frontier import OURS
from experiments.steps.peers import CHECKPOINT, MEMORY_BUDGET, PEERS

from .frontier_times import at_the_peak_of_blocks, is_by_inductor, label
from .tables import machine, table

TIGHT = 0.6  # of the baseline's peak: peers are compared with auto at this peak and below
TOLERANCE = 20  # a peer's results may differ by this multiple of the difference that rounding makes
_EPSILON = 2.0**-23  # of float32
COLUMNS = {
    "name": "method",
    "budget": "budget",
    "peak": "peak",
    "bytes": "measured",
    "off": "off by",
    "again": "recomputed",
    "cost": "cost",
    "bound": "bound",
    "equal": "bit-equal",
    "time": "time",
}


def file_name(record) -> str:
    """``frontier-transformer.json``: one file per model and compiler."""
    compiler = "-inductor" if is_by_inductor(record) else ""
    return f"{record.experiment}-{record.config['model']}{compiler}.json"


def measured(record) -> list[dict]:
    """The points of the policies that were run, not refused, in order."""
    return [point for point in record.metrics["points"] if "measured_peak_bytes" in point]


def is_equal(row) -> bool:
    """Whether gradients and buffers are bit-equal to those of policy none."""
    return row["gradients_difference"] == row["buffers_difference"] == 0.0


def is_correct(row, record) -> bool:
    """Whether gradients and buffers differ from those of policy none by rounding at most."""
    rounding = record.metrics["rounding"]
    return all(row[name] <= TOLERANCE * max(rounding[name], _EPSILON) for name in rounding)


def broken_promises(record) -> list[str]:
    """One line per planned step that was not bit-equal, above its budget, or not as predicted; none with Inductor."""
    if is_by_inductor(record):
        return []
    broken = []
    for point in measured(record):
        peak, name = point["measured_peak_bytes"], _name(point)
        if not is_equal(point):
            broken.append(f"{name}: gradients or buffers are not those of policy none to the last bit")
        if peak > point["limit_bytes"] or peak != point["predicted_peak_bytes"]:
            predicted, limit = point["predicted_peak_bytes"], point["limit_bytes"]
            broken.append(f"{name}: measured {peak} bytes, predicted {predicted}, at most {limit}")
        if point["recompute_flops"] != point["predicted_recompute_flops"]:
            predicted = point["predicted_recompute_flops"]
            broken.append(f"{name}: {point['recompute_flops']} FLOPs recomputed, predicted {predicted}")
    return broken


def comparison(record) -> dict:
    """Policy auto compared with the peers; an entry is None if there is nothing to compare.

    Returns:
        ``beaten``: peers' points at or below `TIGHT` for which auto has a plan within their peak and with no more
        FLOPs, if these are counted; ``ahead``: those for which it has none; ``wrong``: peers' points with wrong
        gradients or buffers.
        ``least`` and ``peer_least``: the smallest peaks of auto and of correct peers, as fractions. ``at_checkpoint``:
        at the peak of torch's checkpoint per block, the FLOPs that auto recomputes over those that checkpoint does.
    """
    metrics = record.metrics
    baseline = metrics["baseline"]["measured_peak_bytes"]
    correct = [row for row in metrics["peers"] if is_correct(row, record)]
    tight = [row for row in correct if row["measured_peak_bytes"] <= TIGHT * baseline and "recompute_flops" in row]
    beaten = [row for row in tight if _is_beaten(row)]
    ours = [point["measured_peak_bytes"] for point in measured(record) if point["policy"] == OURS]
    theirs = [row["measured_peak_bytes"] for row in correct]
    blocks = next((row for row in metrics["peers"] if row["peer"] == CHECKPOINT), None)
    at_checkpoint = None
    if blocks is not None and blocks.get("recompute_flops") and blocks["auto_recompute_flops"] is not None:
        at_checkpoint = blocks["auto_recompute_flops"] / blocks["recompute_flops"]
    return {
        "beaten": [_name(row) for row in beaten],
        "ahead": [_name(row) for row in tight if not _is_beaten(row)],
        "wrong": [_name(row) for row in metrics["peers"] if not is_correct(row, record)],
        "least": min(ours) / baseline if ours else None,
        "peer_least": min(theirs) / baseline if theirs else None,
        "at_checkpoint": at_checkpoint,
    }


def _is_beaten(row) -> bool:
    return row["auto_recompute_flops"] is not None and row["auto_recompute_flops"] <= row["recompute_flops"]


def rows(record) -> list[dict]:
    """One row per point, of the policies and then of the peers; texts by the keys of `COLUMNS`, or None."""
    metrics = record.metrics
    baseline, flops = metrics["baseline"]["measured_peak_bytes"], metrics["baseline"]["flops"]
    points = []
    for point in (*metrics["points"], *metrics["peers"]):
        budget = "least" if point.get("budget", 0) is None else point.get("budget", point.get("setting"))
        row = dict.fromkeys(COLUMNS) | {"name": point.get("policy") or point["peer"]}
        row["budget"] = None if budget is None else str(budget)
        if "measured_peak_bytes" not in point:
            points.append({**row, "bytes": "refused", "off": f"needs {readable(point['least_bytes'])}"})
            continue
        peak = point["measured_peak_bytes"]
        row |= {"peak": f"{peak / baseline:.3f}", "bytes": memory_format(peak)}
        row["again"] = f"{point['recompute_flops'] / flops:+.2%}" if "recompute_flops" in point else None
        row["equal"] = "yes" if is_equal(point) else f"{_worst(point):.0e}"
        if "predicted_peak_bytes" in point:
            row["off"] = f"{point['predicted_peak_bytes'] - peak} B"
            row["cost"] = f"{point['cost']:.2%}"
            row["bound"] = None if point["lower_bound"] is None else f"{point['lower_bound']:.2%}"
        if "seconds_ratio" in point:
            row["time"] = f"{point['seconds_ratio']['median'] - 1:+.1%}"
        points.append(row)
    return points


def _worst(point) -> float:
    return max(point["gradients_difference"], point["buffers_difference"])


def _name(row) -> str:
    setting = row.get("budget", row.get("setting"))
    return row.get("policy") or row["peer"] if setting is None else f"{row.get('policy') or row['peer']} {setting}"


def text_table(record) -> str:
    """The rows in columns; below them the model, the policies not run, and how auto compares with the peers."""
    return "\n".join([*table(rows(record), COLUMNS, left=1), "", *_notes(record)])


def _notes(record) -> list[str]:
    metrics, config = record.metrics, record.config
    baseline = metrics["baseline"]
    sizes = ", ".join(f"{name} {value}" for name, value in config["sizes"].items())
    notes = [
        f"{config['model']}: {sizes}",
        f"baseline: {memory_format(baseline['measured_peak_bytes'])} dynamic, "
        f"{memory_format(baseline['resident_bytes'])} resident, {baseline['flops'] / 1e9:.1f} GFLOP; "
        f"{machine(record)}, torch {record.environment['torch']}",
        "peak: measured, as a fraction of the baseline's; off by: predicted minus measured; recomputed: FLOPs, as a "
        "fraction of the baseline's; cost, bound: of FLOPs and traffic",
        *(f"not run: {policy}: {reason}" for policy, reason in metrics["not_run"].items()),
    ]
    result = comparison(record)
    least, peer_least, at_checkpoint = result["least"], result["peer_least"], result["at_checkpoint"]
    if least is not None and peer_least is not None:
        ratio = least / peer_least
        notes.append(f"smallest: auto {least:.3f}, correct peers {peer_least:.3f}, a ratio of {ratio:.2f}")
    if at_checkpoint is not None:
        share = f"{at_checkpoint:.2f} of the FLOPs" if at_checkpoint else "none of the FLOPs"
        notes.append(f"at the peak of torch's per-block checkpoint, auto recomputes {share} that checkpoint recomputes")
    times = at_the_peak_of_blocks(record)
    if times is not None:
        notes.append(f"and takes {times[1]:+.1%} of the baseline's time, checkpoint {times[0]:+.1%}")
    at = f"at or below {TIGHT}"
    labels = {"beaten": f"no better than auto {at}", "ahead": f"BETTER than auto {at}", "wrong": "wrong results"}
    notes += [f"{label}: {', '.join(result[key])}" for key, label in labels.items() if result[key]]
    return notes


def finding(record) -> str:
    """The finding of the figure, in one sentence."""
    result = comparison(record)
    if result["least"] is None:
        return f"What a lower peak costs on {record.config['model']}"
    ours = f"Plans lower the peak to {result['least']:.2f} of the baseline's"
    return ours if result["peer_least"] is None else f"{ours}, PyTorch's tools to {result['peer_least']:.2f}"


def frontier_plot(record, title: str | None = None):
    """A Figure of measured peak against FLOPs of recomputation: the frontier of plans, policies, peers, lower bound.

    A cross marks a peer whose gradients or buffers are wrong. Points that recompute far more than the peers, or than
    auto if there are no peers, are outside the axis and are listed next to it.

    Args:
        title: by default `finding`.
    """
    from matplotlib.ticker import PercentFormatter
    from seaborn import color_palette

    from experiments.reports import plots

    colors = color_palette("colorblind").as_hex()
    policies = sorted({point["policy"]: None for point in measured(record)}, key=lambda name: name != OURS)
    with plots.style.context("default"):
        figure, axes = plots._axes(
            finding(record) if title is None else title, "dynamic peak, fraction of the baseline's", "recomputed FLOPs"
        )

        def draw(rows_, name, peak="measured_peak_bytes", **looks):
            if rows_:
                base = record.metrics["baseline"]
                x = [row[peak] / base["measured_peak_bytes"] for row in rows_]
                axes.plot(x, [row["recompute_flops"] / base["flops"] for row in rows_], label=name, **looks)

        # A lower bound for a limit is valid for every smaller peak; a plan fits every larger budget.
        bounds = [row for row in record.metrics["bounds"][::-1] if row["recompute_flops"] is not None]
        dashed = {"color": plots.TEXT, "linewidth": 1.2, "linestyle": (0, (4, 3))}
        draw(bounds, "lower bound", "limit_bytes", drawstyle="steps-pre", **dashed)
        for name, color, marker in zip(policies, colors, "osPXvdhp", strict=False):
            points = [point for point in measured(record) if point["policy"] == name]
            points.sort(key=lambda point: point["measured_peak_bytes"])
            looks = {"marker": marker, "markersize": 5, "color": color}
            draw(points, label(name, record), linestyle="none", zorder=4 if name == OURS else 2, **looks)
            if name == OURS:
                ours = record.metrics["front"][::-1]
                draw(ours, None, "peak_bytes", color=color, drawstyle="steps-post", linewidth=2, zorder=3)
        for name, marker in zip(PEERS, "D^s", strict=True):
            rows_ = [row for row in record.metrics["peers"] if row["peer"] == name]
            line = {"linestyle": ":" if name == MEMORY_BUDGET else "none", "linewidth": 1}
            line |= {"marker": marker, "markersize": 7, "color": "#b5402f", "markerfacecolor": "none"}
            draw(rows_, label(name, record), **line)
        wrong = [row for row in record.metrics["peers"] if not is_correct(row, record)]
        draw(wrong, "wrong results", linestyle="none", marker="x", markersize=11, color=plots.TEXT, zorder=5)
        axes.set_xlim(left=0)
        axes.set_ylim(-0.01, _above(axes, record))
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        handles, labels = axes.get_legend_handles_labels()
        return plots._finished(figure, handles, labels)


def _above(axes, record) -> float:
    """The upper end of the axis; lists the policies above it."""
    from experiments.reports.plots import TEXT

    flops = record.metrics["baseline"]["flops"]
    shares = {(p["policy"], p["measured_peak_bytes"]): p["recompute_flops"] / flops for p in measured(record)}
    shown = [row["recompute_flops"] / flops for row in record.metrics["peers"]]
    shown = shown or [share for (policy, _), share in shares.items() if policy == OURS]
    highest = 1.5 * max(shown or shares.values(), default=0.0) or 0.1
    above = "\n".join(
        f"{label(policy, record)} {share:.0%} at {peak / record.metrics['baseline']['measured_peak_bytes']:.2f}"
        for (policy, peak), share in shares.items()
        if share > highest
    )
    if above:
        corner = {"xycoords": "axes fraction", "ha": "right", "va": "top"}
        axes.annotate(f"above the edge:\n{above}", (0.98, 0.98), fontsize=8.5, color=TEXT, **corner)
    return highest
