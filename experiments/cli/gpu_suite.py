"""The command ``gpu-suite``: its options, and the call of the suite."""

from __future__ import annotations

import os
import re
import sys

from .options import UsageError, folder_for, names, require_gpu


def add_gpu_suite(commands) -> None:
    """Add the command and its options."""
    summary = "the published experiments on this GPU, most important first, resumable"
    parser = commands.add_parser(
        "gpu-suite",
        help=summary,
        description=f"{summary}: one JSON record per run, written at once. Run the command again to add the records "
        "that the folder lacks for this commit and configuration. Exits with status 1 if something failed.",
    )
    add = parser.add_argument
    add("--out", metavar="FOLDER", help="folder for the records; required without --predict")
    known = "selftest,synthetic,lm,offload,batch-size,bert,frontier,reference-synthetic,reference-language-model,"
    known += "reference-offload,reference-resnet"
    add("--only", type=names, metavar="E,E,...", help=f"some of {known}")
    add("--minutes", type=float, default=8.0, metavar="N", help="start no job that would end later (default 8)")
    add("--tier", choices=("cpu", "t4", "full"), default="full", help="full (default), t4 (float16), or cpu (small)")
    add("--commit", metavar="SHA", help="the commit of this code, if git cannot tell it")
    add("--predict", action="store_true", help="list the jobs with peaks predicted from shapes alone; --out saves them")
    parser.set_defaults(run=run_gpu_suite)


def run_gpu_suite(arguments, command: str) -> int:
    from experiments.reports.gpu_suite import text_outcome, text_table
    from experiments.results import environment
    from experiments.suite.gpu_suite import records_of, run_suite
    from experiments.suite.gpu_suite_jobs import EXPERIMENTS, jobs

    if not 0 < arguments.minutes < 1e6:
        raise UsageError(f"--minutes must be more than 0 and less than a million, got {arguments.minutes:g}")
    chosen = jobs(arguments.tier, EXPERIMENTS if arguments.only is None else arguments.only)
    if arguments.commit is not None:
        _take_commit(arguments.commit)
    device = "cpu" if arguments.tier == "cpu" else "cuda"
    folder = folder_for(arguments.out, device)
    if arguments.predict:
        return _predict(chosen, folder)
    if folder is None:
        raise UsageError("give a folder for the records: --out FOLDER")
    commit = environment()["commit"]
    require_gpu(device, "torch sees no CUDA GPU here: add --predict for the peaks from shapes alone, or use --tier cpu")
    if device == "cuda":
        if commit is None:
            raise UsageError("git cannot tell the commit of this code, which every record names: give --commit SHA")
        if commit.endswith("-dirty"):
            raise UsageError("this checkout has uncommitted changes, so no record could name its commit: commit them")
    outcome = run_suite(chosen, folder, command, arguments.minutes, _say)
    print("\n".join([text_table(records_of(chosen, folder, commit)), *text_outcome(outcome)]))
    return 1 if outcome.failed or outcome.stopped else 0


def _take_commit(commit: str) -> None:
    from experiments.results import environment

    if not re.fullmatch("[0-9a-f]{40}", commit):
        raise UsageError(f"--commit is a whole commit of 40 hexadecimal digits, got {commit!r}")
    os.environ["ACKPT_COMMIT"] = commit
    if (checked_out := environment()["commit"]) != commit:
        raise UsageError(f"--commit {commit} is not the commit that git reports, {checked_out}: leave --commit out")


def _say(line: str) -> None:
    if sys.stderr.isatty():
        print(line, file=sys.stderr)


def _predict(jobs, folder) -> int:
    """Print the jobs with their predicted peaks; returns 1 if a prediction failed."""
    from experiments.results import environment
    from experiments.steps.failures import Failures
    from experiments.suite.gpu_suite import add_predictions, predicted_peaks

    commit = environment()["commit"]
    failures = Failures()
    for job in jobs:
        print(f"{job.name}: about {job.minutes:g} minutes", flush=True)
        with failures.of(job.name):
            for method, peak in predicted_peaks(job, folder, commit).items():
                print(f"  {method:24} {peak / 2**20:10.1f} MiB")
            if folder is not None:
                add_predictions(job, folder, commit)
    for name, reason in failures.reasons.items():
        print(f"python -m experiments gpu-suite: {name}: {reason}", file=sys.stderr)
    return 1 if failures.reasons else 0
