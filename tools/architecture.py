"""The figure and the tables of the book's page Architecture, read from the source of the package.

`book/_ext/architecture_page.py` calls `part` when the book is built: what the page shows follows from the imports,
classes and docstrings of that moment. `STAGES` names what the source cannot say: the order in which a step passes
through the packages. ``tests/test_architecture.py`` checks it against the source.
"""

from __future__ import annotations

import ast
import re
from functools import cache, partial
from html import escape
from itertools import permutations
from typing import NamedTuple

from address import BRANCH, ROOT, repository_address
from imports import PACKAGE, graph, modules, package_of, room

WIDTH, ROW, BOX, GAP = 400, 62, (112, 38), 12  # of the figure, in its own units


class Stage(NamedTuple):
    """A stage of the flow: its package, the function that readers start from, and the main type that it returns."""

    name: str
    package: str
    function: str
    returns: str


STAGES = (
    Stage("capture", "capture", "trace", "JointGraph"),
    Stage("cost", "costs", "profile", "Profile"),
    Stage("plan", "policies", "schedule", "Schedule"),
    Stage("check", "schedule", "simulate", "Plan"),
    Stage("run", "schedule", "rewrite", "Rewritten"),
)


@cache
def packages() -> dict[str, set[str]]:
    """Package, or file of the planner's first floor -> those that it imports."""
    drawn = {package_of(name) for name, path in modules().items() if path.name == "__init__.py"}
    drawn |= {package_of(name) for name in modules() if name.startswith("ackpt.planner.")}
    drawn -= {"", "planner"}  # whose rooms are drawn
    edges: dict[str, set[str]] = {name: set() for name in sorted(drawn)}
    for module, imported in graph().items():
        if (source := package_of(module)) in drawn:
            edges[source] |= {package_of(name) for name in imported} & drawn - {source}
    return edges


def reduced(edges: dict[str, set[str]]) -> dict[str, set[str]]:
    """`edges` without those that follow from others: the transitive reduction of a graph without cycles."""

    @cache
    def reached(node: str) -> frozenset[str]:
        return frozenset(edges[node]).union(*(reached(other) for other in edges[node]))

    return {
        node: {other for other in others if not any(other in reached(between) for between in others - {other})}
        for node, others in edges.items()
    }


def rows(edges: dict[str, set[str]]) -> list[list[str]]:
    """The nodes in rows, every node below all that it imports; one that imports nothing is right above its importer.

    An arrow that crosses a row passes through a gap there, called ``"imported>importer"``. The order within a row makes
    the arrows as short as possible.
    """

    @cache
    def depth(node: str) -> int:
        return 1 + max((depth(other) for other in edges[node]), default=-1)

    depths = {node: depth(node) for node in edges}
    for node in edges:
        if not edges[node] and (importers := [depths[other] for other in edges if node in edges[other]]):
            depths[node] = min(importers) - 1
    pairs = [(other, node) for node in edges for other in edges[node]]
    ordered: list[list[str]] = []
    above: dict[str, float] = {}
    for number in range(max(depths.values()) + 1):
        row = [node for node in edges if depths[node] == number]
        row += [f"{other}>{node}" for other, node in pairs if depths[other] < number < depths[node]]
        arrows = [(other, node) for other, node in pairs if depths[node] == number]
        arrows += [(name.partition(">")[0], name) for name in row if ">" in name]
        ordered.append(list(min(permutations(sorted(row)), key=partial(_length, arrows, above))))
        above |= centers(ordered[-1])
    return ordered


def _length(arrows: list[tuple[str, str]], above: dict[str, float], row) -> float:
    """How far the arrows into a row go sideways when it has this order."""
    x = centers(row)
    return sum(abs(x[node] - above.get(f"{other}>{node}", above[other])) for other, node in arrows)


def centers(row) -> dict[str, float]:
    """Where the boxes and the gaps of a row are centered."""
    widths = [GAP if ">" in node else BOX[0] for node in row]
    space = (WIDTH - sum(widths)) / len(row)
    return {node: sum(widths[:i]) + widths[i] / 2 + space * (i + 0.5) for i, node in enumerate(row)}


