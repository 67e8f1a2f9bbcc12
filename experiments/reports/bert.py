"""Records of the experiment ``bert``: rows, and a table for a terminal with the published figures below."""

from __future__ import annotations

from experiments.results import DASH, load_reference
from experiments.steps.named_steps import BASELINE, PER_BLOCK

from .batch_size import compared, gradients_note, how, named
from .tables import MIB, PERCENT, is_predicted, machine, mib, not_run, percent_change, published, ran, signed, table

PARTS = ("parameters", "optimizer", "gradients", "activations", "recomputed", "temporaries")
COLUMNS = {
    "method": "method",
    "how": "",
    "peak": "peak MiB",
    "vs_baseline": "vs baseline",
    "dynamic": "dynamic MiB",
    "dynamic_vs_baseline": "vs baseline",
    "flops": "FLOPs",
    "ms": "ms/step",
    "time": "time",
    **{part: part for part in PARTS},
}
FORMS = dict.fromkeys(("vs_baseline", "dynamic_vs_baseline", "flops", "time"), PERCENT)


def file_name(record) -> str:
    """``bert-B8-L512-auto-0.5.json``: one file per record of a run."""
    config = record.config
    return f"{record.experiment}-B{config['batch_size']}-L{config['seq_len']}-{config['method'].replace('@', '-')}.json"


def rows(records) -> list[dict]:
    """One row per record of one size, with the keys of `COLUMNS`; a missing figure is None.

    Sizes are in MiB, differences from the method ``baseline`` in percent; the last columns are the parts of the peak.
    """
    baseline = next((record for record in ran(records) if record.config["method"] == BASELINE), None)
    return [_row(record, baseline) for record in records]


def _row(record, baseline) -> dict:
    metrics = record.metrics
    row = {**dict.fromkeys(COLUMNS), "method": record.config["method"], "how": how(record)}
    if "not_run" in metrics:
        return row
    row |= compared(record, baseline)
    row["dynamic"] = mib(metrics["dynamic_peak_bytes"])
    row |= {part: mib(metrics["categories"].get(part, 0)) for part in PARTS}
    if baseline is not None and baseline is not record and how(baseline) == row["how"]:
        dynamic = baseline.metrics["dynamic_peak_bytes"]
        row["dynamic_vs_baseline"] = percent_change(metrics["dynamic_peak_bytes"], dynamic)
    return row


def published_rows(predicted, measured=()) -> list[dict]:
    """One row per predicted record: the published figures, our prediction, and the measurement at that size on a GPU.

    Args:
        predicted: records of one size, with that of the method ``baseline``.
        measured: records of any size; those of the same size are shown in the rows of their methods.

    Returns:
        Rows with the keys method, ``published``, ``published_memory`` (compared with the baseline), ``minutes``,
        ``published_time``; ``average``, ``peak`` and ``vs_baseline`` (predicted), ``flops``, ``measured`` and
        ``measured_time``: MiB, minutes and percent, as text. A figure that was not published is a dash, one that was
        not measured None.
    """
    printed = {row["method"]: row for row in load_reference("bert")["rows"]}
    theirs = {BASELINE: printed["without"], PER_BLOCK: printed["with"]}
    ours = {_size(record): row for record, row in zip(measured, rows(measured))}
    compared_rows = []
    for record, row in zip(predicted, rows(predicted)):
        other, on_gpu = theirs.get(row["method"]), ours.get(_size(record), {})
        compared_rows.append(
            {
                "method": row["method"],
                "published": f"{other['average_memory']:,}" if other else DASH,
                "published_memory": _against(other, printed["without"], "average_memory"),
                "minutes": f"{other['seconds'] / 60:.1f}" if other else DASH,
                "published_time": _against(other, printed["without"], "seconds"),
                "average": f"{average / MIB:,.1f}" if (average := record.metrics.get("average_bytes")) else None,
                "peak": f"{row['peak']:,.1f}",
                "vs_baseline": signed(row["vs_baseline"], 1),
                "flops": signed(row["flops"], 1),
                "measured": on_gpu.get("peak"),
                "measured_time": on_gpu.get("time"),
            }
        )
    return compared_rows


def _size(record) -> tuple:
    config = record.config
    return tuple(str(config[name]) for name in ("method", "fields", "batch_size", "seq_len", "device", "dtype"))


def _against(row, reference, name: str) -> str:
    return signed(percent_change(row[name], reference[name]) if row and row is not reference else None, 1)


def text_table(records) -> str:
    """One table per size, and below them the methods that were not run, and the published figures."""
    if not records:
        return "no records"
    sizes: dict[tuple, list] = {}
    for record in records:
        sizes.setdefault((is_predicted(record), str(record.config["fields"])), []).append(record)
    lines: list[str] = []
    for group in sizes.values():
        lines += [*_table(group), ""]
    reference = published("bert")
    if reference is None:
        return "\n".join(lines[:-1])
    without, with_switch = reference["rows"]
    memory, time = (
        PERCENT.format(percent_change(with_switch[name], without[name])) for name in ("average_memory", "seconds")
    )
    return "\n".join([*lines, f"published, checkpointed layers: {memory} of average memory, {time} of time"])


def _table(records) -> list[str]:
    config, torch = records[0].config, records[0].environment["torch"]
    origin = machine(records[0])
    if how(records[0]) == "predicted":
        origin = f"predicted from shapes as on {config['device']}, nothing was run"
    return [
        f"{named(config)}: {config['batch_size']} x {config['seq_len']} tokens, {config['dtype']}, AdamW; "
        f"{origin}; torch {torch}; sizes in MiB = 2^20 bytes",
        *table(rows(records), COLUMNS, FORMS, left=1),
        *not_run(records),
        *gradients_note(records),
    ]
