"""Do the interactive figures react to keyboard and mouse, and is there a picture where scripts are off?"""

import json
import re
from pathlib import Path
from typing import Literal
from urllib.parse import urlencode

import built_pages
import pytest
from browser_checks import watch
from playwright.sync_api import Locator, expect

# One key that every kind of control reacts to, and one that leads to another value from there.
KEYS = {"range": ("Home", "End"), "select-one": ("Home", "End"), "radio": ("ArrowRight", "ArrowRight")}


def react(widget: Locator, control: Locator) -> list[str]:
    """Work a control by its keys; a problem if the widget stays as it is."""
    kind = control.evaluate("element => element.type")
    name = control.evaluate("element => element.id || element.name || element.textContent")
    seen = set()
    for key in KEYS.get(kind, ("Space", "Space")):
        control.press(key)
        seen.add(widget.inner_html())
    return [] if len(seen) == 2 else [f"the {kind} {name!r} changes nothing"]


def test_every_control_of_every_widget_reacts_to_keys(new_page, site, base, with_widgets):
    page = new_page()
    problems = watch(page, base)
    page.emulate_media(reduced_motion="reduce")  # otherwise an animation begins by itself while its button is pressed
    page.goto(base + with_widgets)
    widgets = built_pages.read(site / with_widgets).widgets
    for name in set(widgets):
        found = page.locator(f".{name}").all()
        assert len(found) == widgets.count(name)
        for widget in found:
            controls = widget.locator("input, select, button").all()
            assert controls
            for control in controls:
                problems += react(widget, control)
    assert problems == []


def test_widgets_are_pictures_where_scripts_are_off(new_page, site, base, with_widgets):
    page = new_page(scripts=False)
    page.goto(base + with_widgets)
    widgets = built_pages.read(site / with_widgets).widgets
    for name in set(widgets):
        for picture in page.locator(f".{name} + noscript img").all():
            picture.scroll_into_view_if_needed()
            assert picture.evaluate("image => image.naturalWidth") > 0
        assert page.locator(f".{name} + noscript img").count() == widgets.count(name)


@pytest.fixture
def explorer(new_page, base):
    page = new_page()
    page.goto(base + "notebooks/09_frontier.html")
    return page.locator(".frontier-explorer")


def shown(explorer: Locator) -> tuple[int, float, str]:
    """Budget in percent, cost in percent, and the drawing of the timeline."""
    cost = explorer.locator("dt", has_text="cost, FLOPs").locator("+ dd").inner_text()
    timeline = explorer.locator("svg").first.inner_html()
    return int(explorer.locator("output").inner_text().split()[0]), float(cost.split()[0]), timeline


def test_a_lower_budget_costs_more_and_changes_the_timeline(explorer):
    explorer.locator("input").press("End")
    budget, cost, timeline = shown(explorer)
    assert (budget, cost) == (100, 0)
    for _ in range(10):
        explorer.locator("input").press("ArrowLeft")
    lower, higher_cost, other_timeline = shown(explorer)
    assert lower < budget and higher_cost > cost and other_timeline != timeline


def test_the_budget_can_be_dragged(explorer):
    budget, cost, timeline = shown(explorer)
    handle = explorer.locator("input")
    handle.scroll_into_view_if_needed()
    box, mouse = handle.bounding_box(), explorer.page.mouse
    share = handle.evaluate("one => (one.value - one.min) / (one.max - one.min)")
    height = box["y"] + box["height"] / 2
    mouse.move(box["x"] + share * box["width"], height)
    mouse.down()
    mouse.move(box["x"] + 0.9 * box["width"], height, steps=5)
    mouse.up()
    higher, lower_cost, other_timeline = shown(explorer)
    assert higher > budget and lower_cost < cost and other_timeline != timeline


def test_a_budget_that_no_plan_keeps_is_infeasible(explorer):
    explorer.locator("input").press("Home")
    expect(explorer.locator(".answer")).to_contain_text("Infeasible: the smallest feasible budget is")


CALM = "matchMedia('(prefers-reduced-motion: reduce)').matches"


@pytest.fixture
def schematic(new_page, base):
    """Opens the first schematic of a page, for a reader who prefers less motion or not."""

    def opened(path: str, motion: Literal["reduce", "no-preference"] = "reduce") -> Locator:
        page = new_page()
        page.emulate_media(reduced_motion=motion)
        page.goto(base + path)
        schematic = page.locator(".schematic-explorer").first
        schematic.scroll_into_view_if_needed()
        return schematic

    return opened


def test_a_schematic_rests_at_its_peak_for_readers_who_prefer_less_motion(schematic):
    found = schematic("notebooks/06_sublinear_memory.html")
    assert found.page.evaluate(CALM)
    before = found.inner_html()
    found.page.wait_for_timeout(1500)
    assert found.inner_html() == before and found.locator("button").inner_text() == "Play"
    peak = found.locator("dt", has_text="peak").locator("+ dd").inner_text().split(",")[0]
    expect(found.locator(".answer")).to_have_text(re.compile(f"{re.escape(peak)} live"))


