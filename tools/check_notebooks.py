"""Does every executed notebook match its source, and does every notebook have one?"""

from __future__ import annotations

import sys
from pathlib import Path

from address import ROOT
from chapter import problems


def mismatches(root: Path = ROOT) -> list[str]:
    """One line for every committed notebook that its source would not give."""
    sources = sorted((root / "notebooks").glob("*.py"))
    committed = root / "book" / "notebooks"
    found = [line for source in sources for line in problems(source, committed / f"{source.stem}.ipynb")]
    stems = {source.stem for source in sources}
    return found + [f"{p.name}: has no source" for p in sorted(committed.glob("*.ipynb")) if p.stem not in stems]


def main() -> int:
    """Command line: `python tools/check_notebooks.py`."""
    found = mismatches()
    for line in found:
        print(line)
    print("notebooks: " + ("run `nox -s reproduce` and commit what it wrote" if found else "all match their sources"))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
