"""The command for tested models, on a few models, and the page that is made from its record."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import tested_models
import tested_models_page as page

from experiments.results import Record

ROOT = Path(__file__).parent.parent


def test_models_have_equal_gradients_within_the_promised_peak(tmp_path):
    file = tmp_path / "record.json"
    names = ["torch MLP", "torch MLP-Mixer", *["torchvision DenseNet"] * bool(find_spec("torchvision"))]
    command = [sys.executable, "tools/tested_models.py", "--file", str(file)]
    only = [word for name in names for word in ("--only", name)]
    done = subprocess.run([*command, *only], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    entries = Record.load(file).metrics
    assert sorted(entries) == sorted(names)
    for entry in entries.values():
        assert entry["regions"]["outcome"] == entry["plan"]["outcome"] == "equal"
        assert entry["plan"]["measured_bytes"] <= entry["plan"]["promised_bytes"] < entry["plan"]["baseline_bytes"]
    assert "torch MLP" in page.page("models", file)
    assert page.count_rows(file)[0] == {"outcome": "bit-equal", "regions": len(names), "plan": len(names)}
    assert page.page("reasons", file) == "All are bit-equal.\n"


def entry_with(**plan):
    regions = {"outcome": "equal", "difference": 0.0, "regions": 2}
    return {"parameters": 1, "regions": regions, "plan": plan, "version": "1", "commit": "a" * 40, "date": "2026-01-01"}


def test_crashes_and_wrong_numbers_are_defects():
    peaks = {"promised_bytes": 10, "measured_bytes": 10, "baseline_bytes": 20, "in_parts": None, "seconds": 0.1}
    assert not tested_models.is_defect(entry_with(outcome="equal", **peaks))
    assert tested_models.is_defect(entry_with(outcome="equal", **{**peaks, "measured_bytes": 11}))
    assert tested_models.is_defect(entry_with(outcome="different", difference=1e-3, **peaks))
    assert tested_models.is_defect(entry_with(outcome="crash", error="KeyError", message="x"))
    assert not tested_models.is_defect(entry_with(outcome="refused", error="TraceError", message="x"))
    assert not tested_models.is_defect({"not_built": "x"})


def test_a_refusal_has_its_reason_on_the_page(tmp_path):
    where = Record.load(page.FILE).environment
    entries = {
        "torch a": entry_with(outcome="refused", error="TraceError", message="reads `x` | y"),
        "torch b": {"not_built": "x"},
    }
    path = Record("tested-models", {}, entries, where).save(tmp_path / "record.json")
    assert page.reason_rows(path) == [{"model": "torch a", "way": "plan", "reason": "TraceError: `reads 'x' | y`"}]
    assert [row["model"] for row in page.model_rows(path)] == ["torch a"]


def test_the_committed_record_has_no_defects():
    entries = json.loads(page.FILE.read_text())["metrics"]
    assert set(entries) <= set(tested_models.names())
    assert not [name for name, entry in entries.items() if tested_models.is_defect(entry)]
    assert sum("not_built" not in entry for entry in entries.values()) >= 150
