"""The policy that CONTRIBUTING.md shows works as it stands there, and what the page names exists."""

import re

import pytest
from test_readme import ROOT, blocks

TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
MODULE, TEST = blocks("python", TEXT)
PATHS = sorted(set(re.findall(r"`((?:ackpt|experiments|tests|tools|results|book|notebooks)/[\w/.]+)`", TEXT)))


def test_the_policy_of_the_page_keeps_budgets():
    assert len(MODULE.splitlines() + TEST.splitlines()) <= 40
    names: dict = {}
    exec(MODULE + TEST, names)
    (test,) = (value for name, value in names.items() if name.startswith("test_"))
    ((_, budgets),) = (mark.args for mark in test.pytestmark)
    for budget in budgets:
        test(budget)


@pytest.mark.parametrize("path", PATHS)
def test_every_file_that_the_page_names_exists(path):
    made_later = ("notebooks/NN_topic.py", "results/gpu", "book/_build/html")
    assert (ROOT / path).exists() or path in made_later


def test_every_session_that_the_page_names_exists():
    sessions = {name for line in re.findall(r"nox\s-s\s([a-z ]+)", TEXT) for name in line.split()}
    noxfile = (ROOT / "noxfile.py").read_text(encoding="utf-8")
    defined = re.findall(r'^def (\w+)\(session|session\(name="(\w+)"', noxfile, re.M)
    assert "fast" in sessions and sessions <= {name for names in defined for name in names}


def test_the_fast_lane_names_tests_that_exist():
    (fast,) = re.findall(r'^FAST = """(.*?)"""', (ROOT / "noxfile.py").read_text(encoding="utf-8"), re.M | re.S)
    assert [name for name in fast.split() if not (ROOT / "tests" / name).exists()] == []
