"""Records of the experiment ``offload``: rows, a table for a terminal, figures.

A method that was not run has a record with the reason, and a row in every table; figures leave it out.
"""

from __future__ import annotations

from ackpt.metering.timeline import Timeline
from experiments.steps.offload_methods import STORES_IN_TORCH

from .tables import (
    MIB,
    PERCENT,
    is_predicted,
    mib,
    milliseconds,
    not_run,
    origin,
    percent_change,
    published,
    ran,
    signed,
    spread,
    table,
)

STACKED = ("ckpt_classic", "ckpt_sync_offload", "ckpt_async_offload")
COLUMNS = {
    "method": "method",
    "ms": "ms/iter",
    "spread": "low..high",
    "time": "vs baseline",
    "peak": "peak MiB",
    "vs_baseline": "vs baseline",
    "vs_classic": "vs classic",
    "store": "store MiB",
    "hidden": "overlap",
    "published_ms": "published ms",
    "published_peak": "published MB",
}
FORMS = {**dict.fromkeys(("time", "vs_baseline", "vs_classic"), PERCENT), "hidden": "{:.0f} %"}


def file_name(record) -> str:
    """``offload-T2048-ckpt_classic.json``: one file per record of a run."""
    return f"{record.experiment}-T{record.config['total_tokens']}-{record.config['method']}.json"


def rows(records, published=None) -> list[dict]:
    """One row per record, with the keys of `COLUMNS`; a missing figure is None.

    Sizes are in MiB, times in ms, differences and shares in percent; ``store`` is None if a peer's store is
    unknown. `published` comes from ``results.load_reference("offload")``; its figures are not converted. The row of a
    method that was not run has a key ``not_run``, the reason.
    """
    by_method = {record.config["method"]: record.metrics for record in ran(records)}
    printed = {row["method"]: row for row in (published or {"rows": ()})["rows"]}
    return [_row(record, by_method, printed.get(record.config["method"], {})) for record in records]


def _row(record, by_method, printed) -> dict:
    metrics = record.metrics
    row = dict.fromkeys(COLUMNS)
    row["method"] = record.config["method"]
    row["published_ms"], row["published_peak"] = printed.get("milliseconds"), printed.get("peak")
    if "not_run" in metrics:
        return {**row, "not_run": metrics["not_run"]}
    row["peak"] = mib(metrics["peak_bytes"])
    for key, other in (("vs_baseline", "baseline"), ("vs_classic", "ckpt_classic")):
        if other in by_method and row["method"] != other:
            row[key] = percent_change(metrics["peak_bytes"], by_method[other]["peak_bytes"])
    row["store"] = mib(metrics["store_peak_bytes"])
    if "seconds_step" in metrics:
        row["ms"], row["spread"] = milliseconds(metrics["seconds_step"]), spread(metrics["seconds_step"])
        if metrics["seconds_ratio"]["reference"] == "baseline" != row["method"]:
            row["time"] = round(100 * (metrics["seconds_ratio"]["median"] - 1), 1)
        if metrics["seconds_hidden_share"] is not None:
            row["hidden"] = round(100 * metrics["seconds_hidden_share"], 1)
    return row


def published_rows(reference, predicted, times, ours, measured=()) -> list[dict]:
    """One row per published method: its figures, what is predicted for its configuration and for our model, and ours.

    Args:
        reference: from ``results.load_reference("offload")``.
        predicted: rows of `with_measured`; times: rows of `time_ratios.compared`.
        ours: records of `predict_offload`; measured: records of a GPU.

    Returns:
        Rows with the keys method; ``ms``, ``ms_change``, ``peak``, ``peak_change`` and ``classic_change`` as published;
        ``predicted``, ``error``, ``predicted_change`` (of the time), ``measured`` and ``measured_ms`` for the published
        configuration; ``ours``, ``gpu_peak`` and ``gpu_ms``. MiB, ms and percent, as text; a figure that was not
        measured is None.
    """
    peaks = {row["sizes"]["method"]: row for row in predicted}
    ratios = {row["figures"][0]: row["predicted"] for row in times}
    model, on_gpu = ({row["method"]: row for row in rows(records)} for records in (ours, measured))
    classic = next(row["peak"] for row in reference["rows"] if row["method"] == "ckpt_classic")
    shown = []
    for row in reference["rows"]:
        method, ratio = row["method"], ratios.get(row["milliseconds"])
        offloaded = "offload" in method
        measured_peak, measured_ms = (on_gpu.get(method, {}).get(key) for key in ("peak", "ms"))
        shown.append(
            {
                "method": method,
                "ms": f"{row['milliseconds']:,.2f}",
                "ms_change": signed(row["milliseconds_change"]),
                "peak": f"{row['peak']:,.2f}",
                "peak_change": signed(row["peak_change"]),
                "classic_change": signed(100 * (row["peak"] / classic - 1) if offloaded else None),
                "predicted": f"{peaks[method]['predicted'] / MIB:,.2f}",
                "error": signed(100 * peaks[method]["error"], 3),
                **{key: peaks[method].get(key) for key in ("measured", "measured_ms")},
                "predicted_change": signed(None if ratio is None else 100 * (ratio - 1)),
                "ours": f"{model[method]['peak']:,.1f}",
                "gpu_peak": measured_peak,
                "gpu_ms": measured_ms,
            }
        )
    return shown


