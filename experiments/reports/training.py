"""Records of the experiments ``synthetic`` and ``lm``: a table for a terminal, rows and a figure for the book."""

from __future__ import annotations

from .tables import MIB, PERCENT, is_predicted, origin, percent_change, table

FORMS = {"last loss": "{:.4f}"}
PUBLISHED = {
    "seq_len": "tokens",
    "method": "method",
    "published": "published, MiB",
    "configured": "predicted, MiB",
    "configured_measured": "on a GPU, MiB",
    "predicted": "ours, predicted, MiB",
    "measured": "ours, on a GPU, MiB",
    "measured_seconds": "ours, on a GPU, s",
    "seconds": "published, s",
    "ratio": "ratio",
}
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


def published_rows(reference, configured, predicted, measured=(), digits: int = 1) -> list[dict]:
    """One row per published figure: its prediction, our model's, and our measurement.

    Args:
        reference: from ``results.load_reference``; its sizes are in MiB.
        configured: rows of `with_measured` for the published configuration.
        predicted, measured: records of our model; two belong together if their sizes, dtype and method are equal.
        digits: after the decimal point of a published size.

    Returns:
        Rows with the keys of `PUBLISHED`, as text: sizes in MiB, published seconds and their ratio to the baseline's; a
        missing figure is None.
    """
    ours = {(record.config["seq_len"], record.config["method"]): record for record in predicted}
    theirs = {(row["sizes"]["tokens"], row["sizes"]["method"]): row for row in configured}
    printed = {(row["seq_len"], row["method"]): row for row in reference["rows"]}
    rows = []
    for (tokens, method), row in printed.items():
        record, published_step = ours[tokens, method], theirs[tokens, method]
        rows.append(
            {
                "seq_len": f"{tokens:,}",
                "method": method,
                "published": f"{row['peak']:,.{digits}f}",
                "configured": f"{published_step['predicted'] / MIB:,.{digits}f}",
                "configured_measured": published_step.get("measured"),
                "predicted": f"{record.metrics['peak_bytes'] / MIB:,.1f}",
                **measured_figures(record, measured),
                "seconds": f"{row['seconds']:.2f}",
                "ratio": f"{row['seconds'] / printed[tokens, 'baseline']['seconds']:.2f}",
            }
        )
    return rows


def measured_figures(record, measured) -> dict[str, str | None]:
    """``measured``, the peak in MiB, and ``measured_seconds``, of all training steps, at the size of another record.

    A GPU without attention in bfloat16 measures in float16, whose bytes are the same.
    """
    for other in measured:
        if _size(other) == _size(record):
            seconds = f"{other.metrics['seconds_training']:,.1f}"
            return {"measured": f"{other.metrics['peak_bytes'] / MIB:,.1f}", "measured_seconds": seconds}
    return {"measured": None, "measured_seconds": None}


def _size(record) -> tuple:
    size = {name: record.config.get(name) for name in SIZES}
    size["dtype"] = {"float16": "bfloat16"}.get(size["dtype"], size["dtype"])
    return tuple(size.values())


def measured_losses(measured) -> dict[str, dict[str, list[float]]]:
    """``{length: {method: losses}}`` of baseline and checkpoint in half precision, for `figures.losses_plot`."""
    curves: dict[str, dict[str, list[float]]] = {}
    half = [r for r in measured if r.config["dtype"] != "float32" and r.config["method"] in ("baseline", "checkpoint")]
    for record in sorted(half, key=lambda each: (each.config["seq_len"], each.config["method"])):
        curves.setdefault(f"{record.config['seq_len']:,} tokens", {})[record.config["method"]] = record.metrics[
            "losses"
        ]
    return {name: methods for name, methods in curves.items() if len(methods) == 2}


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
