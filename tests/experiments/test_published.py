"""Published measurements on GPUs against predictions from shapes: rows, stored predictions, tables."""

import json
from dataclasses import dataclass

import pytest

from experiments.cli.command_line import main
from experiments.published import STEPS, Predictions, all_predicted, excluded, predicted_bytes, predictions, rows
from experiments.published.report import METRICS, badge, reasons, summary, summary_table, text_table, worst
from experiments.results import load_reference

PHASES = ("start", "forward", "optimizer")
EXACT = ("cross-entropy", "kl-divergence", "jensen-shannon", "total-variation", "layer-norm", "llama-rms-norm")


def smallest(step):
    return min((row for row in rows() if row["step"] == step), key=lambda row: row["bytes"])


def predicted(*steps):
    stored = Predictions()
    return [stored.of(row) for row in rows() if row["step"] in steps]


def test_every_row_is_predicted_or_says_why_not():
    everything = load_reference(predictions.REFERENCE)["rows"]
    assert len(everything) == len(rows()) + len(excluded())
    for row in everything:
        assert bool(row["step"]) != bool(row["excluded"]) and (row["excluded"] or row["step"] in STEPS)
        assert row["bytes"] > row["rounding"] > 0 and ":" in row["url"] and "@" in row["url"]
    assert all(len(row["excluded"]) > 20 and row.get("figures", 1) > 0 for row in excluded())


def test_rows_are_many_and_from_many_sources():
    assert len(rows()) >= 100 and len({row["source"] for row in rows()}) >= 8
    assert {row["metric"] for row in rows()} == {*METRICS, *(f"allocated, {phase}" for phase in PHASES)}
    keys = [json.dumps([row[name] for name in ("source", "step", "sizes", "gpu", "metric")]) for row in rows()]
    assert len(set(keys)) == len(keys)


def test_all_stored_predictions_are_those_of_this_code():
    """After a change of what predicts: run `python -m experiments published`, and `nox -s reproduce -- --only 11`."""
    stored = Predictions()
    assert {stored.key(row) for row in rows()} == set(stored.stored)


@pytest.mark.parametrize("step", [*EXACT, "softmax", "linear-layers", "gated-mlp"])
def test_rows_predicted_now_equal_the_stored_predictions(step):
    row = smallest(step)
    assert Predictions().of(row)["predicted"] == predicted_bytes(*predictions.group(row))[row["metric"]]


def test_losses_and_norms_are_exact():
    """Their figures follow from the sizes of tensors alone.

    But for one: a benchmark of 1024 rows begins with the blocks of another one, which the prediction does not know.
    """
    found = predicted(*EXACT)
    assert {row["step"] for row in found} == set(EXACT)
    (line,) = summary(found, "metric")
    assert line["metric"] == "allocated" and line["n"] - 1 == line["exact"] > 50
    assert text_table(found).endswith(
        f"{line['n']} figures, {line['exact']} exact, median error 0.000%, largest +0.160%"
    )


@dataclass
class Counting:
    """Predicts ten times the rows of a loss, and counts."""

    calls: int = 0

    def __call__(self, step, sizes, gpu):
        self.calls += 1
        return {"allocated": 10 * sizes["rows"], "NVML": 10 * sizes["rows"]}


ROW = {"step": "cross-entropy", "sizes": {"rows": 8, "vocabulary": 2}, "gpu": "t4", "metric": "allocated", "bytes": 40}


