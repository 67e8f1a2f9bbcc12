"""The book's interactive figures: each names data, a picture for readers without scripts, and a script that exists."""

import ast
import json
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
USED = re.compile(r"```\{(\w+)-explorer\} (\S+)\n:image: (\S+)\n:alt: (.+)\n(?::start: (\S+)\n)?```")


def markdown(path):
    """The text of a page, or of a chapter without the marks of comments."""
    return re.sub(r"^# ?", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE)


def used():
    found = []
    for path in sorted([*(ROOT / "notebooks").glob("*.py"), *(ROOT / "book").glob("*.md")]):
        page = ROOT / "book" / ("notebooks" if path.suffix == ".py" else "")
        for name, data, image, alt, start in USED.findall(markdown(path)):
            found.append((name, (page / data).resolve(), (page / image).resolve(), alt, start))
    return found


def test_every_explorer_is_on_a_page_with_its_data_and_a_picture():
    extension = ast.parse((ROOT / "book" / "_ext" / "explorers.py").read_text(encoding="utf-8"))
    (names,) = (
        ast.literal_eval(node.value)
        for node in extension.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "EXPLORERS"
    )
    assert {name for name, *_ in used()} == {*names}
    for name, data, image, alt, start in used():
        read = json.loads(data.read_text(encoding="utf-8"))
        assert read["schema"].startswith("ackpt.")
        assert not start or start in [variant["name"] for variant in read["variants"]]
        assert image.is_file() and len(alt) > 40
        for source in ("common", name):
            assert all((ROOT / "book" / "_explorer" / f"{source}.{end}").is_file() for end in ("css", "js"))
        script = (ROOT / "book" / "_explorer" / f"{name}.js").read_text(encoding="utf-8")
        assert script.rstrip().endswith(f'start("{name}-explorer", build);')


def test_no_explorer_is_missed():
    sources = [*(ROOT / "notebooks").glob("*.py"), *(ROOT / "book").glob("*.md")]
    assert len(used()) == sum(path.read_text(encoding="utf-8").count("-explorer}") for path in sources)


def test_no_script_or_style_of_them_is_loaded_from_elsewhere():
    for path in (ROOT / "book" / "_explorer").iterdir():
        text = path.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|@import|\bfetch\(|\bimport\b", text), path.name


def test_the_colors_of_categories_are_those_of_timelines():
    from experiments.reports.plots import COLORS

    common = (ROOT / "book" / "_explorer" / "common.js").read_text(encoding="utf-8")
    (block,) = re.findall(r"const COLORS = \{(.*?)\};", common, re.DOTALL)
    colors = dict(re.findall(r'(\w+): "(#\w+)"', block))
    assert colors == {name: color for name, color in COLORS.items() if name not in ("resident", "other")}
    style = (ROOT / "book" / "_explorer" / "frontier.css").read_text(encoding="utf-8")
    assert dict(re.findall(r"--(\w+): (#\w+)", style.partition("}")[0])) == {
        "saved": colors["activations"],
        "recomputed": colors["recomputed"],
    }
