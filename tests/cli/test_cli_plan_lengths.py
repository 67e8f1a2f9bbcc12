"""``ackpt plan --lengths``: a report on all batches of a data set, and clear errors."""

import json

import pytest
from test_cli_plan import GPT2, planned

from ackpt.cli import main

MODEL = [each for each in GPT2 if each not in ("--seq-len", "16")]
LENGTHS = [16, 4, 9, 16, 3]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "lengths.txt"
    path.write_text("\n".join(map(str, LENGTHS)))
    return str(path)


def test_the_report_agrees_with_the_plan_of_one_batch(capsys, file):
    report = planned(capsys, *MODEL, "--lengths", file, "--batch-size", "2", "--device-profile", "l4")
    alone = planned(capsys, *GPT2, "--batch-size", "2", "--device-profile", "l4")
    method = report["methods"]["none"]
    assert (
        report["model"] == "hf:GPT2Config" and report["device"] == "l4" and list(report["methods"]) == ["none", "full"]
    )
    assert method["random"]["bytes"]["worst"] == alone["peak_bytes"] and method["random"]["worst"] == [2, 16]
    assert (method["sorted"]["batches"], method["sorted"]["exceeding"], method["largest"]) == (3, 0, len(LENGTHS))


def test_the_table_has_a_row_per_method(capsys, file):
    assert main(["plan", *MODEL, "--lengths", file, "--tokens-per-batch", "32"]) == 0
    first, head, *rows = capsys.readouterr().out.splitlines()
    assert first == "5 sequences of 3 to 16 tokens; batches of at most 32 tokens, padding included"
    assert head.split() == ["order", "batches", "median", "99", "%", "worst"]
    assert [row.split()[:2] for row in rows[:4:2]] == [["without", "checkpointing"], ["per-block", "checkpointing"]]
    assert "of the epoch's FLOPs" in rows[4]


def test_the_report_takes_your_own_model(capsys, tmp_path, file):
    (tmp_path / "own.py").write_text(
        "import torch\n"
        "def make(batch_size, seq_len):\n"
        "    model = torch.nn.Sequential(torch.nn.Embedding(50, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))\n"
        "    return model, {'input': torch.zeros(batch_size, seq_len, dtype=torch.long)}\n"
    )
    own = ["--model", f"{tmp_path}/own.py:make"]
    report = planned(capsys, *own, "--lengths", file, "--batch-size", "2")["methods"]["none"]
    alone = planned(capsys, *own, "--seq-len", "16", "--batch-size", "2")
    assert report["sorted"]["bytes"]["worst"] == alone["peak_bytes"] and report["sorted"]["worst"] == [2, 16]


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("16\n-1", ["--batch-size", "2"], "line 2 of {} is -1: a length is a positive integer"),
        ("16\n\n7.5", ["--batch-size", "2"], "--lengths {}, line 3: '7.5' is not a number of tokens"),
        ("[12,\n 7,,]", ["--batch-size", "2"], "--lengths {}, line 2: this is not JSON"),
        ("16\n\n99999", ["--batch-size", "2"], "line 3 of {} is 99999, longer than the 1024 positions of the model"),
        ('["16"]', ["--batch-size", "2"], "entry 1 of {} is '16': a length is a positive integer"),
        ("", ["--batch-size", "2"], "there are no lengths"),
        ("16", [], "no way to make batches: give one of --batch-size, --tokens-per-batch and --packed"),
        ("16", ["--batch-size", "2", "--packed", "64"], "--batch-size and --packed to make batches: give one of"),
        ("16", ["--batch-size", "0"], "--batch-size must be an integer of at least 1, got 0"),
        ("16", ["--batch-size", "2", "--device-profile", "t4,l4"], "--lengths reports on one device: give one of"),
        ("16", ["--batch-size", "2", "--seq-len", "9"], "reports on all batches of a data set: leave out --seq-len"),
        ("16", ["--batch-size", "2", "--policy", "full"], "reports on all batches of a data set: leave out --policy"),
        ("16", ["--batch-size", "2", "--budget", "50%"], "is a fraction, which bounds every batch by its own baseline"),
    ],
)
def test_unusable_options_are_refused(capsys, tmp_path, text, options, message):
    path = tmp_path / "lengths"
    path.write_text(text)
    assert main(["plan", *MODEL, "--lengths", str(path), *options]) == 2
    assert message.format(path) in capsys.readouterr().err


def test_options_that_need_a_file_are_refused_without_one(capsys, tmp_path):
    assert main(["plan", *MODEL, "--packed", "64"]) == 2
    assert "--tokens-per-batch and --packed make batches of the sequences of --lengths" in capsys.readouterr().err
    assert main(["plan", *MODEL, "--lengths", str(tmp_path / "missing"), "--batch-size", "1"]) == 2
    assert "missing cannot be read" in capsys.readouterr().err


def test_packed_rows_are_for_models_of_transformers(capsys, file):
    assert main(["plan", "lm", "--lengths", file, "--packed", "64"]) == 2
    assert "--packed makes rows for models of transformers (hf:...), not lm" in capsys.readouterr().err


def test_lengths_of_a_built_in_model(capsys, file):
    fields = ["--set", "dim=64", "ff_dim=128", "layers=1", "head_dim=16", "vocab_size=100"]
    report = planned(capsys, "lm", *fields, "--lengths", file, "--batch-size", "2")
    alone = planned(capsys, "lm", *fields, "--seq-len", "16", "--batch-size", "2")
    assert report["methods"]["none"]["random"]["bytes"]["worst"] == alone["peak_bytes"]


def test_json_has_only_plain_types(capsys, file):
    assert main(["plan", *MODEL, "--lengths", file, "--packed", "32", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["batches"] == "of one row of at most 32 tokens, packed"
    assert all(method["largest"] is None for method in report["methods"].values())
