"""Every page, light and dark, wide and narrow: no error, nothing from elsewhere, nothing that axe-core finds."""

from browser_checks import darken, too_wide, unfold, violations, watch, wrong_ground
from conftest import ROOT

PICTURES = ROOT / "book/_build/screenshots"


def test_page(new_page, base, path):
    page = new_page("light")
    problems = watch(page, base)
    page.goto(base + path)
    unfold(page)
    problems += wrong_ground(page, "light") + violations(page)
    keep(page, path, "light-1440")
    darken(page)
    problems += wrong_ground(page, "dark") + violations(page, colours_only=True)
    problems += too_wide(page, 1440) + too_wide(page, 390)
    keep(page, path, "dark-390")
    assert problems == []


def keep(page, path: str, name: str) -> None:
    """Keep a picture of the page, for eyes to look at; pages of source code all look the same."""
    if not path.startswith("_modules/"):
        name = f"{path.removesuffix('.html').replace('/', '-')}-{name}.jpeg"
        page.screenshot(path=PICTURES / name, full_page=True, quality=80)
