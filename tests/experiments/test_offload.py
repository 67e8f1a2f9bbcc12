"""The offload experiment: bytes that are known, gradients that are checked, no method left out silently."""

import dataclasses
import io

import pytest
import torch
from conftest import raises
from PIL import Image

import ackpt.offloading.transport
from ackpt.models.transformer import Transformer
from experiments.offload import (
    CPU,
    GPU,
    GradientsDiffer,
    OffloadConfig,
    make_batch,
    one_step,
    predict_offload,
    run_offload,
)
from experiments.reports import offload as report
from experiments.reports.plots import png
from experiments.results import DASH, Record, load_reference
from experiments.steps.offload_methods import METHODS, MODULES, OURS, _transformers, cannot_run, make_method

TINY = OffloadConfig(
    total_tokens=96, batch_size=4, layers=5, dim=32, ff_dim=64, head_dim=16, steps=2, min_bytes=1024, methods=METHODS
)
INPUT = 96 * 32 * 4  # bytes of a block's input
CKPT_OFFLOAD = ("ckpt_sync_offload", "ckpt_async_offload")


@pytest.fixture(scope="module")
def records():
    return run_offload(TINY, "python -m experiments offload", timed_rounds=2)


@pytest.fixture(scope="module")
def metrics(records):
    return {record.config["method"]: record.metrics for record in records}


def test_every_method_has_a_record_in_order_and_those_not_run_say_why(records):
    assert [record.config["method"] for record in records] == list(METHODS)
    why = {r.config["method"]: r.metrics["not_run"] for r in records if "not_run" in r.metrics}
    assert why == {"trl": "needs a CUDA GPU", "transformers": "needs a CUDA GPU"}
    assert len(report.ran(records)) == len(METHODS) - 2


def test_offloaded_peak_is_the_classic_one_less_the_inputs_that_wait_in_the_store(metrics):
    """Five regions: the newest input stays, the first is the batch, which is there anyway."""
    peaks = [metrics["ckpt_classic"]["peak_bytes"] - metrics[name]["peak_bytes"] for name in CKPT_OFFLOAD]
    assert peaks == [3 * INPUT, 3 * INPUT]
    assert metrics["offload_sync"]["peak_bytes"] < metrics["baseline"]["peak_bytes"]


def test_copies_store_and_pool_are_counted(metrics):
    for name in CKPT_OFFLOAD:
        counted = metrics[name]
        assert counted["store_peak_bytes"] == 4 * INPUT and counted["pool_misses"] == 0
        assert (counted["copies_out"], counted["bytes_out"]) == (4, 4 * INPUT)
        assert (counted["copies_in"], counted["bytes_in"]) == (3, 3 * INPUT)
        assert len(counted["timeline"]["copies"]) == 7
    assert metrics["ckpt_async_offload"]["just_in_time"] == 0
    assert metrics["baseline"]["store_peak_bytes"] == 0 and "copies" not in metrics["baseline"]["timeline"]
    assert metrics["offload_wrapper"]["store_peak_bytes"] is None


def test_gradients_are_equal_to_the_last_bit_for_peers_too(metrics):
    assert {values.get("gradients_difference", 0.0) for values in metrics.values()} == {0.0}


def test_measured_times_are_in_fields_named_seconds(metrics):
    times = {"seconds_step", "seconds_ratio", "seconds_hidden_share"}
    assert {name for name in metrics["baseline"] if name.startswith("seconds")} == times
    assert metrics["baseline"]["seconds_hidden_share"] is None
    copied = metrics["offload_async"]
    assert copied["seconds_copying"] > 0 and 0 <= copied["seconds_hidden_share"] <= 1
    assert metrics["save_on_cpu"]["seconds_hidden_share"] is None


def test_two_runs_record_the_same_but_for_times(metrics):
    again = run_offload(dataclasses.replace(TINY, methods=("baseline", "offload_async")), timed_rounds=0)
    for record in again:
        before = metrics[record.config["method"]]
        assert record.metrics == {name: value for name, value in before.items() if not name.startswith("seconds")}


def test_threads_are_as_before_and_recorded(records):
    before = torch.get_num_threads()
    (record,) = run_offload(dataclasses.replace(TINY, methods=("baseline",), steps=1), timed_rounds=0)
    assert torch.get_num_threads() == before >= record.config["threads"] == record.environment["threads"] >= 1


