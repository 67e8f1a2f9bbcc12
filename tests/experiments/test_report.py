"""Rows and figures that the book makes from records."""

import io

import pytest
from PIL import Image

from experiments.reports.figures import losses_plot, stacked_plot
from experiments.reports.plots import MIB, png
from experiments.reports.training import PUBLISHED, published_rows
from experiments.results import Record, environment

SIZES = {"batch_size": 1, "dim": 64, "ff_dim": 256, "layers": 3}


def record(method, seq_len=128, peak=5 * MIB, **changed):
    config = {**SIZES, "seq_len": seq_len, "method": method, **changed}
    return Record("demo", config, {"peak_bytes": peak, "seconds_training": 9.96}, environment())


def reference():
    rows = [
        {"seq_len": 128, "method": method, "peak": peak, "seconds": seconds}
        for method, peak, seconds in (("baseline", 1234.5, 10.0), ("checkpoint", 4.25, 12.84))
    ]
    return {"rows": rows}


CONFIGURED = [
    {"sizes": {"tokens": 128, "method": "baseline"}, "predicted": 1234 * MIB},
    {"sizes": {"tokens": 128, "method": "checkpoint"}, "predicted": 4 * MIB},
]
PREDICTED = [record("chunked-loss"), record("checkpoint", peak=4 * MIB), record("baseline", peak=2000 * MIB)]


def test_published_predicted_and_measured_have_their_own_columns():
    measured = [record("baseline", peak=5 * MIB + 2**19)]
    first, second = published_rows(reference(), CONFIGURED, PREDICTED, measured, digits=2)
    assert first.keys() == second.keys() == PUBLISHED.keys()
    assert [first[name] for name in ("published", "configured", "seconds", "ratio")] == [
        "1,234.50",
        "1,234.00",
        "10.00",
        "1.00",
    ]
    assert [first[name] for name in ("predicted", "measured", "measured_seconds")] == ["2,000.0", "5.5", "10.0"]
    assert [second[name] for name in ("published", "configured", "seconds", "ratio")] == [
        "4.25",
        "4.00",
        "12.84",
        "1.28",
    ]
    assert [second[name] for name in ("predicted", "measured")] == ["4.0", None]


@pytest.mark.parametrize("name", ["seq_len", "batch_size", "dim", "ff_dim", "layers", "dtype"])
def test_a_measurement_of_another_size_or_dtype_is_not_shown(name):
    row, _ = published_rows(reference(), CONFIGURED, PREDICTED, [record("baseline", **{name: 1024})])
    assert row["measured"] is None


def plots():
    return {
        "losses": losses_plot({"128 tokens": {"baseline": [2.0, 1.0], "checkpoint": [2.0, 1.5]}}, "They differ"),
        "stacked": stacked_plot(["a", "a+b"], {"parameters": [MIB, MIB], "logits": [3 * MIB, 0]}, "Logits go"),
    }


def texts(figure):
    return [text.get_text() for text in figure.axes[0].texts]


def test_losses_have_both_curves_and_their_difference():
    above, below = plots()["losses"].axes
    assert [list(line.get_ydata()) for line in (*above.lines, *below.lines)] == [[2.0, 1.0], [2.0, 1.5], [0.0, 0.5]]
    assert [text.get_text() for text in above.get_legend().get_texts()] == ["baseline", "checkpoint"]
    assert above.get_title() == "128 tokens"


def test_stacked_bars_add_up_to_the_peak():
    figure = plots()["stacked"]
    assert texts(figure) == ["4.00", "1.00"]
    tops = [patch.get_y() + patch.get_height() for patch in figure.axes[0].patches]
    assert tops == [1, 1, 4, 1]


@pytest.mark.parametrize("name", ["losses", "stacked"])
def test_figures_have_a_ground_and_are_the_same_every_time(name):
    first, second = png(plots()[name]), png(plots()[name])
    assert first == second
    image = Image.open(io.BytesIO(first)).convert("RGBA")
    assert image.getpixel((0, image.height - 1)) == (255, 255, 255, 255)
