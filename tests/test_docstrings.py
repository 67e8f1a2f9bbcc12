"""Every public name has an example, and the examples in all docstrings run."""

import doctest
import importlib
from pathlib import Path

import pytest
import torch
from public_names import look_up, public_names

from ackpt.planner.costs import calibration

ROOT = Path(__file__).parent.parent
DOCUMENTED = [name for name in public_names() if callable(look_up(name))]
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for package in ("ackpt", "experiments")
    for path in (ROOT / package).rglob("*.py")
    if ">>> " in path.read_text(encoding="utf-8")
)


@pytest.mark.parametrize("name", DOCUMENTED)
def test_every_public_name_has_an_example(name):
    examples = doctest.DocTestParser().get_examples(look_up(name).__doc__ or "")
    assert any(example.want for example in examples)
    assert not any(example.options for example in examples)  # what is printed is what is compared


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name, monkeypatch):
    monkeypatch.setattr(calibration, "_ROUNDS", 1)  # more rounds would only make rates steadier
    monkeypatch.setattr(calibration, "_SECONDS", 0)
    said: list[str] = []
    runner = doctest.DocTestRunner(verbose=False)
    for test in doctest.DocTestFinder().find(importlib.import_module(name)):
        torch.manual_seed(0)
        torch._dynamo.reset()
        runner.run(test, out=said.append)
    assert runner.tries and not said, "".join(said)
