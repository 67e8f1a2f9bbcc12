"""Does a chapter that was opened in Colab set itself up and run?

Needs an environment with no more than Colab brings: IPython and torch. Runs the install cell of the committed
notebooks, but clones what is committed in this checkout instead of the published repository, then the first cell of
every chapter, which holds the imports, and the whole of the chapters that are named.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import types
from pathlib import Path

from IPython.core.interactiveshell import InteractiveShell

ROOT = Path(__file__).resolve().parent.parent
IN_COLAB = '"google.colab" in sys.modules'


def code_cells(notebook: Path) -> list[str]:
    """The sources of a notebook's code cells, the install cell first."""
    cells = [cell for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    sources = ["".join(cell["source"]) for cell in cells]
    if IN_COLAB not in sources[0]:
        raise ValueError(f"{notebook.name}: its first code cell is not the install cell; run `nox -s reproduce`")
    return sources


def run(cells: list[str]) -> None:
    """Run cells one after the other in a fresh namespace; what a cell raises goes on to the caller."""
    shell = InteractiveShell.instance()
    shell.reset(new_session=False)
    for cell in cells:
        shell.run_cell(cell, silent=True).raise_error()


def main() -> int:
    """Command line: `python tools/check_colab.py [01 ...]`, the numbers of chapters to run whole."""
    notebooks = sorted((ROOT / "book" / "colab").glob("*.ipynb"))
    whole = sys.argv[1:]
    unknown = [number for number in whole if not any(path.name.startswith(number) for path in notebooks)]
    if unknown or not notebooks:
        print(f"no chapter {', '.join(unknown)} in {ROOT / 'book/colab'}")
        return 2
    install, *_ = code_cells(notebooks[0])
    from_here, changed = re.subn(r"(git clone -q --depth 1) \S+", rf"\1 {ROOT.as_uri()}", install)
    assert changed == 1, install
    sys.modules["google.colab"] = types.ModuleType("google.colab")
    os.environ["MPLBACKEND"] = "agg"
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        run([from_here])
        assert Path("noxfile.py").exists(), "the install cell did not enter its clone"
        for path in notebooks:
            first, *rest = code_cells(path)[1:]
            complete = any(path.name.startswith(number) for number in whole)
            run([first, *rest] if complete else [first])
            print(f"{path.stem}: {'runs' if complete else 'its imports are there'}", flush=True)
        os.chdir(ROOT)
    return 0


if __name__ == "__main__":
    sys.exit(main())
