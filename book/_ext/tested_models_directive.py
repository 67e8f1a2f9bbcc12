"""The directive ``tested-models``: a part of the page Tested models, made from the record when the book is built.

```{tested-models} counts
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

import tested_models_page  # noqa: E402


class TestedModels(SphinxDirective):
    """Parts: ``made-on``, ``counts``, ``models``, ``reasons``; see tools/tested_models_page.py."""

    required_arguments = 1
    parts: ClassVar = ("made-on", *tested_models_page.PARTS)

    def run(self) -> list[nodes.Node]:
        (part,) = self.arguments
        if part not in self.parts:
            raise self.error(f"tested-models knows the parts {', '.join(self.parts)}, not {part!r}")
        self.env.note_dependency(str(tested_models_page.FILE))
        text = tested_models_page.made_on() if part == "made-on" else tested_models_page.page(part)
        found = nodes.Element()
        self.state.nested_parse(StringList(text.splitlines(), "tested_models.md"), self.content_offset, found)
        return found.children


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive."""
    app.add_directive("tested-models", TestedModels)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
