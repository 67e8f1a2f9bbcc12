"""Every page, light and dark, wide and narrow: no error, nothing from elsewhere, nothing that axe-core finds."""

from browser_checks import darken, grounds_of_dark_figures, too_wide, unfold, violations, wrong_ground
from built_pages import is_source, kinds_of_code

SHOW = "code => document.querySelector('article div.highlight pre').insertAdjacentHTML('beforeend', code)"


def test_page(reading, base, site, opened_page, pytestconfig):
    pictures, path = pytestconfig.getoption("pictures"), opened_page
    page, problems = reading
    page.goto(base + path)
    if is_source(path):
        page.evaluate(SHOW, kinds_of_code(site))
    unfold(page)
    found = wrong_ground(page, "light") + violations(page)
    keep(page, path, pictures, "light-1440")
    darken(page)
    found += wrong_ground(page, "dark") + grounds_of_dark_figures(page) + violations(page, colours_only=True)
    found += too_wide(page, 1440) + too_wide(page, 390)
    keep(page, path, pictures, "dark-390")
    assert problems + found == []


def keep(page, path: str, folder, name: str) -> None:
    """Keep a picture of the page, for eyes to look at; code looks the same everywhere."""
    if folder is not None and not is_source(path):
        name = f"{path.removesuffix('.html').replace('/', '-')}-{name}.jpeg"
        page.screenshot(path=folder / name, full_page=True, quality=80)