def figure() -> str:
    """The packages and the direction of their imports as an SVG that takes its colors from the page."""
    edges = reduced(packages())
    order = rows(edges)
    at: dict[str, list[tuple[float, int]]] = {}
    for number, row in enumerate(order):
        for node, x in centers(row).items():
            at.setdefault(node, []).append((x, ROW * number + 4))
    lines, boxes = [], []
    for node, others in edges.items():
        for other in sorted(others):
            (x, y), *points = at[other] + at.get(f"{other}>{node}", []) + at[node]
            path = f"M{x:g} {y + BOX[1]}"
            for to_x, to_y in points:
                bend = (ROW - BOX[1]) / 2
                path += f"C{x:g} {to_y - bend:g} {to_x:g} {to_y - bend - 6:g} {to_x:g} {to_y - 6:g}v{BOX[1] + 6}"
                x = to_x
            lines.append(f'<path d="{path.rpartition("v")[0]}"/>')
            lines.append(f'<path class="head" d="M{x - 4:g} {points[-1][1] - 8:g}h8l-4 8z"/>')
    for node in edges:
        ((x, y),) = at[node]
        stages = [stage for stage in STAGES if stage.package == node]
        boxes.append(f'<rect x="{x - BOX[0] / 2:g}" y="{y}" width="{BOX[0]}" height="{BOX[1]}" rx="5"')
        boxes[-1] += f' class="{"stage" if stages else "package"}"/>'
        boxes.append(f'<text x="{x:g}" y="{y + (16 if stages else 23)}">{room(node).name}</text>')
        if stages:
            types = ", ".join(stage.returns for stage in stages)
            boxes.append(f'<text x="{x:g}" y="{y + 31}" class="type">{types}</text>')
    said = "; ".join(f"{node} imports {', '.join(sorted(others))}" for node, others in edges.items() if others)
    return (
        f'<svg class="architecture" viewBox="0 0 {WIDTH} {ROW * len(order)}" role="img" '
        f'aria-label="{escape(f"Packages of ackpt and their imports: {said}.")}">{"".join(lines + boxes)}</svg>'
    )


def package_table() -> str:
    """A Markdown table: every package and what its docstring says it is for."""
    lines = ["| package | files | holds |", "|:---|---:|:---|"]
    for row in rows(reduced(packages())):
        for name in row:
            if ">" in name:
                continue
            path = room(name)
            files = [file for module, file in modules().items() if package_of(module) == name]
            described = path / "__init__.py" if path.is_dir() else path
            docstring = ast.get_docstring(ast.parse(described.read_text(encoding="utf-8"))) or ""
            first = " ".join(re.split(r"\n\n|(?<=\.)\s", docstring)[0].split()).replace("``", "`")
            lines.append(f"| {link(path)} | {len(files)} | {first} |")
    return "\n".join([":::{table}", ":class: stacked", "", *lines, ":::"])


def stage_table() -> str:
    """A Markdown table: the stages in the order of the flow."""
    lines = ["| stage | package | read first | returns |", "|:---|:---|:---|:---|"]
    for stage in STAGES:
        path, line = definition(stage.function, stage.package)
        first = link(path, line, f"{path.relative_to(room(stage.package))}: {stage.function}")
        lines.append(f"| {stage.name} | {link(room(stage.package))} | {first} | `{stage.returns}` |")
    return "\n".join([":::{table}", ":class: stacked", "", *lines, ":::"])


def types() -> str:
    """The main types as a Markdown definition list: where each is defined, and its fields."""
    text = []
    for stage in STAGES:
        path, line = definition(stage.returns)
        declared = fields(stage.returns)
        text.append(f"{link(path, line, stage.returns)}, returned by {stage.name}")
        text.append(f": {', '.join(f'`{name}: {kind}`' for name, kind in declared.items())}\n")
    return "\n".join(text)


def definition(name: str, package: str = "") -> tuple:
    """The file and the line that define the class or function `name`; of policies, of which each has one, `full`'s.

    Raises:
        ValueError: if not exactly one file of the package defines it.
    """
    where = PACKAGE / "planner" / "policies" / "full.py" if package == "policies" else room(package)
    definitions = [
        (path, node.lineno)
        for path in modules().values()
        if path.is_relative_to(where)
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == name
    ]
    if len(definitions) != 1:
        raise ValueError(f"{where} defines {name} {len(definitions)} times, not once: correct tools/architecture.py")
    return definitions[0]


def fields(name: str) -> dict[str, str]:
    """The fields of a class and their types as written: of its body, or what `__init__` sets with a type."""
    path, line = definition(name)
    (tree,) = (node for node in ast.parse(path.read_text(encoding="utf-8")).body if getattr(node, "lineno", 0) == line)
    body = tree.body if isinstance(tree, ast.ClassDef) else []
    made = next((node for node in body if isinstance(node, ast.FunctionDef) and node.name == "__init__"), None)
    typed = [node for node in [*body, *(made.body if made else [])] if isinstance(node, ast.AnnAssign)]
    declared = {ast.unparse(node.target).removeprefix("self."): ast.unparse(node.annotation) for node in typed}
    return {field: kind for field, kind in declared.items() if not field.startswith("_")}


def link(path, line: int | None = None, text: str = "") -> str:
    """A Markdown link to a file or folder of the repository."""
    kind, anchor = ("blob", f"#L{line}" if line else "") if path.is_file() else ("tree", "")
    inside = path.relative_to(ROOT).as_posix()
    return f"[`{text or inside}`]({repository_address()}/{kind}/{BRANCH}/{inside}{anchor})"


PARTS = {"figure": figure, "packages": package_table, "stages": stage_table, "types": types}


def part(name: str) -> str:
    """One of `PARTS`: the figure as SVG, another as Markdown."""
    return PARTS[name]()
