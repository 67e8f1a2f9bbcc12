"""A browser and a server for the built book: `nox -s browser` brings what they need."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import built_pages
import pytest
from browser_checks import watch
from playwright.sync_api import Browser, Page, ViewportSize, expect, sync_playwright

ROOT = Path(__file__).resolve().parent.parent
# No sandbox: containers run it as root. The rest keeps the browser from talking to anyone.
FLAGS = """--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
    --disable-component-update --disable-sync""".split()
WINDOW: ViewportSize = {"width": 1440, "height": 900}
PATIENCE = 60_000  # milliseconds: a machine may have much else to do
expect.set_options(timeout=PATIENCE)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--site", type=Path, default=ROOT / "book/_build/html", help="the built book")
    parser.addoption("--pictures", type=Path, help="the folder for a picture of every page in both themes")
    parser.addoption("--chromium", default="", help="the browser's path; without it, the one that Playwright installed")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    site = metafunc.config.getoption("site")
    if not (site / "index.html").exists():
        raise pytest.UsageError(f"no built book in {site}: run `nox -s book` first")
    paths = built_pages.pages(site)
    if "path" in metafunc.fixturenames:
        metafunc.parametrize("path", paths)
    if "opened_page" in metafunc.fixturenames:
        metafunc.parametrize("opened_page", built_pages.unlike(paths))
    if "with_widgets" in metafunc.fixturenames:
        metafunc.parametrize("with_widgets", [path for path in paths if built_pages.read(site / path).widgets])


class Quiet(SimpleHTTPRequestHandler):
    """Serves files and says nothing."""

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[str]:
    """Serve a folder on this machine; gives the address, with a slash at its end."""
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture(scope="session")
def site(request: pytest.FixtureRequest) -> Path:
    return request.config.getoption("site")


@pytest.fixture(scope="session")
def base(site: Path) -> Iterator[str]:
    with serving(site) as address:
        yield address


@pytest.fixture(scope="session")
def browser(request: pytest.FixtureRequest) -> Iterator[Browser]:
    with sync_playwright() as playwright:
        path = request.config.getoption("chromium") or None
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def opened(browser: Browser, base: str) -> Iterator[tuple[Page, list[str]]]:
    """One page and the problems that it has met: see `reading`."""
    context = browser.new_context(viewport=WINDOW)
    context.set_default_timeout(PATIENCE)
    context.add_init_script("localStorage.clear()")
    page = context.new_page()
    yield page, watch(page, base)
    context.close()


@pytest.fixture
def reading(opened: tuple[Page, list[str]]) -> tuple[Page, list[str]]:
    """An empty light page, and a list that fills with its problems as that of `watch`.

    All tests share the page, so that what the book's pages have in common is loaded once. It remembers nothing.
    """
    page, problems = opened
    page.goto("about:blank")
    page.emulate_media(color_scheme="light")
    page.set_viewport_size(WINDOW)
    problems.clear()
    return page, problems


@pytest.fixture
def new_page(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Open empty pages, each with a memory of its own: `new_page(theme="dark", scripts=False)`."""
    with contextlib.ExitStack() as stack:

        def new_page(theme: str = "light", scripts: bool = True) -> Page:
            context = browser.new_context(color_scheme=theme, java_script_enabled=scripts, viewport=WINDOW)
            stack.callback(context.close)
            context.set_default_timeout(PATIENCE)
            return context.new_page()

        yield new_page
