"""Sphinx extension of the book: the repository's address from pyproject.toml, columns of numbers, MathJax offline."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

from docutils import nodes
from docutils.nodes import Element
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.config import Config
from sphinx.environment import BuildEnvironment
from sphinx.util.fileutil import copy_asset
from sphinx.util.nodes import make_refnode

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "tools"))

from address import BRANCH, COLAB_FOLDER, repository_address  # noqa: E402

from experiments.results import NUMBER  # noqa: E402

BACK = re.compile(r'(?P<start>id="(?P<name>[^"]+)">\n<a class="viewcode-back" href="[^"#]*#)(?P<anchor>[^"]+)')
MATHJAX = ("tex-chtml-full.js", "output/chtml/fonts/woff-v2")


def set_addresses(app: Sphinx, config: Config) -> None:
    """Fill in what the theme and MathJax are told by address."""
    config["html_theme_options"].update(
        repository_url=repository_address(),
        repository_branch=BRANCH,
        path_to_docs="book",
        use_repository_button=True,
        use_edit_page_button=True,
    )
    config["mathjax_path"] = "mathjax/tex-chtml-full.js"


def without_thebe(app: Sphinx, config: Config) -> None:
    """Take out what runs cells on a remote server: jupyter-book always adds its script, hosted elsewhere."""
    for event in ("env-before-read-docs", "doctree-resolved"):
        for listener in list(app.events.listeners[event]):
            if listener.handler.__module__ == "sphinx_thebe":
                app.disconnect(listener.id)


def find_by_last_name(app: Sphinx, environment: BuildEnvironment, node: pending_xref, text: Element) -> Element | None:
    """Resolve `MeterError` to `ackpt.metering.meter.MeterError`: docstrings name things as their own module does."""
    if node.get("refdomain") != "py":
        return None
    last = node["reftarget"].split(".")[-1]
    found = [entry for entry in environment.get_domain("py").get_objects() if entry[0].split(".")[-1] == last]
    own = [entry for entry in found if entry[5] != -1] or found
    if len(own) != 1:
        return None
    name, _, _, page, anchor, _ = own[0]
    return make_refnode(app.builder, node["refdoc"], page, anchor, text, name)


def align_numbers(app: Sphinx, doctree: nodes.document) -> None:
    """Align every column that has only numbers to the right, also in tables that no program writes."""
    for table in doctree.findall(nodes.table):
        rows = [list(row.findall(nodes.entry)) for row in table.findall(nodes.row)]
        body = [list(row.findall(nodes.entry)) for part in table.findall(nodes.tbody) for row in part.children]
        if not body or any(len(row) != len(rows[0]) for row in rows):  # a cell that spans others has no column
            continue
        for place in range(len(rows[0])):
            texts = [row[place].astext().strip() for row in body]
            if any(texts) and all(text == "not yet measured" or NUMBER.fullmatch(text) for text in texts):
                for row in rows:
                    row[place]["classes"] = [*{*row[place]["classes"]} - {"text-left", "text-center"}, "text-right"]


def name_list_items(app: Sphinx, page: str, template: str, context: dict, doctree: Element | None) -> None:
    """Give the entries of the bibliography the role that screen readers know in a list; docutils' one is deprecated."""
    if "body" in context:
        context["body"] = context["body"].replace('role="doc-biblioentry"', 'role="listitem"')


def link_back(app: Sphinx, page: str, template: str, context: dict, doctree: Element | None) -> None:
    """Lead from a source page to where a thing is described; viewcode takes one module's name for all in a file."""
    if not page.startswith(("_modules/ackpt", "_modules/experiments")):
        return
    anchors = {name: anchor for name, _, _, _, anchor, _ in app.env.get_domain("py").get_objects()}
    module = page.split("/")[1:]

    def back(link: re.Match) -> str:
        # A name is documented as one of its module, of a package around that, or of `ackpt.graph`, which re-exports it.
        names = [".".join([*module[:length], link["name"]]) for length in range(1, len(module) + 1)]
        names.append(f"ackpt.graph.{link['name']}")
        return link["start"] + next((anchors[name] for name in names if name in anchors), link["anchor"])

    context["body"] = BACK.sub(back, context["body"])


def open_for_colab(app: Sphinx, page: str, template: str, context: dict, doctree: Element | None) -> None:
    """Let the theme's button open the notebook that is made for Colab; the chapter itself has MyST."""
    for group in context.get("header_buttons", []):
        for button in group.get("buttons", []):
            if button.get("text") == "Colab":
                button["url"] = button["url"].replace("/book/notebooks/", f"/{COLAB_FOLDER}/")


def copy_mathjax(app: Sphinx, error: Exception | None) -> None:
    """Copy the part of MathJax that the pages use from the installed package (named with dashes, so not importable)."""
    package = importlib.util.find_spec("sphinx-mathjax-offline")
    if error is None and package and package.submodule_search_locations:
        source = Path(package.submodule_search_locations[0], "static", "mathjax")
        for name in MATHJAX:
            target = Path(app.outdir, "_static", "mathjax", name)
            copy_asset(str(source / name), str(target if (source / name).is_dir() else target.parent))


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the extension."""
    app.connect("config-inited", set_addresses)
    app.connect("config-inited", without_thebe)
    app.connect("doctree-read", align_numbers)
    app.connect("missing-reference", find_by_last_name)
    app.connect("html-page-context", name_list_items)
    app.connect("html-page-context", link_back)
    app.connect("html-page-context", open_for_colab, priority=502)  # the theme adds the button at 501
    app.connect("build-finished", copy_mathjax)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
