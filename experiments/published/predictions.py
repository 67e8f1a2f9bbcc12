"""Predictions of published measurements, and the file that stores them.

The rows are facts in ``results/reference/published-peaks.json``. `Predictions` stores the predictions in
``results/predictions/published.json``, each under a key that depends on the step, its sizes, the GPU and the code that
predicts. If one of these changes, the step is predicted again.
"""

from __future__ import annotations

import ast
import functools
import gc
import hashlib
import inspect
import json
from collections.abc import Callable, Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ackpt.metering.gpus import ANY, gpu
from experiments.results import REFERENCES, RecordError, load_reference, write_text_atomic

from .prediction import predicted_bytes
from .steps import STEPS

REFERENCE = "published-peaks"
FILE = REFERENCES.parent / "predictions" / "published.json"
CHECKOUT = REFERENCES.parent.parent
_ALWAYS = ("ackpt/metering", *(f"experiments/published/{name}.py" for name in ("step", "training", "prediction")))
_ALSO: dict[str, tuple[str, ...]] = {  # the code that these steps call
    **dict.fromkeys(("resnet50-sum", "reference-resnet"), ("experiments/models",)),
    "flux2-adapters": ("experiments/published/finetuning.py",),
}


def rows() -> list[dict[str, Any]]:
    """The published figures that are predicted, in the order of their file."""
    return [row for row in load_reference(REFERENCE)["rows"] if not row["excluded"]]


def excluded() -> list[dict[str, Any]]:
    """The published figures that are not predicted, each with the reason."""
    return [row for row in load_reference(REFERENCE)["rows"] if row["excluded"]]


def code_version(step: str) -> str:
    """A hash of the files that predict `step`, without comments and docstrings."""
    return version_of((*_ALWAYS, *_ALSO.get(step, ())), inspect.getfile(STEPS[step]))


def version_of(places: Iterable[str], *more_files: str) -> str:
    """A hash of the given files and folders of the checkout, and of `more_files`, as `_code` reads them."""
    files = {*more_files, *(str(file) for place in places for file in _files(CHECKOUT / place))}
    return digest(sorted(_code(Path(file)) for file in files))


def _files(place: Path) -> Iterable[Path]:
    return [place] if place.suffix else (file for file in place.rglob("*.py") if file.name != "plots.py")


@functools.cache
def _code(file: Path) -> str:
    """The code of a file without imports, comments and docstrings: moving or formatting a file changes nothing."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [each for each in body if not _is_silent(each)]  # pyright: ignore[reportAttributeAccessIssue]
    return ast.unparse(tree)


def _is_silent(node: ast.AST) -> bool:
    """Whether a statement is an import or a docstring."""
    is_text = isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str)
    return is_text or isinstance(node, (ast.Import, ast.ImportFrom))


def digest(value: Any) -> str:
    """A short hash of plain data."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def group(row: dict[str, Any]) -> tuple[str, dict[str, Any], str | None]:
    """The inputs of a row's prediction: step, sizes and GPU."""
    return row["step"], row["sizes"], row["gpu"]


class Predictions:
    """The predictions in `file`; ``predicted``: the number of predictions made since it was read.

    Example:
        >>> from experiments.published import Predictions, rows
        >>> softmax = next(row for row in rows() if row["step"] == "softmax")
        >>> Predictions().of(softmax)["bytes"]
        3072
    """

    def __init__(self, file: Path = FILE, predicts: Callable[..., dict[str, Any]] = predicted_bytes):
        self.file, self.predicts, self.predicted = file, predicts, 0
        self.stored: dict[str, dict[str, Any]] = self._read() if file.is_file() else {}
        self._code = functools.cache(code_version)

    def _read(self) -> dict[str, dict[str, Any]]:
        try:
            return json.loads(self.file.read_text(encoding="utf-8"))["predictions"]
        except (ValueError, KeyError, TypeError) as error:
            raise RecordError(
                f"{self.file} cannot be read: delete it and run python -m experiments published"
            ) from error

    def key(self, row: dict[str, Any]) -> str:
        """Changes with the row's step, sizes and GPU, and with the code that predicts them."""
        return digest([*group(row), self._code(row["step"])])

    def entry(self, row: dict[str, Any], repeat: bool = False) -> dict[str, Any]:
        """What `predicts` returns for the row: now if the file has no prediction for its inputs, or if `repeat`."""
        key = self.key(row)
        if repeat or key not in self.stored:
            self.stored[key] = {"step": row["step"], "bytes": self.predicts(*group(row))}
            self.predicted += 1
            gc.collect()
        return self.stored[key]["bytes"]

    def of(self, row: dict[str, Any], repeat: bool = False) -> dict[str, Any]:
        """The row with ``predicted`` bytes and relative ``error``, from its `entry`."""
        size = self.entry(row, repeat)[row["metric"]]
        if row["metric"] == "NVML" and "context" in row:
            size += row["context"] - gpu(row["gpu"] or ANY).context_bytes
        return {**row, "predicted": size, "error": size / row["bytes"] - 1}

    def save(self, chosen: list[dict[str, Any]]) -> Path:
        """Write the predictions of these rows as far as they exist, and drop all others."""
        keys = {self.key(row) for row in chosen} & set(self.stored)
        entries = ",\n".join(f'    "{key}": {json.dumps(self.stored[key], sort_keys=True)}' for key in sorted(keys))
        libraries = json.dumps({name: _version(name) for name in ("torch", "transformers", "peft", "diffusers")})
        text = f'{{\n  "libraries": {libraries},\n  "predictions": {{\n{entries}\n  }}\n}}\n'
        return write_text_atomic(self.file, text)


def _version(library: str) -> str | None:
    try:
        return version(library).split("+")[0]
    except PackageNotFoundError:
        return None


def all_predicted(
    steps: Iterable[str] = STEPS, repeat: bool = False, file: Path = FILE, report: Callable[[str], object] | None = None
) -> list[dict[str, Any]]:
    """The rows of these steps with their predictions, as `Predictions.of` gives them; stores new ones in `file`.

    `repeat`: predict all of them, not only those whose step, sizes, GPU or code changed. `report` gets a line for each
    step that is predicted.
    """
    predictions, everything = Predictions(file), rows()
    chosen = [row for row in everything if row["step"] in set(steps)]
    if repeat:
        for row in chosen:
            predictions.stored.pop(predictions.key(row), None)
    found = []
    for number, row in enumerate(chosen, 1):
        before = predictions.predicted
        found.append(predictions.of(row))
        if predictions.predicted > before:
            predictions.save(everything)
            if report is not None:
                report(f"{number} of {len(chosen)}: {row['step']}, {row['source']}")
    return found
