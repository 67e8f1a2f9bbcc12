"""The page and the snapshot of an explanation: complete, readable by torch's own reader, and with the plan's events."""

import pickle
import pickletools
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
import torch
from conftest import model_of
from torch import nn
from torch.cuda import _memory_viz

import ackpt
from ackpt.metering.meter import memory_format
from ackpt.planner.explain.page import _STYLE, live_series, timeline_svg

VOID = {"meta", "br"}


class Tags(HTMLParser):
    """The tags of a page, all of which must be closed in order."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict]] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture(scope="module", params=[None, 0.7])
def explanation(request):
    layers = (nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8)) for _ in range(3))
    model = model_of(lambda self, x: self.layers(x).square().mean(), layers=nn.Sequential(*layers))
    return ackpt.explain(model, torch.ones(64, 8), request.param)


def test_the_page_is_complete_and_loads_nothing(explanation, tmp_path):
    text = explanation.to_html(tmp_path / "page.html").read_text(encoding="utf-8")
    tags = Tags(text).seen
    assert not {"script", "link", "img", "iframe"} & {tag for tag, _ in tags}
    assert not [attrs for _, attrs in tags if {"src", "href"} & set(attrs)] and "url(" not in text and "//" not in text
    assert "prefers-color-scheme: dark" in text and ("meta", {"name": "viewport"}) in [
        (tag, {"name": attrs["name"]}) for tag, attrs in tags if "name" in attrs
    ]
    assert memory_format(explanation.plan.peak_bytes) in text
    assert len([tag for tag, _ in tags if tag == "details"]) == len(
        {
            ".".join(line.module.split(".")[:n])
            for line in explanation.saved
            for n in range(len(line.module.split(".")) + 1)
        }
    )


def test_the_timeline_is_the_plan_s(explanation):
    series = live_series(explanation)
    timeline, resident = explanation.plan.timeline, explanation.plan.resident_bytes
    assert [resident + live for live in timeline.live] == list(map(sum, zip(*series.values())))
    assert {kind: sizes[timeline.peak_index] for kind, sizes in series.items() if sizes[timeline.peak_index]} == (
        explanation.at_peak
    )
    svg = ElementTree.fromstring(re.sub(r"</svg>.*", "</svg>", timeline_svg(explanation), flags=re.DOTALL))
    assert [each.find("title").text for each in svg.iter("polygon")] == list(series)
    assert "the peak" in [each.find("title").text for each in svg.iter("line")]


def styles() -> tuple[dict[str, str], dict[str, str]]:
    """The variables of the page's style in the light and in the dark theme."""
    light, dark = (dict(re.findall(r"--([a-z]+): (#[0-9a-f]+)", part)) for part in _STYLE.split("@media"))
    return light, {**light, **dark}


def luminance(color: str) -> float:
    """As WCAG 2 defines it."""
    digits = color[1:] if len(color) == 7 else "".join(2 * digit for digit in color[1:])
    parts = [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    dark, light = sorted([luminance(one), luminance(other)])
    return (light + 0.05) / (dark + 0.05)


def test_text_is_readable_in_both_themes():
    for theme in styles():
        for text in ("text", "faint"):
            for ground in ("ground", "bar"):
                assert contrast(theme[text], theme[ground]) >= 4.5, (text, ground)


def test_names_are_escaped(tmp_path):
    model = nn.Sequential()
    model.add_module("<b>&", nn.Linear(8, 8))
    model.add_module("tanh<", nn.Tanh())
    text = ackpt.explain(model, torch.ones(4, 8)).to_html(tmp_path / "page.html").read_text(encoding="utf-8")
    assert "tanh&lt;" in text and "tanh<" not in text


def block():
    return nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.1), nn.Tanh(), nn.Linear(64, 8))


@pytest.fixture(scope="module", params=["none", "full"])
def written(request, tmp_path_factory):
    model = nn.Sequential(block(), block(), block())
    optimizer = torch.optim.AdamW(model.parameters())
    explanation = ackpt.explain(model, torch.ones(64, 8), policy=request.param, optimizer=optimizer)
    path = explanation.to_memory_viz(tmp_path_factory.mktemp("viz") / "step.pickle")
    return explanation, pickle.loads(path.read_bytes())


def test_events_give_the_peak_and_never_overlap(written):
    explanation, data = written
    live: dict[int, int] = {}
    peak = 0
    (segment,) = data["segments"]
    for event in data["device_traces"][0]:
        start, end = event["addr"], event["addr"] + event["size"]
        assert segment["address"] <= start and end <= segment["address"] + segment["total_size"]
        if event["action"] == "alloc":
            assert all(end <= other or other + size <= start for other, size in live.items())
            live[start] = event["size"]
        elif event["action"] == "free_completed":
            assert live.pop(start) == event["size"]
        peak = max(peak, sum(live.values()))
    assert peak == explanation.plan.peak_bytes
    left = {b["address"]: b["size"] for b in segment["blocks"] if b["state"] == "active_allocated"}
    assert left == live and sum(b["size"] for b in segment["blocks"]) == segment["total_size"]
    assert sum(live.values()) == explanation.plan.resident_bytes + explanation.plan.timeline.live[-1]


# What the page's own reader knows: `unpickle` in torch/utils/viz/MemoryViz.js.
OPCODES = set(
    "APPEND APPENDS BINFLOAT BINGET BININT BININT1 BININT2 BINPUT BINUNICODE DICT EMPTY_DICT EMPTY_LIST EMPTY_TUPLE "
    "FRAME LIST LONG1 LONG_BINGET LONG_BINPUT MARK MEMOIZE NEWFALSE NEWTRUE NONE PROTO SETITEM SETITEMS "
    "SHORT_BINUNICODE STOP TUPLE TUPLE1 TUPLE2 TUPLE3".split()
)


def test_the_page_knows_every_opcode(written, tmp_path):
    explanation, _ = written
    operations = list(pickletools.genops(explanation.to_memory_viz(tmp_path / "step.pickle").read_bytes()))
    assert {operation.name for operation, *_ in operations} <= OPCODES
    assert operations[0][1] == 4  # the newest protocol that it knows


def test_torch_reads_the_snapshot(written):
    explanation, data = written
    allocated = explanation.plan.resident_bytes + explanation.plan.timeline.live[-1]
    assert f"total_allocated: {_memory_viz.Bytes(allocated)}" in _memory_viz.segsum(data)
    allocs = sum(event["action"] == "alloc" for event in data["device_traces"][0])
    assert _memory_viz.trace(data).count(" = a[") == allocs == len([a for a in explanation.allocations if a.bytes])
    names = {event["frames"][0]["name"] for event in data["device_traces"][0] if event["action"] == "alloc"}
    assert "optimizer: state of the optimizer" in names and "parameters: 0.0.weight" in names
    assert ("recomputed: tanh (0.2)" in names) == (explanation.plan.policy == "full")
    assert "gradients: gradient of 2.3.bias" in _memory_viz.memory(data, format_flamegraph=lambda lines: lines)
    page = _memory_viz.trace_plot(data)
    assert "add_local_files" in page and len(page) > len(pickle.dumps(data))
    assert _memory_viz.segment_plot(data)
