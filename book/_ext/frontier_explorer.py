"""The directive ``frontier-explorer``: a page's interactive front, with its data, script and style inside of the page.

So the page works from a file, and no other page loads any of it. Where scripts are off there is a picture.

    ```{frontier-explorer} ../../results/explorer/09_frontier.json
    :image: ../../results/figures/09_explorer.png
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


class FrontierExplorer(SphinxDirective):
    """Data by path relative to the page; the image is what readers without scripts, and other formats, see."""

    required_arguments = 1
    option_spec: ClassVar = {"image": directives.unchanged_required, "alt": directives.unchanged_required}

    def run(self) -> list[nodes.Node]:
        missing = [name for name in ("image", "alt") if name not in self.options]
        if missing:
            raise self.error(f"frontier-explorer needs the option :{missing[0]}:")
        _, data = self.env.relfn2path(self.arguments[0])
        parts = {"data": Path(data), "css": SOURCES / "frontier.css", "js": SOURCES / "frontier.js"}
        texts = {}
        for name, path in parts.items():
            self.env.note_dependency(str(path))
            try:
                texts[name] = path.read_text(encoding="utf-8")
            except OSError as error:
                raise self.error(f"frontier-explorer cannot read {path}: {error.strerror}") from error
        data = json.dumps(json.loads(texts["data"]), separators=(",", ":")).replace("</", "<\\/")
        image = nodes.image(uri=self.options["image"], alt=self.options["alt"], classes=["dark-light"])
        return [
            nodes.raw("", '<div class="frontier-explorer"></div>\n<noscript>', format="html"),
            nodes.paragraph("", "", image),
            nodes.raw(
                "",
                f'</noscript>\n<style>\n{texts["css"]}</style>\n<script type="application/json" '
                f'class="frontier-explorer-data">{data}</script>\n<script>\n{texts["js"]}</script>',
                format="html",
            ),
        ]


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive."""
    app.add_directive("frontier-explorer", FrontierExplorer)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
