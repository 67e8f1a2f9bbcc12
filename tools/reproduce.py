"""Execute the notebooks and rewrite what comes from them: notebooks for book and Colab, records, tables and figures.

Everything happens in a staging folder whose `results/` the notebooks see. Only when every notebook has succeeded are
the files moved to where they belong, each by one rename, so that a failed or interrupted run changes nothing.

By default the notebooks see no GPU. With `--device cuda`, those with a cell of parameters also run the published
experiments on the GPU, and their records move to `results/gpu`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

import nbformat
import papermill
from address import COLAB_FOLDER, ROOT
from chapter import NotebookError, normalise, prepare, refuse_accidents, source_hash, to_text
from colab import for_colab
from papermill.exceptions import PapermillExecutionError

MADE = ("cpu", "tables", "figures", "explorer", "runs")  # the folders of results/ that only notebooks write
ON_GPU = Path("results", "gpu")
# One setting for every machine: sums in another order of threads are other numbers.
FIXED = {
    "OMP_NUM_THREADS": "2",
    "MKL_NUM_THREADS": "2",
    "OMP_WAIT_POLICY": "passive",  # threads that spin while they wait slow everything down on a busy machine
    "ACKPT_CALIBRATION": str(ROOT / "results" / "cpu_calibration.json"),  # other rates give other plans
    "PYTHONHASHSEED": "0",
    "PYTHONWARNINGS": "default",
}


def chapters(only: list[str], folder: Path) -> list[Path]:
    """The sources whose name starts with one of `only` (all when empty), in the order of their numbers."""
    sources = sorted(folder.glob("[0-9][0-9]_*.py"))
    chosen = [s for s in sources if not only or any(s.name.startswith(prefix) for prefix in only)]
    unmatched = [prefix for prefix in only if not any(s.name.startswith(prefix) for s in sources)]
    if unmatched or not chosen:
        names = ", ".join(s.stem for s in sources) or "none"
        raise NotebookError(f"no notebook starts with {', '.join(unmatched) or 'a number'}; there are: {names}")
    return chosen


def has_parameters(source: Path) -> bool:
    """Whether the notebook has a cell of parameters, which papermill can set."""
    return 'tags=["parameters"' in source.read_text(encoding="utf-8")


def execute(source: Path, stage: Path, parameters: dict | None = None) -> None:
    """Execute one notebook in `stage`, with these values for its parameters, and leave it there, normalised.

    Raises NotebookError naming notebook and cell; the partly executed notebook and its log stay beside `stage`.
    """
    target = stage / "book" / "notebooks" / f"{source.stem}.ipynb"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(to_text(prepare(source)), encoding="utf-8")
    raw = stage.parent / f"{source.stem}.ipynb"
    try:
        papermill.execute_notebook(
            str(target),
            str(raw),
            parameters if has_parameters(source) else None,
            kernel_name="python3",
            cwd=str(stage),
            progress_bar=sys.stderr.isatty(),
            extra_arguments=["--log-level=ERROR"],
        )
    except PapermillExecutionError as error:
        log = stage.parent / f"{source.stem}.log"
        log.write_text("\n".join([error.source, *error.traceback]), encoding="utf-8")
        raise NotebookError(
            f"{source.name}, cell {error.cell_index}: {error.ename}: {error.evalue}\n"
            f"  log: {log}, notebook so far: {raw}"
        ) from error
    notebook = nbformat.read(raw, as_version=4)
    notebook.cells = [cell for cell in notebook.cells if "injected-parameters" not in cell.metadata.get("tags", [])]
    notebook = normalise(notebook)
    refuse_accidents(notebook, source.name, private_paths(stage))
    target.write_text(to_text(notebook), encoding="utf-8")
    raw.unlink()


def write_for_colab(source: Path, stage: Path) -> None:
    """Write an executed chapter of `stage` in plain Markdown, with the tables that are there."""
    notebook = nbformat.read(stage / "book" / "notebooks" / f"{source.stem}.ipynb", as_version=4)
    target = stage / COLAB_FOLDER / f"{source.stem}.ipynb"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(to_text(for_colab(notebook, stage)), encoding="utf-8")


def record_run(source: Path, stage: Path, seconds: float) -> None:
    """Record how long a notebook took, and where: the book's status page says so."""
    from experiments.results import Record, environment  # here, as torch reads FIXED when it is imported

    config = {"source": f"notebooks/{source.name}", "sha256": source_hash(source)}
    run = Record("notebook", config, {"seconds": seconds}, environment("cpu", "nox -s reproduce"))
    run.save(stage / "results" / "runs" / f"{source.stem}.json")


