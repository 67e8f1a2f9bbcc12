"""The package is one house: imports point one way, along the path of a step, and every name has one meaning."""

import importlib
import inspect
import pkgutil
import subprocess
import sys

import pytest
from imports import EXPERIMENTS, cycles, graph, modules, package_of, written
from structure import figures

import ackpt

IMPORTS = graph()
# Every package imports only what stands before it; modules beside them count as packages.
ORDER = (
    "core offloading metering checkpointing models capture costs schedule policies request choose parts step graph "
    "backend workloads sharding explain api trainer_callback planner cli"
).split()
PART_ONE = {"offloading", "metering", "checkpointing"}
EVERYTHING = {**modules(), **modules(EXPERIMENTS)}
MOST_LINES = 600  # of one file


def test_files_have_no_cycle():
    assert cycles(IMPORTS) == []
    assert cycles(graph(EXPERIMENTS)) == []


@pytest.mark.parametrize("figure", figures(), ids=lambda figure: figure.what)
def test_the_structure_stays_within_its_limits(figure):
    assert figure.value <= figure.most


def test_packages_import_only_earlier_packages():
    against = [
        (source, target)
        for source, targets in IMPORTS.items()
        for target in targets
        if (importing := package_of(source)) not in ("", "__main__")
        and importing != package_of(target)
        and (importing != "cli" if target == "ackpt" else ORDER.index(package_of(target)) > ORDER.index(importing))
    ]
    assert against == []


def test_every_package_has_its_place_in_the_order():
    found = {package_of(name) for name in modules()} - {"", "__main__"}
    assert found == set(ORDER)


def test_part_one_never_imports_part_two():
    part_two = ORDER[ORDER.index("capture") :]
    reached = {package_of(t) for name, targets in IMPORTS.items() if package_of(name) in PART_ONE for t in targets}
    assert not reached & set(part_two)


def test_the_package_never_imports_the_study():
    """Nor what a checkout has besides; in functions, for type checkers and by name included."""
    outside = {"experiments", "tests", "tools", "notebooks"}
    against = {name: found for name, path in modules().items() if (found := {*written(path)} & outside)}
    assert against == {}
    assert "experiments" in written(modules(EXPERIMENTS)["experiments.cli.command_line"])  # the test can fail


def test_no_file_is_too_long():
    lengths = {name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in modules().items()}
    assert {name: lines for name, lines in lengths.items() if lines > MOST_LINES} == {}


@pytest.mark.parametrize("name", [name for name, path in EVERYTHING.items() if path.name == "__init__.py"])
def test_no_function_has_the_path_of_a_module(name):
    package = importlib.import_module(name)
    submodules = {module.name for module in pkgutil.iter_modules(package.__path__)}
    exported = {*getattr(package, "__all__", ()), *(k for k, v in vars(package).items() if inspect.isroutine(v))}
    assert not submodules & exported


@pytest.mark.parametrize("name", sorted(set(EVERYTHING) - {"ackpt.__main__", "experiments.__main__"}))
def test_a_module_says_what_it_is_for(name):
    first_line = (importlib.import_module(name).__doc__ or "").split("\n")[0]
    assert first_line.endswith((".", ":")) and len(first_line) > 15


def test_the_lazy_names_exist():
    assert all(hasattr(ackpt, name) for name in [*ackpt.__all__, "graph", "policies"])


IMPORTED = """
import sys, torch
before = set(sys.modules)
import ackpt
first = set(sys.modules) - before
assert not first & {"matplotlib", "IPython", "ackpt.graph"}, first
import experiments.data
assert not {"datasets", "tokenizers"} & set(sys.modules)
assert callable(ackpt.trace) and "ackpt.graph" in sys.modules
import ackpt.planner.api
loaded = set(sys.modules) - before
assert "ackpt.core.progress" in loaded and not any(name.split(".")[0] == "tqdm" for name in loaded), loaded
"""


def test_optional_packages_are_imported_when_they_are_used():
    done = subprocess.run([sys.executable, "-c", IMPORTED], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
