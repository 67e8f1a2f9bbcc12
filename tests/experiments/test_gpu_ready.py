"""What the experiments do differently on a GPU, as far as it can be proven without one."""

from types import SimpleNamespace

import pytest
import torch

from experiments import provenance
from experiments.cli.command_line import main
from experiments.steps import largest_batch
from experiments.steps.gradients import GradientsDiffer, require_equal
from experiments.steps.named_steps import PER_BLOCK, Method, Setting, method
from experiments.steps.predicted import predict_experiment
from experiments.steps.step_shapes import Shapes
from experiments.synthetic import SyntheticConfig

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


def test_rounding_differences_of_gradients_are_allowed_on_a_gpu():
    wanted = {"weight": torch.tensor([1.0, -2.0]), "bias": torch.tensor([1e-6, 0.0])}
    found = {"weight": torch.tensor([1.0, -2.0]), "bias": torch.tensor([-1e-6, 1e-6])}
    assert require_equal("auto", found, wanted, exact=False) == pytest.approx(2e-6 / 0.02)
    with pytest.raises(GradientsDiffer, match="gradient of bias"):
        require_equal("auto", found, wanted, exact=True)
    with pytest.raises(GradientsDiffer, match="gradient of bias"):
        require_equal("auto", {**found, "bias": torch.tensor([0.1, 0.0])}, wanted, exact=False)


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
        return SimpleNamespace(prepare=lambda each: None, step=lambda each: None)

    monkeypatch.setattr(largest_batch, "RunStep", refuse)
    found = largest_batch.largest_on_cuda(Setting("resnet18", 1), Method("baseline"), 25, guess=3)
    assert (found.batch, found.measured_peak_bytes) == (5, 7)
    assert set(no_gpu) == {0.25, 1.0} and no_gpu[-1] == 1.0


def test_an_error_that_is_not_about_memory_ends_the_search(no_gpu, monkeypatch):
    def refuse(setting):
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(largest_batch, "RunStep", refuse)
    with pytest.raises(RuntimeError, match="illegal"):
        largest_batch.largest_on_cuda(Setting("resnet18", 1), Method("baseline"), 25)
