"""What the experiments do differently on a GPU, as far as it can be proven without one or on a stand-in."""

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch
from stand_in_gpu import Allocator, OnTheCpu

from ackpt.cli import selftest
from experiments import batch_size, offload, provenance
from experiments.batch_size import BatchSizeConfig
from experiments.cli.command_line import main
from experiments.frontier import FrontierConfig, run_frontier
from experiments.lm import LMConfig, run_lm
from experiments.results import GPU_FOLDER, Record, load_records
from experiments.steps import largest_batch, offload_methods, training
from experiments.steps.frontier_models import workload
from experiments.steps.named_steps import PER_BLOCK, Method, Setting, method
from experiments.steps.predicted import predict_experiment
from experiments.steps.step_shapes import Shapes
from experiments.steps.training import METHODS
from experiments.steps.workload import Workload
from experiments.suite.gpu_suite import run_suite
from experiments.suite.gpu_suite_jobs import REFERENCES, SELFTEST, cpu_jobs
from experiments.synthetic import SyntheticConfig, run_synthetic

SIZES = {"dim": 32, "ff_dim": 64, "layers": 2, "head_dim": 16}


def test_a_copy_without_git_has_the_given_commit(monkeypatch):
    told = "1" * 40
    monkeypatch.setenv("ACKPT_COMMIT", told)
    assert provenance.environment()["commit"] != told  # git knows better
    monkeypatch.setattr(provenance, "_git", lambda *_: None)
    assert provenance.environment()["commit"] == told
    monkeypatch.delenv("ACKPT_COMMIT")
    assert provenance.environment()["commit"] is None


