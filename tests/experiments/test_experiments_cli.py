"""The command line: every command once, every bad input one clear line with exit status 2; the demo in one cell."""

import json

import pytest
from conftest import raises

import ackpt
from experiments.cli.command_line import main
from experiments.colab import run_demo
from experiments.results import Record

TINY = ["--dim", "32", "--ff-dim", "64", "--layers", "2", "--head-dim", "16", "--seq-len", "32", "--steps", "2"]
LM = [*TINY, "--vocab-size", "300", "--timed-rounds", "0"]

OFFLOAD = [
    *["--total-tokens", "64", "--batch-size", "2", "--num-layers", "3", "--hidden-dim", "16", "--ff-dim", "32"],
    *["--head-dim", "8", "--steps", "1", "--min-bytes", "1024"],
]


pytestmark = pytest.mark.usefixtures("no_gpu")


def test_synthetic_prints_a_table_with_a_row_per_method_and_length(capsys):
    assert main(["synthetic", *TINY, "--seq-len", "32", "48", "--timed-rounds", "1"]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    rows = [[length, method] for length in ("32", "48") for method in ("baseline", "checkpoint")]
    assert [line.split()[:2] for line in lines[2:6]] == rows
    assert "equal to the last bit at every step (checked)" in out and "x1.00" in out
    assert err == ""  # progress is for terminals


def test_lm_writes_records_and_json(tmp_path, capsys):
    assert main(["lm", *LM, "--out", str(tmp_path / "new"), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    methods = [record["config"]["method"] for record in printed]
    assert methods == ["baseline", "checkpoint", "chunked-loss", "checkpoint+chunked-loss"]
    files = sorted(path.name for path in (tmp_path / "new").iterdir())
    assert files == sorted(f"lm-L32-{method.replace('+', '-')}.json" for method in methods)
    record = Record.load(tmp_path / "new" / "lm-L32-checkpoint.json")
    assert record.environment["command"].startswith("python -m experiments lm --dim 32")
    assert record.metrics["losses"] == printed[0]["metrics"]["losses"]


def test_predict_needs_no_gpu(capsys):
    assert main(["lm", "--tier", "gpu", "--predict", *TINY, "--vocab-size", "512", "--method", "baseline"]) == 0
    out = capsys.readouterr().out
    assert "predicted from shapes, nothing was run" in out and "last loss" not in out


def test_offload_writes_a_record_per_method_and_figures_without_times(tmp_path, capsys):
    methods = ["baseline", "ckpt_classic", "ckpt_async_offload", "trl"]
    assert main(["offload", *OFFLOAD, "--repeats", "1", "--out", str(tmp_path), "--method", *methods]) == 0
    out, err = capsys.readouterr()
    assert [line.split()[0] for line in out.splitlines()[2:6]] == methods
    assert "not run: trl: needs a CUDA GPU" in out and err == ""
    files = [f"offload-T64-{method}.json" for method in methods]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [*files, "offload-T64-peak.png", "offload-T64-timelines.png"]
    )
    record = Record.load(tmp_path / "offload-T64-ckpt_async_offload.json")
    assert record.metrics["store_peak_bytes"] == 2 * 64 * 16 * 4 and record.config["dim"] == 16


def test_a_failed_check_prints_one_line_and_exits_with_status_1(capsys, monkeypatch):
    def fails(*args):
        raise OSError("the disk is gone")

    monkeypatch.setattr("ackpt.offloading.transport._move", fails)
    assert main(["offload", *OFFLOAD, "--method", "ckpt_async_offload", "--timed-rounds", "0"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("python -m experiments offload: a copy to or from the offload store failed")
    assert err.count("\n") == 1


def test_profile_folder_holds_a_trace_and_scalars(tmp_path, capsys):
    pytest.importorskip("tensorboard")
    once = [*TINY, "--method", "checkpoint", "--timed-rounds", "0"]
    assert main(["synthetic", *once, "--profile-dir", str(tmp_path)]) == 0
    names = [path.name for path in (tmp_path / "checkpoint-L32").iterdir()]
    assert any(name.endswith(".pt.trace.json") for name in names)
    assert any(name.startswith("events.out.tfevents") for name in names)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["lm", "--method", "magic"], "unknown method 'magic'"),
        (["synthetic", "--method", "chunked-loss"], "no vocabulary head"),
        (["lm", "--dtype", "float16"], "needs a GPU"),
        (["lm", "--dim", "100", "--head-dim", "30"], "multiple of head_dim"),
        (["lm", "--vocab-size", "300", "--tokenizer-vocab", "400"], "does not fit the model's"),
        (["lm", *LM, "--timed-rounds", "-1"], "--timed-rounds"),
        (["lm", "--tier", "gpu"], "add --predict"),
        (["offload", "--device", "cuda"], "add --predict"),
        (["offload", "--device", "mps"], "unknown device 'mps'"),
        (["offload", *OFFLOAD, "--total-tokens", "65", "--predict"], "not a multiple of 2 sequences"),
        (["synthetic", *TINY, "--predict", "--profile-dir", "x"], "leave out --profile-dir"),
    ],
)
def test_bad_input_prints_one_line_and_exits_with_status_2(arguments, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert words in err and err.count("\n") == 1 and out == ""
    assert err.startswith(f"python -m experiments {arguments[0]}: ")


def test_an_unwritable_folder_is_reported_before_the_work(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["lm", *LM, "--out", str(tmp_path / "file" / "below")]) == 2
    assert "--out: cannot write" in capsys.readouterr().err


TINY_COLAB = {"total_tokens": 64, "batch_size": 2, "layers": 3, "dim": 16, "ff_dim": 32, "head_dim": 8, "steps": 1}
METHODS = ["baseline", "ckpt_classic", "ckpt_async_offload"]


def test_it_prints_the_table_and_returns_the_figures(capsys):
    figures = run_demo(timed_rounds=1, methods=METHODS, min_bytes=0, **TINY_COLAB)
    out, err = capsys.readouterr()
    assert list(figures) == ["peak", "time", "timelines"]
    assert "ckpt_async_offload" in out and "64 tokens in 2 sequences" in out
    assert err == ""


def test_a_method_that_fails_is_named_and_the_others_are_shown(monkeypatch, capsys):
    def broken(model):
        raise ImportError("no such wrapper")

    monkeypatch.setattr("experiments.steps.offload_methods._offload_wrapper", broken)
    run_demo(timed_rounds=0, methods=["baseline", "offload_wrapper", "save_on_cpu"], **TINY_COLAB)
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
