"""The project's commands: `nox -s reproduce` is the main one, `nox -l` lists all.

All sessions but `compat` and `browser` share one virtual environment, so that a fresh machine installs torch once.
"""

from __future__ import annotations

import hashlib
import os
import runpy
import shutil
import sys
import tempfile
from pathlib import Path

import nox
from nox.command import CommandFailed

nox.needs_version = ">=2025.2.9"
nox.options.sessions = ["lint", "tests", "notebooks"]
nox.options.default_venv_backend = "virtualenv"

ROOT = Path(__file__).parent
BIN = ROOT / ".nox" / "environment" / ("Scripts" if sys.platform == "win32" else "bin")
# Exact bytes need one number of threads, and equal plans the same rates of operations.
FIXED = {
    "OMP_NUM_THREADS": "2",
    "MKL_NUM_THREADS": "2",
    "OMP_WAIT_POLICY": "passive",
    "ACKPT_CALIBRATION": str(ROOT / "results" / "cpu_calibration.json"),
}
PYTEST = ["-n", "2", "--dist", "loadfile"]  # a worker for each core of the smallest machine that CI has
# Unit tests, and oracles on tiny cases. Together they take about three minutes of CPU time; see with `--durations=20`.
FAST = """
    checkpointing offloading metering
    planner/capture/test_capture.py planner/capture/test_trace.py planner/capture/test_eager.py
    planner/costs/test_profile.py planner/policies/test_chain_table.py experiments/test_chen.py
    experiments/test_ilp.py experiments/test_revolve.py
    planner/policies/test_rotor.py planner/schedule/test_plan.py planner/schedule/test_rewrite.py
    planner/schedule/test_schedule.py planner/schedule/test_simulate.py
    core test_api_page.py test_imports.py
""".split()
CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# The second brings axe-core: other versions of it have other rules.
BROWSER = [
    "playwright==1.65.2",
    "axe-playwright-python==0.1.8",
    "pytest>=8",
    "pytest-timeout",
    "pytest-xdist",
    "tomli; python_version < '3.11'",
]

# Of the packages that Colab preinstalls, those that a chapter or what it imports may import.
PREINSTALLED = "ipython pip numpy pandas scipy scikit-learn matplotlib seaborn tqdm transformers tokenizers".split()
PREINSTALLED += "datasets accelerate peft safetensors huggingface-hub tensorboard pillow sympy networkx".split()

# What builds the book with a newer Sphinx than Jupyter Book 1 allows, and what of Jupyter Book it leaves out.
NEXT = ["sphinx>=8.2", "sphinx-book-theme>=1.4", "myst-nb", "sphinx-external-toc", "sphinx-design", "sphinx-copybutton"]
NEXT += ["sphinx-togglebutton", "sphinxcontrib-bibtex", "sphinx-multitoc-numbering", "sphinx-mathjax-offline"]
NEXT += ["jupytext", "nbstripout"]
NOT_NEXT = {"jupyter_book", "sphinx_thebe", "sphinx_comments", "sphinx_jupyterbook_latex"}

shared = nox.session(python=False, requires=["environment"])


def run(session: nox.Session, program: str, *arguments: str, env: dict[str, str] | None = None) -> None:
    """Run a program of the shared environment, whether or not that is activated."""
    session.run(str(BIN / program), *arguments, env={**FIXED, **(env or {})}, external=True)


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


@shared
def fast(session: nox.Session) -> None:
    """Run the unit tests, and oracles on tiny cases, in under two minutes; arguments go to pytest."""
    run(session, "pytest", *PYTEST, *(f"tests/{name}" for name in FAST), *session.posargs)


@nox.session(reuse_venv=True, default=False)
@nox.parametrize("torch", ["2.11.0", "2.13.0", "newest"])
def compat(session: nox.Session, torch: str) -> None:
    """Run the tests with the oldest torch allowed, the usual and the newest, gigabytes each; arguments go to pytest.

    torchvision comes along: transformers runs other code where it is there.
    """
    session.install("--upgrade", "-e", ".[dev]", "torch" if torch == "newest" else f"torch=={torch}", "torchvision")
    session.run("python", "-c", "import torch, torchvision as v; print(torch.__version__, v.__version__)")
    session.run("pytest", *(session.posargs or PYTEST), env=FIXED)


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
        shutil.copy(ROOT / "tools" / "forked_kernels.py", Path(folder, "conftest.py"))
        startup = Path(folder, "ipython", "profile_default", "startup")
        startup.mkdir(parents=True)
        shutil.copy(ROOT / "tools" / "brief_times.py", startup)
        options = ["--nbval", "--nbval-current-env", "-n", "2", "--dist", "loadscope", "-p", "no:cacheprovider"]
        with session.chdir(folder):
            env = {"IPYTHONDIR": str(startup.parent.parent), "CUDA_VISIBLE_DEVICES": ""}
            run(session, "pytest", *options, *session.posargs, env=env)


