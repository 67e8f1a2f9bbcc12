"""Records of the training experiments as a table for a terminal and as rows for the book."""

from __future__ import annotations

MIB = 2**20


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


def text_table(records) -> str:
    """The rows in columns, with the machine and the versions below."""
    table = rows(records)
    if not table:
        return "no records"
    names = list(dict.fromkeys(name for row in table for name in row))
    cells = [names] + [[_cell(name, row.get(name)) for name in names] for row in table]
    widths = [max(map(len, column)) for column in zip(*cells)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths)) for line in cells]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join([*lines, "", footnote(records)])


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
