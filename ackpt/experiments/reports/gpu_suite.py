"""What the suite found, as text: one row per run with its ratios to the plain run, then what was predicted how well."""

from __future__ import annotations

from statistics import mean

from ackpt.experiments.suite.gpu_suite import Outcome
from ackpt.results import Record

from .training import aligned

MIB = 2**20
PLAIN = ("baseline", "plain")
COLUMNS = {
    "job": "job",
    "method": "method",
    "peak": "peak MiB",
    "memory": "vs plain",
    "requested": "requested",
    "reserved": "reserved",
    "off": "predicted",
    "ms": "ms/step",
    "spread": "low..high",
    "time": "vs plain",
}


def rows(job: str, records: list[Record]) -> list[dict]:
    """One row per run of a job, with the keys of `COLUMNS`; None where there is no such figure.

    Sizes in MiB, ``memory`` and ``time`` the difference to the plain run in per cent, ``off`` that of the predicted
    peak to the measured one. The peaks of the front are dynamic, all others are of everything.
    """
    runs = [run for record in records for run in _runs(record)]
    plain = next((run for name, run in runs if name in PLAIN), {})
    return [{**dict.fromkeys(COLUMNS), "job": job, "method": name, **_row(run, plain)} for name, run in runs]


def _runs(record: Record):
    """``(method, its figures)`` of a record, the plain run first."""
    metrics = record.metrics
    if "points" not in metrics:
        yield record.config["method"], metrics
        return
    for name, run in (("plain", metrics["baseline"]), *_front(metrics)):
        if "measured_peak_bytes" in run:
            yield name, {**run, "peak_bytes": run["measured_peak_bytes"]}


def _front(metrics):
    yield "eager", metrics["eager"]
    for point in metrics["points"]:
        yield f"{point['policy']} {'least' if point['budget'] is None else point['budget']}", point
    for peer in (*metrics["peers"], *metrics.get("inductor", ())):
        yield f"torch: {peer['peer']}" + ("" if peer["setting"] is None else f" {peer['setting']}"), peer


def _row(run: dict, plain: dict) -> dict:
    for why in ("not_run", "not_measured"):  # the latter has figures, predicted ones
        if why in run:
            return {"spread": why.replace("_", " ")}
    if "largest_batch" in run:
        return {"spread": f"largest batch {run['largest_batch']}"}
    peak = run["peak_bytes"]
    row: dict = {"peak": round(peak / MIB, 1)}
    for name, key in (("requested", "requested_peak_bytes"), ("reserved", "reserved_peak_bytes")):
        row[name] = round(run[key] / MIB, 1) if key in run else None
    if run.get("predicted_peak_bytes"):
        row["off"] = 100 * (run["predicted_peak_bytes"] / peak - 1)
    if run is not plain and plain.get("peak_bytes"):
        row["memory"] = 100 * (peak / plain["peak_bytes"] - 1)
    if "seconds_step" in run:
        seconds = run["seconds_step"]
        row["ms"] = round(1e3 * seconds["median"], 1)
        row["spread"] = f"{1e3 * seconds['low']:.1f}..{1e3 * seconds['high']:.1f}"
    reference = run.get("seconds_ratio", {}).get("reference", "plain")
    if run is not plain and "seconds_ratio" in run and reference in PLAIN:
        row["time"] = 100 * (run["seconds_ratio"]["median"] - 1)
    return row


def text_table(records: dict[str, list[Record]]) -> str:
    """All rows in columns, the machine, and how well the peaks were predicted."""
    table = [row for job, found in records.items() for row in rows(job, found)]
    if not table:
        return "no records"
    names = [name for name in COLUMNS if any(row[name] is not None for row in table)]
    cells = [[COLUMNS[name] for name in names]] + [[_cell(name, row[name]) for name in names] for row in table]
    where = next(found[0].environment for found in records.values() if found)
    versions = [f"torch {where['torch']}"] + [f"{name} {where[name]}" for name in ("cuda", "driver") if name in where]
    notes = [f"{where['device_name']}; {', '.join(versions)}; commit {where['commit']}; MiB = 2^20 bytes"]
    return "\n".join([*aligned(cells, left=2), "", *notes, *_predictions(table)])


def _cell(name: str, value) -> str:
    if value is None:
        return "-"
    if name in ("memory", "time", "off"):
        return f"{round(value, 1) + 0.0:+.1f} %"  # no minus before nothing
    return f"{value:.1f}" if isinstance(value, float) else str(value)


def _predictions(table) -> list[str]:
    off = {f"{row['job']} {row['method']}": abs(row["off"]) for row in table if row["off"] is not None}
    if not off:
        return []
    worst = max(off, key=lambda name: off[name])
    share = f"{mean(off.values()):.2f} % on average, {off[worst]:.2f} % at most ({worst})"
    return [f"predicted peaks of {len(off)} runs are off by {share}"]


def text_outcome(outcome: Outcome) -> list[str]:
    """One line each on what was there already, what is left, and what failed why."""
    lines = []
    if outcome.skipped:
        lines.append(f"already there, not run again: {', '.join(outcome.skipped)}")
    if outcome.left:
        lines.append(f"left for want of time, run the command again: {', '.join(outcome.left)}")
    if outcome.stopped:
        lines.append(outcome.stopped)
    for job, reasons in outcome.failed.items():
        lines += [f"failed: {job}: {what}: {reason}" for what, reason in reasons.items()]
    return lines