def test_a_copy_that_goes_wrong_is_noticed(monkeypatch):
    """The check is not empty: a worker that copies half of the bytes ends the experiment."""
    move = ackpt.offloading.transport._move
    monkeypatch.setattr(ackpt.offloading.transport, "_move", lambda *args: move(*args[:-1], args[-1] // 2))
    with pytest.raises(GradientsDiffer, match="ckpt_async_offload: the gradient of blocks.* to the last bit"):
        run_offload(dataclasses.replace(TINY, methods=("ckpt_async_offload",)), timed_rounds=0)


def test_gradients_that_are_not_finite_are_refused(monkeypatch):
    def poisoned(config, step):
        x, cu_seqlens = make_batch(config, step)
        return x.index_fill(0, torch.tensor(3), float("nan")), cu_seqlens

    monkeypatch.setattr("experiments.offload.make_batch", poisoned)
    with pytest.raises(GradientsDiffer, match="not finite"):
        run_offload(dataclasses.replace(TINY, methods=("baseline",)), timed_rounds=0)


def test_bfloat16_autocast_is_equal_to_the_last_bit_too():
    config = dataclasses.replace(TINY, dtype="bfloat16", methods=CKPT_OFFLOAD, steps=1)
    found = run_offload(config, timed_rounds=0)
    assert {record.metrics["gradients_difference"] for record in found} == {0.0}
    assert all("pool_misses" not in record.metrics for record in found)  # there is no second step


def test_sequences_share_the_tokens_as_evenly_as_can_be():
    assert GPU.lengths() == [250] * 48
    config = dataclasses.replace(TINY, total_tokens=10, batch_size=4)
    assert config.lengths() == [3, 3, 2, 2]
    assert make_batch(config, 0)[1].tolist() == [0, 3, 6, 8, 10]
    uneven = run_offload(
        dataclasses.replace(config, methods=("baseline", "ckpt_async_offload"), steps=1), timed_rounds=0
    )
    assert uneven[1].metrics["gradients_difference"] == 0.0
    raises(ValueError, "not a multiple of 4", lambda: predict_offload(config))


def test_predicted_peaks_are_the_measured_ones_but_for_kernel_scratch(metrics):
    for record in predict_offload(dataclasses.replace(TINY, methods=("offload_async", *CKPT_OFFLOAD, "trl"))):
        if record.config["method"] not in OURS:
            assert "without data" in record.metrics["not_run"]
            continue
        measured = metrics[record.config["method"]]
        assert record.metrics["resident_bytes"] == measured["resident_bytes"]
        assert record.metrics["store_peak_bytes"] == measured["store_peak_bytes"]
        assert 0 <= measured["peak_bytes"] - record.metrics["peak_bytes"] < 64 * 1024


def test_at_the_published_size_offload_takes_a_sixth_off_the_classic_peak():
    config = dataclasses.replace(GPU, methods=("ckpt_classic", "ckpt_async_offload"))
    classic, overlapped = (record.metrics["peak_bytes"] for record in predict_offload(config))
    assert classic - overlapped == 10 * 12_000 * 1024 * 4
    assert overlapped <= (1 - 0.18) * classic


def test_a_peer_on_a_gpu_needs_its_package(monkeypatch):
    assert cannot_run("transformers", "cuda") is None and cannot_run("save_on_cpu", "cpu") is None

    def broken(name):
        raise RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.setattr("importlib.import_module", broken)
    why = "cannot be imported (RuntimeError: operator torchvision::nms does not exist): pip install -U"
    for peer, module in MODULES.items():
        assert cannot_run(peer, "cuda") == f"{module} {why} {peer}"


def test_blocks_in_a_model_of_transformers_have_the_same_gradients():
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    model, batch = Transformer(TINY.model()), make_batch(TINY, 0)
    baseline = make_method("baseline", model, "cpu", 0)
    one_step(TINY, model, baseline, batch)
    wanted = [parameter.grad.clone() for parameter in model.parameters()]
    theirs = dataclasses.replace(baseline, forward=_transformers(model, offload=False))
    one_step(TINY, model, theirs, batch)
    assert all(torch.equal(a, b.grad) for a, b in zip(wanted, model.parameters()))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"total_tokens": 0}, "total_tokens must be at least 1"),
        ({"batch_size": 97}, "97 sequences cannot share 96 tokens"),
        ({"steps": 0}, "steps must be at least 1"),
        ({"min_bytes": -1}, "min_bytes must be 0 or more"),
        ({"methods": ("magic",)}, "unknown method 'magic'"),
        ({"methods": ()}, "unknown method none"),
        ({"head_dim": 5}, "multiple of head_dim"),
    ],
)
def test_bad_settings_are_refused(changes, words):
    raises(ValueError, words, lambda: dataclasses.replace(TINY, **changes))


