"""Published measurements on GPUs against predictions from shapes."""

import pytest

from ackpt.experiments import published
from ackpt.experiments.published import PublishedConfig
from ackpt.experiments.steps.published_steps import STEPS
from ackpt.results import load_reference


def test_every_row_is_predicted_or_says_why_not():
    rows = load_reference(published.REFERENCE)["rows"]
    assert {bool(row["step"]) for row in rows} == {True, False}
    for row in rows:
        assert row["excluded"] or row["step"] in STEPS
        assert row["bytes"] > row["rounding"] > 0 and ":" in row["url"]


def test_losses_and_norms_are_exact():
    """Their figures follow from the sizes of tensors alone."""
    steps = ("cross-entropy", "kl-divergence", "jensen-shannon", "total-variation", "layer-norm", "llama-rms-norm")
    records = list(published.run(PublishedConfig(steps)))
    assert {record.config["step"] for record in records} == set(steps)
    (found,) = published.summary(records)
    assert found["metric"] == "allocated" and found["n"] == found["exact"] == 8
    assert published.text_table(records).endswith("8 figures, 8 exact, median error 0.000%, largest +0.000%")


def test_unknown_steps_are_refused():
    with pytest.raises(ValueError, match="unknown step 'rope2' .did you mean 'rope'"):
        PublishedConfig(("rope2",))


def test_every_excluded_figure_has_a_reason():
    assert published.excluded() and all(len(row["excluded"]) > 20 for row in published.excluded())


@pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning")  # peft calls it
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_fine_tuning_step_has_the_published_metrics(attention):
    sizes = {"layers": 1, "dim": 64, "heads": 4, "kv_heads": 2, "ff": 128, "vocabulary": 256, "tied": True}
    sizes |= {"batch": 1, "length": 128, "rank": 4, "attention": attention}
    found = published.predicted_bytes("lora-causal-lm", sizes, "t4")
    assert found["allocated, start"] < found["allocated, optimizer"] <= found["allocated"] <= found["reserved"]
