"""Does the built book load anything from elsewhere? A reader without a network must see it whole."""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path

from address import ROOT

LOADING = {"script": "src", "link": "href", "img": "src", "iframe": "src", "source": "src", "video": "src"}
NOT_LOADED = {"canonical", "search", "alternate", "author", "next", "prev", "index"}
IN_CSS = re.compile(r"""(?:url\(\s*|@import\s+)['"]?((?:https?:)?//[^'")\s]+)""")
IN_SCRIPT = re.compile(r"""["'](https?://[^"'\s]+\.(?:js|css|mjs|woff2?)[^"'\s]*)["']""")


class _Page(HTMLParser):
    """Collects what the tags of a page load."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._in_script = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        address = values.get(LOADING.get(tag, "")) or ""
        named = set((values.get("rel") or "").split())
        if re.match(r"(https?:)?//", address) and not named & NOT_LOADED:
            self.found.append(address)
        self.found.extend(IN_CSS.findall(values.get("style") or ""))
        self._in_script = tag == "script"

    def handle_endtag(self, tag: str) -> None:
        self._in_script = False

    def handle_data(self, data: str) -> None:
        if self._in_script:
            self.found.extend(IN_SCRIPT.findall(data))


def external(html: Path) -> list[str]:
    """`file: address` of everything that a page or style sheet below `html` loads from another host."""
    found = []
    for path in sorted(html.rglob("*.html")):
        page = _Page()
        page.feed(path.read_text(encoding="utf-8"))
        found.extend(f"{path.relative_to(html)}: {address}" for address in page.found)
    for path in sorted(html.rglob("*.css")):
        addresses = IN_CSS.findall(path.read_text(encoding="utf-8"))
        found.extend(f"{path.relative_to(html)}: {address}" for address in addresses)
    return found


def main() -> int:
    """Command line: `python tools/check_offline.py`."""
    html = ROOT / "book" / "_build" / "html"
    found = external(html)
    for line in found:
        print(line)
    print("book: " + (f"{len(found)} things come from elsewhere" if found else "loads nothing from elsewhere"))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
