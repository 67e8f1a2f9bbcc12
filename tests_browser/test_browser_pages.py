"""Every page, light and dark, wide and narrow: no error, nothing from elsewhere, nothing that axe-core finds."""

from browser_checks import darken, too_wide, unfold, violations, wrong_ground


def test_page(reading, base, path, pytestconfig):
    pictures = pytestconfig.getoption("pictures")
    page, problems = reading
    page.goto(base + path)
    unfold(page)
    found = wrong_ground(page, "light") + violations(page)
    keep(page, path, pictures, "light-1440")
    darken(page)
    found += wrong_ground(page, "dark") + violations(page, colours_only=True)
    found += too_wide(page, 1440) + too_wide(page, 390)
    keep(page, path, pictures, "dark-390")
    assert problems + found == []


def keep(page, path: str, folder, name: str) -> None:
    """Keep a picture of the page, for eyes to look at; pages of source code all look the same."""
    if folder is not None and not path.startswith("_modules/"):
        name = f"{path.removesuffix('.html').replace('/', '-')}-{name}.jpeg"
        page.screenshot(path=folder / name, full_page=True, quality=80)
