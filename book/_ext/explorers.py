"""The directives ``calculator-explorer``, ``frontier-explorer``, ``schematic-explorer``: figures.

Data, script and style are part of the page, so it works from a file, and no other page loads any of it. Readers without
scripts, and formats other than HTML, get the picture. ``start`` names the schedule that a schematic shows first.

    ```{frontier-explorer} ../../results/explorer/09_frontier.json
    :image: ../../results/figures/09_frontier.png
    :alt: what the picture shows
    ```
"""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import ClassVar

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

SOURCES = Path(__file__).resolve().parent.parent / "_explorer"
# Each has a style and a script in SOURCES, which follow what they share.
EXPLORERS = ("calculator", "frontier", "schematic")


class Explorer(SphinxDirective):
    """Data by path relative to the page; the image is what readers without scripts, and other formats, see."""

    required_arguments = 1
    option_spec: ClassVar = dict.fromkeys(("image", "alt", "start"), directives.unchanged_required)

    def run(self) -> list[nodes.Node]:
        if missing := [name for name in ("image", "alt") if name not in self.options]:
            raise self.error(f"{self.name} needs the option :{missing[0]}:")
        _, path = self.env.relfn2path(self.arguments[0])
        data = json.dumps(json.loads(self._read(Path(path))), separators=(",", ":")).replace("</", "<\\/")
        own = self.name.removesuffix("-explorer")
        css, js = ("".join(self._read(SOURCES / f"{name}.{end}") for name in ("common", own)) for end in ("css", "js"))
        image = nodes.image(uri=self.options["image"], alt=self.options["alt"])
        alt, first = (escape(self.options.get(name, "")) for name in ("alt", "start"))
        about = f'role="group" aria-label="{alt}" data-start="{first}"'
        return [
            nodes.raw("", f'<div class="explorer {self.name}" {about}></div>\n<noscript>', format="html"),
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