@pytest.mark.parametrize("commit, message", [(None, "give --commit SHA"), ("1" * 40 + "-dirty", "commit them")])
def test_a_gpu_record_without_a_commit_is_refused(commit, message, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr("experiments.results.environment", lambda: {"commit": commit})
    assert main(["gpu-suite", "--out", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err


def test_the_peak_of_per_block_is_a_budget():
    setting = Setting("transformer", 2, 16, fields=SIZES)
    asked = method("auto@per-block")
    assert asked == Method("auto@per-block", "auto", PER_BLOCK)
    shapes = Shapes(setting)
    peak = shapes.predicted(Method(PER_BLOCK))["peak_bytes"]
    assert shapes.resolved(asked).budget == peak and shapes.resolved(Method("baseline")) == Method("baseline")
    assert shapes.predicted(shapes.resolved(asked))["peak_bytes"] <= peak


def test_a_plan_is_predicted_within_the_peak_of_checkpoint():
    config = SyntheticConfig((32,), **SIZES, device="cuda", methods=("baseline", "checkpoint", "auto"))
    ((_, checkpoint, planned),) = predict_experiment(config)
    assert planned.metrics["peak_bytes"] <= checkpoint.metrics["peak_bytes"]
    assert planned.metrics["flops"] < checkpoint.metrics["flops"]


HALF = {"dtype": "float16", "device": "cpu"}  # as on a T4, whose attention knows no bfloat16


def test_every_experiment_trains_in_float16_with_a_scaled_loss():
    text = {"vocab_size": 300, "tokenizer_vocab": 300, "methods": METHODS[:2]}
    runs = [
        *next(iter(run_synthetic(SyntheticConfig((32,), 1, 3, **SIZES, **HALF), timed_rounds=1))),
        *next(iter(run_lm(LMConfig((24,), 2, 3, **SIZES, **text, **HALF), timed_rounds=1))),
    ]
    assert [record.config["dtype"] for record in runs] == ["float16"] * 4
    for record in runs:
        assert all(map(math.isfinite, record.metrics["losses"])) and record.metrics["seconds_step"]["median"] > 0
    methods = ("baseline", "per-block", "auto@0.9")
    steps = BatchSizeConfig("transformer", (2,), seq_len=16, fields=SIZES, methods=methods, **HALF)
    ((*records,),) = batch_size.compare_steps(steps, timed_rounds=1)
    assert [record.metrics["gradients_difference"] for record in records] == [0.0] * 3
    front = {"layers": 1, "dim": 32, "heads": 2, "ff_dim": 64, "vocab_size": 64, "seq_len": 32}
    config = FrontierConfig("transformer", front, policies=("full",), budgets=(0.9,), peers=("checkpoint",), **HALF)
    made = workload(config.model, config.sizes, 0, dtype="float16")
    made.step(made.model, 0)
    smallest = min(float(parameter.grad.abs().max()) for parameter in made.model.parameters())
    assert smallest > 1 and run_frontier(config).metrics["points"][0]["gradients_difference"] == 0.0


def test_methods_are_switched_outside_the_time(monkeypatch):
    """And a step that is timed contains the step alone."""
    order = []

    def clock(step, device):
        order.append("begin")
        step()
        order.append("end")
        return 1.0

    monkeypatch.setattr("ackpt.metering.cpu_meter.clock", clock)
    for module, name in ((training, "configure"), (offload_methods, "remove_activation_checkpointing")):
        switch = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, switch=switch: order.append("switch") or switch(*args))
    next(iter(run_synthetic(SyntheticConfig((16,), 1, 1, **SIZES), timed_rounds=2)))
    small = {"total_tokens": 32, "batch_size": 2, "steps": 1, "methods": ("baseline", "save_on_cpu")}
    offload.run_offload(offload.OffloadConfig(**SIZES, **small), timed_rounds=2)
    inside = [order[begin + 1] for begin, name in enumerate(order) if name == "begin"]
    before = [order[begin - 1] for begin, name in enumerate(order) if name == "begin"]
    assert inside == ["end"] * 8 and before == ["switch"] * 8


def test_a_step_without_an_optimizer_is_forward_and_backward():
    config = BatchSizeConfig(
        "transformer", (2,), seq_len=16, fields=SIZES, methods=("baseline", "auto@0.9"), trains=False
    )
    ((*records,),) = batch_size.compare_steps(config, timed_rounds=0)
    predicted = batch_size.predicted(config)
    for record, other in zip(records, predicted, strict=True):
        assert record.metrics["categories"]["optimizer"] == other.metrics["categories"]["optimizer"] == 0
        assert record.metrics["peak_bytes"] == record.metrics["predicted_peak_bytes"]
    assert records[0].metrics["peak_bytes"] == predicted[0].metrics["peak_bytes"]


@pytest.mark.parametrize("command", ["gpu-suite --tier cpu", "lm", "offload", "frontier", "bert", "batch-size"])
def test_a_folder_of_records_of_another_device_is_refused(command, tmp_path, capsys):
    where = provenance.environment() | {"device": "cuda"}
    Record("lm", {}, {}, where).save(tmp_path / "one.json")
    for folder in (tmp_path, GPU_FOLDER):
        assert main([*command.split(), "--out", str(folder)]) == 2
        assert "makes records of device cpu, and that folder is for the other device" in capsys.readouterr().err


@pytest.fixture
def no_gpu(monkeypatch):
    """As much of torch.cuda as a search within a limit calls."""
    fractions = []
    fake = SimpleNamespace(
        mem_get_info=lambda: (50, 100),
        set_per_process_memory_fraction=fractions.append,
        reset_peak_memory_stats=lambda: None,
        synchronize=lambda: None,
        max_memory_allocated=lambda: 7,
        empty_cache=lambda: None,
    )
    monkeypatch.setattr(largest_batch.torch, "cuda", fake)
    return fractions


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED")]
)
def test_every_kind_of_out_of_memory_error_means_that_a_batch_does_not_fit(no_gpu, monkeypatch, error):
    def refuse(setting):
        if setting.batch_size > 5:
            raise error
        return SimpleNamespace(prepare=lambda each: None, switch=lambda each: None, step=lambda each: None)

    monkeypatch.setattr(largest_batch, "RunStep", refuse)
    found = largest_batch.largest_on_cuda(Setting("resnet18", 1), Method("baseline"), 25, guess=3)
    assert (found.batch, found.measured_peak_bytes) == (5, 7)
    assert set(no_gpu) == {0.25, 1.0} and no_gpu[-1] == 1.0


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
    capability = (8, 0) if job.experiment in REFERENCES else (7, 5)  # published models compute in bfloat16
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
