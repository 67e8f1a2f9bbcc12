"""Do the book's pages say what the package says? Errors, sources, links to Colab, and interactive figures."""

import ast
import json
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
        if isinstance(cls := getattr(module, name), type)
        and issubclass(cls, Exception)
        and cls.__module__.split(".")[0] in ("ackpt", "experiments")
    }


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


USED = re.compile(r"```\{(\w+)-explorer\} (\S+)\n:image: (\S+)\n:alt: (.+)\n(?::start: (\S+)\n)?```")


def markdown(path):
    """The text of a page, or of a chapter without the marks of comments."""
    return re.sub(r"^# ?", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE)


def used():
    found = []
    for path in sorted([*(ROOT / "notebooks").glob("*.py"), *(ROOT / "book").glob("*.md")]):
        page = ROOT / "book" / ("notebooks" if path.suffix == ".py" else "")
        for name, read, image, alt, start in USED.findall(markdown(path)):
            found.append((name, (page / read).resolve(), (page / image).resolve(), alt, start))
    return found


def test_every_explorer_is_on_a_page_with_its_data_and_a_picture():
    extension = ast.parse((ROOT / "book" / "_ext" / "explorers.py").read_text(encoding="utf-8"))
    (names,) = (
        ast.literal_eval(node.value)
        for node in extension.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "EXPLORERS"
    )
    assert {name for name, *_ in used()} == {*names}
    for name, path, image, alt, start in used():
        read = json.loads(path.read_text(encoding="utf-8"))
        assert read["schema"].startswith("ackpt.")
        assert not start or start in [variant["name"] for variant in read["variants"]]
        assert image.is_file() and len(alt) > 40
        for source in ("common", name):
            assert all((ROOT / "book" / "_explorer" / f"{source}.{end}").is_file() for end in ("css", "js"))
        script = (ROOT / "book" / "_explorer" / f"{name}.js").read_text(encoding="utf-8")
        assert script.rstrip().endswith(f'start("{name}-explorer", build);')


def test_no_explorer_is_missed():
    sources = [*(ROOT / "notebooks").glob("*.py"), *(ROOT / "book").glob("*.md")]
    assert len(used()) == sum(path.read_text(encoding="utf-8").count("-explorer}") for path in sources)


def test_no_script_or_style_of_them_is_loaded_from_elsewhere():
    for path in (ROOT / "book" / "_explorer").iterdir():
        text = path.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|@import|\bfetch\(|\bimport\b", text), path.name


def test_the_colors_of_categories_are_those_of_timelines():
    from experiments.reports.plots import COLORS

    common = (ROOT / "book" / "_explorer" / "common.js").read_text(encoding="utf-8")
    (block,) = re.findall(r"const COLORS = \{(.*?)\};", common, re.DOTALL)
    colors = dict(re.findall(r'(\w+): "(#\w+)"', block))
    assert colors == {name: color for name, color in COLORS.items() if name not in ("resident", "other")}
    style = (ROOT / "book" / "_explorer" / "frontier.css").read_text(encoding="utf-8")
    assert dict(re.findall(r"--(\w+): (#\w+)", style.partition("}")[0])) == {
        "saved": colors["activations"],
        "recomputed": colors["recomputed"],
    }
