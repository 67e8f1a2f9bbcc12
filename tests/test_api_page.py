"""Does the API page have every public name: those of the packages, and those that the book and the README use?"""

import ast
import re
from functools import cache
from pathlib import Path

import pytest
from public_names import look_up, public_names

import ackpt
from ackpt import graph, models
from ackpt.metering import meter
from experiments import data, results

ROOT = Path(__file__).parent.parent
PACKAGES = (ackpt, graph, models, meter, results, data)
CHAPTERS = ("ackpt.cli", "ackpt.planner.sharding", "ackpt.planner.workloads")  # the code of the command line


@cache
def documented():
    return {id(thing): thing for thing in map(look_up, public_names())}


def is_documented(thing):
    return id(thing) in documented()


def code():
    """The chapters, and the Python of the README and of the pages."""
    texts = {path.name: path.read_text(encoding="utf-8") for path in sorted(ROOT.glob("notebooks/*.py"))}
    for path in (ROOT / "README.md", *sorted((ROOT / "book").glob("*.md"))):
        blocks = re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL)
        texts[path.name] = "\n".join(blocks)
    return texts


def used(text: str):
    """What a text uses of the package, by full name: `from ackpt.x import y`, `y.z` and `ackpt.y.z`."""
    tree = ast.parse(re.sub(r"^( *)[%!].*", r"\1pass", text, flags=re.MULTILINE))
    known = {"ackpt": "ackpt"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "ackpt":
            known |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    yield from known.values()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            first, *rest = ast.unparse(node).split(".")
            if first in known and all(part.isidentifier() for part in rest):
                yield ".".join([known[first], *rest])


def test_names_are_listed_once():
    names = public_names()
    assert len(set(names)) == len(names)
    assert len(documented()) == len(names)


@pytest.mark.parametrize("module", PACKAGES, ids=lambda module: module.__name__)
def test_every_exported_name_is_on_the_page(module):
    assert [name for name in module.__all__ if not is_documented(getattr(module, name))] == []


def test_every_name_that_the_book_uses_is_on_the_page():
    missing = set()
    for text in code().values():
        for name in {*used(text)} - {"ackpt"}:
            if name.startswith(CHAPTERS) or name.split(".")[-1].startswith("_"):
                continue
            try:
                thing = look_up(name)
            except (AttributeError, ModuleNotFoundError):  # an attribute of a documented thing
                continue
            if callable(thing) and thing.__module__.startswith("ackpt") and not is_documented(thing):
                missing.add(name)
    assert missing == set()
