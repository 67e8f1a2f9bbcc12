"""What the book's status page says: each notebook's last run, and what each table's figures were measured on.

Everything is read from committed files: the records of runs that tools/reproduce.py writes, the tables, the notebooks'
sources, and the records made on a GPU.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path

from address import ROOT
from chapter import source_hash

from experiments.reports.gpu_records import all_rows, gpu_columns, gpu_records
from experiments.reports.gpu_suite import DIFFERENCES
from experiments.results import DASH, Record, load_records, markdown_table

RUN = "notebook"  # the experiment of a run's record
MISSING = "*not yet measured*"
NOTHING = "no such column"
READER = "gpu_records"  # what a notebook reads records of a GPU with, by experiment
KINDS = {  # of figures, beside those that were measured on a CPU
    "published by others": re.compile("published", re.I),
    "predicted": re.compile("predicted|simulated|from shapes alone|data sheet", re.I),
}
NOTEBOOKS = {
    "notebook": "notebook",
    "seconds": "run time, s",
    "machine": "machine",
    "versions": "versions",
    "date": "date (UTC)",
    "commit": "commit",
    "source": "its source",
}
TABLES = {"table": "table", "cpu": "made on a CPU", "also": "also holds figures", "gpu": "measured on a GPU"}
ON_GPU = {
    "job": "experiment",
    "method": "method",
    "peak": "peak, MiB",
    "memory": "vs baseline, %",
    "requested": "requested, MiB",
    "reserved": "reserved, MiB",
    "off": "prediction off by, %",
    "ms": "ms per step",
    "spread": "lowest to highest",
    "time": "added time, %",
    "training": "training, s",
}
FIGURES = {  # drawn by the chapters if there are records
    "14_synthetic_measured.png": "The synthetic experiment at 16,384 tokens: memory as predicted, and as measured.",
    "14_offload_measured.png": "The offload experiment: memory as predicted, and as measured.",
}
MISSING_CELLS = {"table": "table", "column": "column", "cells": "rows not yet measured"}


@dataclass(frozen=True)
class Table:
    """A file of results/tables: its caption and label, the headings of its columns, and the rows below them.

    ``left_out``: the columns without any value, which only the note below the table names.
    """

    path: Path
    caption: str
    label: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left_out: tuple[str, ...] = ()

    @property
    def on_gpu(self) -> tuple[str, ...]:
        """The columns of what is measured on a GPU, also those left out."""
        names = tuple(dict.fromkeys((*self.columns, *self.left_out)))
        return tuple(names[index] for index in gpu_columns(f"| {' | '.join(names)} |"))

    def missing(self) -> dict[str, int]:
        """How many cells of each column were not measured; only columns that have such."""
        counts = {
            name: sum(MISSING in row[index] or (name in self.on_gpu and row[index] == DASH) for row in self.rows)
            for index, name in enumerate(self.columns)
        }
        counts |= dict.fromkeys(self.left_out, len(self.rows))
        return {name: count for name, count in counts.items() if count}


def read_table(path: Path) -> Table:
    """Raises ValueError for a file that is not one that `experiments.results.markdown_table` wrote."""
    text = path.read_text(encoding="utf-8")
    label = re.match(r":::\{table\} (.*)\n:name: (\S+)\n", text)
    lines = [
        tuple(cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1])
        for line in text.splitlines()
        if line[:1] == "|"
    ]
    if label is None or len(lines) < 2 or any(len(line) != len(lines[0]) for line in lines):
        raise ValueError(f"{path} is no table of experiments.results.markdown_table: write it with that")
    note = re.search(r"^\*Not shown, because not yet measured: (.*)\.\*$", text, re.MULTILINE)
    left_out = tuple(re.findall('"(.*?)"', note[1])) if note else ()
    return Table(path, label[1], label[2], lines[0], tuple(lines[2:]), left_out)


def tables(root: Path = ROOT) -> list[Table]:
    return [read_table(path) for path in sorted((root / "results" / "tables").glob("*.md"))]


def runs(root: Path = ROOT) -> dict[str, Record]:
    """``{stem of the notebook: the record of its last run}``."""
    folder = root / "results" / "runs"
    found = load_records(folder, RUN) if folder.is_dir() else []
    return {Path(record.config["source"]).stem: record for record in found}


def sources(root: Path = ROOT) -> list[Path]:
    return sorted((root / "notebooks").glob("[0-9][0-9]_*.py"))


def chapter_of(table: Table, root: Path = ROOT) -> Path:
    """The source of the notebook that writes the table; ValueError if none, or more than one, names it."""
    found = [path for path in sources(root) if f"results/tables/{table.path.name}" in path.read_text(encoding="utf-8")]
    if len(found) != 1:
        raise ValueError(f"{table.path.name} is named by {len(found)} notebooks, not by one")
    return found[0]


def gpu_experiments(source: Path) -> set[str]:
    """The experiments whose records of a GPU the notebook reads."""
    calls = (node for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))) if isinstance(node, ast.Call))
    named = (call.args[0] for call in calls if ast.unparse(call.func).split(".")[-1] == READER and call.args)
    return {str(ast.literal_eval(argument)) for argument in named}


def on_gpu(table: Table, root: Path = ROOT) -> str | None:
    """Where the table's figures of a GPU come from; None if it has no column for them."""
    if not table.on_gpu:
        return None
    missing = table.missing()
    if all(missing.get(name) == len(table.rows) for name in table.on_gpu):
        return MISSING
    folder = root / "results" / "gpu"
    wanted = gpu_experiments(chapter_of(table, root))
    found = [record for experiment in sorted(wanted) for record in gpu_records(experiment, folder)]
    if not found:
        raise ValueError(f"{table.path.name} has figures of a GPU, and {folder} has no record of {', '.join(wanted)}")
    return "; ".join(dict.fromkeys(where(record.environment) for record in found))