def private_paths(stage: Path) -> list[str]:
    """Paths of this machine that no output may hold."""
    homes = [str(Path.home()) + os.sep] if len(Path.home().parts) > 1 else []
    return [str(stage.parent.parent), sys.prefix, *homes]


def move_into_place(stage: Path, out: Path, untouched: dict[Path, int], everything: bool) -> list[Path]:
    """Move to `out` what was made in `stage` since `untouched` (times of change) was noted there.

    After a full run, results that no notebook wrote are removed, but for records of a GPU; return them.
    """
    made = [name for name, changed in times_of_change(stage).items() if untouched.get(name) != changed]
    for name in made:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        os.replace(stage / name, out / name)
    old = [name for name in times_of_change(out) if name not in made and ON_GPU not in name.parents]
    removed = old if everything else []
    for name in removed:
        (out / name).unlink()
    return removed


def times_of_change(top: Path) -> dict[Path, int]:
    """When each file under `top` that belongs to the notebooks alone was last changed, in nanoseconds."""
    files = (p for folder in made_folders(top) for p in sorted(folder.rglob("*")) if p.is_file())
    return {p.relative_to(top): p.stat().st_mtime_ns for p in files if ".ipynb_checkpoints" not in p.parts}


def made_folders(top: Path) -> list[Path]:
    """The folders under `top` that belong to the notebooks alone, and that of the records of a GPU."""
    return [top / "book" / "notebooks", top / COLAB_FOLDER, *(top / "results" / name for name in MADE), top / ON_GPU]


def make_stage(root: Path, everything: bool) -> Path:
    """A fresh folder with the `results/` that notebooks read; a full run starts without what an earlier one made."""
    work = root / ".reproduce"
    work.mkdir(exist_ok=True)
    stage = Path(tempfile.mkdtemp(prefix="stage-", dir=work))
    if (root / "results").is_dir():
        ignored = shutil.ignore_patterns(*MADE) if everything else None
        shutil.copytree(root / "results", stage / "results", ignore=ignored)
    for name in MADE:
        (stage / "results" / name).mkdir(parents=True, exist_ok=True)
    return stage


def on_gpu(minutes: float, sources: list[Path]) -> dict:
    """The parameters of notebooks that run on a GPU and share the minutes; NotebookError if no record could be kept."""
    from experiments.results import environment

    if (environment()["commit"] or "-dirty").endswith("-dirty"):
        raise NotebookError("records of a GPU name the commit of the code: commit the changes of this checkout first")
    return {"device": "cuda", "minutes": minutes / max(1, sum(map(has_parameters, sources)))}


def reproduce(root: Path, out: Path, only: list[str], minutes_on_gpu: float | None = None) -> None:
    """Execute the chosen chapters of the checkout `root` and write everything they make below `out`."""
    sources = chapters(only, root / "notebooks")
    os.environ.update(FIXED if minutes_on_gpu else {**FIXED, "CUDA_VISIBLE_DEVICES": ""})
    parameters = on_gpu(minutes_on_gpu, sources) if minutes_on_gpu else None
    stage = make_stage(root, everything=not only)
    untouched = times_of_change(stage)
    try:
        for source in sources:
            start = time.perf_counter()
            execute(source, stage, parameters)
            seconds = time.perf_counter() - start
            record_run(source, stage, seconds)
            print(f"{source.stem}: {seconds:.0f} s", flush=True)
        for source in sources:  # when all tables are there
            write_for_colab(source, stage)
        for gone in move_into_place(stage, out, untouched, everything=not only):
            print(f"removed {gone}: no notebook writes it")
    finally:
        shutil.rmtree(stage)


def main() -> int:
    """Command line: `python tools/reproduce.py [--only 01 ...] [--out FOLDER] [--device cuda --minutes 60]`."""
    parser = argparse.ArgumentParser(description="Execute the notebooks and rewrite what comes from them.")
    parser.add_argument("--only", nargs="+", default=[], metavar="NN", help="the chapters to execute (default: all)")
    parser.add_argument("--out", type=Path, default=ROOT, help="write below this folder, not into the checkout")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: also run the experiments there")
    parser.add_argument("--minutes", type=float, default=60, metavar="N", help="with --device cuda, of all chapters")
    arguments = parser.parse_args()
    minutes = arguments.minutes if arguments.device == "cuda" else None
    try:
        reproduce(ROOT, arguments.out.resolve(), arguments.only, minutes)
    except NotebookError as error:
        print(f"reproduce: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
