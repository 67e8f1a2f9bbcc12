"""The offload experiment in one cell."""

import pytest
from conftest import raises

import ackpt
from experiments.colab import run_demo

TINY = {"total_tokens": 64, "batch_size": 2, "layers": 3, "dim": 16, "ff_dim": 32, "head_dim": 8, "steps": 1}
METHODS = ["baseline", "ckpt_classic", "ckpt_async_offload"]


pytestmark = pytest.mark.usefixtures("no_gpu")


def test_it_prints_the_table_and_returns_the_figures(capsys):
    figures = run_demo(timed_rounds=1, methods=METHODS, min_bytes=0, **TINY)
    out, err = capsys.readouterr()
    assert list(figures) == ["peak", "time", "timelines"]
    assert "ckpt_async_offload" in out and "64 tokens in 2 sequences" in out
    assert err == ""


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
