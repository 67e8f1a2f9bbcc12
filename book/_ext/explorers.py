"""The directives ``frontier-explorer`` and ``memory-explorer``: interactive figures that a page holds whole.

Data, script and style stand inside of the page, so that it works from a file, and no other page loads any of it. Where
scripts are off, and in other formats than HTML, there is a picture.

    ```{memory-explorer} ../../results/explorer/01_memory_bars.json
    :image: ../../results/figures/01_memory_bars.png
    :alt: what the picture shows
    ```
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import ClassVar

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

SOURCES = Path(__file__).resolve().parent.parent / "_explorer"
EXPLORERS = ("frontier", "memory")  # each has a style and a script in SOURCES, behind what they share


class Explorer(SphinxDirective):
    """Data by path relative to the page; the image is what readers without scripts, and other formats, see."""

    required_arguments = 1
    option_spec: ClassVar = {"image": directives.unchanged_required, "alt": directives.unchanged_required}

    def run(self) -> list[nodes.Node]:
        if missing := [name for name in ("image", "alt") if name not in self.options]:
            raise self.error(f"{self.name} needs the option :{missing[0]}:")
        _, path = self.env.relfn2path(self.arguments[0])
        data = json.dumps(json.loads(self._read(Path(path))), separators=(",", ":")).replace("</", "<\\/")
        own = self.name.removesuffix("-explorer")
        css, js = ("".join(self._read(SOURCES / f"{name}.{end}") for name in ("common", own)) for end in ("css", "js"))
        image = nodes.image(uri=self.options["image"], alt=self.options["alt"], classes=["dark-light"])
        return [
            nodes.raw("", f'<div class="explorer {self.name}"></div>\n<noscript>', format="html"),
            nodes.paragraph("", "", image),
            nodes.raw(
                "",
                f'</noscript>\n<style>\n{css}</style>\n<script type="application/json" class="{self.name}-data">{data}'
                f'</script>\n<script>\n(() => {{\n"use strict";\n{js}}})();\n</script>',
                format="html",
            ),
        ]

    def _read(self, path: Path) -> str:
        self.env.note_dependency(str(path))
        try:
            return path.read_text(encoding="utf-8")
        except OSError as error:
            raise self.error(f"{self.name} cannot read {path}: {error.strerror}") from error


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directives."""
    for name in EXPLORERS:
        app.add_directive(f"{name}-explorer", Explorer)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
