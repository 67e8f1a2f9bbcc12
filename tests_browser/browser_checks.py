"""What a browser sees wrong on a page. Every check gives a list of problems, empty where there is none."""

from __future__ import annotations

import contextlib
from importlib.resources import files

from playwright.sync_api import Page, TimeoutError

AXE = files("axe_playwright_python").joinpath("axe.min.js").read_text(encoding="utf-8")

# Wait for the formulas, then unfold everything at once: what is folded is to be read, too.
STILL = "*, ::before, ::after { animation: none !important; transition: none !important; }"
UNFOLD = """async () => {
    await window.MathJax?.startup?.promise;
    for (const box of document.querySelectorAll("details")) box.open = true;
    for (const button of document.querySelectorAll("button.toggle-button-hidden")) button.click();
}"""

WIDE = """() => {
    const width = document.documentElement.clientWidth;
    if (document.documentElement.scrollWidth <= width) return [];
    const scrolls = (element) => {
        for (let up = element; up && up !== document.body; up = up.parentElement)
            if (getComputedStyle(up).overflowX !== "visible") return true;
        return false;
    };
    const right = (element) => {
        const box = element.getBoundingClientRect();
        return box.left + Math.max(box.width, element.scrollWidth);
    };
    const wide = [...document.body.querySelectorAll("*")].filter((one) => right(one) > width + 0.5 && !scrolls(one));
    const inner = wide.filter((element) => !wide.some((other) => other !== element && element.contains(other)));
    const names = inner.slice(0, 3).map((element) => element.outerHTML.slice(0, 80));
    return [`${document.documentElement.scrollWidth} of ${width} px: ${names.join(" ")}`];
}"""

# axe takes seconds on a long page to look for the ground behind every text. What it then says depends on styles only,
# so one text, or the link around it, stands for all of its kind; all but those and the blocks around links is taken
# away meanwhile. The rule `region` is slow, too, and what it finds is moderate. `preload` fetches style sheets from
# wrong addresses.
VIOLATIONS = """async (everything) => {
    const grounds = new Map([[null, ""]]);
    const ground = (element) => {
        if (!grounds.has(element)) {
            const style = getComputedStyle(element);
            const own = [style.backgroundColor, style.backgroundImage, style.opacity, style.filter].join();
            grounds.set(element, `${ground(element.parentElement)};${own}`);
        }
        return grounds.get(element);
    };
    const letters = (element) => {
        const style = getComputedStyle(element);
        return [style.color, style.fontSize, style.fontWeight, style.textShadow, style.textDecorationLine].join();
    };
    const kinds = new Map();
    for (const element of document.body.querySelectorAll("*")) {
        if (![...element.childNodes].some((node) => node.nodeType === Node.TEXT_NODE && node.data.trim())) continue;
        if (!element.checkVisibility()) continue;
        const link = element.closest("a"), around = link?.parentElement;
        const kind = [ground(element), letters(element)];
        if (link) kind.push(letters(link), letters(around), around.textContent.trim() === link.textContent.trim());
        const name = kind.join("|");
        if (!kinds.has(name)) kinds.set(name, link ?? element);
    }
    const blockAround = (element) => {
        while (getComputedStyle(element).display.startsWith("inline") && element !== document.body)
            element = element.parentElement;
        return element;
    };
    const shown = [...kinds.values()].map((one) => one.matches("a") ? blockAround(one.parentElement) : one);
    const ancestors = new Set();
    for (const one of shown)
        for (let up = one; up && !ancestors.has(up); up = up.parentElement) ancestors.add(up);
    const keep = new Set(shown), hidden = [];
    const hideOthers = (element) => {
        for (const child of element.children) {
            if (keep.has(child)) continue;
            if (ancestors.has(child)) hideOthers(child);
            else hidden.push([child, child.getAttribute("style"), [...child.childNodes]]);
        }
    };
    const ofTexts = async () => {
        if (!keep.has(document.body)) hideOthers(document.body);
        for (const [element] of hidden) {
            element.style.setProperty("display", "none", "important");
            element.replaceChildren();
        }
        try {
            return (await axe.run(texts, { ...options, runOnly: ofStyles })).violations;
        } finally {
            for (const [element, style, nodes] of hidden) {
                style === null ? element.removeAttribute("style") : element.setAttribute("style", style);
                element.replaceChildren(...nodes);
            }
        }
    };
    const options = { resultTypes: ["violations"], preload: false };
    const ofStyles = ["color-contrast", "link-in-text-block"];
    const others = Object.fromEntries([...ofStyles, "region"].map((rule) => [rule, { enabled: false }]));
    const texts = { include: [...kinds.values()] };
    const found = [
        ...(kinds.size ? await ofTexts() : []),
        ...(everything ? (await axe.run(document, { ...options, rules: others })).violations : []),
    ];
    return found
        .filter(({ impact }) => ["serious", "critical"].includes(impact))
        .flatMap(({ id, nodes }) => nodes.map(({ html, failureSummary }) =>
            `${id}: ${html.slice(0, 120)} (${failureSummary.split("\\n").slice(1).join(";").trim()})`));
}"""

