"""The book as one HTML page, checked and printed as a PDF.

Everything that the page shows lies beside it: every figure is there, nothing is loaded from elsewhere, and Chromium,
without a network, typesets every formula. Where there is no Chromium, the page is checked without it and not printed.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from urllib.parse import unquote

from address import ROOT
from check_offline import external

FOLDER = ROOT / "book" / "_build" / "singlehtml"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
IMAGE = re.compile(r'<img\b[^>]*?\ssrc="(?!data:)([^"]+)"')
FORMULA = re.compile(r'class="math notranslate')
HEADING = re.compile(r'(<div id="jb-print-docs-body"[^>]*>\s*)<h1>(.*?)</h1>')
PART = re.compile(
    r'<span class="caption-text">([^<]*)</span></p>\s*<ul[^>]*>\s*<li[^>]*>'
    r'<a [^>]*href="(?:index\.html)?#(document-[^"]*)"'
)
PATIENCE = 600  # seconds for Chromium, on a busy machine
BUDGET = 120_000  # milliseconds of the page's own clock for MathJax


class PageError(ValueError):
    """A page that lacks something, or a browser that did not do its work."""


def problems(folder: Path) -> list[str]:
    """What the page in `folder` lacks, as far as its files tell."""
    text = (folder / "index.html").read_text(encoding="utf-8")
    images = dict.fromkeys(IMAGE.findall(text))
    gone = [f"no such picture: {name}" for name in images if not (folder / unquote(name)).is_file()]
    return [*(f"comes from elsewhere: {found}" for found in external(folder)), *gone]


def problems_of_formulas(source: str, typeset: str) -> list[str]:
    """What MathJax did not do, from the page's source and the page as a browser shows it."""
    formulas, done = len(FORMULA.findall(source)), typeset.count("<mjx-container")
    found = [] if done >= formulas else [f"{formulas - done} of {formulas} formulas are not typeset"]
    return found + ([f"{wrong} formulas are wrong"] if (wrong := typeset.count("<mjx-merror")) else [])


def for_paper(text: str) -> str:
    """The page as a book: with a title page, the names of the parts, every folded cell open, and links within it."""
    text = HEADING.sub(lambda found: found[1] + title_page(found[2]), text)
    for name, target in dict.fromkeys(PART.findall(text)):
        start = f'<span id="{target}"></span>'
        text = text.replace(start, f'<p class="part">{name}</p>{start}', 1)
    return re.sub(r"<details(?! open)\b", "<details open", text).replace('href="index.html#', 'href="#')


def title_page(title: str) -> str:
    """The title page; what follows a colon in the title is its second line."""
    first, _, second = title.partition(": ")
    author, year = (value_of(f"{key}: ", "book/_config.yml") for key in ("author", "copyright"))
    version = value_of("__version__ = ", "ackpt/core/__init__.py")
    lines = f'<p class="subtitle">{second}</p><p>{author}</p><p>Version {version}, {year}</p>'
    return f'<div class="title-page"><p class="title">{first}</p>{lines}</div>'


def value_of(start: str, path: str) -> str:
    """What follows `start` on a line of a file of the repository, without quotes."""
    lines = (ROOT / path).read_text(encoding="utf-8").splitlines()
    found = [line.removeprefix(start).strip('"') for line in lines if line.startswith(start)]
    if len(found) != 1:
        raise PageError(f"{path} has {len(found)} lines that start with {start!r}, not 1")
    return found[0]


def print_page(folder: Path, browser: str, pdf: Path) -> list[str]:
    """Print the page in `folder`; returns what is wrong with its formulas."""
    source = (folder / "index.html").read_text(encoding="utf-8")
    page = folder / "for_paper.html"
    page.write_text(for_paper(source), encoding="utf-8")
    try:
        wrong = problems_of_formulas(source, chromium(browser, page, "--dump-dom"))
        pdf.parent.mkdir(parents=True, exist_ok=True)
        chromium(browser, page, "--no-pdf-header-footer", "--generate-pdf-document-outline", f"--print-to-pdf={pdf}")
    finally:
        page.unlink()
    if not pdf.is_file():
        raise PageError(f"{browser} wrote no {pdf}")
    return wrong


def chromium(browser: str, page: Path, *options: str) -> str:
    """What the browser prints, run without a network and with a profile of its own; raises PageError if it fails."""
    with tempfile.TemporaryDirectory() as profile:
        command = [
            browser,
            "--headless",
            "--disable-gpu",
            f"--user-data-dir={profile}",
            f"--virtual-time-budget={BUDGET}",
        ]
        # Chromium's sandbox does not start for root, as in a container.
        command += ["--no-sandbox", "--host-resolver-rules=MAP * ~NOTFOUND", *options, page.as_uri()]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
        except subprocess.TimeoutExpired as error:
            raise PageError(f"{browser} took longer than {PATIENCE} s") from error
    if done.returncode:
        raise PageError(f"{browser} failed with {done.returncode}: {done.stderr.strip()[-500:]}")
    return done.stdout


def main() -> int:
    """Command line: `python tools/single_page.py`, after `jupyter-book build --builder singlehtml`."""
    found = problems(FOLDER)
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        print(f"no PDF: none of {', '.join(BROWSERS)} is installed")
    else:
        pdf = FOLDER.parent / "pdf" / "ackpt.pdf"
        try:
            found += print_page(FOLDER, browser, pdf)
        except PageError as error:
            found.append(str(error))
        else:
            print(f"as a PDF: {pdf.relative_to(ROOT)}, {pdf.stat().st_size / 1e6:.0f} MB")
    for line in found:
        print(line)
    print(f"as one page: {FOLDER.relative_to(ROOT)}/index.html" + (f", {len(found)} problems" if found else ""))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
