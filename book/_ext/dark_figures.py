"""Figures on dark pages: each figure with the class ``dark-light`` gets a second picture for the dark theme.

The ground becomes transparent, grays are inverted, and colors stay, so one palette holds for figures in both themes and
for the interactive ones. The style sheet shows one of the two; the theme's own classes would hide captions, too.
"""

from __future__ import annotations

from pathlib import Path

import numpy
from docutils import nodes
from PIL import Image
from sphinx.application import Sphinx
from sphinx.writers.html5 import HTML5Translator

GRAY, COLOR = 0.10, 0.35  # chroma up to which a pixel is gray, and from which on a color covers all of it


def dark(picture: Image.Image) -> Image.Image:
    """The picture without its white ground, with grays inverted and colors as they are."""
    pixels = numpy.asarray(picture.convert("RGB"), dtype=numpy.float32) / 255
    chroma = pixels.max(2, keepdims=True) - pixels.min(2, keepdims=True)
    cover = numpy.clip((chroma - GRAY) / (COLOR - GRAY), 0, 1)
    color = numpy.clip(pixels - (1 - cover), 0, 1)  # what a color adds to white at the edge of an area
    gray = (1 - cover) * (1 - pixels.mean(2, keepdims=True))
    alpha = numpy.maximum(cover, gray)
    straight = numpy.clip((color + gray) / numpy.maximum(alpha, 1e-6), 0, 1)
    return Image.fromarray(numpy.uint8(255 * numpy.concatenate([straight, alpha], 2) + 0.5), "RGBA")


def visit(writer: HTML5Translator, node: nodes.image) -> None:
    """Write the image, and after it the one of dark pages."""
    source = writer.builder.images.get(node["uri"])
    if "dark-light" not in node["classes"] or source is None:
        return HTML5Translator.visit_image(writer, node)
    folder = Path(writer.builder.outdir, writer.builder.imagedir)
    name = f"{Path(source).stem}-dark.png"
    folder.mkdir(parents=True, exist_ok=True)
    with Image.open(Path(writer.builder.srcdir, node["uri"])) as picture:
        dark(picture).save(folder / name, optimize=True)
    for theme, file in (("light", source), ("dark", name)):
        copy = node.deepcopy()
        copy["classes"] = [*node["classes"], f"in-{theme}"]
        copy["uri"] = f"{writer.builder.imgpath}/{file}"
        HTML5Translator.visit_image(writer, copy)
        HTML5Translator.depart_image(writer, copy)


def depart(writer: HTML5Translator, node: nodes.image) -> None:
    """Both images are complete."""
    if "dark-light" not in node["classes"] or node["uri"] not in writer.builder.images:
        HTML5Translator.depart_image(writer, node)


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the extension."""
    app.add_node(nodes.image, override=True, html=(visit, depart))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
