"""Does every check find the fault that it is for? On small pages that have one each."""

import pytest
from address import colab_address, repository_address
from browser_checks import too_wide, unfold, violations, watch, wrong_ground
from built_pages import broken_links, broken_repository_links, images_without_text, read
from conftest import ROOT, serving

HEAD = '<!DOCTYPE html><html lang="en" data-theme="light"><head><meta name="viewport" content="width=device-width">'
BODY = "<body style='margin: 0; background: {ground}'><main><h1>A page</h1>{body}</main></body>"
PAGE = f"{HEAD}<title>A page</title><link rel='icon' href='data:,'></head>{BODY}</html>"
ROW = "<tr style='background: {ground}'><td><a href='other.html#here' style='color: #176de8'>text</a></td></tr>"
WIDE = "<div style='width: 700px'>wide</div>"


@pytest.fixture
def site(tmp_path):
    (tmp_path / "other.html").write_text(PAGE.format(ground="white", body='<p id="here">here</p>'))
    return tmp_path


@pytest.fixture
def write(site):
    """Write a page with this body; gives the site."""

    def write(path: str, body: str, ground: str = "white"):
        (site / path).parent.mkdir(exist_ok=True)
        (site / path).write_text(PAGE.format(ground=ground, body=body))
        read.cache_clear()
        return site

    return write


@pytest.fixture
def problems(write, new_page):
    """What the checks in the browser find on a page with this body."""

    def problems(body: str, width: int = 390, ground: str = "white", theme: str = "light") -> list[str]:
        with serving(write("page.html", body, ground)) as base:
            page = new_page(theme)
            found = watch(page, base)
            page.goto(base + "page.html")
            unfold(page)
            found = [*found, *wrong_ground(page, theme), *violations(page), *too_wide(page, width)]
            page.close()
        return found

    return problems


def test_nothing_is_found_where_nothing_is_wrong(problems):
    scrolling = f"<div style='overflow-x: auto' tabindex='0'>{WIDE}</div>"
    assert problems(scrolling + "<p><img src='data:,' alt='a figure'></p><a href='other.html#here'>text</a>") == []


@pytest.mark.parametrize(
    "body, found",
    [
        ("<script>console.error('broken')</script>", "console: broken"),
        ("<script>missing()</script>", "script: missing is not defined"),
        ("<img src='missing.png' alt='a figure'>", "failed: 404"),
        ("<img src='http://127.0.0.1:9/figure.png' alt='a figure'>", "external: http://127.0.0.1:9/figure.png"),
        ("<script>fetch('http://127.0.0.1:9/')</script>", "external: http://127.0.0.1:9/"),
        ("<p style='color: #aaa'>pale</p>", "color-contrast"),
        (f"<table>{ROW.format(ground='white')}{ROW.format(ground='#f3f4f5')}</table>", "color-contrast"),
        ("<details><summary>more</summary><p style='color: #aaa'>pale</p></details>", "color-contrast"),
        ("<p>a <a href='other.html' style='color: #124; text-decoration: none'>link</a> in text", "link-in-text-block"),
        ("<img src='data:,'>", "image-alt"),
        ("<input>", "label"),
        (WIDE, "700 of 390 px: <div"),
        (f"<details><summary>more</summary>{WIDE}</details>", "700 of 390 px"),
    ],
)
def test_a_fault_in_the_browser_is_found(problems, body, found):
    assert any(problem.startswith(found) or found in problem for problem in problems(body))


def test_a_light_page_in_dark_colours_is_found(problems):
    assert any(problem.startswith("light: ") for problem in problems("", ground="#222"))
    assert any(problem.startswith("dark: ") for problem in problems("", theme="dark"))


@pytest.mark.parametrize(
    "body, found",
    [
        ("<a href='missing.html'>text</a>", ["page.html: missing.html: no such file"]),
        ("<a href='other.html#there'>text</a>", ["page.html: other.html#there: no such anchor"]),
        ("<a href='#there'>text</a>", ["page.html: #there: no such anchor"]),
        ("<a href='../pyproject.toml'>text</a>", ["page.html: ../pyproject.toml: no such file"]),
        ("<a href='other.html#here'>text</a><a href='https://example.org/#x'>text</a>", []),
    ],
)
def test_a_broken_link_is_found(write, body, found):
    assert broken_links(write("page.html", body), "page.html") == found


def test_a_chapter_links_to_its_source_and_opens_in_colab(write):
    source = f"{repository_address()}/edit/main/notebooks/01_where_memory_goes"
    notebook = colab_address(repository_address(), "book/colab/01_where_memory_goes.ipynb")
    chapter = "notebooks/01_where_memory_goes.html"

    def found(*links: str) -> list[str]:
        body = "".join(f"<a href='{link}'>text</a>" for link in links)
        return broken_repository_links(write(chapter, body), chapter, ROOT)

    assert found(f"{source}.py", notebook) == []
    assert found(f"{source}.py") == [f"{chapter}: no link to {notebook}"]
    gone, chapter_itself, other = (
        notebook.replace("01_", "00_"),
        notebook.replace("book/colab", "book/notebooks"),
        "https://colab.research.google.com/github/another/one/blob/main/a.ipynb",
    )
    assert found(f"{source}.py", notebook, gone, chapter_itself, other, f"{source}.ipynb") == [
        f"{chapter}: {gone}: not in the repository",
        f"{chapter}: {chapter_itself}: opens no notebook that is made for Colab",
        f"{chapter}: {other}: opens no notebook that is made for Colab",
        f"{chapter}: {source}.ipynb: not in the repository",
    ]


@pytest.mark.parametrize("alt, fault", [("", 1), ("alt=''", 1), ("alt='figures/peak.png'", 1), ("alt='The peak'", 0)])
def test_an_image_without_a_text_is_found(write, alt, fault):
    assert len(images_without_text(write("page.html", f"<img src='figures/peak.png' {alt}>"), "page.html")) == fault
