"""The offload experiment in one cell."""

import pytest
import torch
from conftest import raises

import ackpt
from experiments.colab import run_demo
from experiments.results import Record, environment

TINY = {"total_tokens": 64, "batch_size": 2, "layers": 3, "dim": 16, "ff_dim": 32, "head_dim": 8, "steps": 1}
METHODS = ["baseline", "ckpt_classic", "ckpt_async_offload"]


pytestmark = pytest.mark.usefixtures("no_gpu")


def test_it_prints_the_table_and_returns_the_figures(capsys):
    figures = run_demo(timed_rounds=1, methods=METHODS, min_bytes=0, **TINY)
    out, err = capsys.readouterr()
    assert list(figures) == ["peak", "time", "timelines"]
    assert "ckpt_async_offload" in out and "64 tokens in 2 sequences" in out
    assert err == ""


def test_in_ipython_it_shows_the_figures(monkeypatch, capsys):
    shown = []
    monkeypatch.setattr("IPython.get_ipython", object)
    monkeypatch.setattr("IPython.display.display", shown.append)
    assert run_demo("cpu", timed_rounds=0, methods=METHODS, **TINY) == {}
    assert [image.data[:4] for image in shown] == [b"\x89PNG"] * 2
    assert "ckpt_classic" in capsys.readouterr().out


def test_on_a_gpu_it_is_the_published_size_in_fp16(monkeypatch):
    """Records and figures are made elsewhere; here, that nothing but the device decides on the size."""
    asked = []

    def run(config, command, rounds, failures):
        asked.append((config.total_tokens, config.dtype, config.device, config.layers))
        return [Record("offload", {"method": "trl", **vars(config), "methods": []}, {"not_run": "no"}, RUN_HERE)]

    RUN_HERE = environment()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("experiments.offload.run_offload", run)
    assert run_demo(layers=2) == {}
    assert asked == [(12_000, "float16", "cuda", 2)]


def test_a_method_that_fails_is_named_and_the_others_are_shown(monkeypatch, capsys):
    def broken(model):
        raise ImportError("no such wrapper")

    monkeypatch.setattr("experiments.steps.offload_methods._offload_wrapper", broken)
    run_demo(timed_rounds=0, methods=["baseline", "offload_wrapper", "save_on_cpu"], **TINY)
    out = capsys.readouterr().out
    assert "save_on_cpu" in out and "FAILED: offload_wrapper: ImportError: no such wrapper" in out


@pytest.mark.parametrize(
    ("arguments", "overrides", "words"),
    [
        (("tpu",), {}, "unknown device 'tpu'"),
        (("cuda",), {}, "choose Runtime, Change runtime type"),
        ((), {"num_layers": 3}, "unknown field 'num_layers'"),
        ((), {"total_tokens": 0}, "total_tokens must be at least 1"),
    ],
)
def test_bad_arguments_are_refused(arguments, overrides, words):
    raises(ValueError, words, lambda: run_demo(*arguments, **overrides))


def test_the_package_prints_its_path():
    with pytest.raises(AttributeError, match="ackpt.colab is now experiments.colab"):
        _ = ackpt.colab
