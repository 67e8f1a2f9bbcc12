"""All published experiments as a list of jobs, most important first, run one after the other until the time runs out.

A job is done when its records are in the folder and ``jobs/<name>.json`` there says so for this commit and this
configuration; then it is skipped. Every file is written in one step, ``jobs/<name>.json`` last, so that an interruption
leaves only complete files and costs one job.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import hashlib
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch

from ackpt.cli.selftest import WORKSPACE, deterministic
from experiments.results import Record, RecordError, environment, write_text_atomic
from experiments.steps.failures import Failures, described

DONE, FAILED, CUT_OFF = "done", "failed", "cut off"
WHOLE, PREDICTION = "the job itself", "the prediction"  # names in `Outcome.failed` that are not methods


@dataclass(frozen=True)
class Job:
    """One configuration of one experiment.

    ``minutes``: an estimate, used until a job of this experiment has been timed. ``run(config, command, failures)``
    yields lists of Records; ``predict(config)`` returns ``{method: peak bytes}`` from shapes alone.
    """

    name: str
    experiment: str
    config: Any
    minutes: float
    run: Callable[[Any, str, Failures], Iterable[list[Record]]]
    predict: Callable[[Any], dict[str, int]]
    deterministic: bool = False

    @property
    def key(self) -> str:
        """A hash of the configuration, which distinguishes it from others of the same name."""
        about = [self.name, self.experiment, dataclasses.asdict(self.config), self.deterministic]
        return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]


@dataclass
class Outcome:
    """Names of jobs: ``ran`` now, ``skipped`` because they were done, ``left`` for lack of time; ``failed``, why."""

    ran: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    failed: dict[str, dict[str, str]] = field(default_factory=dict)
    stopped: str | None = None


class OutOfTime(BaseException):
    """The suite's time ran out during a job. Not an Exception, so that no experiment catches it."""


def run_suite(jobs, folder, command: str = "", minutes: float = 9, say: Callable[[str], object] = lambda line: None):
    """Run the jobs that are not done and fit into the time, those that failed before last; returns an `Outcome`.

    Args:
        folder: for the records.
        minutes: of wall-clock time. A job that should take longer than the rest of it does not begin; a job that does
            take longer is cut off.
        say: called with a line when a job begins.
    """
    deadline = time.monotonic() + 60 * minutes
    outcome = Outcome()
    commit = environment(command=command)["commit"]
    states = {job.name: read_state(folder, job, commit) for job in jobs}
    outcome.skipped = [job.name for job in jobs if states[job.name].get("state") == DONE]
    ahead = [job for job in jobs if job.name not in outcome.skipped]
    ahead.sort(key=lambda job: states[job.name].get("state") == FAILED)
    with mock.patch.dict(os.environ):
        if any(job.deterministic for job in jobs):  # cuBLAS reads it at its first use; torch's choice on Hopper
            os.environ.setdefault(WORKSPACE, ":4096:8")
        for number, job in enumerate(ahead, 1):
            expected, left = expected_minutes(job, folder), (deadline - time.monotonic()) / 60
            if outcome.stopped or expected > left:
                outcome.left.append(job.name)
                continue
            say(f"[{number}/{len(ahead)}] {job.name}: about {expected:.1f} of {left:.1f} minutes left")
            failures = Failures()
            state = _run_job(job, Path(folder), command, commit, failures, deadline)
            if state == CUT_OFF:
                outcome.left.append(job.name)
            else:
                outcome.ran.append(job.name)
            if failures.reasons:
                outcome.failed[job.name] = failures.reasons
            outcome.stopped = _free_all()
        with contextlib.suppress(OutOfTime), _time_limit(deadline):  # last: a GPU is not needed for it
            for job in [] if outcome.stopped else jobs:
                failures = Failures()
                with failures.of(PREDICTION):
                    add_predictions(job, folder, commit)
                if failures.reasons:
                    outcome.failed.setdefault(job.name, {}).update(failures.reasons)
    return outcome


def _run_job(job: Job, folder: Path, command: str, commit, failures: Failures, deadline: float) -> str:
    began = time.monotonic()
    names: list[str] = []
    state, device = DONE, "unknown"
    try:
        with (
            _time_limit(deadline),
            failures.of(WHOLE),
            deterministic() if job.deterministic else contextlib.nullcontext(),
        ):
            for group in job.run(job.config, command, failures):
                for record in group:
                    name = f"{job.name}-{len(names):02d}-{re.sub('[^a-zA-Z0-9._-]+', '-', _method(record))}.json"
                    record.save(folder / name)
                    names.append(name)
                    device = record.environment["device_name"]
    except OutOfTime:
        state = CUT_OFF
    if failures.reasons and state == DONE:
        state = FAILED
    about = {"state": state, "minutes": (time.monotonic() - began) / 60, "stated_minutes": job.minutes}
    about |= {"device_name": device, "records": names, "failed": failures.reasons}
    _write_state(folder, job, commit, about)
    return state


