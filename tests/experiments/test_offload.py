"""The offload experiment: bytes that are known, gradients that are checked, no method left out silently."""

import dataclasses
import sys
from types import SimpleNamespace

import pytest
import torch

import ackpt.offloading.transport
from ackpt.models.transformer import Transformer
from experiments.offload import GPU, GradientsDiffer, OffloadConfig, make_batch, one_step, predict_offload, run_offload
from experiments.reports import offload as report
from experiments.steps.offload_methods import METHODS, OURS, _transformers, cannot_run, make_method
from experiments.steps.profiling import summary, traced

TINY = OffloadConfig(
    total_tokens=96, batch_size=4, layers=5, dim=32, ff_dim=64, head_dim=16, steps=2, min_bytes=1024, methods=METHODS
)
INPUT = 96 * 32 * 4  # bytes of a block's input
CKPT_OFFLOAD = ("ckpt_sync_offload", "ckpt_async_offload")


@pytest.fixture(scope="module")
def records():
    return run_offload(TINY, "python -m experiments offload", timed_rounds=2)


@pytest.fixture(scope="module")
def metrics(records):
    return {record.config["method"]: record.metrics for record in records}


def test_every_method_has_a_record_in_order_and_those_not_run_say_why(records):
    assert [record.config["method"] for record in records] == list(METHODS)
    why = {r.config["method"]: r.metrics["not_run"] for r in records if "not_run" in r.metrics}
    assert why == {"trl": "needs a CUDA GPU", "transformers": "needs a CUDA GPU"}
    assert len(report.ran(records)) == len(METHODS) - 2


def test_offloaded_peak_is_the_classic_one_less_the_inputs_that_wait_in_the_store(metrics):
    """Five regions: the newest input stays, the first is the batch, which is there anyway."""
    peaks = [metrics["ckpt_classic"]["peak_bytes"] - metrics[name]["peak_bytes"] for name in CKPT_OFFLOAD]
    assert peaks == [3 * INPUT, 3 * INPUT]
    assert metrics["offload_sync"]["peak_bytes"] < metrics["baseline"]["peak_bytes"]


def test_copies_store_and_pool_are_counted(metrics):
    for name in CKPT_OFFLOAD:
        counted = metrics[name]
        assert counted["store_peak_bytes"] == 4 * INPUT and counted["pool_misses"] == 0
        assert (counted["copies_out"], counted["bytes_out"]) == (4, 4 * INPUT)
        assert (counted["copies_in"], counted["bytes_in"]) == (3, 3 * INPUT)
        assert len(counted["timeline"]["copies"]) == 7
    assert metrics["ckpt_async_offload"]["just_in_time"] == 0
    assert metrics["baseline"]["store_peak_bytes"] == 0 and "copies" not in metrics["baseline"]["timeline"]
    assert metrics["offload_wrapper"]["store_peak_bytes"] is None


def test_gradients_are_equal_to_the_last_bit_for_peers_too(metrics):
    assert {values.get("gradients_difference", 0.0) for values in metrics.values()} == {0.0}


def test_a_copy_that_goes_wrong_is_noticed(monkeypatch):
    """The check is not empty: a worker that copies half of the bytes ends the experiment."""
    move = ackpt.offloading.transport._move
    monkeypatch.setattr(ackpt.offloading.transport, "_move", lambda *args: move(*args[:-1], args[-1] // 2))
    with pytest.raises(GradientsDiffer, match="ckpt_async_offload: the gradient of blocks.* to the last bit"):
        run_offload(dataclasses.replace(TINY, methods=("ckpt_async_offload",)), timed_rounds=0)


def test_predicted_peaks_are_the_measured_ones_but_for_kernel_scratch(metrics):
    for record in predict_offload(dataclasses.replace(TINY, methods=("offload_async", *CKPT_OFFLOAD, "trl"))):
        if record.config["method"] not in OURS:
            assert "without data" in record.metrics["not_run"]
            continue
        measured = metrics[record.config["method"]]
        assert record.metrics["resident_bytes"] == measured["resident_bytes"]
        assert record.metrics["store_peak_bytes"] == measured["store_peak_bytes"]
        assert 0 <= measured["peak_bytes"] - record.metrics["peak_bytes"] < 64 * 1024


def test_at_the_published_size_offload_takes_a_sixth_off_the_classic_peak():
    config = dataclasses.replace(GPU, methods=("ckpt_classic", "ckpt_async_offload"))
    classic, overlapped = (record.metrics["peak_bytes"] for record in predict_offload(config))
    assert classic - overlapped == 10 * 12_000 * 1024 * 4
    assert overlapped <= (1 - 0.18) * classic


def test_blocks_in_a_model_of_transformers_have_the_same_gradients():
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    model, batch = Transformer(TINY.model()), make_batch(TINY, 0)
    baseline = make_method("baseline", model, "cpu", 0)
    one_step(TINY, model, baseline, batch)
    wanted = [parameter.grad.clone() for parameter in model.parameters()]
    theirs = dataclasses.replace(baseline, forward=_transformers(model, offload=False))
    one_step(TINY, model, theirs, batch)
    assert all(torch.equal(a, b.grad) for a, b in zip(wanted, model.parameters()))


def test_trl_knows_the_parameters_and_is_active_during_the_whole_step(monkeypatch):
    """TRL needs a GPU: a stand-in notes its calls."""
    events = []

    class OffloadActivations:
        def update_model_params(self, model):
            events.append(sum(1 for _ in model.parameters()))

        def __enter__(self):
            events.append("begin")

        def __exit__(self, *error):
            events.append("end")

    model = Transformer(TINY.model())
    model.register_full_backward_hook(lambda *_: events.append("backward"))
    assert "cannot be imported (ModuleNotFoundError" in str(cannot_run("trl", "cuda"))
    for name in ("trl", "trl.models", "trl.models.activation_offloading"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(OffloadActivations=OffloadActivations, __path__=[]))
    assert cannot_run("trl", "cuda") is None
    batch = make_batch(TINY, 0)
    batch[0].requires_grad_()
    one_step(TINY, model, make_method("trl", model, "cuda", 0), batch)
    assert events == [sum(1 for _ in model.parameters()), "begin", "backward", "end"]


def event(cat, begin, end, name=""):
    return {"cat": cat, "name": name, "ts": begin, "dur": end - begin}


OUT, IN = "Memcpy DtoH (Device -> Pinned)", "Memcpy HtoD (Pinned -> Device)"


def test_copies_count_as_hidden_while_any_kernel_runs_and_once():
    kernels = [event("kernel", 0, 10), event("kernel", 5, 20), event("kernel", 40, 50)]
    copies = [event("gpu_memcpy", 10, 30, OUT), event("gpu_memcpy", 45, 65, IN)]
    others = [
        event("gpu_memcpy", 0, 99, "Memcpy DtoD (Device -> Device)"),
        event("cpu_op", 0, 99, "aten::mm"),
        {"ph": "M"},
    ]
    found = summary([*copies, *kernels, *others])
    assert found["copies"] == 2 and found["out"] == found["in"] == 20e-6
    assert found["hidden"] == 15e-6 and found["kernels"] == 30e-6 and found["hidden_share"] == 0.375


def test_a_step_without_a_gpu_has_a_trace_without_copies():
    calls = []
    found = traced(lambda: calls.append(torch.ones(4).sum()))
    assert len(calls) == 2 and found["copies"] == 0 and found["hidden_share"] is None
