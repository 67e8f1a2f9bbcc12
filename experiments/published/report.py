"""Tables, figure and badge of the predictions of published measurements, from rows as `all_predicted` gives them."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median
from typing import Any

from experiments.results import markdown_table

TICKS = (-50, -10, -1, -0.1, 0, 0.1, 1, 10, 50)
METRICS = ("allocated", "reserved", "NVML")
OPERATORS = ("Liger-Kernel", "Cut Cross-Entropy README", "pytorch_memlab README")  # not complete training steps


def metric_of(row: dict[str, Any]) -> str:
    """The metric without the phase of the step."""
    return row["metric"].split(",")[0]


def is_exact(row: dict[str, Any]) -> bool:
    """Whether the prediction differs from the published figure by no more than its rounding."""
    return abs(row["predicted"] - row["bytes"]) <= row["rounding"]


def summary(rows: Iterable[dict[str, Any]], *by: str) -> list[dict[str, Any]]:
    """Number of figures, exact ones, median and largest error by ``source`` and ``metric``, in the order of the rows.

    Example:
        >>> row = {"source": "a paper", "metric": "reserved", "bytes": 100, "rounding": 1, "predicted": 99}
        >>> summary([{**row, "error": -0.01}], "metric")
        [{'metric': 'reserved', 'n': 1, 'exact': 1, 'median': 0.01, 'largest': -0.01}]
    """
    groups: dict[tuple, list[dict]] = {}
    for row in rows:
        groups.setdefault(tuple(metric_of(row) if name == "metric" else row[name] for name in by), []).append(row)
    return [
        {
            **dict(zip(by, key, strict=True)),
            "n": len(group),
            "exact": sum(map(is_exact, group)),
            "median": median(abs(row["error"]) for row in group),
            "largest": max((row["error"] for row in group), key=abs),
        }
        for key, group in groups.items()
    ]


def percent(value: float, signed: bool = False) -> str:
    """A fraction in percent with two significant digits or two decimals, whichever is shorter."""
    number = 100 * value
    digits = 2 if abs(number) < 1 else 1
    return f"{number:{'+' if signed else ''}.{digits}f}"


def summary_table(rows: list[dict[str, Any]], *by: str, caption: str, name: str) -> str:
    """A table of `summary`."""
    lines = [
        {**line, "median": percent(line["median"]), "largest": percent(line["largest"], signed=True)}
        for line in summary(rows, *by)
    ]
    headings = {"n": "figures", "exact": "exact", "median": "median error, %", "largest": "largest, %"}
    return markdown_table(lines, {**{key: key for key in by}, **headings}, caption, name)


def worst(rows: Iterable[dict[str, Any]], at_least: float) -> list[dict[str, Any]]:
    """The row with the largest error of each step and metric, if it is `at_least` large; the largest first."""
    found: dict[tuple, dict] = {}
    for row in rows:
        key = row["source"], row["step"], metric_of(row)
        if abs(row["error"]) >= at_least and abs(row["error"]) > abs(found.get(key, {"error": 0})["error"]):
            found[key] = row
    return sorted(found.values(), key=lambda row: -abs(row["error"]))


def reasons(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Why figures are excluded: reason, sources and number of figures, the most frequent first."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        entry = found.setdefault(row["excluded"], {"reason": row["excluded"], "sources": [], "n": 0})
        entry["n"] += row.get("figures", 1)
        if row["source"] not in entry["sources"]:
            entry["sources"].append(row["source"])
    ordered = sorted(found.values(), key=lambda entry: -entry["n"])
    return [{**entry, "sources": ", ".join(entry["sources"])} for entry in ordered]


def badge(rows: list[dict[str, Any]], chapter: str) -> str:
    """One sentence in MyST with the number of figures, median and largest error, which links to the chapter.

    The errors of whole training steps follow if they differ, as printed, from those of all figures.
    """
    whole = [row for row in rows if row["source"] not in OPERATORS]
    (total,), (steps,) = summary(rows), summary(whole)
    text = f"predicted; validated on {total['n']} published measurements, {_errors(total)}"
    of_steps = f"{steps['n']} of them of whole training steps"
    if _errors(steps) != _errors(total):
        of_steps += f": {_errors(steps)}"
    return f"{{doc}}`{text} <{chapter}>` ({of_steps}; {len({row['source'] for row in rows})} sources)\n"


def _errors(line: dict[str, Any]) -> str:
    return f"median error {percent(line['median'])} %, largest {percent(line['largest'], signed=True)} %"


def text_table(rows: list[dict[str, Any]]) -> str:
    """All figures with their errors in percent, and the summary by metric."""
    lines = [f"{'step':<28} {'GPU':<14} {'metric':<21} {'published':>15} {'predicted':>15} {'error, %':>9}"]
    for row in rows:
        lines.append(
            f"{row['step']:<28} {row['gpu'] or '':<14} {row['metric']:<21} {row['bytes']:>15,} "
            f"{row['predicted']:>15,} {100 * row['error']:>+9.3f}"
        )
    lines += [
        f"{each['metric']}: {each['n']} figures, {each['exact']} exact, median error {each['median']:.3%}, "
        f"largest {each['largest']:+.3%}"
        for each in summary(rows, "metric")
    ]
    return "\n".join(lines)


def errors_plot(rows: list[dict[str, Any]]):
    """The error of every figure by source, with a color for each metric, on an axis that is linear within 0.1 %."""
    from matplotlib.ticker import FixedLocator, NullLocator

    from experiments.reports import plots
    from experiments.reports.figures import MARKERS, SERIES

    sources = list(dict.fromkeys(row["source"] for row in rows))[::-1]
    with plots.style.context("default"):
        figure, axes = plots._axes("", "prediction relative to the published figure, % (logarithmic beyond ±0.1)", "")
        figure.set_size_inches(7.2, 0.3 * len(sources) + 1.3)
        for metric, color, marker in zip(METRICS, SERIES, MARKERS, strict=False):
            chosen = [row for row in rows if metric_of(row) == metric]
            places = [sources.index(row["source"]) for row in chosen]
            errors = [100 * row["error"] for row in chosen]
            axes.scatter(errors, places, s=24, alpha=0.6, color=color, marker=marker, label=metric, linewidths=0)
        axes.set_xscale("symlog", linthresh=0.1, linscale=0.7)
        axes.set_xlim(-100, 100)
        axes.xaxis.set_major_locator(FixedLocator(TICKS))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xticklabels([f"{tick:+g}" if tick else "0" for tick in TICKS])
        axes.yaxis.set_major_locator(FixedLocator(range(len(sources))))
        axes.set_yticklabels(sources)
        axes.grid(axis="x", color=plots.TEXT, alpha=0.25, linewidth=0.8)
        return plots._finished(figure, *axes.get_legend_handles_labels())
