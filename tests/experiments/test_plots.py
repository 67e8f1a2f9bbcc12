import io

import pytest
from matplotlib.figure import Figure
from PIL import Image

from ackpt.metering.timeline import build_timeline
from experiments.reports import plots
from experiments.reports.plots import MIB, png, save, timeline_plot


def actions():
    saved = [("alloc", key, 4 * MIB) for key in range(10)]
    backward = [step for key in reversed(range(10)) for step in (("alloc", 99, MIB), ("free", key), ("free", 99))]
    return [*saved, ("backward",), *backward]


TIMELINE = build_timeline(actions(), before={77: ("gradients", 2 * MIB)})
FIGURES = {
    "timeline": lambda: timeline_plot(TIMELINE, "Activations grow until backward begins"),
    "with resident": lambda: timeline_plot(TIMELINE, "A long title " * 10, resident_bytes=100 * MIB),
}


def texts(figure):
    return [text.get_text() for text in figure.axes[0].texts]


@pytest.mark.parametrize("name", FIGURES)
class TestEveryFigure:
    def test_same_bytes_every_time(self, name, tmp_path):
        one, two = FIGURES[name](), FIGURES[name]()
        assert isinstance(one, Figure)
        first = save(one, tmp_path / "a.png").read_bytes()
        assert first == png(one) == one._repr_png_() == save(two, tmp_path / "b.png").read_bytes()
        assert b"matplotlib" not in first.lower() and b"tEXt" not in first

    def test_its_ground_is_white_on_every_page(self, name):
        image = Image.open(io.BytesIO(png(FIGURES[name]()))).convert("RGBA")
        assert image.getchannel("A").getextrema() == (255, 255)
        corners = [(0, image.height - 1), (image.width - 1, image.height - 1), (image.width - 1, 0)]
        assert {image.getpixel(corner) for corner in corners} == {(255, 255, 255, 255)}

    def test_nothing_overlaps_or_leaves_the_page(self, name):
        figure = FIGURES[name]()
        axes, renderer = figure.axes[0], figure.canvas.get_renderer()
        title = figure._suptitle.get_window_extent(renderer)
        parts = [*figure.legends, *axes.texts]
        page = figure.bbox
        for part in parts:
            box = part.get_window_extent(renderer)
            assert not box.overlaps(title)
            assert page.x0 <= box.x0 and box.x1 <= page.x1 and page.y0 <= box.y0 and box.y1 <= page.y1


def test_stacks_have_one_order_everywhere():
    stacked = {name: name for name in ("recomputed", "resident", "temporaries", "activations", "gradients")}
    order = ["temporaries", "recomputed", "activations", "gradients", "resident"]
    assert [*plots.as_stacked(stacked)] == order


def test_a_timeline_marks_its_peak():
    assert texts(FIGURES["timeline"]()) == ["peak 43.0 MiB", "backward begins"]
    figure = FIGURES["with resident"]()
    assert texts(figure)[0] == "peak 143 MiB"
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["temporaries", "activations", "gradients", "resident"]  # from top to bottom, as drawn
