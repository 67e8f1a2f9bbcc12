"""What the built pages say of themselves: their links, anchors, images and addresses, read without a browser."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from address import BRANCH, COLAB_FOLDER, colab_address, repository_address

LINKS = {"a": "href", "link": "href", "img": "src", "script": "src", "source": "src", "iframe": "src"}
COLAB = "https://colab.research.google.com/"
CODE = re.compile(r'<span class="(?P<kind>[a-z0-9]{1,3})">[^<]+</span>')


@dataclass
class Page(HTMLParser):
    """One page: `anchors`, the addresses in its tags, its images as (address, alternative text or None).

    A widget NAME is an element of that class, with its data in a script of the class NAME-data.
    """

    anchors: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    images: list[tuple[str, str | None]] = field(default_factory=list)
    widgets: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.anchors |= {value for name in ("id", "name") if (value := values.get(name))}
        if address := values.get(LINKS.get(tag, "")):
            self.links.append(address)
        if tag == "img":
            self.images.append((values.get("src") or "", values.get("alt")))
        if tag == "script" and values.get("type") == "application/json":
            self.widgets.append((values.get("class") or "").removesuffix("-data"))


@cache
def read(path: Path) -> Page:
    """The page in this file."""
    page = Page()
    page.feed(path.read_text(encoding="utf-8"))
    return page


def pages(site: Path) -> list[str]:
    """The pages that a reader can open, relative to the site."""
    paths = (path.relative_to(site) for path in site.rglob("*.html"))
    return sorted(path.as_posix() for path in paths if path.parts[0] != "_static")


def is_source(path: str) -> bool:
    """Whether this is a page of source code. Such pages differ in the code that they show, and in nothing else."""
    return path.startswith("_modules/") and path != "_modules/index.html"


def unlike(paths: list[str]) -> list[str]:
    """The pages, but of those with source code only the first: it stands for all if it shows all kinds of code."""
    sources = [path for path in paths if is_source(path)]
    return [path for path in paths if path not in sources[1:]]


def kinds_of_code(site: Path) -> str:
    """One example of every kind of marked-up code on the pages of source code: keywords, strings, comments, ..."""
    examples: dict[str, str] = {}
    for path in filter(is_source, pages(site)):
        for example in CODE.finditer((site / path).read_text(encoding="utf-8")):
            examples.setdefault(example["kind"], example[0])
    return " ".join(examples.values())


def broken_links(site: Path, path: str) -> list[str]:
    """Addresses of this page that lead to no file of the site, or to an anchor that is not there."""
    problems = []
    for address in read(site / path).links:
        parts = urlsplit(address)
        if parts.scheme or parts.netloc:
            continue
        target = (site / path).parent / unquote(parts.path) if parts.path else site / path
        if not target.resolve().is_relative_to(site.resolve()) or not target.is_file():
            problems.append(f"{path}: {address}: no such file")
        elif parts.fragment and target.suffix == ".html" and unquote(parts.fragment) not in read(target).anchors:
            problems.append(f"{path}: {address}: no such anchor")
    return problems


def broken_repository_links(site: Path, path: str, root: Path) -> list[str]:
    """Links into the repository and to Colab that name no file in `root`, and those that the page should have."""
    address, links = repository_address(root), read(site / path).links
    named = {kind: f"{address}/{kind}/{BRANCH}/" for kind in ("edit", "blob", "tree", "raw")}
    colab = colab_address(address, "")
    problems = []
    for link in links:
        for prefix in (*named.values(), colab):
            if link.startswith(prefix) and not (root / unquote(urlsplit(link.removeprefix(prefix)).path)).exists():
                problems.append(f"{path}: {link}: not in the repository")
        if link.startswith(COLAB) and not (link.startswith(f"{colab}{COLAB_FOLDER}/") and link.endswith(".ipynb")):
            problems.append(f"{path}: {link}: opens no notebook that is made for Colab")
    if path.startswith("notebooks/"):
        name = Path(path).stem
        needed = [named["edit"] + f"notebooks/{name}.py", colab + f"{COLAB_FOLDER}/{name}.ipynb"]
    elif (site / "_sources" / path).with_suffix(".md").exists():
        needed = [named["edit"] + f"book/{Path(path).with_suffix('.md').as_posix()}"]
    else:
        needed = []  # the search and the indices have no source
    return problems + [f"{path}: no link to {link}" for link in needed if link not in links]


def images_without_text(site: Path, path: str) -> list[str]:
    """Images without an alternative text; a file's name, which Sphinx fills in, is none."""
    return [
        f"{path}: {src}: alt={alt!r}"
        for src, alt in read(site / path).images
        if not (alt or "").strip() or Path(alt or "").name == Path(src).name
    ]
