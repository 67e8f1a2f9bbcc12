"""The buttons in the sidebar that open and close a chapter's pages have a name for screen readers.

``pydata_sphinx_theme/toctree.py`` makes a ``<summary>`` with nothing but an icon.
"""

from __future__ import annotations

from sphinx.application import Sphinx

NAME = "generate_toctree_html"


def label(app: Sphinx, page: str, template: str, context: dict, doctree) -> None:
    """Name the buttons of the sidebar of a page."""
    if (made := context.get(NAME)) is None:
        return

    def labelled(*args, **kwargs):
        soup = made(*args, **kwargs)
        for button in soup.select("summary") if hasattr(soup, "select") else ():
            button["aria-label"] = "show or hide the pages of this chapter"
        return soup

    context[NAME] = labelled


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the extension, after the theme's."""
    app.connect("html-page-context", label, priority=900)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
