"""What a reader does with the book: search it, switch its colours, move its widgets, read it without scripts."""

import re

from browser_checks import watch, wrong_ground
from playwright.sync_api import expect

WORD = "rematerialization"


def test_search_finds_a_word(new_page, base):
    page = new_page()
    problems = watch(page, base)
    page.goto(base + "index.html")
    page.locator("button.search-button__button:visible").first.click()
    page.locator("input[type=search]:visible").first.fill(WORD)
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile("search.html"))
    expect(page.locator("#search-results .search-summary")).to_contain_text("found")
    page.locator("#search-results li a").first.click()
    expect(page.locator("article")).to_contain_text(re.compile(WORD, re.IGNORECASE))
    assert problems == []


def test_search_does_not_find_what_is_not_there(new_page, base):
    page = new_page()
    page.goto(base + "search.html?q=zyzzyva")
    expect(page.locator("#search-results .search-summary")).to_contain_text("did not match")
    expect(page.locator("#search-results li")).to_have_count(0)


def test_search_works_in_files_without_a_server(new_page, site):
    page = new_page()
    page.goto((site / "search.html").resolve().as_uri() + f"?q={WORD}")
    expect(page.locator("#search-results li a").first).to_be_visible()


def test_the_page_opens_in_the_colours_of_the_system(new_page, base):
    page = new_page("dark")
    problems = watch(page, base)
    page.goto(base + "index.html")
    assert problems + wrong_ground(page, "dark") == []


def test_the_theme_button_switches_and_is_remembered(new_page, base):
    page = new_page("light")
    page.goto(base + "index.html")
    mode = "document.documentElement.dataset.mode"
    for theme in ("dark", "light"):
        for _ in range(3):
            if page.evaluate(mode) != theme:
                page.locator("button.theme-switch-button:visible").first.click()
        assert page.evaluate(mode) == theme
        assert wrong_ground(page, theme) == []
        page.goto(base + "api.html")
        assert wrong_ground(page, theme) == []
