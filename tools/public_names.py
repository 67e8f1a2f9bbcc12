"""What is public? Every name that the book's API pages document, one directive each."""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from pathlib import Path

_BOOK = Path(__file__).resolve().parent.parent / "book"
PAGES = tuple(_BOOK / name for name in ("api.md", "api_graphs.md", "api_study.md"))
_DIRECTIVE = re.compile(r"^\.\. auto(?:function|class|exception|data):: (\S+)$", re.MULTILINE)


def public_names(pages: Sequence[Path] = PAGES) -> list[str]:
    """The names in the order of the pages, such as ``"ackpt.graph.Step"``."""
    return [name for page in pages for name in _DIRECTIVE.findall(page.read_text(encoding="utf-8"))]


def look_up(name: str) -> object:
    """What `name` names, an attribute before a submodule of the same name, as on the page.

    Raises:
        AttributeError: if there is no such thing.
    """
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)
