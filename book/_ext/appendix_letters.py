"""Figures and tables of the appendices have a letter for their page: Table B.3.

Sphinx numbers what is on pages without a chapter's number through the whole book, so a table of an appendix would look
like one of the first page.
"""

from __future__ import annotations

import re
from string import ascii_uppercase

from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

APPENDIX = re.compile(r"notebooks/1\d_")


def letter(app: Sphinx, environment: BuildEnvironment) -> list[str]:
    """Number figures and tables anew by appendix."""
    pages = sorted(filter(APPENDIX.match, environment.found_docs))
    for name, page in zip(ascii_uppercase, pages, strict=False):
        for numbers in environment.toc_fignumbers.get(page, {}).values():
            numbers.update({label: (name, number) for number, label in enumerate(numbers, 1)})
    return []


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the extension, after what numbers figures."""
    app.connect("env-get-updated", letter, priority=900)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
