"""Shorten module names and source lines, and group equal modules, in what is printed; nothing is matched by them."""

import os
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

_COUNTER = re.compile(r"_\d+$")
_CHECKOUT = str(Path(__file__).parents[3])
_LIBRARIES = re.compile(r".*[/\\](?:site|dist)-packages[/\\]")


def pattern(module: str) -> str:
    """The name of a module with ``*`` for the numbers in it: ``transformer.h.*.mlp`` for ``transformer.h.11.mlp``."""
    return ".".join("*" if part.isdecimal() else part for part in module.split("."))


def block_of(module: str) -> str:
    """The block of a module, ``transformer.h.11`` of ``transformer.h.11.mlp``, or else its top-level module."""
    parts = module.split(".")
    length = next((number for number, part in enumerate(parts, 1) if part.isdecimal()), 1)
    return ".".join(parts[:length])


def operation(name: str) -> str:
    """The name of a node without its counter: ``tanh`` for ``tanh_12``."""
    return _COUNTER.sub("", name)


@cache
def short_source(source: str) -> str:
    """A file and line, relative to the library, the current folder or the checkout of ackpt that the file is in."""
    relative = _LIBRARIES.sub("", source)
    folders = (folder + os.sep for folder in (os.getcwd(), _CHECKOUT))
    inside = next((folder for folder in folders if relative == source and source.startswith(folder)), "")
    return relative[len(inside) :]


def modules_text(modules: Iterable[str]) -> str:
    """Modules in words: their names, and ``"12 x blocks.*.mlp"`` for several with one pattern."""
    equal: dict[str, list[str]] = {}
    for name in dict.fromkeys(modules):
        equal.setdefault(pattern(name), []).append(name)
    texts = (f"{len(names)} x {common(names)}" if len(names) > 1 else names[0] for names in equal.values())
    return ", ".join(text or "the model itself" for text in texts)


def common(names: Iterable[str]) -> str:
    """Names of one pattern as one, with ``*`` for the parts that differ."""
    columns = zip(*(name.split(".") for name in names))
    return ".".join(parts[0] if len(set(parts)) == 1 else "*" for parts in columns)
