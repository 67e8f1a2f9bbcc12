"""Rates of a CPU: measured once, stored, read again, and refused where they cannot be read."""

import json
import logging

import pytest
import torch
from conftest import raises, threads

import ackpt
from ackpt.planner.costs import calibration
from ackpt.planner.costs.calibration import CalibrationError, load, this_cpu
from ackpt.planner.costs.profiles import profile
from experiments.results import RecordError


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache folder, and no file that is given; measuring takes no time."""
    monkeypatch.delenv(calibration.VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(calibration, "_fastest", lambda call: (call(), 0.001)[1])
    monkeypatch.setattr(calibration, "_ROUNDS", 1)
    calibration._this_cpu.cache_clear()
    yield tmp_path / "ackpt"
    calibration._this_cpu.cache_clear()


def stored(cache):
    (path,) = cache.iterdir()
    return path


def test_the_first_call_measures_and_the_second_process_reads(cache, monkeypatch):
    first = this_cpu()
    assert json.loads(stored(cache).read_text())["machine"]["threads"] == torch.get_num_threads()
    calibration._this_cpu.cache_clear()
    monkeypatch.setattr(calibration, "measured", lambda: pytest.fail("it is stored"))
    assert this_cpu() == first


def test_another_number_of_threads_is_measured_again(cache):
    this_cpu()
    with threads(torch.get_num_threads() + 1):
        this_cpu()
    assert len(list(cache.iterdir())) == 2


@pytest.mark.parametrize("damage", ["machine", "truncated", "version", "rate"])
def test_a_file_of_another_machine_or_version_is_measured_again_with_a_note(cache, caplog, damage):
    first = this_cpu()
    path = stored(cache)
    data = json.loads(path.read_text())
    if damage == "machine":
        data["machine"]["processor"] = "another"
    elif damage == "version":
        data["version"] = 0
    elif damage == "rate":
        data["by_operation"]["mm"]["float32"] = -1.0
    path.write_text(json.dumps(data)[: -20 if damage == "truncated" else None])
    calibration._this_cpu.cache_clear()
    with caplog.at_level(logging.WARNING, "ackpt"):
        assert this_cpu() == first
    assert "calibrated again" in caplog.text
    calibration._this_cpu.cache_clear()
    caplog.clear()
    this_cpu()
    assert not caplog.text


@pytest.mark.parametrize("home", ["a file", "none"])
def test_a_cache_that_cannot_be_written_is_a_warning(cache, caplog, monkeypatch, home):
    cache.write_text("a file, no folder")
    if home == "none":  # a container with a user of no name
        monkeypatch.setenv("XDG_CACHE_HOME", "~no-such-user/.cache")
    with caplog.at_level(logging.WARNING, "ackpt"):
        assert this_cpu().flops_per_second["float32"] > 0
    assert "cannot be stored" in caplog.text


def test_a_given_file_is_used_on_every_machine(cache, tmp_path, monkeypatch):
    path = tmp_path / "cpu.json"
    written = ackpt.calibrate(path)
    data = json.loads(path.read_text())
    path.write_text(json.dumps(data | {"machine": data["machine"] | {"processor": "another"}}))
    monkeypatch.setenv(calibration.VARIABLE, str(path))
    assert this_cpu().by_operation == written.by_operation
    assert not cache.exists()


def test_files_that_cannot_be_read_or_written(tmp_path):
    with pytest.raises(CalibrationError, match="not a calibration"):
        path = tmp_path / "other.json"
        path.write_text("{}")
        load(path)
    raises(CalibrationError, "no.json", lambda: load(tmp_path / "no.json"))
    with pytest.raises(RecordError):
        ackpt.calibrate(tmp_path / "other.json" / "x.json")


def test_plans_use_the_rates():
    graph = ackpt.trace(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5)), torch.ones(4, 8))
    costs = dict(zip((node.target for node in graph.nodes), profile(graph, "cpu").seconds))
    rates = this_cpu()
    draws = next(seconds for target, seconds in costs.items() if "dropout_noise" in target)
    assert draws == rates.seconds_per_call + 32 / rates.by_operation["dropout_noise"]["float32"]
    products = costs["aten.addmm.default"]
    assert products == rates.seconds_per_call + 2 * 4 * 8 * 8 / rates.by_operation["addmm"]["float32"]
    assert ackpt.plan(graph).device == "cpu"
