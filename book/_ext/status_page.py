"""The directive ``status``: a part of the status page, made from committed files when the book is built.

```{status} notebooks
```
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import ClassVar

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "tools"))

import status  # noqa: E402


class Status(SphinxDirective):
    """Parts: ``notebooks``, ``tables``, ``missing``; see tools/status.py."""

    required_arguments = 1
    parts: ClassVar = status.PARTS

    def run(self) -> list[nodes.Node]:
        (part,) = self.arguments
        if part not in self.parts:
            raise self.error(f"status knows the parts {', '.join(self.parts)}, not {part!r}")
        self.env.note_reread()  # files that are new are no dependency yet
        try:
            lines = status.page(part).splitlines()
        except ValueError as error:
            raise self.error(str(error)) from error
        found = nodes.Element()
        self.state.nested_parse(StringList(lines, "status.md"), self.content_offset, found)
        return found.children


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive."""
    app.add_directive("status", Status)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
