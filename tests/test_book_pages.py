"""Do the book's reference pages say what the package says? Errors and their messages, sources, links to Colab."""

import ast
import re
from functools import cache
from pathlib import Path

from address import colab_address, repository_address

import ackpt
from ackpt import graph
from ackpt.core import errors
from ackpt.metering import flops
from experiments import data

ROOT = Path(__file__).parent.parent
BOOK = ROOT / "book"
GAP = "…"


def error_classes(*modules):
    return {
        name
        for module in modules
        for name in (*getattr(module, "__all__", ()), *vars(module))
        if isinstance(cls := getattr(module, name), type) and issubclass(cls, Exception) and is_ours(cls)
    }


def is_ours(cls):
    return cls.__module__.split(".")[0] in ("ackpt", "experiments")


@cache
def quoted() -> tuple[str, ...]:
    """The messages that the page quotes: what stands in backticks on lines before a definition."""
    lines = (BOOK / "troubleshooting.md").read_text(encoding="utf-8").splitlines()
    terms = [line for line, following in zip(lines, lines[1:], strict=False) if following.startswith(": ")]
    return tuple(text for line in terms for text in re.findall(r"`([^`]+)`", line))


@cache
def texts() -> list[str]:
    """All texts of the code, a gap for whatever is filled in."""
    found: list[str] = []
    for path in sorted([*ROOT.glob("ackpt/**/*.py"), *ROOT.glob("experiments/**/*.py")]):
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if id(node) not in docstrings and len(said := text(node)) >= 10:
                found.append(said)
    return found


def text(node: ast.AST) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(text(part) or GAP for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return "".join(text(part) or GAP for part in (node.left, node.right))
    return ""


def is_quoted_from(message: str, source: str) -> bool:
    """Whether the parts of `message` between gaps occur in `source`, in their order."""
    start = 0
    for part in filter(None, map(str.strip, message.split(GAP))):
        start = source.find(part, start) + len(part)
        if start < len(part):
            return False
    return True


OUR_ERRORS = error_classes(errors, ackpt, graph, flops, data)


def test_every_error_class_is_on_the_page():
    page = (BOOK / "troubleshooting.md").read_text(encoding="utf-8")
    assert {"BudgetError", "CheckpointError", "RecordError", "TraceError"} <= OUR_ERRORS
    assert sorted(name for name in OUR_ERRORS if not re.search(rf"\b{name}`", page)) == []


def test_every_quoted_message_is_in_the_package():
    assert len(quoted()) > 40
    vague = [message for message in quoted() if max(map(len, message.split(GAP))) < 10]
    gone = [message for message in quoted() if not any(is_quoted_from(message, source) for source in texts())]
    assert (vague, gone) == ([], [])


def test_a_message_with_another_wording_is_not_found():
    assert is_quoted_from("the … has gone", "now the … cat has gone away")
    assert not is_quoted_from("the … has gone", "has gone the cat")


def test_every_cited_source_is_in_the_bibliography():
    number = r"arXiv[:.]+(?:org/abs/)?(\d{4}\.\d{5})|doi(?::|\.org/)(10\.\d{4,}/[\d.]+\d)"
    sources = [*(ROOT / "ackpt").rglob("*.py"), *(ROOT / "notebooks").glob("*.py")]
    cited = {found for path in sources for found in re.findall(number, path.read_text(encoding="utf-8"), re.IGNORECASE)}
    bibliography = (BOOK / "references.bib").read_text(encoding="utf-8")
    assert len(cited) > 10
    assert sorted(one for pair in cited for one in pair if one not in bibliography) == []


def test_every_entry_of_the_bibliography_is_explained():
    keys = re.findall(r"^@\w+\{(\w+),", (BOOK / "references.bib").read_text(encoding="utf-8"), re.MULTILINE)
    page = (BOOK / "bibliography.md").read_text(encoding="utf-8")
    assert keys
    assert [key for key in keys if f"`{key}`" not in page] == []


def test_every_chapter_opens_in_colab():
    names = re.findall(r"file: (notebooks/\S+)", (BOOK / "_toc.yml").read_text(encoding="utf-8"))
    assert names
    for name in names:
        path = f"book/colab/{Path(name).name}.ipynb"
        assert (ROOT / path).is_file()
        assert colab_address(repository_address(), path) in (BOOK / f"{name}.ipynb").read_text(encoding="utf-8")
    selftest = colab_address(repository_address(), "book/colab/12_your_gpu.ipynb")
    assert selftest in (BOOK / "index.md").read_text(encoding="utf-8")


def test_every_guarantee_names_a_test_that_exists():
    page, _, exceptions = (BOOK / "guarantees.md").read_text(encoding="utf-8").partition("(not-guaranteed)=")
    assert exceptions
    rows = [line for line in page.splitlines() if line.startswith("| ") and not line.startswith("| guarantee")]
    named = [re.findall(r"`((?:tests|tools)/[\w/]+\.py)(?:::(\w+))?`", row) for row in rows]
    assert len(rows) > 30 and all(named)
    for path, test in (each for row in named for each in row):
        code = (ROOT / path).read_text(encoding="utf-8")
        assert path.startswith("tools/") or f"\ndef {test}(" in code, f"{path}::{test}"
