"""The book as one page: what is missing from it is found, and what is folded is open on paper."""

import single_page
from conftest import raises
from single_page import PageError, chromium, for_paper, problems, problems_of_formulas

PAGE = '<img alt="a" src="_images/a%20b.png"><img src="data:image/png;base64,"><details class="hide"></details>'


def test_missing_pictures_and_external_resources_are_reported(tmp_path):
    page = tmp_path / "index.html"
    page.write_text(PAGE)
    assert problems(tmp_path) == ["no such picture: _images/a%20b.png"]
    (tmp_path / "_images").mkdir()
    (tmp_path / "_images" / "a b.png").write_bytes(b"")
    assert problems(tmp_path) == []
    page.write_text('<script src="https://cdn.example/mathjax.js"></script>')
    assert problems(tmp_path) == ["comes from elsewhere: index.html: https://cdn.example/mathjax.js"]


def test_formulas_that_are_not_typeset_are_counted():
    source = '<div class="math notranslate nohighlight">x</div>' * 3
    done = '<mjx-container class="MathJax">x</mjx-container>'
    assert problems_of_formulas(source, 3 * done) == []
    assert problems_of_formulas(source, 2 * done) == ["1 of 3 formulas are not typeset"]
    assert problems_of_formulas(source, 3 * done + "<mjx-merror>") == ["1 formulas are wrong"]


def test_the_printed_page_unfolds_blocks_and_keeps_links_internal():
    assert for_paper(PAGE).endswith('<details open class="hide"></details>')
    assert for_paper(for_paper(PAGE)) == for_paper(PAGE)
    assert for_paper('<a href="index.html#goals">') == '<a href="#goals">'


def test_a_browser_that_fails_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(single_page, "PATIENCE", 30)
    raises(PageError, "false failed with 1", lambda: chromium("false", tmp_path / "index.html"))
