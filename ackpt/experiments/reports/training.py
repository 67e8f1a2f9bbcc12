"""Records of the experiments ``synthetic`` and ``lm``: a table for a terminal, rows and a figure for the book."""

from __future__ import annotations

from ackpt.metering.timeline import Timeline

from .tables import MIB, PERCENT, is_predicted, mib, origin, percent_change, table

FORMS = {"last loss": "{:.4f}"}
SIZES = ("seq_len", "method", "batch_size", "dim", "ff_dim", "layers", "dtype")


def file_name(record) -> str:
    """``lm-L512-checkpoint.json``: one file per record of a run."""
    method = record.config["method"].replace("+", "-")
    return f"{record.experiment}-L{record.config['seq_len']}-{method}.json"


def baseline_of(record, records):
    """The record of the method ``baseline`` at the same sequence length, or None if there is none."""
    for other in records:
        if other.config["method"] == "baseline" and other.config["seq_len"] == record.config["seq_len"]:
            return other
    return None


def rows(records) -> list[dict]:
    """One row per record: sizes in MiB, FLOPs in 1e9, and the peak's difference from the baseline's in percent.

    Figures that were not measured have no key: a prediction has neither times nor losses.
    """
    all_rows = []
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
            row["peak"] = PERCENT.format(percent_change(metrics["peak_bytes"], base.metrics["peak_bytes"]))
        if metrics.get("flops") is not None:
            row["GFLOP"] = metrics["flops"] / 1e9
        if "losses" in metrics:
            row["last loss"] = metrics["losses"][-1]
        if "seconds_step" in metrics:
            row["ms/step"] = metrics["seconds_step"]["median"] * 1e3
            row["time"] = f"x{metrics['seconds_ratio']['median']:.2f}"
        all_rows.append(row)
    return all_rows


def published_rows(reference, predicted, measured=()) -> list[dict]:
    """One row per predicted record, with the published and the measured peak of the same length and method.

    Args:
        reference: from ``results.load_reference``; its figures are not converted.
        predicted, measured: records; two belong together if their sizes, dtype and method are equal.

    Returns:
        Rows with the keys seq_len, method, published (as printed), predicted and measured (MiB); a missing figure is
        None.
    """

    def sizes(record):
        return tuple(record.config.get(name) for name in SIZES)

    printed = {(row["seq_len"], row["method"]): row["peak"] for row in reference["rows"]}
    peaks = {sizes(record): mib(record.metrics["peak_bytes"]) for record in measured}
    return [
        {
            "seq_len": record.config["seq_len"],
            "method": record.config["method"],
            "published": printed.get((record.config["seq_len"], record.config["method"])),
            "predicted": mib(record.metrics["peak_bytes"]),
            "measured": peaks.get(sizes(record)),
        }
        for record in predicted
    ]


def timelines_plot(records, title: str):
    """A Figure with the steps of several records side by side: live memory by category after every event.

    Args:
        records: of one experiment, with their timelines.
        title: the finding.

    Returns:
        A Figure; in every step the peak is marked, and a line shows where backward begins.
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
        for index, (record, step) in enumerate(zip(records, steps)):
            resident = record.metrics["resident_bytes"]
            handles |= plots.draw_step(axes, step, resident, pitch * len(steps), start=pitch * index)
        centres = [pitch * index + len(step.live) / 2 for index, step in enumerate(steps)]
        axes.set_xticks(centres, [record.config["method"] for record in records])
        axes.tick_params(axis="x", length=0)
        shown = plots.as_stacked(handles)
        return plots._finished(figure, [*shown.values()], [*shown])


def text_table(records) -> str:
    """The rows in columns, with the machine and the versions below."""
    shown = rows(records)
    if not shown:
        return "no records"
    headings = {name: name for row in shown for name in row}
    return "\n".join([*table(shown, headings, FORMS, always=headings), "", footnote(records)])


def footnote(records) -> str:
    """Where the numbers come from, in a few lines."""
    first = records[0]
    config, predicted = first.config, is_predicted(first)
    dataset = f", corpus {config['dataset']}" if "dataset" in config and not predicted else ""
    versions = f"torch {first.environment['torch']}; {config['dtype']}{dataset}"
    notes = [f"{origin(first)}; {versions}; sizes in MiB = 2^20 bytes"]
    if any("seconds_ratio" in record.metrics for record in records):
        reference = first.metrics["seconds_ratio"]["reference"]
        notes.append(f"time: median ratio to {reference}, methods interleaved in one process")
    methods = {record.config["method"] for record in records}
    if not predicted and {"baseline", "checkpoint"} <= methods:
        equal = "equal to the last bit at every step" if config["device"] == "cpu" else "equal within tolerance"
        notes.append(f"losses of baseline and checkpoint: {equal} (checked)")
    return "\n".join(notes)
