"""Records of the training experiments: a table for a terminal, rows and figures for the book."""

from __future__ import annotations

from ackpt.metering.timeline import CATEGORIES, Timeline

MIB = 2**20
HIGHLIGHT = "#b5402f"  # in a stack of categories, whatever is none of them
SIZES = ("seq_len", "method", "batch_size", "dim", "ff_dim", "layers", "dtype")


def file_name(record) -> str:
    """``lm-L512-checkpoint.json``: one file per record of a run."""
    method = record.config["method"].replace("+", "-")
    return f"{record.experiment}-L{record.config['seq_len']}-{method}.json"


def baseline_of(record, records):
    """The record of the same sequence length by the method baseline, or None if that was not run."""
    for other in records:
        if other.config["method"] == "baseline" and other.config["seq_len"] == record.config["seq_len"]:
            return other
    return None


def rows(records) -> list[dict]:
    """One row per record: sizes in MiB, FLOPs in 1e9, each with its difference to the baseline in per cent.

    Keys that were not measured are left out: times and losses of a prediction, say.
    """
    table = []
    for record in records:
        metrics = record.metrics
        base = baseline_of(record, records)
        row = {
            "seq_len": record.config["seq_len"],
            "method": record.config["method"],
            "peak MiB": metrics["peak_bytes"] / MIB,
            "dynamic MiB": metrics["dynamic_peak_bytes"] / MIB,
        }
        if base is not None:
            row["peak"] = _percent(metrics["peak_bytes"], base.metrics["peak_bytes"])
        if metrics.get("flops") is not None:
            row["GFLOP"] = metrics["flops"] / 1e9
        if "losses" in metrics:
            row["last loss"] = metrics["losses"][-1]
        if "seconds_step" in metrics:
            row["ms/step"] = metrics["seconds_step"]["median"] * 1e3
            row["time"] = f"x{metrics['seconds_ratio']['median']:.2f}"
        table.append(row)
    return table


def published_rows(reference, predicted, measured=()) -> list[dict]:
    """One row per predicted record, with the published and the measured peak of the same length and method beside it.

    Args:
        reference: what ``results.load_reference`` gives; its figures stay as they are printed there.
        predicted, measured: records; two belong together if their sizes, dtype and method are equal.

    Returns:
        Rows with the keys seq_len, method, published (as printed), predicted and measured (MiB); None where there is
        no such figure.
    """

    def sizes(record):
        return tuple(record.config.get(name) for name in SIZES)

    printed = {(row["seq_len"], row["method"]): row["peak"] for row in reference["rows"]}
    found = {sizes(record): round(record.metrics["peak_bytes"] / MIB, 1) for record in measured}
    return [
        {
            "seq_len": record.config["seq_len"],
            "method": record.config["method"],
            "published": printed.get((record.config["seq_len"], record.config["method"])),
            "predicted": round(record.metrics["peak_bytes"] / MIB, 1),
            "measured": found.get(sizes(record)),
        }
        for record in predicted
    ]


def timelines_plot(records, title: str):
    """The steps of several records side by side on one axis of bytes: live memory by category, event after event.

    Args:
        records: of one experiment, with their timelines.
        title: the finding.

    Returns:
        A Figure; every step has its peak marked, and a line where backward begins.
    """
    from ackpt import plots

    with plots.style.context("default"):
        steps = [Timeline.from_json(record.metrics["timeline"]) for record in records]
        width = max(len(step.live) for step in steps)
        pitch = round(1.12 * width)
        highest = max(record.metrics["resident_bytes"] + step.peak_bytes for record, step in zip(records, steps)) / MIB
        figure, axes = plots._axes(title, "allocations and frees of one step, in order", "live memory (MiB)")
        axes.set_xlim(0, pitch * len(steps) - (pitch - width))
        axes.set_ylim(0, highest * 1.2)
        handles = {}
        for place, (record, step) in enumerate(zip(records, steps)):
            start = pitch * place
            events = range(start, start + len(step.live))
            resident = record.metrics["resident_bytes"]
            handles |= plots.stack(axes, events, {"resident": [resident] * len(events), **step.categories})
            plots._mark_peak(axes, start + step.peak_index, (resident + step.peak_bytes) / MIB, pitch * len(steps))
            if step.boundary is not None:
                plots._mark_backward(axes, start + step.boundary, pitch * len(steps))
        centres = [pitch * place + len(step.live) / 2 for place, step in enumerate(steps)]
        axes.set_xticks(centres, [record.config["method"] for record in records])
        axes.tick_params(axis="x", length=0)
        names = [name for name in ("resident", *CATEGORIES) if name in handles][::-1]
        return plots._finished(figure, [handles[name] for name in names], names)


