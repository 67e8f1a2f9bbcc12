"""Helpers of all reports: tables as text, sizes in MiB, differences in percent, and notes on where figures come from.

Each report next to this file adds its own columns, the notes below its table, and its figures.
"""

from __future__ import annotations

from collections.abc import Mapping

from experiments.results import DASH, RecordError, load_reference

MIB = 2**20
PERCENT = "{:+.1f} %"  # a difference from the baseline


def table(rows, headings: Mapping[str, str], forms: Mapping | None = None, left: int = 0, always=()) -> list[str]:
    """The lines of a table: a column for every key of `headings` for which a row has a value.

    Args:
        rows: dictionaries; a key that is missing, or None, is shown as ``-``.
        headings: ``{key: heading}``, in the order of the columns.
        forms: ``{key: format}``, such as `PERCENT`, of the columns for which the format of `cell` does not fit.
        left: how many columns, from the first, are aligned to the left.
        always: keys of the columns that are shown even if no row has a value.

    Example:
        >>> from experiments.reports.tables import PERCENT, table
        >>> rows = [{"method": "baseline", "peak": 4.0}, {"method": "full", "peak": 1.0, "change": -75.0}]
        >>> headings = {"method": "method", "peak": "MiB", "change": "vs baseline"}
        >>> for line in table(rows, headings, {"change": PERCENT}, 1):
        ...     print(line)
        method    MiB  vs baseline
        --------  ---  -----------
        baseline  4.0            -
        full      1.0      -75.0 %
    """
    forms = forms or {}
    names = [name for name in headings if name in always or any(row.get(name) is not None for row in rows)]
    cells = [[cell(row.get(name), forms.get(name)) for name in names] for row in rows]
    return aligned([[headings[name] for name in names], *cells], left)


def cell(value, form: str | None = None) -> str:
    """A value as text: by its format, if there is one; otherwise floats have one decimal."""
    if value is None:
        return "-"
    if form is not None:
        return form.format(value)
    return f"{value:.1f}" if isinstance(value, float) else str(value)


def aligned(cells, left: int = 0) -> list[str]:
    """Lines of equal columns, with a rule below the first line; the first `left` columns are aligned to the left."""
    widths = [max(map(len, column)) for column in zip(*cells)]
    sides = [str.ljust] * left + [str.rjust] * (len(widths) - left)
    lines = ["  ".join(side(text, width) for side, text, width in zip(sides, line, widths)) for line in cells]
    return [lines[0], "  ".join("-" * width for width in widths), *lines[1:]]


def percent_change(value, reference) -> float:
    """The difference of `value` from `reference` in percent of it, with one decimal."""
    return round(100 * (value / reference - 1), 1)


def signed(value: float | None, digits: int = 2) -> str:
    """A difference with its sign, as text; a dash if there is none."""
    return DASH if value is None else f"{value:+.{digits}f}"


def mib(size: int | None) -> float | None:
    """Bytes in MiB, with one decimal."""
    return None if size is None else round(size / MIB, 1)


def milliseconds(seconds: dict) -> float:
    """The median of ``seconds_step`` in milliseconds, with one decimal."""
    return round(1e3 * seconds["median"], 1)


def spread(seconds: dict) -> str:
    """``low..high`` of ``seconds_step`` in milliseconds."""
    return f"{1e3 * seconds['low']:.1f}..{1e3 * seconds['high']:.1f}"


def is_predicted(record) -> bool:
    """Whether the record holds a prediction from shapes, not a measurement."""
    return record.experiment.endswith("-predicted")


def machine(record) -> str:
    """The device and the threads of the machine that made the record."""
    return f"{record.environment['device_name']}, {record.environment['threads']} threads"


def origin(record) -> str:
    """`machine`, or that the figures are predicted."""
    return "predicted from shapes, nothing was run" if is_predicted(record) else machine(record)


def ran(records) -> list:
    """The records of methods that were run, or predicted."""
    return [record for record in records if "not_run" not in record.metrics]


def not_run(records, name=lambda record: record.config["method"]) -> list[str]:
    """One line for each method that was not run, with the reason."""
    return [f"not run: {name(each)}: {each.metrics['not_run']}" for each in records if "not_run" in each.metrics]


def published(name: str) -> dict | None:
    """`load_reference`, or None in an installed package, which has no ``results`` folder."""
    try:
        return load_reference(name)
    except RecordError:
        return None