def test_a_schematic_plays_when_it_is_seen_and_stops_by_the_keyboard(schematic):
    found = schematic("notebooks/06_sublinear_memory.html", "no-preference")
    button, slider = found.locator("button"), found.locator("input")
    expect(button).to_have_text("Pause")
    button.press("Space")
    expect(button).to_have_text("Play")
    frame = slider.input_value()
    found.page.wait_for_timeout(1000)
    assert slider.input_value() == frame
    button.press("Enter")
    expect(slider).not_to_have_value(frame)
    slider.press("Home")
    expect(button).to_have_text("Play")
    expect(found.locator(".answer")).to_have_text("Before the step: nothing is live.")


def test_a_schematic_is_a_still_in_print(schematic):
    found = schematic("notebooks/06_sublinear_memory.html", "no-preference")
    expect(found.locator("button")).to_have_text("Pause")
    found.page.evaluate("dispatchEvent(new Event('beforeprint'))")
    found.page.emulate_media(media="print")
    expect(found.locator(".controls")).to_be_hidden()
    still = found.inner_html()
    found.page.wait_for_timeout(1000)
    assert found.inner_html() == still
    expect(found.locator("svg").first).to_be_visible()


def test_the_schedules_of_a_schematic_differ_in_peak_and_in_recomputation(schematic):
    found = schematic("index.html")
    seen = set()
    for label in found.locator("option").all_inner_texts():
        found.locator("select").select_option(label=label)
        seen.add(tuple(found.locator("dd").all_inner_texts()))
        expect(found.locator(".about")).to_contain_text(label)
    assert len(seen) == 5


CALCULATOR = Path(__file__).parent.parent / "results" / "calculator"
# To another hash of the page's address, until the page knows of it.
MOVE = """hash => hash === location.hash || new Promise(done => {
    addEventListener("hashchange", () => done(), { once: true });
    location.hash = hash;
})"""
NAMES = {"none": "nothing recomputed", "per block": "every block recomputed"}


@pytest.fixture
def calculator(new_page, base):
    """Opens the first page's calculator at an address that names a setting, always in the same tab."""
    page = new_page()

    def opened(**setting) -> Locator:
        hash = f"#calculator&{urlencode(setting)}"
        if page.url == "about:blank":
            page.goto(f"{base}index.html{hash}")
        else:
            page.evaluate(MOVE, hash)
        return page.locator(".calculator-explorer")

    return opened


def test_the_calculator_shows_what_ackpt_plan_says(calculator):
    sample = json.loads((CALCULATOR / "sample.json").read_text())
    drawn = ([row for row in group["rows"] if row["setting"]["policy"] in NAMES][:6] for group in sample["samples"])
    rows = [row for some in drawn for row in some]
    assert len(rows) > 6
    for row in rows:
        setting = dict(row["setting"])
        name = NAMES[setting.pop("policy")]
        shown = calculator(**{"model" if key == "preset" else key: value for key, value in setting.items()})
        said = shown.locator("svg").first.get_attribute("aria-label")
        (size, unit) = re.search(rf"{name} ([\d.]+) ([GM]iB)", said).groups()
        peak = row["planned"]["peak_bytes"]
        assert float(size) * 2 ** (30 if unit == "GiB" else 20) == pytest.approx(peak, rel=0.005, abs=0.05 * 2**30)


def test_the_calculator_keeps_its_state_in_the_address(calculator):
    shown = calculator(model="llama-3-8b", batch=3, gpu="h200", budget=60)
    assert shown.locator("#calculator-batch").input_value() == "3"
    shown.locator("#calculator-optimizer").press("End")
    address = shown.page.url
    assert "model=llama-3-8b" in address and "gpu=h200" in address and "budget=60" in address
    before = shown.locator(".answer").inner_text()
    shown.page.reload()
    expect(shown.locator(".answer")).to_have_text(before)


def test_a_lower_budget_of_the_calculator_recomputes_more_and_then_is_refused(calculator):
    shown = calculator(model="llama-3-8b", gpu="a100-80g", mode="lora", batch=4, length=4096, budget=100)
    costs = []
    for _ in range(20):
        shown.locator("#calculator-budget").press("ArrowLeft")
        costs.append(float(shown.locator("dt", has_text="recomputed FLOPs").locator("+ dd").inner_text().split()[0]))
    assert costs == sorted(costs) and costs[-1] > 0
    shown.locator("#calculator-budget").press("Home")
    expect(shown.locator(".answer")).to_contain_text("Nothing on the menu keeps the budget")
    expect(shown.locator(".answer")).not_to_contain_text("LoRA")  # which is set already
    call, command = shown.locator("pre").all()
    expect(call).to_be_hidden()
    expect(command).to_contain_text("ackpt plan")
