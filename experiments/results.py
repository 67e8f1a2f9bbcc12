"""Records of experiments: configuration, metrics and environment of a run, read and written as checked JSON.

Tables and figures are made from records only. Measured times are only in fields whose names start with ``seconds``, so
that everything else can be compared between two runs byte by byte.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ackpt.core.files import RecordError, write_bytes_atomic, write_text_atomic

from .provenance import environment

__all__ = [
    "Record",
    "RecordError",
    "environment",
    "load_records",
    "load_reference",
    "markdown_table",
    "write_bytes_atomic",
    "write_text_atomic",
]

SCHEMA = "ackpt.record"
REFERENCE_SCHEMA = "ackpt.reference"
VERSION = 1
GPU_FOLDER = Path(__file__).parent.parent / "results" / "gpu"
REFERENCES = Path(__file__).parent.parent / "results" / "reference"

_RECORD = {"schema": str, "version": int, "experiment": str, "config": dict, "metrics": dict, "environment": dict}
_ENVIRONMENT = {
    "device": str,
    "device_name": str,
    "torch": str,
    "python": str,
    "ackpt": str,
    "threads": int,
    "commit": (str, type(None)),
    "date": str,
    "command": str,
}
_REFERENCE = {
    "schema": str,
    "version": int,
    "name": str,
    "source": str,
    "hardware": (str, type(None)),
    "units": dict,
    "rows": list,
}


@dataclass(frozen=True)
class Record:
    """One run of an experiment.

    Args:
        experiment: its name, such as ``"lm"``.
        config: what it was asked to do; plain JSON values.
        metrics: what came out; plain JSON values, sizes in bytes, times in fields named ``seconds...``.
        environment: where, as `environment()` gives it.

    Raises:
        RecordError: for a field of another type, values that JSON cannot hold exactly (NaN, infinity, tensors).

    Example:
        >>> from experiments.results import Record, environment
        >>> record = Record("demo", {"layers": 2}, {"peak_bytes": 4096}, environment())
        >>> record.metrics["peak_bytes"]
        4096
    """

    experiment: str
    config: dict[str, Any]
    metrics: dict[str, Any]
    environment: dict[str, Any]

    def __post_init__(self) -> None:
        _check_record(self.to_json(), "this record")

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "version": VERSION,
            "experiment": self.experiment,
            "config": self.config,
            "metrics": self.metrics,
            "environment": self.environment,
        }

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the record as JSON, keys sorted, in one step; returns the path."""
        text = json.dumps(self.to_json(), indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False)
        return write_text_atomic(path, text + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Record:
        """Read and check a record; raises RecordError for anything that is not a whole record of this version."""
        data = _read(path, SCHEMA)
        _check_record(data, str(path))
        return cls(data["experiment"], data["config"], data["metrics"], data["environment"])


def load_records(folder: str | os.PathLike[str], experiment: str | None = None) -> list[Record]:
    """All records of a folder in the order of their file names, or those of one experiment.

    Raises RecordError if there is no such folder, or a ``.json`` file in it is no record.

    Example:
        >>> import tempfile
        >>> from experiments.results import Record, environment, load_records
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Record("demo", {"layers": 2}, {"peak_bytes": 4096}, environment()).save(f"{folder}/first.json")
        ...     [record.config for record in load_records(folder, "demo")]
        [{'layers': 2}]
    """
    if not Path(folder).is_dir():
        raise RecordError(f"there is no folder {folder}: run the experiment first, or name another folder")
    records = [Record.load(path) for path in sorted(Path(folder).glob("*.json"))]
    return [record for record in records if experiment in (None, record.experiment)]


def devices_in(folder: str | os.PathLike[str]) -> set[str]:
    """The devices, ``"cpu"`` or ``"cuda"``, on which the measured records of a folder were made."""
    found = set()
    for path in Path(folder).glob("*.json"):
        with contextlib.suppress(RecordError):
            record = Record.load(path)
            found |= set() if record.experiment.endswith("-predicted") else {record.environment["device"]}
    return found


def load_reference(name: str, folder: str | os.PathLike[str] = REFERENCES) -> dict[str, Any]:
    """Published figures of others: ``name``, ``source``, ``hardware``, ``units`` and ``rows``, a list of dicts.

    Raises RecordError for an unknown name or a file that does not have this form.

    Example:
        >>> import json, tempfile
        >>> from experiments.results import load_reference, write_text_atomic
        >>> figures = {"schema": "ackpt.reference", "version": 1, "name": "demo", "source": "a paper, table 1"}
        >>> figures |= {"hardware": None, "units": {"layers": "1", "peak": "MiB"}, "rows": [{"layers": 2, "peak": 8}]}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = write_text_atomic(f"{folder}/demo.json", json.dumps(figures))
        ...     load_reference("demo", folder)["rows"]
        [{'layers': 2, 'peak': 8}]
    """
    path = Path(folder, f"{name}.json")
    if not path.is_file():
        names = ", ".join(sorted(file.stem for file in Path(folder).glob("*.json"))) or "none here"
        raise RecordError(
            f"no reference figures named {name!r} in {folder} (known: {names}); they are part of the repository, not "
            "of the installed package"
        )
    data = _read(path, REFERENCE_SCHEMA)
    _check_fields(data, _REFERENCE, str(path))
    columns = set(data["units"])
    for index, row in enumerate(data["rows"]):
        if not isinstance(row, dict) or not set(row) <= columns:
            raise RecordError(f"{path}: row {index} is not an object with keys out of {', '.join(sorted(columns))}")
    return data


DASH = "–"
_ONE = rf"[-+{DASH}]?[\d,.]*(?: ?%| (?:[KMG]iB|m?s))?"
NUMBER = re.compile(rf"(\*\*)?(?:infeasible|not run|(?:≥ )?{_ONE}(?:(?: to |, ){_ONE})?)(\*\*)?")


def markdown_table(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str], caption: str, name: str) -> str:
    """A complete MyST table, ready to be included into a page.

    Args:
        rows: dicts, one per row.
        columns: ``{key: heading}`` in order; columns of numbers, also as text (``"1.5 to 8.3"``, ``"2.5%, 1.7 ms"``,
            ``"infeasible"``), are aligned to the right, and integers from 10,000 on get separators.
        caption: one sentence that can be read alone.
        name: the label that pages refer to.

    A value of None is shown as *not yet measured*. A column without any value is left out, and a note below the table
    names it. Floats are shown as given, so round them before, or give them as text.

    Example:
        >>> from experiments.results import markdown_table
        >>> print(markdown_table([{"n": 4, "peak": None}], {"n": "layers", "peak": "peak"}, "Peaks.", "tab-peaks"))
        :::{table} Peaks.
        :name: tab-peaks
        <BLANKLINE>
        | layers |
        |---:|
        | 4 |
        :::
        *Not shown, because not yet measured: "peak".*
        <BLANKLINE>
    """
    empty = [key for key in columns if all(row.get(key) is None for row in rows)]
    names = ", ".join(f'"{columns[key]}"' for key in empty)
    note = [f"*Not shown, because not yet measured: {names}.*"] if empty else []
    shown = [key for key in columns if key not in empty]
    aligned = ["---:" if all(_is_number(row.get(key)) for row in rows) else ":---" for key in shown]
    lines = [_line(columns[key] for key in shown), f"|{'|'.join(aligned)}|"]
    lines += [_line(row.get(key) for key in shown) for row in rows]
    return "\n".join([f":::{{table}} {caption}", f":name: {name}", "", *lines, ":::", *note, ""])


