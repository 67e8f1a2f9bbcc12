"""Records of the batch-size experiment: rows and a table for a terminal."""

from __future__ import annotations

from ackpt.budget import from_text, readable
from ackpt.experiments.batch_size import EXPERIMENT, LARGEST, PREDICTED
from ackpt.experiments.steps.named_steps import PLAIN, needs_limit
from ackpt.metering.meter import memory_format
from ackpt.results import RecordError, load_reference

from .training import aligned

MIB = 2**20
COLUMNS = {
    "batch_size": "batch",
    "method": "method",
    "how": "",
    "peak": "peak MiB",
    "vs_plain": "vs plain",
    "flops": "FLOPs",
    "ms": "ms/step",
    "time": "time",
    "published_peak": "published MiB",
    "published_ms": "published ms",
}
LARGEST_COLUMNS = {
    "method": "method",
    "largest": "largest batch",
    "how": "",
    "peak": "peak MiB",
    "vs_plain": "vs plain",
}


def file_name(record) -> str:
    """``batch-size-resnet50-B32-auto-0.5.json``: one file per record of a run."""
    config = record.config
    size = f"-B{config['batch_size']}" if "batch_size" in config else ""
    return f"{record.experiment}-{config['model']}{size}-{config['method'].replace('@', '-')}.json"


def how(record) -> str:
    """Whether the record's figures were measured, or predicted, or there are none."""
    if "not_run" in record.metrics:
        return "not run"
    return "predicted" if record.experiment.endswith(PREDICTED) else "measured"


def rows(records, published=None) -> list[dict]:
    """One row per record of a batch size, with the keys of `COLUMNS`; None where there is no such figure.

    Differences are to the plain method at the same batch, in per cent, and stand only where both were measured or
    both predicted. `published` is what ``results.load_reference("mu-two-resnet")`` gives; of it "without" stands
    beside plain, "with" beside every other method.
    """
    steps = [record for record in records if record.experiment.startswith(EXPERIMENT)]
    plain = {r.config["batch_size"]: r for r in steps if r.config["method"] == PLAIN}
    printed = {(row["batch_size"], row["method"]): row for row in (published or {"rows": ()})["rows"]}
    return [_row(record, plain.get(record.config["batch_size"]), printed) for record in steps]


def _row(record, plain, printed) -> dict:
    config, metrics = record.config, record.metrics
    row = {**dict.fromkeys(COLUMNS), "batch_size": config["batch_size"], "method": config["method"], "how": how(record)}
    other = printed.get((row["batch_size"], "without" if row["method"] == PLAIN else "with"), {})
    row["published_peak"], row["published_ms"] = other.get("peak"), other.get("milliseconds")
    if "not_run" in metrics:
        return row
    return row | figures(record, plain)


def figures(record, plain) -> dict:
    """Peak, FLOPs and time of a step that was run or predicted: MiB, ms, and differences to `plain` in per cent.

    ``peak``, and where there is such a figure ``vs_plain``, ``flops``, ``ms`` and ``time``.
    """
    metrics = record.metrics
    found = {"peak": round(metrics["peak_bytes"] / MIB, 1)}
    other = None if plain is record else plain
    if other is not None and how(other) == how(record):
        found["vs_plain"] = change(metrics["peak_bytes"], other.metrics["peak_bytes"])
        if metrics["flops"] is not None and other.metrics["flops"]:
            found["flops"] = change(metrics["flops"], other.metrics["flops"])
    if "seconds_step" in metrics:
        found["ms"] = round(1e3 * metrics["seconds_step"]["median"], 1)
        if other is not None and metrics["seconds_ratio"]["reference"] == PLAIN:
            found["time"] = round(100 * (metrics["seconds_ratio"]["median"] - 1), 1)
    return found


def peaks(records) -> tuple[list[int], dict[str, list], dict[str, list]]:
    """Batch sizes in order, and peaks by method at each of them, measured and predicted: None where there is none."""
    steps = [r for r in records if r.experiment.startswith(EXPERIMENT) and "not_run" not in r.metrics]
    sizes = sorted({r.config["batch_size"] for r in steps})
    measured: dict[str, list] = {r.config["method"]: [None] * len(sizes) for r in steps}
    predicted: dict[str, list] = {method: [None] * len(sizes) for method in measured}
    for record in steps:
        method, place = record.config["method"], sizes.index(record.config["batch_size"])
        if how(record) == "measured":
            measured[method][place] = record.metrics["peak_bytes"]
        predicted[method][place] = record.metrics.get("predicted_peak_bytes", record.metrics["peak_bytes"])
    return sizes, measured, predicted