@shared
def reproduce(session: nox.Session) -> None:
    """Execute every notebook, rewrite records, tables and figures, build the book (`-- --only 01`: one chapter).

    `-- --device cuda --minutes 60` also runs the published experiments on this GPU.
    """
    run(session, "python", "tools/reproduce.py", *session.posargs)
    build_book(session)


@shared
def book(session: nox.Session) -> None:
    """Build the book from the committed notebooks; nothing is executed."""
    build_book(session)


@nox.session(name="book-next", reuse_venv=True, default=False, requires=["environment"])
def book_next(session: nox.Session) -> None:
    """Build the book from the same sources with a newer Sphinx and theme, in an environment of its own (2 GB)."""
    session.install("-c", "constraints.txt", "-e", ".[lm,plots,plan,hf]", *NEXT)
    source, settings = ROOT / "book", ROOT / "book" / "conf.py"
    try:
        run(session, "jupyter-book", "config", "sphinx", str(source))
        names = runpy.run_path(str(settings))["extensions"]
        extensions = ",".join(name for name in names if name not in NOT_NEXT)
        target = source / "_build" / "next"
        options = ["-E", "-n", "-W", "--keep-going", "-q", "-D", f"extensions={extensions}"]
        paths = os.pathsep.join([str(ROOT), str(source / "_ext")])
        session.run("sphinx-build", *options, str(source), str(target), env={**FIXED, "PYTHONPATH": paths})
    finally:
        settings.unlink(missing_ok=True)
    session.log(f"the book: open {(target / 'index.html').relative_to(Path.cwd())}")


@nox.session(name="all", python=False, default=False, requires=["lint", "tests", "notebooks", "browser"])
def everything(session: nox.Session) -> None:
    """Run lint, tests, notebooks and browser; a session that fails does not stop the others."""


@nox.session(reuse_venv=True, default=False, requires=["book"])
def browser(session: nox.Session) -> None:
    """Build the book and read it in a browser: links, errors, search, widgets, widths, colours, axe-core's rules.

    `-- --pictures FOLDER` also keeps a picture of every page.
    """
    session.install(*BROWSER)
    options = [f"--chromium={chromium(session)}", "-n", "2", *session.posargs]
    session.run("pytest", "tests_browser", *options)


def chromium(session: nox.Session) -> str:
    """The path of a Chromium: the machine's own, else Debian's if it can be installed; "" for Playwright's own."""
    installed = next(filter(None, map(shutil.which, CHROMIUM)), "")
    if not installed and os.name == "posix" and os.geteuid() == 0 and shutil.which("apt-get"):
        try:
            session.run("apt-get", "update", "-q", external=True)
            install = ["install", "-q", "-y", "--no-install-recommends", "chromium", "fonts-liberation"]
            session.run("apt-get", *install, external=True)
        except CommandFailed:
            session.warn("apt-get cannot install chromium; trying Playwright's own")
        installed = shutil.which("chromium") or ""
    if not installed:
        try:
            session.run("playwright", "install", "chromium")
        except CommandFailed:
            session.skip(
                "NOTHING WAS CHECKED: there is no Chromium, and neither apt-get (as root) nor `playwright install "
                "chromium` could get one. Put chromium or google-chrome on PATH and run `nox -s browser` again."
            )
    return installed


@shared
def calculator(session: nox.Session) -> None:
    """Compute the grid of the memory calculator, in about half an hour of one core (`-- --only gpt2`: one model)."""
    run(session, "python", "tools/calculator.py", *session.posargs)


@shared
def running(session: nox.Session) -> None:
    """Predict the step of Llama 3 8B that the chapters of the book share, in about a minute."""
    run(session, "python", "-m", "experiments.running_model")


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


@nox.session(reuse_venv=True, default=False)
def colab(session: nox.Session) -> None:
    """Run every chapter as Colab does, with what Colab preinstalls and a broken torchvision (`-- 06`: one chapter)."""
    session.install("-c", "constraints.txt", "torch", *PREINSTALLED)
    env = {**FIXED, "PIP_CONSTRAINT": str(ROOT / "constraints.txt")}
    session.run("python", "tools/check_colab.py", *session.posargs, env=env)


def build_book(session: nox.Session) -> None:
    """Build `book/` with every warning an error, see that it loads nothing from elsewhere, say where it is."""
    run(session, "jupyter-book", "build", "book", "--all", "-n", "-W", "--keep-going", "-q")
    run(session, "python", "tools/check_offline.py")
    session.log(f"the book: open {(ROOT / 'book/_build/html/index.html').relative_to(Path.cwd())}")
