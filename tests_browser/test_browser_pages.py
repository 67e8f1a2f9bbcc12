"""Every page, light and dark, wide and narrow: no error, nothing from elsewhere, nothing that axe-core finds."""

import pytest
from browser_checks import too_wide, unfold, violations, watch, wrong_ground
from conftest import ROOT

WIDTHS = {"light": 1440, "dark": 390}  # of the picture that is kept


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_page(new_page, base, path, theme):
    page = new_page(theme)
    problems = watch(page, base)
    page.goto(base + path)
    unfold(page)
    problems += wrong_ground(page, theme) + violations(page)
    for width in (1440, 390):
        problems += too_wide(page, width)
        if width == WIDTHS[theme]:
            name = f"{path.removesuffix('.html').replace('/', '-')}-{theme}-{width}.jpeg"
            page.screenshot(path=ROOT / "book/_build/screenshots" / name, full_page=True, quality=80)
    assert problems == []