GROUND = """() => {
    const [red, green, blue] = getComputedStyle(document.body).backgroundColor.match(/[\\d.]+/g).map(Number);
    return [document.documentElement.dataset.theme, (0.2126 * red + 0.7152 * green + 0.0722 * blue) / 255];
}"""


def watch(page: Page, base: str) -> list[str]:
    """A list that fills with the page's console errors, failed requests and requests to anything outside `base`."""
    problems: list[str] = []

    def console(message) -> None:
        if message.type == "error":
            problems.append(f"console: {message.text}")

    def request(request) -> None:
        if not request.url.startswith((base, "data:", "blob:")):
            problems.append(f"external: {request.url}")

    def response(response) -> None:
        if response.status >= 400:
            problems.append(f"failed: {response.status} {response.url}")

    page.on("console", console)
    page.on("pageerror", lambda error: problems.append(f"script: {error}"))
    page.on("request", request)
    page.on("requestfailed", lambda request: problems.append(f"failed: {request.failure} {request.url}"))
    page.on("response", response)
    return problems


def unfold(page: Page) -> None:
    """Bring the page into the state in which all of it can be seen."""
    page.add_style_tag(content=STILL)
    page.evaluate(UNFOLD)


def too_wide(page: Page, width: int) -> list[str]:
    """What makes the page scroll sideways in a window of `width` pixels; boxes that scroll by themselves may."""
    page.set_viewport_size({"width": width, "height": 900})
    return page.evaluate(WIDE)


def violations(page: Page, colours_only: bool = False) -> list[str]:
    """What axe-core calls serious or critical; in a second theme only its rules on colours can say something new."""
    page.evaluate(AXE)
    return page.evaluate(VIOLATIONS, not colours_only)


def darken(page: Page) -> None:
    """Let the system turn dark while the page is open; the page follows a little later, or never."""
    page.emulate_media(color_scheme="dark")
    with contextlib.suppress(TimeoutError):
        page.wait_for_function("document.documentElement.dataset.theme === 'dark'", timeout=15_000)


def grounds_of_dark_figures(page: Page) -> list[str]:
    """What lies behind the figures of a dark page, which are drawn for the page's own ground."""
    grounds = page.evaluate(
        "[...document.querySelectorAll('img.in-dark')].map(each => [each.src, getComputedStyle(each).backgroundColor])"
    )
    return [f"dark: {source} on {ground}" for source, ground in grounds if ground != "rgba(0, 0, 0, 0)"]


def wrong_ground(page: Page, theme: str) -> list[str]:
    """Is the page drawn in the theme `light` or `dark`? By its mark and by its ground."""
    shown, brightness = page.evaluate(GROUND)
    right = brightness > 0.9 if theme == "light" else brightness < 0.1
    return [] if shown == theme and right else [f"{theme}: the page says {shown}, the brightness is {brightness:.2f}"]
