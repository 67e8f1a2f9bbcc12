"""Records of the BERT experiment: rows, and a table for a terminal with the published figures below."""

from __future__ import annotations

from ackpt.experiments.steps.named_steps import PER_BLOCK, PLAIN
from ackpt.results import RecordError, load_reference

from .batch_size import cell, change, figures, gradients_note, how, named
from .training import aligned

MIB = 2**20
PARTS = ("parameters", "optimizer", "gradients", "activations", "temporaries")
COLUMNS = {
    "method": "method",
    "how": "",
    "peak": "peak MiB",
    "vs_plain": "vs plain",
    "dynamic": "dynamic MiB",
    "dynamic_vs_plain": "vs plain",
    "flops": "FLOPs",
    "ms": "ms/step",
    "time": "time",
    **{part: part for part in PARTS},
}


def file_name(record) -> str:
    """``bert-B8-L512-auto-0.5.json``: one file per record of a run."""
    config = record.config
    return f"{record.experiment}-B{config['batch_size']}-L{config['seq_len']}-{config['method'].replace('@', '-')}.json"


def rows(records) -> list[dict]:
    """One row per record of one size, with the keys of `COLUMNS`; None where there is no such figure.

    Sizes in MiB, differences to the plain method in per cent; the last columns are the parts of the peak.
    """
    plain = next((r for r in records if r.config["method"] == PLAIN and "not_run" not in r.metrics), None)
    return [_row(record, plain) for record in records]


def _row(record, plain) -> dict:
    metrics = record.metrics
    row = {**dict.fromkeys(COLUMNS), "method": record.config["method"], "how": how(record)}
    if "not_run" in metrics:
        return row
    row |= figures(record, plain)
    row["dynamic"] = round(metrics["dynamic_peak_bytes"] / MIB, 1)
    row |= {part: round(metrics["categories"].get(part, 0) / MIB, 1) for part in PARTS}
    if plain is not None and plain is not record and how(plain) == row["how"]:
        row["dynamic_vs_plain"] = change(metrics["dynamic_peak_bytes"], plain.metrics["dynamic_peak_bytes"])
    return row


def published_rows(predicted, measured=()) -> list[dict]:
    """One row per predicted record: the published figures, our prediction, and what was measured at that size on a GPU.

    Args:
        predicted: records of one size, plain's among them.
        measured: records of any size; those of the same one stand beside their method.

    Returns:
        Rows with the keys method, ``published`` and ``published_memory`` (as printed, and against plain),
        ``published_time``, ``peak`` and ``vs_plain`` (predicted), ``flops``, ``measured`` and ``measured_time``; MiB
        and per cent. What was never published is "", what was not measured None.
    """
    printed = {row["method"]: row for row in load_reference("bert")["rows"]}
    theirs = {PLAIN: printed["without"], PER_BLOCK: printed["with"]}
    ours = {_size(record): row for record, row in zip(measured, rows(measured))}
    table = []
    for record, row in zip(predicted, rows(predicted)):
        other, found = theirs.get(row["method"]), ours.get(_size(record), {})
        table.append(
            {
                "method": row["method"],
                "published": other["average_memory"] if other else "",
                "published_memory": _against(other, printed["without"], "average_memory"),
                "published_time": _against(other, printed["without"], "seconds"),
                "peak": row["peak"],
                "vs_plain": "" if row["vs_plain"] is None else row["vs_plain"],
                "flops": "" if row["flops"] is None else row["flops"],
                "measured": found.get("peak"),
                "measured_time": found.get("time"),
            }
        )
    return table


def _size(record) -> tuple:
    config = record.config
    return tuple(str(config[name]) for name in ("method", "fields", "batch_size", "seq_len", "device", "dtype"))


def _against(row, reference, name: str):
    return change(row[name], reference[name]) if row and row is not reference else ""


def text_table(records) -> str:
    """One table per size, and below them what was not run, and the published figures."""
    if not records:
        return "no records"
    sizes: dict[tuple, list] = {}
    for record in records:
        sizes.setdefault((record.experiment.endswith("-predicted"), str(record.config["fields"])), []).append(record)
    lines: list[str] = []
    for group in sizes.values():
        lines += [*_table(group), ""]
    try:
        without, with_switch = load_reference("bert")["rows"]
    except RecordError:  # an installed package has no published figures beside it
        return "\n".join(lines[:-1])
    memory = change(with_switch["average_memory"], without["average_memory"])
    time = change(with_switch["seconds"], without["seconds"])
    return "\n".join(
        [*lines, f"published, per-module switch: {memory:+.1f} % of average memory, {time:+.1f} % of time"]
    )


def _table(records) -> list[str]:
    config, where = records[0].config, records[0].environment
    table = rows(records)
    names = [name for name in COLUMNS if any(row[name] is not None for row in table)]
    kind = f"{where['device_name']}, {where['threads']} threads"
    if how(records[0]) == "predicted":
        kind = f"predicted from shapes as on {config['device']}, nothing was run"
    lines = [
        f"{named(config)}: {config['batch_size']} x {config['seq_len']} tokens, {config['dtype']}, AdamW; "
        f"{kind}; torch {where['torch']}; sizes in MiB = 2^20 bytes",
        *aligned([[COLUMNS[n] for n in names], *([cell(n, row[n]) for n in names] for row in table)], left=1),
    ]
    for record in records:
        if "not_run" in record.metrics:
            lines.append(f"not run: {record.config['method']}: {record.metrics['not_run']}")
    return [*lines, *gradients_note(records)]
