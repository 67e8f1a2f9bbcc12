"""Rows and figures that the book makes from records."""

import io

import pytest
from PIL import Image

from ackpt.experiments.reports.figures import stacked_plot
from ackpt.experiments.reports.training import published_rows, timelines_plot
from ackpt.metering.timeline import build_timeline
from ackpt.plots import MIB, png
from ackpt.results import Record, environment

SIZES = {"batch_size": 1, "dim": 64, "ff_dim": 256, "layers": 3}


def record(method, seq_len=128, peak=5 * MIB, saved=3, **changed):
    actions = [("alloc", key, MIB) for key in range(saved)] + [("backward",)] + [("free", key) for key in range(saved)]
    timeline = build_timeline(actions, before={77: ("gradients", MIB)}, after={77: "gradients"})
    metrics = {"peak_bytes": peak, "resident_bytes": 2 * MIB, "timeline": timeline.to_json()}
    return Record("demo", {**SIZES, "seq_len": seq_len, "method": method, **changed}, metrics, environment())


def reference(*rows):
    return {"rows": [dict(zip(("seq_len", "method", "peak"), row)) for row in rows]}


def test_published_predicted_and_measured_stand_in_columns_of_their_own():
    printed = reference((128, "baseline", 7.25), (256, "baseline", 9.5))
    predicted = [record("baseline"), record("baseline", 256, 8 * MIB), record("checkpoint", 256, 4 * MIB)]
    assert published_rows(printed, predicted, [record("baseline", peak=5 * MIB + 2**19)]) == [
        {"seq_len": 128, "method": "baseline", "published": 7.25, "predicted": 5.0, "measured": 5.5},
        {"seq_len": 256, "method": "baseline", "published": 9.5, "predicted": 8.0, "measured": None},
        {"seq_len": 256, "method": "checkpoint", "published": None, "predicted": 4.0, "measured": None},
    ]


@pytest.mark.parametrize("name", ["seq_len", "batch_size", "dim", "ff_dim", "layers", "dtype"])
def test_a_measurement_of_another_size_or_dtype_is_not_shown(name):
    (row,) = published_rows(reference(), [record("baseline")], [record("baseline", **{name: 1024})])
    assert row["measured"] is None


def plots():
    return {
        "timelines": timelines_plot([record("baseline"), record("checkpoint", saved=1)], "One hill, one molehill"),
        "stacked": stacked_plot(["a", "a+b"], {"parameters": [MIB, MIB], "logits": [3 * MIB, 0]}, "Logits go"),
    }


def texts(figure):
    return [text.get_text() for text in figure.axes[0].texts]


def test_every_step_has_its_own_peak_and_boundary_on_one_axis_of_bytes():
    figure = plots()["timelines"]
    marks = ["peak 6.00 MiB", "backward begins", "peak 4.00 MiB", "backward begins"]
    assert texts(figure) == marks
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == ["baseline", "checkpoint"]
    legend = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert legend == ["activations", "gradients", "resident"]
    assert figure.axes[0].get_ylim()[1] > 6


def test_stacked_bars_add_up():
    figure = plots()["stacked"]
    assert texts(figure) == ["4.00", "1.00"]
    tops = [patch.get_y() + patch.get_height() for patch in figure.axes[0].patches]
    assert tops == [1, 1, 4, 1]


@pytest.mark.parametrize("name", ["timelines", "stacked"])
def test_figures_have_a_ground_and_are_the_same_every_time(name):
    first, second = png(plots()[name]), png(plots()[name])
    assert first == second
    image = Image.open(io.BytesIO(first)).convert("RGBA")
    assert image.getpixel((0, image.height - 1)) == (255, 255, 255, 255)
