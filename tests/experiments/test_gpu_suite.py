"""The runner of the suite, with jobs that do next to nothing: what it skips, leaves, records and survives."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace

import torch
from stand_in_gpu import Allocator

from experiments import provenance
from experiments.reports.gpu_suite import text_outcome
from experiments.results import Record, environment, load_records
from experiments.suite import gpu_suite
from experiments.suite.gpu_suite import Job, expected_minutes, read_state, records_of, run_suite

COMMIT = environment()["commit"]


@dataclass(frozen=True)
class Config:
    size: int = 1


def a_record(config, method, command="", **metrics):
    return Record("fake", {"size": config.size, "method": method}, {"peak_bytes": 100 * config.size, **metrics}, WHERE)


WHERE = environment(command="python -m experiments gpu-suite")


def two_runs(config, command, failures):
    yield [a_record(config, "baseline"), a_record(config, "auto@0.5")]


def job(name="one", run=two_runs, minutes=0.001, predict=lambda config: {"baseline": 99}, **more):
    return Job(name, "fake", Config(), minutes, run, predict, **more)


def test_a_lost_gpu_ends_the_suite_and_keeps_its_records(tmp_path, monkeypatch):
    def lost():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    Allocator(monkeypatch)
    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    found = run_suite([job(), job("two")], tmp_path)
    assert (found.ran, found.left, len(load_records(tmp_path))) == (["one"], ["two"], 2)
    assert "the GPU no longer responds (RuntimeError: CUDA error" in "\n".join(text_outcome(found))


def test_records_are_written_at_once_with_their_prediction_and_a_second_run_skips_them(tmp_path):
    found = run_suite([job()], tmp_path)
    assert (found.ran, found.skipped, found.left, found.failed) == (["one"], [], [], {})
    names = ["one-00-baseline.json", "one-01-auto-0.5.json"]
    assert [path.name for path in sorted(tmp_path.glob("*.json"))] == names
    baseline, planned = load_records(tmp_path)
    assert baseline.metrics == {"peak_bytes": 100, "predicted_peak_bytes": 99}
    assert planned.metrics == {"peak_bytes": 100}
    before = {name: (tmp_path / name).stat().st_mtime_ns for name in names}
    again = run_suite([job(run=None)], tmp_path)
    assert (again.ran, again.skipped) == ([], ["one"])
    assert {name: (tmp_path / name).stat().st_mtime_ns for name in names} == before


def test_changed_configurations_commits_and_missing_records_rerun(tmp_path, monkeypatch):
    run_suite([job()], tmp_path)
    other = replace(job(), config=Config(2))
    assert run_suite([other], tmp_path).ran == ["one"] and run_suite([other], tmp_path).skipped == ["one"]
    assert run_suite([replace(other, deterministic=True)], tmp_path).ran == ["one"]
    assert run_suite([job()], tmp_path).ran == ["one"]
    (tmp_path / "one-01-auto-0.5.json").unlink()
    assert run_suite([job()], tmp_path).ran == ["one"] and run_suite([job()], tmp_path).ran == []
    monkeypatch.setattr(gpu_suite, "environment", lambda **_: {"commit": "0" * 40})
    assert run_suite([job()], tmp_path).ran == ["one"]


def test_a_failed_job_leaves_its_error_and_no_figures_and_the_others_run(tmp_path):
    def fails(config, command, failures):
        yield [a_record(config, "baseline")]
        with failures.of("auto"):
            raise ValueError("no\nplan")
        raise torch.OutOfMemoryError("CUDA out of memory")

    jobs = [job("bad", fails), job("good")]
    found = run_suite(jobs, tmp_path)
    assert found.ran == ["bad", "good"]
    failed = {"auto": "ValueError: no plan", gpu_suite.WHOLE: "OutOfMemoryError: CUDA out of memory"}
    assert found.failed == {"bad": failed}
    state = json.loads((tmp_path / "jobs" / "bad.json").read_text())
    assert state["state"] == gpu_suite.FAILED and state["failed"] == found.failed["bad"]
    assert [record.config["method"] for record in records_of(jobs, tmp_path, COMMIT)["bad"]] == ["baseline"]
    assert "failed: bad: auto: ValueError: no plan" in text_outcome(found)
    order = []
    noted = [job(name, lambda *_, name=name: order.append(name) or []) for name in ("bad", "new")]
    run_suite(noted, tmp_path)
    assert order == ["new", "bad"]


def test_no_job_starts_that_exceeds_the_remaining_time(tmp_path):
    said = []
    found = run_suite([job("long", run=None, minutes=5), job("short")], tmp_path, minutes=1, say=said.append)
    assert found.left == ["long"] and found.ran == ["short"]
    assert len(said) == 1 and said[0].startswith("[2/2] short: about 0.0 of ")
    assert "not run for lack of time" in "\n".join(text_outcome(found))


def test_a_job_that_takes_too_long_is_cut_off_and_its_next_estimate_is_longer(tmp_path):
    def endless(config, command, failures):
        yield [a_record(config, "baseline")]
        with failures.of("auto"):  # takes no end of time for its own error
            time.sleep(60)

    slow = job("slow", endless)
    began = time.monotonic()
    found = run_suite([slow, job("next", run=None)], tmp_path, minutes=0.02)
    assert time.monotonic() - began < 30 and found.left == ["slow", "next"] and found.failed == {}
    state = read_state(tmp_path, slow, COMMIT)
    assert state["state"] == gpu_suite.CUT_OFF and expected_minutes(slow, tmp_path) == 1.5 * state["minutes"]
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert run_suite([replace(slow, run=two_runs)], tmp_path, minutes=1).ran == ["slow"]
    assert read_state(tmp_path, slow, COMMIT)["state"] == gpu_suite.DONE


TESTS = os.path.dirname(os.path.dirname(__file__))
KILLED = """
import os, signal, sys
sys.path[:0] = {tests!r}
from experiments import provenance
from test_gpu_suite import a_record, job
from experiments.suite.gpu_suite import run_suite

def dies(config, command, failures):
    yield [a_record(config, "baseline")]
    os.kill(os.getpid(), signal.SIGKILL)

provenance._commit = lambda: {commit!r}
run_suite([job("whole"), job("killed", dies)], {folder!r})
"""


def test_after_a_kill_all_files_are_complete_and_only_the_killed_job_reruns(tmp_path, monkeypatch):
    monkeypatch.setattr(provenance, "_commit", lambda: COMMIT)  # other tests that run now may change the checkout
    code = KILLED.format(tests=[os.path.dirname(__file__), TESTS], folder=str(tmp_path), commit=COMMIT)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=120, env=os.environ)
    assert done.returncode == -signal.SIGKILL
    assert len(load_records(tmp_path)) == 3  # of these one of the job that was killed
    found = run_suite([job("whole", run=None), job("killed")], tmp_path)
    assert (found.skipped, found.ran, found.failed) == (["whole"], ["killed"], {})
    assert len(load_records(tmp_path)) == 4


def test_deterministic_algorithms_are_on_for_their_jobs_only(tmp_path, monkeypatch):
    monkeypatch.delenv(gpu_suite.WORKSPACE, raising=False)
    seen = []

    def look(config, command, failures):
        seen.append((torch.are_deterministic_algorithms_enabled(), os.environ.get(gpu_suite.WORKSPACE)))
        return []

    run_suite([job("a", look), job("b", look, deterministic=True), job("c", look)], tmp_path)
    assert seen == [(False, ":4096:8"), (True, ":4096:8"), (False, ":4096:8")]
    assert not torch.are_deterministic_algorithms_enabled() and gpu_suite.WORKSPACE not in os.environ
