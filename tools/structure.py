"""The structure of the package in figures, each with its limit: `python tools/structure.py`.

Imports inside functions count; for circles, those for type checkers count, too.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

from imports import PACKAGE, cycles, graph, modules

CHECKPOINT, APPLY_BUDGET = "ackpt.checkpointing.reentrant", "ackpt.planner.api"


class Figure(NamedTuple):
    """A figure of the structure; ``most``: its limit."""

    what: str
    value: int
    most: int


def figures() -> list[Figure]:
    """The figures of the package as it stands."""
    files = modules()
    imported = graph()
    checkpoint, budget = reached(CHECKPOINT, imported), reached(APPLY_BUDGET, imported)
    first_floor = [path for path in PACKAGE.iterdir() if path.name != "__pycache__"]
    return [
        Figure("lines of ackpt/", lines(files.values()), 38_699),
        Figure("files of ackpt/", len(files), 155),
        Figure("files and folders on the first floor of ackpt/", len(first_floor), 12),
        Figure("lines that ackpt.checkpoint reaches", lines(files[name] for name in checkpoint), 5_683),
        Figure("files that ackpt.apply_budget reaches", len(budget), 106),
        Figure("lines that ackpt.apply_budget reaches", lines(files[name] for name in budget), 31_417),
        Figure("circles of imports", len(cycles(graph(for_type_checkers=True))), 0),
    ]


def reached(module: str, imported: dict[str, set[str]]) -> set[str]:
    """`module` and all modules that it imports, directly or not."""
    found, waiting = set(), [module]
    while waiting:
        if (name := waiting.pop()) not in found:
            found.add(name)
            waiting += imported[name]
    return found


def lines(paths) -> int:
    """The lines of files together."""
    return sum(len(Path(path).read_text(encoding="utf-8").splitlines()) for path in paths)


def main() -> int:
    """Print the figures; 1 if one exceeds its limit."""
    found = figures()
    for each in found:
        exceeded = "" if each.value <= each.most else "  EXCEEDED"
        print(f"{each.what:<50} {each.value:>7,}  at most {each.most:>7,}{exceeded}")
    return int(any(each.value > each.most for each in found))


if __name__ == "__main__":
    sys.exit(main())
