"""Records of the command ``gpu-suite`` as text: one row per run, compared with the baseline, and how well predicted."""

from __future__ import annotations

from statistics import mean

from ackpt.planner.costs.devices import device
from experiments.results import Record
from experiments.steps.named_steps import BASELINE
from experiments.suite.gpu_suite import Outcome

from .tables import MIB, PERCENT, milliseconds, spread, table

COLUMNS = {
    "job": "job",
    "method": "method",
    "peak": "peak MiB",
    "memory": "vs baseline",
    "requested": "requested",
    "reserved": "reserved",
    "off": "predicted",
    "ms": "ms/step",
    "spread": "low..high",
    "time": "vs baseline",
}
DIFFERENCES = ("memory", "time", "off")


def rows(job: str, records: list[Record]) -> list[dict]:
    """One row per run of a job, with the keys of `COLUMNS`, and ``training``, in seconds; a missing figure is None.

    Sizes are in MiB. ``memory`` and ``time`` are the differences from the baseline in percent, ``off`` is that of the
    predicted peak from the measured one. The peaks of frontier and selftest are dynamic, others of the whole memory.
    """
    runs = [run for record in records for run in _runs(record)]
    baseline = next((run for name, run in runs if name == BASELINE), {})
    empty = {**dict.fromkeys(COLUMNS), "training": None, "job": job}
    return [{**empty, "method": name, **_row(run, baseline)} for name, run in runs]


def _runs(record: Record):
    """``(method, its figures)`` of a record, the baseline first."""
    metrics = record.metrics
    if "points" in metrics:
        runs = [(BASELINE, metrics["baseline"]), *_frontier(metrics)]
    elif "checks" in metrics:  # of the selftest
        runs = metrics["methods"].items()
    else:
        yield record.config["method"], metrics
        return
    for name, run in runs:
        if "measured_peak_bytes" in run:
            yield name, {**run, "peak_bytes": run["measured_peak_bytes"]}


def _frontier(metrics):
    yield "eager", metrics["eager"]
    for point in metrics["points"]:
        yield f"{point['policy']} {'least' if point['budget'] is None else point['budget']}", point
    for peer in metrics["peers"]:
        yield f"torch: {peer['peer']}" + ("" if peer["setting"] is None else f" {peer['setting']}"), peer


def _row(run: dict, baseline: dict) -> dict:
    for why in ("not_run", "not_measured"):  # the latter has figures, predicted ones
        if why in run:
            return {"spread": why.replace("_", " ")}
    if "largest_batch" in run:
        return {"spread": f"largest batch {run['largest_batch']}"}
    peak = run["peak_bytes"]
    row: dict = {"peak": round(peak / MIB, 1)}
    for name, key in (("requested", "requested_peak_bytes"), ("reserved", "reserved_peak_bytes")):
        row[name] = round(run[key] / MIB, 1) if key in run else None
    row["training"] = run.get("seconds_training")
    if run.get("predicted_peak_bytes"):
        row["off"] = 100 * (run["predicted_peak_bytes"] / peak - 1)
    if run is not baseline and baseline.get("peak_bytes"):
        row["memory"] = 100 * (peak / baseline["peak_bytes"] - 1)
    if "seconds_step" in run:
        row["ms"], row["spread"] = milliseconds(run["seconds_step"]), spread(run["seconds_step"])
    reference = run.get("seconds_ratio", {}).get("reference", BASELINE)
    if run is not baseline and "seconds_ratio" in run and reference == BASELINE:
        row["time"] = 100 * (run["seconds_ratio"]["median"] - 1)
    return row


GPUS = {"t4": "T4", "l4": "L4", "a100-40g": "A100", "h100-80g": "H100"}
SHARE = 0.4  # of a data sheet's rate, that steps reach
STEPS = {"synthetic": 14, "lm": 500}  # of training; the other experiments time single steps
SIZES = {"synthetic": "seq_len", "lm": "seq_len", "offload": "total_tokens", "bert": "seq_len"}
FIT_COLUMNS = {"experiment": "experiment", "tokens": "tokens", "steps": "steps", "peak": "largest peak, MiB"}
FIT_COLUMNS |= {name: f"{title}, s" for name, title in GPUS.items()}


def fit_rows(predicted: list[Record]) -> list[dict]:
    """One row per size of the published experiments: its largest predicted peak, and its seconds on several GPUs.

    The seconds are those of the published steps by all methods, at `SHARE` of the rates; a text where the peak exceeds
    the memory.
    """
    groups: dict[tuple, list[Record]] = {}
    for record in predicted:
        experiment = record.experiment.removesuffix("-predicted")
        if experiment in SIZES and experiment != record.experiment:
            groups.setdefault((experiment, record.config[SIZES[experiment]]), []).append(record)
    shown = []
    for (experiment, tokens), records in sorted(groups.items()):
        steps, peak = STEPS.get(experiment, 1), max(record.metrics["peak_bytes"] for record in records)
        flops = steps * sum(record.metrics["flops"] for record in records)
        row = {"experiment": experiment, "tokens": f"{tokens:,}", "steps": steps, "peak": f"{peak / MIB:,.1f}"}
        for name in GPUS:
            seconds = flops / (SHARE * device(name).flops_per_second["float16"])
            row[name] = f"{seconds:,.1f}" if peak < device(name).memory_bytes else "does not fit"
        shown.append(row)
    return shown


def text_table(records: dict[str, list[Record]]) -> str:
    """All rows in columns, the machine, and how well the peaks were predicted."""
    every = [row for job, group in records.items() for row in rows(job, group)]
    if not every:
        return "no records"
    # Rounded first, and 0.0 added, so that no difference reads "-0.0 %".
    shown = [row | {n: round(row[n], 1) + 0.0 for n in DIFFERENCES if row[n] is not None} for row in every]
    where = next(group[0].environment for group in records.values() if group)
    versions = [f"torch {where['torch']}"] + [f"{name} {where[name]}" for name in ("cuda", "driver") if name in where]
    note = f"{where['device_name']}; {', '.join(versions)}; commit {where['commit']}; MiB = 2^20 bytes"
    lines = table(shown, COLUMNS, dict.fromkeys(DIFFERENCES, PERCENT), left=2)
    return "\n".join([*lines, "", note, *_predictions(every)])


def _predictions(rows) -> list[str]:
    off = {f"{row['job']} {row['method']}": abs(row["off"]) for row in rows if row["off"] is not None}
    if not off:
        return []
    worst = max(off, key=lambda name: off[name])
    share = f"{mean(off.values()):.2f} % on average, {off[worst]:.2f} % at most ({worst})"
    return [f"predicted peaks of {len(off)} runs are off by {share}"]


def text_outcome(outcome: Outcome) -> list[str]:
    """One line each on the jobs that were skipped, that are left, and that failed, with the reasons."""
    lines = []
    if outcome.skipped:
        lines.append(f"already recorded, skipped: {', '.join(outcome.skipped)}")
    if outcome.left:
        lines.append(f"not run for lack of time, run the command again: {', '.join(outcome.left)}")
    if outcome.stopped:
        lines.append(outcome.stopped)
    for job, reasons in outcome.failed.items():
        lines += [f"failed: {job}: {method}: {reason}" for method, reason in reasons.items()]
    return lines
