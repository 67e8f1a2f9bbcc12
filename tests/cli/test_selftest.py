"""The selftest passes here, and each of its checks can fail."""

import json

import pytest

from ackpt.cli import main
from ackpt.cli.selftest import TOLERANCE, SelftestConfig, _checks, run_selftest, text_table


@pytest.fixture(scope="module")
def record():
    return run_selftest(SelftestConfig(rounds=1))


def test_all_checks_pass_on_this_machine(record):
    assert [check["check"] for check in record.metrics["checks"] if not check["passed"]] == []
    assert len(record.metrics["checks"]) == 8
    rows = record.metrics["methods"]
    assert rows["plan"]["measured_peak_bytes"] < rows["baseline"]["measured_peak_bytes"]
    assert rows["regions, offload"]["seconds_hidden_share"] is not None
    assert "passed  budget of plan" in text_table(record)


@pytest.mark.parametrize(
    ("method", "field", "value", "broken"),
    [
        ("regions", "gradients_difference", 1e-9, "gradients of regions"),
        ("regions, offload", "gradients_difference", 1e-9, "gradients of regions, offload"),
        ("plan", "predicted_peak_bytes", 1, "peak of plan"),
        ("plan", "limit_bytes", 1, "budget of plan"),
    ],
)
def test_each_check_can_fail(record, method, field, value, broken):
    measured = {name: dict(row) for name, row in record.metrics["methods"].items()}
    measured[method][field] = value
    assert [check["check"] for check in _checks(measured, TOLERANCE["cpu"]) if not check["passed"]] == [broken]


@pytest.mark.parametrize(("reserved", "passed"), [(105 << 20, True), (115 << 20, False)])
def test_reserved_bytes_are_checked_where_there_is_an_allocator(record, reserved, passed):
    measured = {name: dict(row) for name, row in record.metrics["methods"].items()}
    measured["regions"] |= {"reserved_peak_bytes": reserved, "predicted_reserved_peak_bytes": 100 << 20}
    checks = {check["check"]: check["passed"] for check in _checks(measured, TOLERANCE["cpu"])}
    assert checks["reserved bytes of regions"] is passed


def test_the_command_writes_a_record_and_its_status_says_what_failed(record, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("ackpt.cli.selftest.run_selftest", lambda config, command: record)
    assert main(["selftest", "--device", "cpu", "--out", str(tmp_path)]) == 0
    written = json.loads((tmp_path / "selftest-cpu.json").read_text())
    assert written == record.to_json() and written["environment"]["torch"]
    checks = [{"check": "budget of plan", "passed": False, "found": "2 of 1 bytes"}]
    monkeypatch.setitem(record.metrics, "checks", checks)
    assert main(["selftest", "--device", "cpu"]) == 1
    assert "budget of plan: 2 of 1 bytes" in capsys.readouterr().err
    assert main(["selftest", "--device", "cuda"]) == 2
    assert "torch sees no CUDA GPU" in capsys.readouterr().err
