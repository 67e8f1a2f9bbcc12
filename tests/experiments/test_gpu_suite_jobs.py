"""The suite's jobs: all of them small on the CPU, and that those for a GPU stand and can be predicted."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.cli.command_line import main
from experiments.provenance import environment
from experiments.reports.gpu_suite import rows
from experiments.suite.gpu_suite import read_state, records_of
from experiments.suite.gpu_suite_jobs import EXPERIMENTS, REFERENCES, cpu_jobs, gpu_jobs, jobs

COMMIT = environment()["commit"]
ROOT = Path(__file__).parents[2]
# A machine with a GPU may have numpy, torch and transformers only, with what these bring.
ABSENT = "matplotlib seaborn scipy datasets tensorboard accelerate peft jupytext papermill nbformat IPython pandas trl"
BARE = f"""
import sys
sys.modules.update(dict.fromkeys({ABSENT.split()!r}))
from experiments.cli.command_line import main
raise SystemExit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    """Everything once, as the command runs it in a bare checkout."""
    folder = tmp_path_factory.mktemp("suite")
    command = [sys.executable, "-c", BARE, "gpu-suite", "--tier", "cpu", "--out", str(folder), "--minutes", "120"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environ)
    assert done.returncode == 0, done.stderr + done.stdout
    return folder, records_of(cpu_jobs(), folder, COMMIT)


def test_every_job_leaves_records_with_their_command_and_no_failure(suite):
    folder, records = suite
    assert list(records) == [job.name for job in cpu_jobs()]
    assert {job.experiment for job in cpu_jobs()} == set(EXPERIMENTS)
    for job in cpu_jobs():
        state = read_state(folder, job, COMMIT)
        assert state["state"] == "done" and state["failed"] == {} and state["records"]
        assert all("gpu-suite" in record.environment["command"] for record in records[job.name])


def test_peaks_are_predicted_within_one_percent_and_methods_save_memory(suite):
    _, records = suite
    table = {(row["job"], row["method"]): row for job, found in records.items() for row in rows(job, found)}
    off = [row["off"] for row in table.values() if row["off"] is not None]
    # Shapes do not show the buffers of CPU flash attention, some for every thread: the peaks here are below 2 MiB.
    scratch = [row["peak"] * 2**20 * abs(row["off"]) / 100 for row in table.values() if row["off"] is not None]
    assert len(off) >= 20 and max(scratch) < 64 * 1024 and sum(map(abs, off)) / len(off) <= 1.0
    saves = {"lm-L24": "checkpoint", "synthetic-L48": "auto", "bert-B2": "per-block"}
    saves["frontier-transformer"] = "full least"
    assert all(table[key]["memory"] < 0 for key in saves.items())
    times = {row["method"]: row["time"] for row in table.values() if row["job"] == "synthetic-L48"}
    assert times.pop("baseline") is None and None not in times.values()


def test_jobs_for_a_gpu_are_of_their_own_and_the_published_ones_come_first():
    found = gpu_jobs()
    names = [job.name for job in found]
    assert len(set(names)) == len({job.key for job in found}) == len(found)
    first = ["selftest", "synthetic-L16384", "lm-L8192", "offload-T12000", "frontier-transformer-short"]
    assert names[:5] == first and sum(job.minutes for job in found[:5]) < 8
    assert {job.experiment for job in found} == set(EXPERIMENTS)
    for job in found:
        assert job.config.device == "cuda" and json.dumps(dataclasses.asdict(job.config))


@pytest.mark.parametrize(("capability", "dtype"), [((7, 5), "float16"), ((8, 0), "bfloat16")])
def test_the_device_chooses_the_half_precision_that_its_attention_has(capability, dtype, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device=None: capability)
    dtypes = {job.name: getattr(job.config, "dtype", None) for job in jobs("full")}
    named = ("synthetic-L16384", "lm-L8192", "bert-B8", "frontier-transformer-short", "largest-batch-bert-large")
    assert {dtypes[name] for name in named} == {dtype} and dtypes["offload-T12000"] == "float16"
    assert dtypes["batch-size-resnet152-B64"] == dtypes["lm-L2048-float32-deterministic"] == "float32"
    assert {job.config.dtype for job in jobs("t4") if job.experiment == "lm"} == {"float16", "float32"}
    run = {job.experiment for job in jobs("full") if job.experiment in REFERENCES}
    assert run == set(REFERENCES[2:] if dtype == "float16" else REFERENCES)  # the first two compute in bfloat16


@pytest.mark.parametrize(
    "options, message",
    [
        (["--only", "lm,vision"], "unknown experiment 'vision': choose from selftest, synthetic, lm,"),
        (["--minutes", "0"], "--minutes must be more than 0 and less than a million, got 0"),
        (["--minutes", "nan"], "and less than a million, got nan"),
        (["--minutes", "inf"], "and less than a million, got inf"),
        (["--only", ","], "give at least one experiment: selftest, synthetic,"),
        (["--commit", "abc"], "--commit is a whole commit of 40 hexadecimal digits"),
        ([], "give a folder for the records: --out FOLDER"),
    ],
)
def test_a_step_that_does_not_fit_prints_one_line_and_exits_with_status_2(options, message, capsys):
    assert main(["gpu-suite", "--tier", "cpu", *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("python -m experiments gpu-suite: ") and message in error and error.count("\n") == 1
