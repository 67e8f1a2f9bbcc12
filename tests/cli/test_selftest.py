"""The selftest passes here, and each of its checks can fail."""

import copy
import json

import pytest
import torch

from ackpt.cli import main
from ackpt.cli.selftest import BASELINE, FAILED, PASSED, WARNING, checks, run_selftest, text_of


@pytest.fixture(scope="module")
def record():
    return run_selftest()


def results(*arguments):
    return {each["check"]: each["result"] for each in checks(*arguments) if each["result"] != PASSED}


def test_all_checks_pass_on_this_machine(record):
    assert {check["result"] for check in record["metrics"]["checks"]} == {PASSED}
    assert len(record["metrics"]["checks"]) == 9
    rows = record["metrics"]["methods"]
    assert rows["plan"]["measured_peak_bytes"] < rows["regions"]["measured_peak_bytes"]
    assert "passed  budget of plan" in text_of(record) and not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize(
    ("method", "field", "factor", "on_cpu", "on_gpu"),
    [
        ("plan", "predicted_peak_bytes", 0.5, {"peak of plan": FAILED}, {"peak of plan": WARNING}),
        ("regions", "measured_peak_bytes", 1.01, {"peak of regions": FAILED}, {}),
        ("plan", "limit_bytes", 0.985, {"budget of plan": FAILED}, {"budget of plan": WARNING}),
        ("plan", "limit_bytes", 0.9, {"budget of plan": FAILED}, {"budget of plan": FAILED}),
    ],
)
def test_bytes_must_be_exact_on_a_cpu_and_warn_on_a_gpu(record, method, field, factor, on_cpu, on_gpu):
    rows = copy.deepcopy(record["metrics"]["methods"])
    rows[method][field] = int(rows[method][field] * factor)
    equal = dict.fromkeys(rows, [torch.ones(2)])
    assert results(rows, equal, equal[BASELINE], 0.0) == on_cpu
    assert results(rows, equal, equal[BASELINE], 0.02) == on_gpu


def test_gradients_that_the_baseline_does_not_repeat_are_not_compared(record):
    rows, again = record["metrics"]["methods"], [torch.ones(2), torch.zeros(2)]
    gradients = {**dict.fromkeys(rows, again), "regions": [torch.ones(2), torch.full((2,), 3.0)]}
    assert results(rows, gradients, again, 0.0) == {"gradients of regions": FAILED}
    differs = [torch.ones(2), torch.full((2,), 1e-9)]
    assert results(rows, gradients, differs, 0.0) == {"gradients of baseline, twice": WARNING}
    (first, *_) = checks(rows, gradients, differs, 0.0)
    assert first["found"] == "1 of 2 differ between two equal steps without ackpt"


def test_the_command_writes_a_record_and_its_status_says_what_failed(record, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("ackpt.cli.selftest.run_selftest", lambda device, command: record)
    assert main(["selftest", "--device", "cpu", "--out", str(tmp_path)]) == 0
    written = json.loads((tmp_path / "selftest-cpu.json").read_text())
    assert written == json.loads(json.dumps(record)) and written["environment"]["torch"]
    broken = [{"check": "budget of plan", "result": FAILED, "found": "2 of 1 bytes"}]
    monkeypatch.setitem(record["metrics"], "checks", broken)
    assert main(["selftest", "--device", "cpu"]) == 1
    assert "budget of plan: 2 of 1 bytes" in capsys.readouterr().err
    monkeypatch.undo()
    assert main(["selftest", "--device", "cuda"]) == 2
    assert "torch sees no CUDA GPU" in capsys.readouterr().err