def _is_number(value) -> bool:
    return bool(NUMBER.fullmatch(value)) if isinstance(value, str) else isinstance(value, (int, float, type(None)))


def _line(values) -> str:
    return "| " + " | ".join(map(_cell, values)) + " |"


def _cell(value) -> str:
    if type(value) is int and abs(value) >= 10_000:
        return f"{value:,}"
    return "*not yet measured*" if value is None else str(value).replace("|", "\\|")


def _read(path, schema: str) -> dict:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise RecordError(f"cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise RecordError(f"{path} is not a text file, so it is not a record of ackpt") from error
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise RecordError(
            f"{path} is truncated or not JSON (line {error.lineno}: {error.msg}); delete it and run its experiment "
            "again"
        ) from error
    if not isinstance(data, dict) or data.get("schema") != schema:
        raise RecordError(f"{path} is not a file of the kind {schema}; it was written by something else")
    if data.get("version") != VERSION:
        raise RecordError(
            f"{path} has version {data.get('version')!r} of {schema}, and this ackpt reads version {VERSION}; run its "
            "experiment again, or use the ackpt that wrote it"
        )
    return data


def _check_record(data: dict, where: str) -> None:
    _check_fields(data, _RECORD, where)
    if not data["experiment"]:
        raise RecordError(f"{where}: the field 'experiment' is empty")
    _check_fields(data["environment"], _ENVIRONMENT, where, "environment.")
    for part in ("config", "metrics", "environment"):
        _check_value(data[part], f"{where}: {part}")


def _check_fields(data: dict, fields: dict, where: str, prefix: str = "") -> None:
    for name, kind in fields.items():
        if name not in data:
            raise RecordError(f"{where}: the field '{prefix}{name}' is missing")
        if not isinstance(data[name], kind) or isinstance(data[name], bool):
            raise RecordError(f"{where}: the field '{prefix}{name}' is a {type(data[name]).__name__}")


def _check_value(value, where: str) -> None:
    """RecordError for a value that JSON would not read back as it was written."""
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise RecordError(f"{where}: the key {key!r} is a {type(key).__name__}; JSON has text keys only")
            _check_value(item, f"{where}.{key}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _check_value(item, f"{where}[{index}]")
    elif isinstance(value, float) and not math.isfinite(value):
        raise RecordError(f"{where} is {value}, which JSON cannot hold")
    elif not isinstance(value, (str, int, float, type(None))):
        raise RecordError(f"{where} is a {type(value).__name__}; records hold plain values, lists and dicts")
