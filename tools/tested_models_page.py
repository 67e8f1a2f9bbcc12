"""What the book's page Tested models shows: counts of outcomes, a row for every model, and the reasons of refusals.

Everything is read from the record that tools/tested_models.py writes.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from address import ROOT

from ackpt.core.budget import readable
from experiments.results import Record, markdown_table

FILE = ROOT / "results" / "models" / "tested_models.json"
WAYS = {"regions": "regions", "plan": "plan"}
OUTCOMES = {
    "equal": "bit-equal",
    "different": "gradients differ",
    "refused": "refused, with a reason",
    "crash": "fails",
}
COUNTS = {"outcome": "outcome", "regions": "regions", "plan": "plan"}
MODELS = {
    "model": "model",
    "regions": "regions",
    "plan": "plan",
    "baseline": "baseline's peak",
    "peak": "promised (measured) peak",
    "seconds": "CPU seconds to plan",
    "tried": "version, date",
}
REASONS = {"model": "model", "way": "with", "reason": "first line of the error, or the difference"}


def tested(path: Path = FILE) -> dict[str, dict[str, Any]]:
    """The entries of the models that were built."""
    return {name: entry for name, entry in Record.load(path).metrics.items() if "not_built" not in entry}


def count_rows(path: Path = FILE) -> list[dict[str, Any]]:
    """A row for every outcome that occurs, and one for the plans that run in parts."""
    entries = tested(path).values()
    counts = {way: Counter(entry[way]["outcome"] for entry in entries) for way in WAYS}
    rows = [
        {"outcome": text, **{way: counts[way][outcome] for way in WAYS}}
        for outcome, text in OUTCOMES.items()
        if any(counts[way][outcome] for way in WAYS)
    ]
    in_parts = sum(entry["plan"].get("in_parts") is not None for entry in entries)
    exceeds = sum(_exceeds(entry["plan"]) for entry in entries)
    return [
        *rows,
        {"outcome": "of these, planned in parts", "regions": "", "plan": in_parts},
        {"outcome": "of these, measured above the promised peak", "regions": "", "plan": exceeds},
        {"outcome": "all models", "regions": len(entries), "plan": len(entries)},
    ]


def model_rows(path: Path = FILE) -> list[dict[str, Any]]:
    """A row for every model."""
    rows = []
    for name, entry in tested(path).items():
        plan = entry["plan"]
        row = {"model": name, "regions": OUTCOMES[entry["regions"]["outcome"]], "plan": OUTCOMES[plan["outcome"]]}
        row |= dict.fromkeys(("baseline", "peak", "seconds"), "")
        row["tried"] = f"{entry['version']}, {entry['date']}"
        if "promised_bytes" in plan:
            in_parts = ", in parts" if plan["in_parts"] is not None else ""
            peaks = [readable(plan[f"{which}_bytes"]) for which in ("promised", "measured")]
            row["plan"] += in_parts
            row |= {"baseline": readable(plan["baseline_bytes"]), "peak": f"{peaks[0]} ({peaks[1]})"}
            row["seconds"] = f"{plan['seconds']:.1f}"
        rows.append(row)
    return rows


def reason_rows(path: Path = FILE) -> list[dict[str, Any]]:
    """A row for everything that is not bit-equal."""
    rows = []
    for name, entry in tested(path).items():
        for way in WAYS:
            found = entry[way]
            if "message" in found:
                rows.append({"model": name, "way": way, "reason": f"{found['error']}: {_literal(found['message'])}"})
            elif found["outcome"] == "different":
                size = "not finite" if found["difference"] is None else f"{found['difference']:.0e}"
                rows.append({"model": name, "way": way, "reason": f"relative difference {size}"})
    return rows


def page(part: str, path: Path = FILE) -> str:
    """One of `PARTS` as Markdown."""
    rows_of, columns, caption = PARTS[part]
    rows = rows_of(path)
    return markdown_table(rows, columns, caption, f"tested-{part}") if rows else "All are bit-equal.\n"


def made_on(path: Path = FILE) -> str:
    """Where and with which versions the models were run, in one sentence."""
    record = Record.load(path)
    at, entries = record.environment, tested(path).values()
    versions = sorted({(name.split()[0], entry["version"]) for name, entry in tested(path).items()})
    dates = sorted({entry["date"] for entry in entries})
    days = dict.fromkeys((dates[0], dates[-1]))
    commits = sorted({(entry["commit"] or "no commit")[:9] for entry in entries})
    return (
        f"Run on {at['device_name']} with Python {at['python']}, one thread, on {' to '.join(days)}; "
        f"commits of ackpt: {', '.join(commits)}; {', '.join(f'{name} {version}' for name, version in versions)}.\n"
    )


PARTS = {
    "counts": (count_rows, COUNTS, "Outcomes of all tested models."),
    "models": (model_rows, MODELS, "Every tested model."),
    "reasons": (reason_rows, REASONS, "What is not bit-equal, and why."),
}


def _exceeds(plan: dict[str, Any]) -> bool:
    return "promised_bytes" in plan and plan["measured_bytes"] > plan["promised_bytes"]


def _literal(text: str) -> str:
    """Text of an error as Markdown that shows it unchanged."""
    return f"`{text.replace('`', chr(39))}`" if text else ""
