"""The command line: every command by hand once, and every bad input one clear line with exit status 2."""

import json
import sys

import pytest

from experiments.cli.command_line import main
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
    assert [line.split()[:2] for line in lines[2:6]] == [
        ["32", "baseline"],
        ["32", "checkpoint"],
        ["48", "baseline"],
        ["48", "checkpoint"],
    ]
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


def test_offload_without_matplotlib_writes_records_and_says_what_is_missing(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "experiments.reports.plots", None)
    monkeypatch.delattr("experiments.reports.plots", raising=False)
    arguments = ["offload", *OFFLOAD, "--timed-rounds", "0", "--out", str(tmp_path), "--method", "baseline", "--json"]
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    assert len(json.loads(out)) == 1 and err.startswith("no figures: ") and err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["offload-T64-baseline.json"]


def test_offload_on_a_gpu_that_is_not_there_is_predicted_in_the_published_dtype(capsys):
    arguments = ["offload", "--device", "cuda", "--predict", *OFFLOAD, "--method", "ckpt_classic", "ckpt_sync_offload"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "predicted from shapes" in out and "float16" in out and "ms/iter" not in out.splitlines()[0]


def test_a_failed_check_prints_one_line_and_exits_with_status_1(capsys, monkeypatch):
    def fails(*args):
        raise OSError("the disk is gone")

    monkeypatch.setattr("ackpt.offloading.transport._move", fails)
    assert main(["offload", *OFFLOAD, "--method", "ckpt_async_offload", "--timed-rounds", "0"]) == 1
    err = capsys.readouterr().err
    assert (
        err.startswith("python -m experiments offload: a copy to or from the offload store failed")
        and err.count("\n") == 1
    )


def test_profile_folder_holds_a_trace_and_scalars(tmp_path, capsys):
    pytest.importorskip("tensorboard")
    once = [*TINY, "--method", "checkpoint", "--timed-rounds", "0"]
    assert main(["synthetic", *once, "--profile-dir", str(tmp_path)]) == 0
    names = [path.name for path in (tmp_path / "checkpoint-L32").iterdir()]
    assert any(name.endswith(".pt.trace.json") for name in names)
    assert any(name.startswith("events.out.tfevents") for name in names)


def test_profile_folder_without_tensorboard_names_the_line_that_installs_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    assert main(["synthetic", *TINY, "--profile-dir", str(tmp_path)]) == 2
    assert 'pip install "ackpt[profile]"' in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["lm", "--method", "magic"], "unknown method 'magic'"),
        (["synthetic", "--method", "chunked-loss"], "no vocabulary head"),
        (["lm", "--dataset", "pile"], "unknown dataset 'pile'"),
        (["lm", "--dtype", "int8"], "unknown dtype 'int8'"),
        (["lm", "--dtype", "float16"], "needs a GPU"),
        (["lm", "--dim", "100", "--head-dim", "30"], "multiple of head_dim"),
        (["lm", "--steps", "0"], "steps must be at least 1"),
        (["lm", "--steps", "-3"], "steps must be at least 1"),
        (["lm", "--seq-len", "0"], "seq_len must be at least 1"),
        (["lm", "--batch-size", "-1"], "batch_size must be at least 1"),
        (["lm", "--loss-chunks", "0"], "loss_chunks must be at least 1"),
        (["lm", "--layers", "0"], "layers must be"),
        (["lm", "--vocab-size", "300", "--tokenizer-vocab", "400"], "does not fit the model's"),
        (["lm", "--lr", "-1", *LM], "learning rate"),
        (["lm", *LM, "--seq-len", "9999999"], "corpus is too short"),
        (["lm", *LM, "--timed-rounds", "-1"], "--timed-rounds"),
        (["lm", "--tier", "gpu"], "add --predict"),
        (["synthetic", "--device", "cuda"], "add --predict"),
        (["offload", "--device", "cuda"], "add --predict"),
        (["offload", "--tier", "gpu"], "add --predict"),
        (["offload", "--dtype", "float16"], "needs a GPU"),
        (["offload", "--dtype", "int8"], "unknown dtype 'int8'"),
        (["offload", "--device", "mps"], "unknown device 'mps'"),
        (["offload", "--method", "magic"], "unknown method 'magic'"),
        (["offload", "--total-tokens", "4"], "sequences cannot share 4 tokens"),
        (["offload", "--num-layers", "0"], "layers must be"),
        (["offload", "--hidden-dim", "100"], "multiple of head_dim"),
        (["offload", "--batch-size", "0"], "batch_size must be at least 1"),
        (["batch-size", "--batches", "4,0"], "--batches must be at least 1, got 0"),
        (["offload", "--steps", "0"], "steps must be at least 1"),
        (["offload", "--min-bytes", "-1"], "min_bytes must be 0 or more"),
        (["offload", *OFFLOAD, "--repeats", "-1"], "--timed-rounds"),
        (["offload", *OFFLOAD, "--total-tokens", "65", "--predict"], "not a multiple of 2 sequences"),
        (["synthetic", "--device", "tpu"], "unknown device"),
        (["synthetic", *TINY, "--predict", "--profile-dir", "x"], "leave out --profile-dir"),
        (["lm", "--dataset-path", "somewhere", *LM], "the embedded corpus takes no path"),
        (["lm", "--dataset", "wikitext", "--dataset-path", "no-such-folder", *LM], "no-such-folder"),
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