def where(environment: dict) -> str:
    """Machine, commit and day of a record."""
    return f"{environment['device_name']}, {_commit(environment)}, {environment['date']}"


def _commit(environment: dict) -> str:
    commit, changed, _ = (environment["commit"] or "no commit").partition("-dirty")
    return commit[:9] + (" and changes" if changed else "")


def notebook_rows(root: Path = ROOT) -> list[dict]:
    """A row for every notebook; what was not recorded is said to be so."""
    found, rows = runs(root), []
    for source in sources(root):
        row = {"notebook": f"{{doc}}`{source.stem} <notebooks/{source.stem}>`", "seconds": "not recorded"}
        if record := found.get(source.stem):
            at = record.environment
            is_current = record.config["sha256"] == source_hash(source)
            row |= {
                "seconds": round(record.metrics["seconds"]),
                "machine": f"{at['device_name']}, {at['threads']} threads",
                "versions": f"torch {at['torch']}, Python {at['python']}, ackpt {at['ackpt']}",
                "date": at["date"],
                "commit": _commit(at),
                "source": "unchanged" if is_current else "an older one",
            }
        rows.append({name: row.get(name, "") for name in NOTEBOOKS})
    return rows


def table_rows(root: Path = ROOT) -> list[dict]:
    """A row for every table: what kinds of figures it holds, and from where."""
    found, rows = runs(root), []
    for table in tables(root):
        source = chapter_of(table, root)
        run = found.get(source.stem)
        said = [table.caption, *(name for name in table.columns if name not in table.on_gpu)]
        also = [kind for kind, word in KINDS.items() if any(word.search(text) for text in said)]
        rows.append(
            {
                "table": f"{{ref}}`{table.path.stem} <{table.label}>`",
                "also": ", ".join(also),
                "cpu": where(run.environment) if run else "not recorded",
                "gpu": on_gpu(table, root) or NOTHING,
            }
        )
    return rows


def missing_rows(root: Path = ROOT) -> list[dict]:
    """A row for every column of a table with cells that were not measured."""
    return [
        {
            "table": f"{{ref}}`{table.path.stem} <{table.label}>`",
            "column": name,
            "cells": f"{count} of {len(table.rows)}",
        }
        for table in tables(root)
        for name, count in table.missing().items()
    ]


def gpu_rows(root: Path = ROOT) -> list[dict]:
    """A row for every run that a GPU recorded."""
    rows = all_rows(root / "results" / "gpu")
    for row in rows:
        row |= {name: round(row[name], 1) for name in (*DIFFERENCES, "training") if row[name] is not None}
    return [{name: DASH if row[name] is None else row[name] for name in ON_GPU} for row in rows]


PARTS = {
    "notebooks": (notebook_rows, NOTEBOOKS, "The last run of every notebook."),
    "tables": (table_rows, TABLES, "Every table of the book: where its figures come from."),
    "gpu": (gpu_rows, ON_GPU, "Every run that a GPU recorded. Peaks of frontier and selftest are dynamic."),
    "missing": (missing_rows, MISSING_CELLS, "What is not yet measured."),
}
NONE = {"missing": "Nothing is missing.", "gpu": "There is no record of a GPU yet."}


def page(part: str, root: Path = ROOT) -> str:
    """One of `PARTS` as Markdown."""
    rows, columns, caption = PARTS[part]
    found = rows(root)
    if not found:
        return f"{NONE[part]}\n"
    drawn = {
        name: text for name, text in FIGURES.items() if part == "gpu" and (root / "results/figures" / name).exists()
    }
    figures = [
        f"```{{figure}} ../results/figures/{name}\n:alt: {text}\n\n{text}\n```\n" for name, text in drawn.items()
    ]
    return "\n".join([markdown_table(found, columns, caption, f"status-{part}"), *figures])
