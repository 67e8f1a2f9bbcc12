"""Every job of the suite with device "cuda", on a stand-in for a GPU: what it calls, and what its records say."""

import dataclasses

import pytest
from stand_in_gpu import Allocator, OnTheCpu

from ackpt.cli import selftest
from experiments.results import load_records
from experiments.steps.workload import Workload
from experiments.suite.gpu_suite import run_suite
from experiments.suite.gpu_suite_jobs import REFERENCE, SELFTEST, cpu_jobs

JOBS = [
    dataclasses.replace(job, config=dataclasses.replace(job.config, device="cuda"), predict=lambda config: {})
    for job in cpu_jobs()
    if job.experiment != SELFTEST and not job.name.startswith("largest")  # see test_gpu_ready
]


@pytest.mark.filterwarnings("ignore")
def test_the_selftest_fails_nothing_where_only_bytes_differ(monkeypatch):
    Allocator(monkeypatch)
    monkeypatch.setitem(selftest.SIZES, "cuda", (8, 64, 2, 64, 32))
    with OnTheCpu():
        record = selftest.run_selftest("cuda")
    results = {each["check"]: each["result"] for each in record["metrics"]["checks"]}
    gradients = {name: result for name, result in results.items() if name.startswith("gradients")}
    assert len(gradients) == 4 and set(gradients.values()) == {selftest.PASSED}
    assert selftest.failed(record) == [] and results["peak of plan"] == selftest.WARNING  # the stand-in has no bytes
    assert record["environment"]["device_name"] == "a stand-in"


@pytest.mark.parametrize("job", JOBS, ids=[job.name for job in JOBS])
@pytest.mark.filterwarnings("ignore")  # of autocast and the profiler, which miss CUDA
def test_a_job_runs_and_its_records_are_those_of_a_gpu(job, tmp_path, monkeypatch):
    capability = (8, 0) if job.experiment == REFERENCE else (7, 5)  # published models compute in bfloat16
    allocator = Allocator(monkeypatch, capability)
    allocator.live = allocator.peak = 2**30  # the budget of a plan is a measured peak
    monkeypatch.setattr(Workload, "device", "cuda")
    monkeypatch.setattr("experiments.offload.traced", lambda step: step() or {"copies": 0})  # see test_profiling
    with OnTheCpu():
        outcome = run_suite([job], tmp_path, minutes=10)
    assert (outcome.ran, outcome.failed) == ([job.name], {})
    records = load_records(tmp_path)
    assert {record.environment["device_name"] for record in records} == {"a stand-in"}
    for record in records:
        assert record.config["device"] == record.environment["device"] == "cuda"
        assert record.environment["capability"] == ".".join(map(str, capability))
        if "seconds_step" in record.metrics:
            assert record.metrics["seconds_step"]["median"] == 1.5  # by the events of the stand-in
        if "points" not in record.metrics and "largest_batch" not in record.metrics:
            assert record.metrics["reserved_peak_bytes"] == 2 * record.metrics["peak_bytes"]
    assert allocator.emptied and not allocator.recording
