"""Do the chapters that were opened in Colab set themselves up and run?

Needs an environment like Colab's: IPython, torch, its preinstalled packages, and a torchvision that fails on import,
which `nox -s colab` makes. Every chapter runs in a Python and a clone of its own, as in a fresh runtime; the clone is
of what is committed in this checkout instead of the published repository.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import types
from importlib.machinery import ModuleSpec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
IN_COLAB = '"google.colab" in sys.modules'
BROKEN = "raise RuntimeError('operator torchvision::nms does not exist')\n"


def code_cells(notebook: Path) -> list[str]:
    """The sources of a notebook's code cells, the install cell first."""
    cells = [cell for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    sources = ["".join(cell["source"]) for cell in cells]
    if IN_COLAB not in sources[0]:
        raise ValueError(f"{notebook.name}: its first code cell is not the install cell; run `nox -s reproduce`")
    return sources


def break_torchvision() -> None:
    """Install a torchvision that fails on import, as one built for another torch does."""
    site = Path(sysconfig.get_path("purelib"))
    about = site / "torchvision-0.1.dist-info"
    for folder in (site / "torchvision", about):
        folder.mkdir(exist_ok=True)
    (site / "torchvision" / "__init__.py").write_text(BROKEN)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: torchvision\nVersion: 0.1\n")
    files = ("torchvision/__init__.py", *(f"{about.name}/{name}" for name in ("METADATA", "RECORD", "INSTALLER")))
    (about / "INSTALLER").write_text("pip\n")
    (about / "RECORD").write_text("".join(f"{name},,\n" for name in files))


def run_all(notebook: Path) -> None:
    """Run every cell of a notebook in this process, in the current folder; what a cell raises goes to the caller."""
    from IPython.core.interactiveshell import InteractiveShell

    install, *cells = code_cells(notebook)
    from_here, changed = re.subn(r"(git clone -q --depth 1) \S+", rf"\1 {ROOT.as_uri()}", install)
    assert changed == 1, install
    colab = sys.modules["google.colab"] = types.ModuleType("google.colab")
    colab.__spec__ = ModuleSpec(colab.__name__, None)  # accelerate looks for the package with find_spec
    os.environ["MPLBACKEND"] = "agg"
    shell = InteractiveShell.instance()
    for cell in (from_here, *cells):
        shell.run_cell(cell, silent=True).raise_error()
        assert Path("noxfile.py").exists(), "the install cell did not enter its clone"


def main() -> int:
    """Command line: `python tools/check_colab.py [--folder FOLDER] [01 ...]`, all chapters by default."""
    parser = argparse.ArgumentParser(description="Run chapters as Colab does.")
    parser.add_argument("--folder", type=Path, default=ROOT / "book" / "colab", help="the notebooks (book/colab)")
    parser.add_argument("--here", action="store_true", help="run one chapter in this process, in the current folder")
    parser.add_argument("chapters", nargs="*", metavar="NN", help="numbers of chapters")
    arguments = parser.parse_args()
    notebooks = sorted(arguments.folder.resolve().glob("*.ipynb"))
    chosen = [path for path in notebooks if path.name.startswith(tuple(arguments.chapters or [""]))]
    if not chosen or len(chosen) < len(set(arguments.chapters)):
        print(f"no chapter {', '.join(arguments.chapters)} in {arguments.folder}")
        return 2
    if arguments.here:
        run_all(*chosen)
        return 0
    failed = []
    for path in chosen:
        break_torchvision()
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, __file__, "--here", "--folder", str(arguments.folder.resolve()), path.name]
            failed += [path.stem] if subprocess.run(command, cwd=folder).returncode else []
        print(f"{path.stem}: {'FAILED' if path.stem in failed else 'runs'}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