def stacked_plot(labels, parts: dict, title: str, *, ylabel="memory at the peak (MiB)"):
    """One bar per label, made of parts that add up.

    Args:
        labels: one per bar.
        parts: ``{name: bytes of every bar}``, from the bottom to the top; names of categories have their colours.
        title: the finding.

    Returns:
        A Figure; every bar has its sum on top.
    """
    from ackpt import plots

    with plots.style.context("default"):
        figure, axes = plots._axes(title, "", ylabel)
        bottom = [0.0] * len(labels)
        for name, sizes in parts.items():
            heights = [size / MIB for size in sizes]
            axes.bar(range(len(labels)), heights, 0.6, bottom, color=plots.COLORS.get(name, HIGHLIGHT), label=name)
            bottom = [low + height for low, height in zip(bottom, heights)]
        for place, total in enumerate(bottom):
            look = {"ha": "center", "va": "bottom", "fontsize": 9, "fontweight": "bold", "color": plots.TEXT}
            text = plots._number(total, max(bottom))
            axes.annotate(text, (place, total), xytext=(0, 3), textcoords="offset points", **look)
        axes.set_xticks(range(len(labels)), [label.replace("+", " +\n") for label in labels])
        axes.tick_params(axis="x", length=0)
        axes.set_ylim(0, max(bottom) * 1.1)
        handles, names = axes.get_legend_handles_labels()
        return plots._finished(figure, handles[::-1], names[::-1])


def text_table(records) -> str:
    """The rows in columns, with the machine and the versions below."""
    table = rows(records)
    if not table:
        return "no records"
    names = list(dict.fromkeys(name for row in table for name in row))
    cells = [names] + [[_cell(name, row.get(name)) for name in names] for row in table]
    return "\n".join([*aligned(cells), "", footnote(records)])


def aligned(cells, left: int = 0) -> list[str]:
    """Lines of equal columns, a rule below the first; the first `left` columns begin at the left."""
    widths = [max(map(len, column)) for column in zip(*cells)]
    sides = [str.ljust] * left + [str.rjust] * (len(widths) - left)
    lines = ["  ".join(side(cell, width) for side, cell, width in zip(sides, line, widths)) for line in cells]
    return [lines[0], "  ".join("-" * width for width in widths), *lines[1:]]


def footnote(records) -> str:
    """Where the numbers come from, in a few lines."""
    where, config = records[0].environment, records[0].config
    predicted = records[0].experiment.endswith("-predicted")
    dataset = f", corpus {config['dataset']}" if "dataset" in config and not predicted else ""
    kind = f"{where['device_name']}, {where['threads']} threads"
    if predicted:
        kind = "predicted from shapes, nothing was run"
    notes = [f"{kind}; torch {where['torch']}; {config['dtype']}{dataset}; sizes in MiB = 2^20 bytes"]
    if any("seconds_ratio" in record.metrics for record in records):
        reference = records[0].metrics["seconds_ratio"]["reference"]
        notes.append(f"time: median ratio to {reference}, methods interleaved in one process")
    methods = {record.config["method"] for record in records}
    if not predicted and {"baseline", "checkpoint"} <= methods:
        equal = "equal to the last bit at every step" if config["device"] == "cpu" else "equal within tolerance"
        notes.append(f"losses of baseline and checkpoint: {equal} (checked)")
    return "\n".join(notes)


def _percent(value, reference) -> str:
    return f"{100 * (value / reference - 1):+.1f} %"


def _cell(name, value) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4f}" if name == "last loss" else f"{value:.1f}"
    return str(value)
