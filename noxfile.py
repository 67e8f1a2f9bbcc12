"""The project's commands: `nox -s reproduce` is the main one, `nox -l` lists all.

All sessions but `compat` share one virtual environment, so that a fresh machine installs torch once.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
import tempfile
from pathlib import Path

import nox

nox.needs_version = ">=2025.2.9"
nox.options.sessions = ["lint", "tests", "notebooks"]
nox.options.default_venv_backend = "virtualenv"

ROOT = Path(__file__).parent
BIN = ROOT / ".nox" / "environment" / ("Scripts" if sys.platform == "win32" else "bin")
# Exact bytes need one number of threads; pages and records are made with this one.
THREADS = {"OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive"}
PYTEST = ["-n", "2", "--dist", "loadfile"]

shared = nox.session(python=False, requires=["environment"])


def run(session: nox.Session, program: str, *arguments: str, env: dict[str, str] | None = None) -> None:
    """Run a program of the shared environment, whether or not that is activated."""
    session.run(str(BIN / program), *arguments, env={**THREADS, **(env or {})}, external=True)


@nox.session(reuse_venv=True, default=False)
def environment(session: nox.Session) -> None:
    """Install the package with all its extras; does nothing while what it is made from is unchanged."""
    made_from = [ROOT / "pyproject.toml", ROOT / "constraints.txt"]
    state = hashlib.sha256(b"".join(path.read_bytes() for path in made_from)).hexdigest()
    stamp = Path(session.virtualenv.location) / "installed"
    if stamp.exists() and stamp.read_text() == state:
        return
    session.install("-c", "constraints.txt", "-e", ".[dev]")
    stamp.write_text(state)


@shared
def tests(session: nox.Session) -> None:
    """Run the tests; arguments go to pytest."""
    run(session, "pytest", *(session.posargs or PYTEST))


@nox.session(reuse_venv=True, default=False)
@nox.parametrize("torch", ["2.11.0", "2.13.0", "newest"])
def compat(session: nox.Session, torch: str) -> None:
    """Run the tests with the oldest torch allowed, the usual and the newest, gigabytes each; arguments go to pytest."""
    session.install("--upgrade", "-e", ".[dev]", "torch" if torch == "newest" else f"torch=={torch}")
    session.run("python", "-c", "import torch; print(torch.__version__)")
    session.run("pytest", *(session.posargs or PYTEST), env=THREADS)


@shared
def lint(session: nox.Session) -> None:
    """ruff, pyright, and pyright as a user of the package meets it."""
    run(session, "ruff", "check", ".")
    run(session, "pyright", "--pythonpath", str(BIN / "python"))
    run(session, "python", "tools/check_types.py")


@shared
def notebooks(session: nox.Session) -> None:
    """Execute the committed notebooks again and compare every output; measured times may differ."""
    run(session, "python", "tools/check_notebooks.py")
    with tempfile.TemporaryDirectory() as folder:
        # Notebooks read and write `results/` where they run: a copy keeps the checkout as it is.
        shutil.copytree(ROOT / "results", Path(folder, "results"), dirs_exist_ok=True)
        for path in sorted((ROOT / "book" / "notebooks").glob("*.ipynb")):
            shutil.copy(path, folder)
        options = ["--nbval", "--nbval-current-env", "-n", "2", "--dist", "loadscope", "-p", "no:cacheprovider"]
        with session.chdir(folder):
            run(session, "pytest", *options, *session.posargs)


@shared
def reproduce(session: nox.Session) -> None:
    """Execute every notebook, rewrite records, tables and figures, build the book (`-- --only 01`: one chapter)."""
    run(session, "python", "tools/reproduce.py", *session.posargs)
    build_book(session)


@shared
def book(session: nox.Session) -> None:
    """Build the book from the committed notebooks; nothing is executed."""
    build_book(session)


@shared
def single(session: nox.Session) -> None:
    """Build the book as one HTML page and, where Chromium is installed, as a PDF; nothing is executed."""
    run(session, "jupyter-book", "build", "book", "--builder", "singlehtml", "--all", "-n", "-W", "--keep-going", "-q")
    run(session, "python", "tools/single_page.py")


@shared
def check(session: nox.Session) -> None:
    """Reproduce twice and compare the bytes; arguments go to both reproductions."""
    run(session, "python", "tools/check_address.py")
    run(session, "python", "tools/check_notebooks.py")
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        for folder in (first, second):
            run(session, "python", "tools/reproduce.py", "--out", folder, *session.posargs)
        run(session, "python", "tools/check_same.py", first, second)


def build_book(session: nox.Session) -> None:
    """Build `book/` with every warning an error, see that it loads nothing from elsewhere, say where it is."""
    run(session, "jupyter-book", "build", "book", "--all", "-n", "-W", "--keep-going", "-q")
    run(session, "python", "tools/check_offline.py")
    session.log(f"the book: open {(ROOT / 'book/_build/html/index.html').relative_to(Path.cwd())}")
