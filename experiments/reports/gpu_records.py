"""Records that were made on a GPU, as rows for a page: a figure that was not measured is None, never a guess."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from experiments.results import Record, load_records

from .gpu_suite import rows
from .tables import MIB, milliseconds

FOLDER = Path("results", "gpu")
COMMIT = re.compile("[0-9a-f]{40}")


def gpu_records(experiment: str, folder=FOLDER, **config) -> list[Record]:
    """The records that a GPU made of an experiment, with the given values in their configuration.

    Example:
        >>> from experiments.reports.gpu_records import gpu_records
        >>> gpu_records("lm", folder="nowhere", seq_len=8192, dtype="bfloat16")
        []
    """
    records = load_records(folder, experiment) if Path(folder).is_dir() else []
    records = [record for record in records if record.environment["device"] == "cuda"]
    return [r for r in records if all(r.config.get(name) == value for name, value in config.items())]


def with_measured(predicted: list[dict], records: list[Record]) -> list[dict]:
    """Rows of `Predictions.of`, each with the ``measured`` MiB and ``measured_ms`` of its step, as text or None.

    `records`: of published steps that a GPU ran, such as ``gpu_records("reference-offload")``.
    """
    found = {(record.experiment, *sorted(record.config["sizes"].items())): record.metrics for record in records}
    shown = []
    for row in predicted:
        figures: dict[str, str | None] = {"measured": None, "measured_ms": None}
        if metrics := found.get((row["step"], *sorted(row["sizes"].items()))):
            figures["measured"] = f"{metrics['peak_bytes'] / MIB:,.1f}"
            figures["measured_ms"] = f"{milliseconds(metrics['seconds_step']):,.1f}"
        shown.append(row | figures)
    return shown


def not_of_this_repository(folder=FOLDER, root=".") -> list[str]:
    """The files of records that name no commit of the repository at `root`, each with what it names instead."""
    wrong = []
    for path in sorted(Path(folder).glob("*.json")):
        commit = Record.load(path).environment["commit"]
        if not (commit and COMMIT.fullmatch(commit) and _is_commit(commit, root)):
            wrong.append(f"{path.name}: {commit}")
    return wrong


def _is_commit(commit: str, root) -> bool:
    command = ["git", "-C", str(root), "cat-file", "-e", f"{commit}^{{commit}}"]
    return subprocess.run(command, capture_output=True).returncode == 0


_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")
_ON_GPU = re.compile("GPU|^our time")


def unrecorded(table: str, folder=FOLDER) -> list[str]:
    """The numbers in the GPU columns of a Markdown table that no record of the folder holds.

    Args:
        table: the text of a file in ``results/tables``; the headings of its columns say which are measured on a GPU.
    """
    recorded = {abs(round(value, 1)) for row in all_rows(folder) for value in row.values() if isinstance(value, float)}
    return [text for text in gpu_cells(table) if float(text.replace(",", "")) not in recorded]


def gpu_cells(table: str) -> list[str]:
    """The numbers in the columns of a Markdown table that were measured on a GPU."""
    lines = [[cell.strip() for cell in line.strip("| ").split("|")] for line in table.splitlines() if line[:1] == "|"]
    columns = gpu_columns(table)
    cells = (cells[index] for cells in lines[2:] for index in columns if index < len(cells))
    return [number for cell in cells for number in _NUMBER.findall(cell)]


def gpu_columns(table: str) -> list[int]:
    """The indices of the columns of a Markdown table that were measured on a GPU."""
    heading = next((line for line in table.splitlines() if line[:1] == "|"), "")
    return [index for index, cell in enumerate(heading.strip("| ").split("|")) if _ON_GPU.search(cell.strip())]


def all_rows(folder=FOLDER) -> list[dict]:
    """The rows of every record of a GPU in the folder, compared with the baseline of its configuration.

    ``job`` is the experiment with its size.
    """
    groups: dict[str, list[Record]] = {}
    for record in load_records(folder) if Path(folder).is_dir() else []:
        shared = {name: value for name, value in _flat(record).items() if name != "method"}
        if record.environment["device"] == "cuda":
            groups.setdefault(f"{record.experiment} {sorted(shared.items())}", []).append(record)
    return [row for group in groups.values() for row in rows(_sized(group[0]), group)]


def _flat(record: Record) -> dict:
    """The configuration with the sizes of a published step."""
    config = dict(record.config)
    return config | config.pop("sizes", {})


def _sized(record: Record) -> str:
    """The experiment of a record, its model, sizes and dtype."""
    sizes = {"seq_len": "tokens", "total_tokens": "tokens", "tokens": "tokens"}
    sizes |= {"batch_size": "in a batch", "batch": "in a batch"}
    config = _flat(record)
    parts = [str(config[name]) for name in ("model", "compiler") if config.get(name)]
    parts += [f"{config[name]:,} {unit}" for name, unit in sizes.items() if isinstance(config.get(name), int)]
    return ", ".join([record.experiment, *parts, *([config["dtype"]] if config.get("dtype") else [])])