def largest_rows(records) -> list[dict]:
    """One row per record of a largest batch, with the keys of `LARGEST_COLUMNS`."""
    found = [record for record in records if record.experiment.startswith(LARGEST)]
    plain = next((r.metrics["largest_batch"] for r in found if r.config["method"] == PLAIN), 0)
    return [
        {
            "method": record.config["method"],
            "largest": record.metrics["largest_batch"],
            "how": how(record),
            "peak": _mib(record.metrics.get("peak_bytes", record.metrics["least_peak_bytes"])),
            "vs_plain": round(record.metrics["largest_batch"] / plain, 2) if plain else None,
        }
        for record in found
    ]


def change(value, reference) -> float:
    """In per cent, with one decimal."""
    return round(100 * (value / reference - 1), 1)


def text_table(records) -> str:
    """Both tables in columns, and below them what was not run, the machine, the versions."""
    if not records:
        return "no records"
    table = rows(records, _published(records[0].config))
    names = [name for name in COLUMNS if name == "peak" or any(row[name] is not None for row in table)]
    lines = aligned([[COLUMNS[n] for n in names], *([cell(n, row[n]) for n in names] for row in table)])
    limit = records[0].config["limit_bytes"]
    lines += ["", f"largest batch within {memory_format(limit)} ({limit} bytes)"]
    names = list(LARGEST_COLUMNS)
    found = ([cell("times" if n == "vs_plain" else n, row[n]) for n in names] for row in largest_rows(records))
    lines += aligned([[LARGEST_COLUMNS[n] for n in names], *found], left=1)
    return "\n".join([*lines, "", *_notes(records)])


def _published(config):
    """The published figures, if the repository is here and this is their model: by what an image adds, a ResNet-152."""
    if config["model"] != "resnet152" or config["fields"] or config["image_size"] not in (None, 224):
        return None
    try:
        return load_reference("mu-two-resnet")
    except RecordError:
        return None


def cell(name: str, value) -> str:
    """A figure as the table for a terminal shows it: a difference in per cent with its sign."""
    if value is None:
        return "-"
    if name in ("vs_plain", "dynamic_vs_plain", "flops", "time"):
        return f"{value:+.1f} %"
    if name == "times":
        return f"x{value:.2f}"
    return f"{value:.1f}" if isinstance(value, float) else str(value)


def _notes(records) -> list[str]:
    config, where = records[0].config, records[0].environment
    size = f"{config['image_size']} x {config['image_size']} pixels" if config["image_size"] else ""
    size = size or (f"{config['seq_len']} tokens each" if config["seq_len"] else "224 x 224 pixels")
    notes = [
        f"{named(config)}, {size}, {config['dtype']}, AdamW; {where['device_name']}, "
        f"{where['threads']} threads; torch {where['torch']}; sizes in MiB = 2^20 bytes",
        *_budgets(dict.fromkeys(record.config["method"] for record in records)),
    ]
    for record in records:
        if "not_run" in record.metrics:
            notes.append(
                f"not run: {record.config['method']} at {record.config['batch_size']}: {record.metrics['not_run']}"
            )
    for record in records:
        if "one_peak_bytes" in record.metrics:
            one = readable(record.metrics["one_peak_bytes"])
            notes.append(f"no batch fits: {record.config['method']} takes at least {one} for a batch of 1")
    reasons = {record.metrics["not_measured"] for record in records if "not_measured" in record.metrics}
    notes += [f"predicted: {reason}" for reason in sorted(reasons)]
    return [*notes, *gradients_note(records)]


def named(config) -> str:
    """The model of a record, with what was changed of its configuration."""
    fields = ", ".join(f"{name} {value}" for name, value in config["fields"].items())
    return f"{config['model']} changed to {fields}" if fields else config["model"]


def gradients_note(records) -> list[str]:
    """The line that says what was found of gradients; none where none were compared."""
    if all(record.metrics.get("gradients_difference") is None for record in records):
        return []
    equal = "equal to the last bit" if records[0].config["device"] == "cpu" else "equal within tolerance"
    return [f"gradients of all measured methods and of the plain model: {equal} (checked)"]


def _budgets(methods) -> list[str]:
    """What the budgets of these methods mean."""
    meant = []
    for name in methods:
        budget = name.partition("@")[2]
        if budget:
            share = isinstance(from_text(budget), float)
            meant.append(f"{name}: at most {budget} of " + ("the plain step's dynamic peak" if share else "everything"))
        elif needs_limit(name):
            meant.append(f"{name}: at most the limit")
    return ["; ".join(meant)] if meant else []


def _mib(size: int | None) -> float | None:
    return None if size is None else round(size / MIB, 1)
