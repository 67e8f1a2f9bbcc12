"""The directive ``architecture``: a part of the page Architecture, read from the package's source by the build.

```{architecture} figure
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

import architecture  # noqa: E402


class Architecture(SphinxDirective):
    """Parts: ``figure``, ``packages``, ``stages``, ``types``; see tools/architecture.py."""

    required_arguments = 1
    parts: ClassVar = architecture.PARTS

    def run(self) -> list[nodes.Node]:
        (name,) = self.arguments
        if name not in self.parts:
            raise self.error(f"architecture knows the parts {', '.join(self.parts)}, not {name!r}")
        self.env.note_reread()  # every file of the package counts
        text = architecture.part(name)
        if name == "figure":
            return [nodes.raw("", text, format="html")]
        container = nodes.Element()
        self.state.nested_parse(StringList(text.splitlines(), "architecture.md"), self.content_offset, container)
        return container.children


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive."""
    app.add_directive("architecture", Architecture)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
