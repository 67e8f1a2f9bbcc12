"""The experiment ``published``: memory that others measured on GPUs, predicted from shapes alone.

The rows are facts in ``results/reference/published-peaks.json``. `run` predicts the rows that a configuration selects,
one record per step, with the published and the predicted bytes of every metric. `text_table` shows them with their
errors, `summary` the errors by metric; `excluded` are the figures that are not predicted, with the reasons.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

from torch._subclasses.fake_tensor import FakeTensorMode

from ackpt.errors import did_you_mean
from ackpt.experiments.steps.published_steps import STEPS
from ackpt.metering.prediction import predict
from ackpt.results import Record, environment, load_reference

EXPERIMENT = "published"
REFERENCE = "published-peaks"
PHASES = ("start", "forward", "optimizer")


@dataclass(frozen=True)
class PublishedConfig:
    """Which rows to predict: those of the named `steps` (empty: all), and at most `largest_gib` of published memory."""

    steps: tuple[str, ...] = ()
    largest_gib: float | None = None

    def __post_init__(self):
        for name in self.steps:
            if name not in STEPS:
                raise ValueError(f"unknown step {name!r}{did_you_mean(name, STEPS)}: choose from {', '.join(STEPS)}")

    def selects(self, row: dict[str, Any]) -> bool:
        fits = self.largest_gib is None or row["bytes"] <= self.largest_gib * 2**30
        return not row["excluded"] and fits and (not self.steps or row["step"] in self.steps)


CPU = PublishedConfig(tuple(name for name in STEPS if name != "lora-causal-lm"))
ALL = PublishedConfig()


def run(config: PublishedConfig, command: str = "") -> Iterator[Record]:
    """Predict the selected rows; yields one record per step and size, in the order of the rows."""
    groups: dict[str, list[dict]] = {}
    for row in load_reference(REFERENCE)["rows"]:
        if config.selects(row):
            groups.setdefault(repr([row[key] for key in ("source", "gpu", "step", "sizes")]), []).append(row)
    for rows in groups.values():
        first = rows[0]
        predicted = predicted_bytes(first["step"], first["sizes"], first["gpu"])
        metrics = [
            {"metric": row["metric"], "published": row["bytes"], "rounding": row["rounding"], "predicted": size}
            for row in rows
            if (size := predicted.get(row["metric"])) is not None
        ]
        what = {key: first[key] for key in ("source", "url", "gpu", "step", "sizes")}
        yield Record(EXPERIMENT, what, {"rows": metrics}, environment("cpu", command))


def predicted_bytes(step: str, sizes: dict[str, Any], gpu: str | None) -> dict[str, int]:
    """Bytes by metric of one step on a GPU."""
    with FakeTensorMode():
        made = STEPS[step](**sizes)
    pending = [made.setup] if made.setup is not None else []

    def run():
        if pending:
            pending.pop()()
        made.run()

    found = predict(run, resident=made.resident, device=gpu or "cuda")
    phases = {f"allocated, {phase}": found.allocator.get(f"{phase}_peak_bytes") for phase in PHASES}
    sizes = {"allocated": found.peak_bytes, "reserved": found.allocator["reserved_peak_bytes"], **phases}
    return {metric: size for metric, size in sizes.items() if size is not None}


def excluded() -> list[dict[str, Any]]:
    """The published figures that are not predicted, each with the reason."""
    return [row for row in load_reference(REFERENCE)["rows"] if row["excluded"]]


def rows(records: list[Record]) -> list[dict[str, Any]]:
    """One row for each published figure: source, step, GPU, metric, published and predicted bytes, and the error."""
    return [
        {
            **{key: record.config[key] for key in ("source", "step", "gpu", "sizes")},
            **metric,
            "error": metric["predicted"] / metric["published"] - 1,
        }
        for record in records
        for metric in record.metrics["rows"]
    ]


def summary(records: list[Record]) -> list[dict[str, Any]]:
    """For each metric: the number of figures, how many are exact, and the median and the largest relative error.

    A figure is exact if the prediction differs by no more than its rounding.
    """
    by_metric: dict[str, list[dict]] = {}
    for row in rows(records):
        by_metric.setdefault(row["metric"].split(",")[0], []).append(row)
    return [
        {
            "metric": metric,
            "n": len(group),
            "exact": sum(abs(row["predicted"] - row["published"]) <= row["rounding"] for row in group),
            "median": median(abs(row["error"]) for row in group),
            "largest": max((row["error"] for row in group), key=abs),
        }
        for metric, group in by_metric.items()
    ]


def text_table(records: list[Record]) -> str:
    """All figures with their errors in percent, and the summary by metric."""
    lines = [
        f"{'step':<20} {'GPU':<10} {'metric':<21} {'published':>14} {'predicted':>14} {'difference':>12} {'error':>9}"
    ]
    for row in rows(records):
        difference = row["predicted"] - row["published"]
        lines.append(
            f"{row['step']:<20} {row['gpu'] or '':<10} {row['metric']:<21} {row['published']:>14,} "
            f"{row['predicted']:>14,} {difference:>+12,} {row['error']:>+9.3%}"
        )
    lines += [
        f"{each['metric']}: {each['n']} figures, {each['exact']} exact, median error {each['median']:.3%}, "
        f"largest {each['largest']:+.3%}"
        for each in summary(records)
    ]
    return "\n".join(lines)