def _method(record: Record) -> str:
    return str(record.config.get("method", record.config.get("model", "")))


def add_predictions(job: Job, folder, commit) -> None:
    """Add the predicted peaks to the job's records in the folder."""
    for name in read_state(folder, job, commit).get("records", ()):
        record = Record.load(Path(folder, name))
        if "peak_bytes" in record.metrics and "predicted_peak_bytes" not in record.metrics:
            if (peak := predicted_peaks(job, folder, commit).get(_method(record))) is not None:
                metrics = {"predicted_peak_bytes": peak, **record.metrics}
                dataclasses.replace(record, metrics=metrics).save(Path(folder, name))


def predicted_peaks(job: Job, folder, commit) -> dict[str, int]:
    """``{method: peak bytes}`` from shapes alone; saved in the folder, if there is one, for the next run."""
    if folder is None:
        return job.predict(job.config)
    path = Path(folder, "predicted", f"{job.name}.json")
    saved = _read(path)
    if (saved.get("commit"), saved.get("key")) == (commit, job.key):
        return saved["peaks"]
    peaks = job.predict(job.config)
    about = {"commit": commit, "key": job.key, "torch": torch.__version__, "peaks": peaks}
    write_text_atomic(path, json.dumps(about, indent=1, sort_keys=True) + "\n")
    return peaks


def expected_minutes(job: Job, folder) -> float:
    """The time of this job if it ran before, else its estimate, scaled by how far those of its experiment were off."""
    states = [_read(path) for path in sorted(Path(folder, "jobs").glob("*.json"))]
    earlier = [state for state in states if state.get("key") == job.key and state["state"] in (DONE, CUT_OFF)]
    if earlier and earlier[0]["state"] == DONE:
        return earlier[0]["minutes"]
    kind = [state for state in states if state.get("experiment") == job.experiment and state["state"] == DONE]
    share = median(state["minutes"] / state["stated_minutes"] for state in kind) if kind else 1.0
    longer = [1.5 * state["minutes"] for state in earlier]
    return max([job.minutes * share, *longer])


def read_state(folder, job: Job, commit) -> dict:
    """The content of ``jobs/<name>.json`` for this commit and configuration; {} without one, or if a record is gone."""
    state = _read(_state_path(folder, job))
    if (state.get("commit"), state.get("key")) != (commit, job.key):
        return {}
    return state if all(Path(folder, name).is_file() for name in state["records"]) else {}


def records_of(jobs, folder, commit) -> dict[str, list[Record]]:
    """The records in the folder for this commit and configuration, by job and in order."""
    states = {job.name: read_state(folder, job, commit) for job in jobs}
    return {
        name: [Record.load(Path(folder, each)) for each in state["records"]] for name, state in states.items() if state
    }


def _state_path(folder, job: Job) -> Path:
    return Path(folder, "jobs", f"{job.name}.json")


def _write_state(folder, job: Job, commit, about: dict) -> None:
    config = json.loads(json.dumps(dataclasses.asdict(job.config)))
    about = {"job": job.name, "experiment": job.experiment, "commit": commit, "key": job.key, "config": config, **about}
    write_text_atomic(_state_path(folder, job), json.dumps(about, indent=1, sort_keys=True) + "\n")


def _read(path: Path) -> dict:
    """A file that the suite wrote; {} if there is none."""
    if not path.is_file():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RecordError(f"cannot read {path} ({error}): delete it, so that its job runs again") from error


@contextlib.contextmanager
def _time_limit(deadline: float):
    """Inside, raises `OutOfTime` at the deadline; only a main thread can be interrupted."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def stop(*_):
        raise OutOfTime

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(1e-3, deadline - time.monotonic()))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _free_all() -> str | None:
    """Free the memory of a job; returns why nothing more can run in this process, or None."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    gc.collect()
    if not torch.cuda.is_available():
        return None
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError as error:  # an illegal access, say: the process has lost its GPU
        return f"the GPU no longer responds ({described(error)}); run the command again for the rest"
    return None