def text_table(records) -> str:
    """The rows in columns; below them the methods not run, with reasons, machine, versions, and an explanation."""
    if not records:
        return "no records"
    reference = published("offload")
    shown = [row | {"peak": "not run"} if "not_run" in row else row for row in rows(records, reference)]
    return "\n".join([*table(shown, COLUMNS, FORMS, left=1, always=("peak",)), "", *_notes(records, reference)])


def _notes(records, reference) -> list[str]:
    first = records[0]
    config, predicted = first.config, is_predicted(first)
    notes = not_run(records)
    sizes = f"{config['layers']} layers, dim {config['dim']}, {config['total_tokens']} tokens in {config['batch_size']}"
    torch = f"torch {first.environment['torch']}"
    notes.append(f"{origin(first)}; {torch}; {config['dtype']}; {sizes} sequences; MiB = 2^20 bytes")
    methods = [record.config["method"] for record in ran(records)]
    if not predicted and methods:
        differences = [record.metrics["gradients_difference"] for record in ran(records)]
        equal = f"within {max(differences, default=0):.2g} of a parameter's largest one"
        if not any(differences):
            equal = "equal to the last bit"
        notes.append(f"gradients compared with the baseline's at {config['steps']} steps: {equal} (checked)")
    if any("seconds_step" in record.metrics for record in ran(records)):
        notes.append("time: methods interleaved in one process; the difference is the median of the rounds' ratios")
    if not predicted and config["device"] == "cpu":
        notes.append("the CPU's memory simulates a device's; ackpt's store is separate from it, its own threads copy")
        if "save_on_cpu" in methods:
            notes.append("save_on_cpu: copies nothing that is already on a CPU, so here it equals torch's checkpoint")
        notes += [f"{name}: its peak includes its store here" for name in STORES_IN_TORCH if name in methods]
    if reference is not None:
        notes.append(f"published: {reference['hardware']}; {reference['source'].split('; ')[-1]}")
    return notes


def bars_plot(records, what: str, title: str):
    """A Figure with one bar per method that was run: peak memory, or time per step with its lowest and highest.

    Args:
        records: of one run.
        what: ``"peak"`` or ``"time"``; times differ from run to run, so do not save that figure.
        title: the finding.

    Raises:
        ValueError: for another `what`, and if no record has a figure of it.
    """
    from experiments.reports import plots
    from experiments.reports.figures import SERIES

    if what not in ("peak", "time"):
        raise ValueError(f"what={what!r} is unknown: choose 'peak' or 'time'")
    key = "peak_bytes" if what == "peak" else "seconds_step"
    shown = [record for record in ran(records) if key in record.metrics]
    if not shown:
        raise ValueError(f"none of the {len(records)} records has a {what}")
    with plots.style.context("default"):
        xlabel = "peak device memory (MiB)" if what == "peak" else "time of a step (ms): median, lowest to highest"
        figure, axes = plots._axes(title, xlabel, "")
        axes.grid(False, axis="y")
        axes.grid(axis="x", color=plots.TEXT, alpha=0.25, linewidth=0.8)
        axes.xaxis.set_major_formatter(plots.StrMethodFormatter("{x:,.10g}"))
        if what == "peak":
            spans = [(record.metrics[key] / MIB,) * 3 for record in shown]
        else:
            spans = [tuple(1e3 * record.metrics[key][name] for name in ("low", "median", "high")) for record in shown]
        highest = max(high for _, _, high in spans)
        for index, (low, middle, high) in enumerate(spans):
            axes.barh(index, middle, 0.66, color=SERIES[0])
            if high > low:
                axes.plot([low, high], [index, index], color=plots.TEXT, linewidth=1.6)
            look = {"va": "center", "fontsize": 8.5, "color": plots.TEXT}
            text = plots._number(middle, highest)
            axes.annotate(text, (high, index), xytext=(5, 0), textcoords="offset points", **look)
        axes.set_yticks(range(len(shown)), [record.config["method"] for record in shown])
        axes.tick_params(axis="y", length=0)
        axes.set_ylim(len(shown) - 0.4, -0.6)
        axes.set_xlim(0, highest * 1.12)
        return plots._finished(figure, [], [])


