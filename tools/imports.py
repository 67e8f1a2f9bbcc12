"""The imports of the package's files, read from their source: of what a file executes at any time, in functions too."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "ackpt"
EXPERIMENTS = PACKAGE.with_name("experiments")


def modules(package: Path = PACKAGE) -> dict[str, Path]:
    """Every module of a package by its dotted name."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        found[".".join(parts).removesuffix(".__init__")] = path
    return found


def imports(name: str, path: Path, known, *, for_type_checkers: bool = False) -> set[str]:
    """The modules among `known` that a module imports; those for type checkers alone only if `for_type_checkers`."""
    found = set()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree) if for_type_checkers else _executed(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
            base = base[: len(base) + 1 - node.level] if node.level else []
            source = ".".join([*base, *(node.module or "").split(".")]).rstrip(".")
            for alias in node.names:
                submodule = f"{source}.{alias.name}"
                found.add(submodule if submodule in known else source)
    return {each for each in found if each in known and each != name}


def written(path: Path) -> set[str]:
    """The top-level packages that a file imports anywhere, for type checkers too, and those that strings name."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add((node.module or "").partition(".")[0])
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= {node.value.partition(".")[0]} if re.fullmatch(r"\w+(\.\w+)+", node.value) else set()
    return found


def _executed(tree) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        yield node
        yield from _executed(node)


def graph(package: Path = PACKAGE, *, for_type_checkers: bool = False) -> dict[str, set[str]]:
    """Module -> the modules of the same package that it imports."""
    known = modules(package)
    return {name: imports(name, path, known, for_type_checkers=for_type_checkers) for name, path in known.items()}


def cycles(edges: dict[str, set[str]]) -> list[list[str]]:
    """The strongly connected components of more than one node, each sorted (Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(node):
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(edges[node]):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            component = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(component) > 1:
                found.append(sorted(component))

    for node in sorted(edges):
        if node not in index:
            visit(node)
    return found


def package_of(module: str) -> str:
    """The room that a module belongs to, such as ``"capture"`` in ``ackpt.planner``; "" for `ackpt` itself."""
    below = module.split(".")[1:]
    return "".join(below[1:2] if below[:1] == ["planner"] and len(below) > 1 else below[:1])


def room(name: str) -> Path:
    """The folder or file of a room, by the name that `package_of` returns."""
    path = PACKAGE / name if (PACKAGE / name).exists() else PACKAGE / "planner" / name
    return path if path.exists() else path.with_suffix(".py")
