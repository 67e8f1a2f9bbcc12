"""Records of the experiment ``batch-size``: rows, and a table for a terminal."""

from __future__ import annotations

from ackpt.core.budget import from_text, readable
from ackpt.metering.meter import memory_format
from experiments.batch_size import EXPERIMENT, LARGEST
from experiments.results import DASH
from experiments.steps.named_steps import BASELINE, PER_BLOCK, needs_limit

from .tables import (
    MIB,
    PERCENT,
    is_predicted,
    machine,
    mib,
    milliseconds,
    not_run,
    percent_change,
    published,
    signed,
    table,
)

COLUMNS = {
    "batch_size": "batch",
    "method": "method",
    "how": "",
    "peak": "peak MiB",
    "vs_baseline": "vs baseline",
    "flops": "FLOPs",
    "ms": "ms/step",
    "time": "time",
    "published_peak": "published MiB",
    "published_ms": "published ms",
}
# Our measurements in the table of the published batches: method, key of `rows`, heading.
GPU_FIGURES = {
    "gpu": (BASELINE, "peak", "baseline, on a GPU, MiB"),
    "gpu ms": (BASELINE, "ms", "baseline, on a GPU, ms"),
    "gpu per-block": (PER_BLOCK, "peak", "per-block, on a GPU, MiB"),
    "gpu per-block time": (PER_BLOCK, "time", "per-block, on a GPU: added time, %"),
    "gpu mu-two": ("mu-two@per-block", "peak", "mu-TWO, on a GPU, MiB"),
    "gpu mu-two time": ("mu-two@per-block", "time", "mu-TWO, on a GPU: added time, %"),
    "gpu auto": ("auto@per-block", "peak", "plan, on a GPU, MiB"),
    "gpu auto time": ("auto@per-block", "time", "plan, on a GPU: added time, %"),
}
ON_GPU = {key: heading for key, (_, _, heading) in GPU_FIGURES.items()}
FORMS = dict.fromkeys(("vs_baseline", "flops", "time"), PERCENT)
LARGEST_COLUMNS = {
    "method": "method",
    "largest": "largest batch",
    "how": "",
    "peak": "peak MiB",
    "vs_baseline": "vs baseline",
}


def file_name(record) -> str:
    """``batch-size-resnet50-B32-auto-0.5.json``: one file per record of a run."""
    config = record.config
    size = f"-B{config['batch_size']}" if "batch_size" in config else ""
    return f"{record.experiment}-{config['model']}{size}-{config['method'].replace('@', '-')}.json"


def how(record) -> str:
    """``"measured"``, ``"predicted"`` or ``"not run"``."""
    if "not_run" in record.metrics:
        return "not run"
    return "predicted" if is_predicted(record) else "measured"


def rows(records, published=None) -> list[dict]:
    """One row per record of a batch size, with the keys of `COLUMNS`; a missing figure is None.

    Differences are relative to the method ``baseline`` at the same batch size, in percent, if both were measured or
    both predicted. `published` comes from ``results.load_reference("mu-two-resnet")``: its figures "without" are in the
    rows of ``baseline``, its figures "with" in those of every other method.
    """
    steps = [record for record in records if record.experiment.startswith(EXPERIMENT)]
    baselines = {r.config["batch_size"]: r for r in steps if r.config["method"] == BASELINE}
    printed = {(row["batch_size"], row["method"]): row for row in (published or {"rows": ()})["rows"]}
    return [_row(record, baselines.get(record.config["batch_size"]), printed) for record in steps]


def _row(record, baseline, printed) -> dict:
    config, metrics = record.config, record.metrics
    row = {**dict.fromkeys(COLUMNS), "batch_size": config["batch_size"], "method": config["method"], "how": how(record)}
    other = printed.get((row["batch_size"], "without" if row["method"] == BASELINE else "with"), {})
    row["published_peak"], row["published_ms"] = other.get("peak"), other.get("milliseconds")
    if "not_run" in metrics:
        return row
    return row | compared(record, baseline)