def test_rows_hold_differences_and_the_published_figures(records):
    rows = {row["method"]: row for row in report.rows(records, load_reference("offload"))}
    assert list(rows["baseline"]) == list(report.COLUMNS)
    assert rows["baseline"]["vs_baseline"] is None and rows["baseline"]["time"] is None
    assert rows["ckpt_async_offload"]["vs_classic"] < 0 and rows["ckpt_classic"]["vs_baseline"] < 0
    assert (rows["ckpt_classic"]["published_ms"], rows["ckpt_classic"]["published_peak"]) == (3745.56, 2759.07)
    assert rows["offload_async"]["published_ms"] is None and rows["save_on_cpu"]["store"] is None
    assert rows["trl"]["not_run"] == "needs a CUDA GPU" and rows["trl"]["peak"] is None


def test_published_rows_have_all_published_figures_and_predictions(records):
    reference = load_reference("offload")
    peaks = [
        {"sizes": {"method": row["method"]}, "predicted": 2259.5 * 2**20, "error": -0.00123}
        for row in reference["rows"]
    ]
    times = [{"figures": [3745.56, 3347.69], "predicted": 1.25}]
    rows = report.published_rows(reference, peaks, times, records)
    assert [row["method"] for row in rows] == ["baseline", "ckpt_classic", *CKPT_OFFLOAD]
    baseline, classic, sync, _ = rows
    assert (baseline["ms"], baseline["peak"], baseline["ms_change"]) == ("3,347.69", "10,895.44", DASH)
    assert (classic["ms_change"], classic["peak_change"], classic["classic_change"]) == ("+11.88", "-74.68", DASH)
    assert (sync["classic_change"], sync["predicted"], sync["error"]) == ("-18.15", "2,259.50", "-0.123")
    assert (classic["predicted_change"], sync["predicted_change"]) == ("+25.00", DASH)
    assert {(row["gpu_peak"], row["gpu_ms"]) for row in rows} == {(None, None)}
    (measured,) = (record.metrics["peak_bytes"] for record in records if record.config["method"] == "baseline")
    assert baseline["ours"] == f"{measured / 2**20:,.1f}"
    assert report.published_rows(reference, peaks, times, records, records)[0]["gpu_peak"] == float(baseline["ours"])


def test_the_table_names_what_was_not_run_and_what_was_checked(records):
    table = report.text_table(records)
    assert "not run: trl: needs a CUDA GPU" in table and "equal to the last bit (checked)" in table
    assert table.splitlines()[2].startswith("baseline ") and "Colab T4" in table
    assert report.text_table([]) == "no records"


def test_figures_of_one_run(records, tmp_path):
    figures = report.figures(records)
    assert list(figures) == ["peak", "time", "timelines"]
    title = figures["timelines"].get_suptitle().replace("\n", " ")
    assert title.startswith("Offloading the boundaries removes the ramp and lowers the checkpointed peak by 0.0 MiB")
    stacked = figures["timelines"].axes
    assert [axes.get_ylabel() for axes in stacked] == [f"{name}\nMiB" for name in report.STACKED]
    assert len({axes.get_xlim() for axes in stacked}) == 1 and len({axes.get_ylim()[1] for axes in stacked}) == 1
    assert stacked[0].get_ylim()[0] == 0 > stacked[1].get_ylim()[0]  # classic copies nothing
    legend = [text.get_text() for text in figures["timelines"].legends[0].get_texts()]
    assert legend[:2] == ["copy out", "copy in"] and legend[-1] == "resident"
    bars = figures["peak"].axes[0]
    assert [label.get_text() for label in bars.get_yticklabels()] == [
        m for m in METHODS if m not in ("trl", "transformers")
    ]
    record = Record.load(records[0].save(tmp_path / report.file_name(records[0])))
    assert (tmp_path / "offload-T96-baseline.json").exists() and record.metrics == records[0].metrics


@pytest.mark.parametrize("name", ["peak", "timelines"])
def test_figures_have_a_ground_and_are_the_same_every_time(records, name):
    first, second = (png(report.figures(records)[name]) for _ in range(2))
    assert first == second
    assert Image.open(io.BytesIO(first)).convert("RGBA").getpixel((0, 0)) == (255, 255, 255, 255)


def test_nothing_to_draw_is_an_error(records):
    peers = [record for record in records if record.config["method"] in ("trl", "transformers")]
    raises(ValueError, "none of the 2 records", lambda: report.bars_plot(peers, "peak", "Nothing"))
    raises(ValueError, "unknown", lambda: report.bars_plot(records, "flops", "Something else"))
    raises(ValueError, "none of the records", lambda: report.timelines_plot(peers, "Nothing"))
    assert report.figures(peers) == {}


def test_the_small_tier_is_small():
    assert CPU.total_tokens * CPU.dim * CPU.layers < 2**21 and CPU.device == "cpu"
