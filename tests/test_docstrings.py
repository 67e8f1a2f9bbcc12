"""The examples in the docstrings run, and every public name has one."""

from __future__ import annotations

import doctest
import importlib

import pytest

import ackpt

CORE = ["reentrant", "region", "refusals", "reach", "closure", "guards"]
CORE += ["rng", "autocast", "tree", "wrap", "loss", "errors", "phases"]
CORE += ["offload", "offload_engine", "offload_tally", "offload_pays", "packed", "store", "stored", "streams"]
CORE += ["transport", "transport_cuda", "graph.joint", "graph.trace"]


@pytest.mark.parametrize("name", CORE)
def test_examples_run(name):
    module = importlib.import_module(f"ackpt.{name}")
    assert module.__doc__
    assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize("name", ackpt.__all__)
def test_every_public_name_is_documented(name):
    thing = getattr(ackpt, name)
    assert thing.__doc__ and thing.__doc__.strip()
    if thing.__module__.rpartition(".")[2] in CORE and not isinstance(thing, type):
        assert ">>>" in thing.__doc__