def compared(record, baseline) -> dict:
    """Peak (MiB), FLOPs and time (ms) of a step that was run or predicted, and differences from `baseline` in percent.

    The keys are ``peak``, and if there is such a figure ``vs_baseline``, ``flops``, ``ms`` and ``time``.
    """
    metrics = record.metrics
    figures = {"peak": mib(metrics["peak_bytes"])}
    other = None if baseline is record else baseline
    if other is not None and how(other) == how(record):
        figures["vs_baseline"] = percent_change(metrics["peak_bytes"], other.metrics["peak_bytes"])
        if metrics["flops"] is not None and other.metrics["flops"]:
            figures["flops"] = percent_change(metrics["flops"], other.metrics["flops"])
    if "seconds_step" in metrics:
        figures["ms"] = milliseconds(metrics["seconds_step"])
        if other is not None and metrics["seconds_ratio"]["reference"] == BASELINE:
            figures["time"] = round(100 * (metrics["seconds_ratio"]["median"] - 1), 1)
    return figures


def largest_rows(records) -> list[dict]:
    """One row per record of a largest batch, with the keys of `LARGEST_COLUMNS`."""
    answers = [record for record in records if record.experiment.startswith(LARGEST)]
    baseline = next((r.metrics["largest_batch"] for r in answers if r.config["method"] == BASELINE), 0)
    return [
        {
            "method": record.config["method"],
            "largest": record.metrics["largest_batch"],
            "how": how(record),
            "peak": mib(record.metrics.get("peak_bytes", record.metrics["least_peak_bytes"])),
            "vs_baseline": round(record.metrics["largest_batch"] / baseline, 2) if baseline else None,
        }
        for record in answers
    ]


def published_rows(reference, predicted, curves, measured=()) -> list[dict]:
    """One row per published batch size: the figures without and with the pipeline, predictions, and ours.

    Args:
        reference: from ``results.load_reference("mu-two-resnet")``.
        predicted: rows of `with_measured` for the column "without".
        curves: ``{batch: {method: {"peak_bytes": ..., "seconds": ...}}}`` of our model, as `BatchCurves` gives them.
        measured: records of a GPU.

    Returns:
        Rows with the keys batch; without, with, ``saved``, ``without_ms``, ``with_ms``, ``time`` and ``larger`` as
        published, or computed from it; ``predicted``, ``error``, ``predicted_ms``, ``measured`` and ``measured_ms`` of
        "without"; the peak and the ``time`` of each method of the curves, such as ``mu-two time``; those of `ON_GPU`.
        MiB, ms and percent. ``larger``: which batch fits with the pipeline into the memory of the row without it,
        interpolated, relative to the row's batch; ``"≥ 2.0"`` if even the largest published batch fits.
    """
    without, with_it = (
        {row["batch_size"]: row for row in reference["rows"] if row["method"] == method}
        for method in ("without", "with")
    )
    peaks = {row["sizes"]["batch"]: row for row in predicted}
    on_gpu = {(row["batch_size"], row["method"]): row for row in rows(measured)}
    shown = []
    for batch, row in without.items():
        other, ours = with_it[batch], curves[batch]
        shown.append(
            {
                "batch": batch,
                "without": f"{row['peak']:,.1f}",
                "predicted": f"{peaks[batch]['predicted'] / MIB:,.1f}",
                "error": signed(100 * peaks[batch]["error"]),
                **{key: peaks[batch].get(key) for key in ("measured", "measured_ms")},
                "with": f"{other['peak']:,.1f}",
                "saved": signed(100 * (other["peak"] / row["peak"] - 1), 1),
                "without_ms": f"{row['milliseconds']:.1f}",
                "predicted_ms": f"{1e3 * ours['without']['seconds']:.1f}",
                "with_ms": f"{other['milliseconds']:.1f}",
                "time": signed(100 * (other["milliseconds"] / row["milliseconds"] - 1), 1),
                "larger": _larger(row, with_it),
                **{f"{name} peak": f"{each['peak_bytes'] / MIB:,.1f}" for name, each in ours.items()},
                **{
                    f"{name} time": signed(100 * (each["seconds"] / ours["without"]["seconds"] - 1), 1)
                    for name, each in ours.items()
                },
                **{key: on_gpu.get((batch, way), {}).get(name) for key, (way, name, _) in GPU_FIGURES.items()},
            }
        )
    return shown


