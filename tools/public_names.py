"""What is public? Every name that the book's API page documents, one directive each."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

PAGE = Path(__file__).resolve().parent.parent / "book" / "api.md"
_DIRECTIVE = re.compile(r"^\.\. auto(?:function|class|exception|data):: (\S+)$", re.MULTILINE)


def public_names(page: Path = PAGE) -> list[str]:
    """The names in the page's order, such as ``"ackpt.graph.Step"``."""
    return _DIRECTIVE.findall(page.read_text(encoding="utf-8"))


def look_up(name: str) -> object:
    """What `name` names, an attribute before a submodule of the same name, as on the page.

    Raises:
        AttributeError: if there is no such thing.
    """
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)
