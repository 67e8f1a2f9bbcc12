"""The command line: the commands that it has, those that moved, and bad input as one clear line with exit status 2."""

import json
import subprocess
import sys

import pytest

from ackpt.cli import MOVED, main
from experiments.cli.command_line import main as study


def test_doctor_says_what_is_missing(capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "datasets" else object())
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert 'missing: pip install "ackpt[lm]"' in out and "no CUDA GPU: ackpt plan" in out
    assert main(["doctor", "--json"]) == 0
    packages = {p["name"]: p["installed"] for p in json.loads(capsys.readouterr().out)["packages"]}
    assert packages["datasets"] is False and packages["tokenizers"] is True


@pytest.mark.parametrize("command", MOVED)
def test_a_command_that_moved_says_where_it_is(command, capsys):
    assert main([command, "--out", "folder"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert err.startswith(f"ackpt {command}: ") and f"`python -m experiments {command}`" in err
    with pytest.raises(SystemExit) as stop:
        study([command, "--help"])
    assert stop.value.code == 0


def refusal_by(run, arguments, capsys) -> str:
    with pytest.raises(SystemExit) as stop:
        run(arguments)
    err = capsys.readouterr().err
    assert stop.value.code == 2 and err.count("\n") == 1
    return err


UNPARSABLE = [
    *((main, arguments) for arguments in ([], ["nonsense"], ["plan", "lm", "--batch-size", "many"])),
    *((study, arguments) for arguments in ([], ["nonsense"], ["lm", "--tier", "tpu"], ["lm", "--steps", "many"])),
]


@pytest.mark.parametrize(("run", "arguments"), UNPARSABLE)
def test_unparsable_arguments_print_one_line(run, arguments, capsys):
    assert "--help" in refusal_by(run, arguments, capsys)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plan", "lm", "--budgt", "1"], "ackpt plan: unrecognized arguments: --budgt 1 (did you mean '--budget'?)"),
        (["--verbose", "doctor"], "ackpt: unrecognized arguments: --verbose"),
        (
            ["frontier", "--budget", "6GiB"],
            "python -m experiments frontier: argument --budget: '6GiB' is not a fraction of the baseline's peak: write",
        ),
        (
            ["frontier", "--polices", "auto"],
            "python -m experiments frontier: unrecognized arguments: --polices auto (did you mean",
        ),
        (["--verbose", "lm"], "python -m experiments: unrecognized arguments: --verbose"),
        (
            ["plan", "lm", "--chunk-head", "True"],
            "ackpt plan: argument --chunk-head: 'True' is not 'auto': write --chunk-head alone",
        ),
        (
            ["plan", "--chunk-head", "lm"],
            "ackpt plan: argument --chunk-head: 'lm' is not 'auto': write --chunk-head alone, or",
        ),
        (["explain", "lm"], "ackpt: argument command: unknown command 'explain' (did you mean ackpt plan --explain?)"),
        (["plann", "lm"], "ackpt: argument command: unknown command 'plann' (did you mean 'plan'?): choose from plan"),
        (
            ["plan", "lm", "--seq-lens", "8,16"],
            "ackpt plan: unrecognized arguments: --seq-lens 8,16: for several sizes write --sweep seq_len=512,1024 or",
        ),
    ],
)
def test_a_misspelt_option_is_named_by_its_command(arguments, words, capsys):
    err = refusal_by(study if "experiments" in words else main, arguments, capsys)
    assert err.startswith(words) and f"(see {words.partition(':')[0]} --help)" in err


@pytest.mark.parametrize("command, option", [("ackpt plan", "--budget"), ("experiments lm", "--loss-chunks")])
def test_modules_and_help_run_as_programs(command, option):
    command = [sys.executable, "-m", *command.split(), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and option in done.stdout