def _larger(row: dict, with_it: dict[int, dict]) -> str:
    """The batch that fits with the pipeline into the row's peak, at most the largest published one, over the row's."""
    batches = list(with_it)
    if row["batch_size"] == batches[-1]:
        return DASH
    pairs = list(zip(batches, batches[1:]))
    low, high = next((pair for pair in pairs if row["peak"] <= with_it[pair[1]]["peak"]), pairs[-1])
    slope = (with_it[high]["peak"] - with_it[low]["peak"]) / (high - low)
    fitting = low + (row["peak"] - with_it[low]["peak"]) / slope
    if fitting > batches[-1]:
        return f"≥ {batches[-1] / row['batch_size']:.1f}"
    return f"{fitting / row['batch_size']:.1f}"


def text_table(records) -> str:
    """Both tables in columns, and below them the methods that were not run, the machine, the versions."""
    if not records:
        return "no records"
    steps = table(rows(records, _published(records[0].config)), COLUMNS, FORMS, always=("peak",))
    limit = records[0].config["limit_bytes"]
    largest = table(largest_rows(records), LARGEST_COLUMNS, {"vs_baseline": "x{:.2f}"}, left=1, always=LARGEST_COLUMNS)
    heading = f"largest batch within {memory_format(limit)} ({limit} bytes)"
    return "\n".join([*steps, "", heading, *largest, "", *_notes(records)])


def _published(config):
    """The published figures, if they are of this model; judging by their bytes per image it was a ResNet-152."""
    if config["model"] != "resnet152" or config["fields"] or config["image_size"] not in (None, 224):
        return None
    return published("mu-two-resnet")


def _notes(records) -> list[str]:
    config, torch = records[0].config, records[0].environment["torch"]
    size = f"{config['image_size']} x {config['image_size']} pixels" if config["image_size"] else ""
    size = size or (f"{config['seq_len']} tokens each" if config["seq_len"] else "224 x 224 pixels")
    notes = [
        f"{named(config)}, {size}, {config['dtype']}, AdamW; {machine(records[0])}; torch {torch}; "
        "sizes in MiB = 2^20 bytes",
        *_budgets(dict.fromkeys(record.config["method"] for record in records)),
        *not_run(records, lambda record: f"{record.config['method']} at {record.config['batch_size']}"),
    ]
    for record in records:
        if "one_peak_bytes" in record.metrics:
            one = readable(record.metrics["one_peak_bytes"])
            notes.append(f"no batch fits: {record.config['method']} needs at least {one} for a batch of 1")
    reasons = {record.metrics["not_measured"] for record in records if "not_measured" in record.metrics}
    notes += [f"predicted: {reason}" for reason in sorted(reasons)]
    return [*notes, *gradients_note(records)]


def named(config) -> str:
    """The model of a record, with the changed fields of its configuration."""
    fields = ", ".join(f"{name} {value}" for name, value in config["fields"].items())
    return f"{config['model']} changed to {fields}" if fields else config["model"]


def gradients_note(records) -> list[str]:
    """One line that says how equal the gradients are; [] if none were compared."""
    if all(record.metrics.get("gradients_difference") is None for record in records):
        return []
    equal = "equal to the last bit" if records[0].config["device"] == "cpu" else "equal within tolerance"
    return [f"gradients of all measured methods and of the baseline: {equal} (checked)"]


def _budgets(methods) -> list[str]:
    """One line that says what the budgets of these methods bound; [] if none has one."""
    meant = []
    for name in methods:
        budget = name.partition("@")[2]
        if budget:
            share = isinstance(from_text(budget), float)
            meant.append(f"{name}: at most {budget} of " + ("the baseline's dynamic peak" if share else "everything"))
        elif needs_limit(name):
            meant.append(f"{name}: at most the limit")
    return ["; ".join(meant)] if meant else []
