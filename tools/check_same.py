"""Do two reproductions give the same bytes?

Measured times may differ, and nothing else: outputs of cells tagged `measured-time`, fields of records whose name
starts with `seconds`, and the day on which a record was made.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
from chapter import is_measured


def differences(first: Path, second: Path) -> list[str]:
    """Every file, cell or field that differs between two folders written by tools/reproduce.py."""
    names = sorted({p.relative_to(top) for top in (first, second) for p in top.rglob("*") if p.is_file()})
    found = []
    for name in names:
        one, two = first / name, second / name
        if not (one.exists() and two.exists()):
            found.append(f"{name}: written by one run only")
        elif name.suffix == ".ipynb":
            found.extend(f"{name}, {where}" for where in _cells(one, two))
        elif name.suffix == ".json":
            found.extend(f"{name}, field {where}" for where in _fields(_load(one), _load(two)))
        elif one.read_bytes() != two.read_bytes():
            found.append(f"{name}: other bytes")
    return found


def _load(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _cells(one: Path, two: Path) -> Iterator[str]:
    first, second = (nbformat.read(path, as_version=4) for path in (one, two))
    if len(first.cells) != len(second.cells):
        yield "number of cells"
    for index, (a, b) in enumerate(zip(first.cells, second.cells, strict=False)):
        if is_measured(a) and is_measured(b):
            a.outputs, b.outputs = [], []
        if a != b:
            yield f"cell {index}"
    if first.metadata != second.metadata:
        yield "metadata"


def _fields(a: Any, b: Any, where: str = "") -> Iterator[str]:
    if isinstance(a, dict) and isinstance(b, dict):
        for key in sorted(a.keys() | b.keys()):
            path = f"{where}.{key}".lstrip(".")
            if key.startswith("seconds") or path == "environment.date":
                continue
            if key not in a or key not in b:
                yield path
            else:
                yield from _fields(a[key], b[key], path)
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for index, (x, y) in enumerate(zip(a, b, strict=True)):
            yield from _fields(x, y, f"{where}[{index}]")
    elif a != b or type(a) is not type(b):
        yield where or "(all)"


def main() -> int:
    """Command line: `python tools/check_same.py FIRST SECOND`."""
    first, second = (Path(argument) for argument in sys.argv[1:])
    found = differences(first, second)
    for line in found:
        print(line)
    print("two reproductions: " + (f"{len(found)} differences" if found else "the same bytes, measured times apart"))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
