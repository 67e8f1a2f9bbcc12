"""Does every executed notebook match its source and every notebook for Colab its chapter, and does each have one?"""

from __future__ import annotations

import sys
from pathlib import Path

import nbformat
from address import COLAB_FOLDER, ROOT
from chapter import NotebookError, problems, to_text
from colab import for_colab


def mismatches(root: Path = ROOT) -> list[str]:
    """One line for every committed notebook that its source would not give."""
    sources = sorted((root / "notebooks").glob("*.py"))
    folders = (root / "book" / "notebooks", root / COLAB_FOLDER)
    found = []
    for source in sources:
        chapter, colab = (folder / f"{source.stem}.ipynb" for folder in folders)
        found += problems(source, chapter)
        found += colab_problems(chapter, colab, root) if chapter.exists() else []
    stems = {source.stem for source in sources}
    notebooks = (path for folder in folders for path in sorted(folder.glob("*.ipynb")))
    return found + [f"{path.relative_to(root)}: has no source" for path in notebooks if path.stem not in stems]


def colab_problems(chapter: Path, colab: Path, root: Path) -> list[str]:
    """What keeps a notebook for Colab from being the one that its chapter and the tables in `root/results` give."""
    name = colab.relative_to(root).as_posix()
    try:
        expected = to_text(for_colab(nbformat.read(chapter, as_version=4), root))
    except NotebookError as error:
        return [f"{name}: {error}"]
    if not colab.exists():
        return [f"{name}: never written"]
    differs = colab.read_text(encoding="utf-8") != expected
    return [f"{name}: differs from its chapter or from a table that it includes"] * differs


def main() -> int:
    """Command line: `python tools/check_notebooks.py`."""
    found = mismatches()
    for line in found:
        print(line)
    print("notebooks: " + ("run `nox -s reproduce` and commit what it wrote" if found else "all match their sources"))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