def timelines_plot(records, title: str, methods=STACKED):
    """A Figure with the steps of several methods, one above the other: live memory by category, and the copies.

    The peak is marked, and where backward begins. Every copy is a bar, from the event at which it is submitted to the
    event at which compute waits for it.

    Args:
        records: of one run; those of `methods` are drawn, in that order.
        title: the finding.

    Raises:
        ValueError: if none of `methods` was run.
    """
    from experiments.reports import plots

    by_method = {record.config["method"]: record for record in ran(records)}
    shown = [by_method[name] for name in methods if name in by_method]
    if not shown:
        raise ValueError(f"none of the records is a run of {', '.join(methods)}")
    steps = [Timeline.from_json(record.metrics["timeline"]) for record in shown]
    width = max(len(step.live) for step in steps)
    highest = max(record.metrics["peak_bytes"] for record in shown) / MIB
    with plots.style.context("default"):
        figure, axes = plots._axes(title, "", "")
        figure.set_size_inches(6.0, 1.2 + 2.0 * len(shown))
        axes.remove()
        handles: dict = {}
        for index, (record, step) in enumerate(zip(shown, steps)):
            axes = figure.add_subplot(len(shown), 1, index + 1)
            plots._style(axes)
            axes.patch.set_alpha(0)
            axes.set_xlim(0, width - 1)
            axes.set_ylim(0, highest * 1.25)
            handles |= plots.draw_step(axes, step, record.metrics["resident_bytes"], width)
            _copies(plots, axes, step, highest, handles)
            axes.set_ylabel("\n".join([record.config["method"], "MiB"]), color=plots.TEXT, fontsize=8.5)
            if index < len(shown) - 1:
                axes.tick_params(labelbottom=False)
        axes.set_xlabel("allocations and frees of one step, in order", color=plots.TEXT, fontsize=9)
        copies = {name: handles[name] for name in ("copy out", "copy in") if name in handles}
        shown = {**copies, **plots.as_stacked(handles)}
        return plots._finished(figure, [*shown.values()], [*shown])


LANES = {"out": (0.05, "#c8553f"), "in": (0.14, "#4f9a63")}


def _copies(plots, axes, step, highest, handles) -> None:
    """Draw copies as thin bars below the zero line, one lane for each direction; staggered, since they may overlap."""
    from matplotlib.lines import Line2D

    if not step.copies:
        return
    shortest = len(step.live) / 250  # compute may wait for a copy immediately: its bar would be too short to see
    for number, copy in enumerate(step.copies):
        depth, color = LANES[copy.way]
        height = -(depth + 0.03 * (number % 2)) * highest
        ends = [copy.begin, max(copy.end, copy.begin + shortest)]
        axes.plot(ends, [height] * 2, color=color, linewidth=2.4, solid_capstyle="butt")
        label = f"copy {copy.way}"
        handles.setdefault(label, Line2D([], [], color=color, linewidth=3.2, label=label))
    axes.set_ylim(-0.22 * highest, highest * 1.25)
    axes.axhline(0, color=plots.TEXT, linewidth=0.8)
    axes.set_yticks([tick for tick in axes.get_yticks() if 0 <= tick <= highest * 1.25])


def figures(records) -> dict:
    """``{name: Figure}`` of one run: peak, timelines, and time if it was measured; the titles state the findings."""
    metrics = {record.config["method"]: record.metrics for record in ran(records)}
    if not metrics:
        return {}
    least = min(metrics, key=lambda name: metrics[name]["peak_bytes"])
    drawn = {"peak": bars_plot(records, "peak", f"{least} has the lowest peak of {len(metrics)} methods")}
    timed = {name: each["seconds_step"]["median"] for name, each in metrics.items() if "seconds_step" in each}
    if timed:
        fastest = min(timed, key=lambda name: timed[name])
        drawn["time"] = bars_plot(records, "time", f"{fastest} has the shortest step of {len(timed)} methods")
    if set(STACKED) & set(metrics):
        title = "Boundaries of checkpointed blocks form a ramp in the forward"
        if {"ckpt_classic", "ckpt_async_offload"} <= set(metrics):
            classic, offloaded = (metrics[name]["peak_bytes"] for name in ("ckpt_classic", "ckpt_async_offload"))
            change = f"{abs(classic - offloaded) / MIB:,.1f} MiB ({abs(1 - offloaded / classic):.0%})"
            title = f"Offloaded boundaries change the checkpointed peak by {change}"
            if offloaded < classic:
                title = f"Offloading the boundaries removes the ramp and lowers the checkpointed peak by {change}"
        drawn["timelines"] = timelines_plot(records, title)
    return drawn