class TestStoredPredictions:
    def test_a_row_is_predicted_once(self, tmp_path):
        counting = Counting()
        first = Predictions(tmp_path / "file.json", counting)
        assert first.of(ROW)["predicted"] == 80 and first.of(ROW)["error"] == 1.0
        first.save([ROW])
        assert Predictions(tmp_path / "file.json", counting).of(ROW)["predicted"] == 80
        assert counting.calls == first.predicted == 1
        assert Predictions(tmp_path / "file.json", counting).of(ROW, repeat=True)["predicted"] == 80
        assert counting.calls == 2

    @pytest.mark.parametrize("change", [{"gpu": "l4"}, {"sizes": {"rows": 9, "vocabulary": 2}}, {"step": "softmax"}])
    def test_every_input_of_a_prediction_changes_its_key(self, change):
        stored = Predictions()
        assert stored.key({**ROW, **change}) != stored.key(ROW)
        assert stored.key({**ROW, "metric": "reserved", "bytes": 1}) == stored.key(ROW)

    def test_changed_code_is_predicted_again_and_old_predictions_are_dropped(self, tmp_path, monkeypatch):
        counting, file = Counting(), tmp_path / "file.json"
        before = Predictions(file, counting)
        before.of(ROW)
        before.save([ROW])
        monkeypatch.setattr(predictions, "code_version", lambda step: "new")
        after = Predictions(file, counting)
        after.of(ROW)
        after.save([ROW])
        assert counting.calls == 2 and list(Predictions(file).stored) == [after.key(ROW)] != [before.key(ROW)]

    def test_new_predictions_are_reported_and_stored(self, tmp_path):
        lines = []
        found = all_predicted(("linear-layers",), file=tmp_path / "file.json", report=lines.append)
        assert len(found) == 3 and len(lines) == 2  # two metrics of one step
        assert all_predicted(("linear-layers",), file=tmp_path / "file.json", report=lines.append) == found
        assert len(lines) == 2
        all_predicted(("linear-layers",), True, tmp_path / "file.json", lines.append)
        assert len(lines) == 4


def test_tables_and_badge():
    found = predicted("softmax", "linear-layers")
    table = summary_table(found, "source", caption="Errors.", name="tab-x")
    assert "| Liger-Kernel | 12 | 12 | 0.00 | +0.00 |" in table
    made = [{**found[0], "error": 0.5, "source": "a paper"}, *found]
    assert [row["error"] for row in worst(made, 0.1)] == [0.5]
    sentence = badge(made, "there")
    errors = "median error 0.00 %, largest +50.0 %"
    assert sentence.startswith(f"{{doc}}`predicted; validated on 16 published measurements, {errors} <there>`")
    assert "(1 of them of whole training steps: median error 50.0 %, largest +50.0 %; 3 sources)" in sentence
    assert badge(made[:1], "there").endswith("(1 of them of whole training steps; 1 sources)\n")
    listed = reasons(excluded())
    assert sum(entry["n"] for entry in listed) == sum(row.get("figures", 1) for row in excluded())
    assert [entry["n"] for entry in listed] == sorted((entry["n"] for entry in listed), reverse=True)


def test_the_command_prints_the_figures_of_a_step(capsys):
    assert main(["published", "--step", "softmax"]) == 0
    assert "allocated: 12 figures, 12 exact" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning")  # peft calls it
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_fine_tuning_step_has_the_published_metrics(attention):
    sizes = {"layers": 1, "dim": 64, "heads": 4, "kv_heads": 2, "ff": 128, "vocabulary": 256, "tied": True}
    sizes |= {"batch": 1, "length": 128, "rank": 4, "attention": attention}
    found = predicted_bytes("lora-causal-lm", sizes, "t4")
    assert found["allocated, start"] < found["allocated, optimizer"] <= found["allocated"] <= found["reserved"]


@pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning")  # peft calls it
def test_a_causal_step_keeps_gradients_and_attends_with_a_mask():
    sizes = {"layers": 1, "dim": 64, "heads": 4, "kv_heads": 2, "ff": 128, "vocabulary": 256, "tied": True}
    sizes |= {"batch": 1, "length": 128}
    full, adapted = (predicted_bytes("causal-lm", {**sizes, **options}, "rtx3090") for options in ({}, {"rank": 4}))
    eager = predicted_bytes("causal-lm", {**sizes, "attention": "eager"}, "rtx3090")
    assert eager["allocated, start"] == full["allocated, start"] < adapted["allocated, start"]
    assert adapted["allocated"] < full["allocated"] < eager["allocated"]
