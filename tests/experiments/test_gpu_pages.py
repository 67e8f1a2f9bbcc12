"""Every number that a GPU records is on a page: synthetic records of all jobs, and the tables made of them."""

import itertools

import pytest
import status
import torch
from conftest import raises
from stand_in_gpu import Allocator

from experiments import lm, offload, synthetic
from experiments.graph_profile import overlaid_plot
from experiments.published import rows as published_figures
from experiments.reports import batch_size as batch_report
from experiments.reports import bert as bert_report
from experiments.reports import frontier_times, training
from experiments.reports import offload as offload_report
from experiments.reports.figures import losses_plot
from experiments.reports.gpu_records import gpu_records, unrecorded
from experiments.reports.gpu_suite import FIT_COLUMNS, fit_rows
from experiments.results import Record, environment, load_records, load_reference, markdown_table
from experiments.steps.predicted import predicted_timelines
from experiments.steps.settings import record_config
from experiments.suite import chapters
from experiments.suite.gpu_suite import Outcome
from experiments.suite.gpu_suite_jobs import EXPERIMENTS, gpu_jobs

MIB = 2**20
WHERE = environment() | {"device": "cuda", "device_name": "a stand-in", "commit": "a" * 40}
TIMELINE = {"live": [0, 2 * MIB, MIB], "categories": {"activations": [0, 2 * MIB, MIB]}, "boundary": 1}


def synthetic_records(job, count):
    """Records of a job as it makes them, each with numbers of its own."""
    config = record_config(job.config)
    if job.experiment == "frontier":
        record = Record.load(status.ROOT / "results/frontiers/frontier-transformer.json")
        config = {name: list(value) if isinstance(value, tuple) else value for name, value in config.items()}
        return [Record("frontier", config | {"costs": record.config["costs"]}, record.metrics, WHERE)]
    if job.experiment == "selftest":
        methods = {"baseline": {"measured_peak_bytes": next(count) * MIB}}
        return [Record("selftest", {**config, "method": "selftest"}, {"methods": methods, "checks": []}, WHERE)]
    config = {name: value for name, value in config.items() if name not in ("batches", "limit")}
    sizes = [("seq_len", getattr(job.config, "seq_lens", ())), ("batch_size", getattr(job.config, "batches", ()))]
    config |= {name: values[-1] for name, values in sizes if values}
    if job.name.startswith("largest"):
        found = {"largest_batch": next(count), "peak_bytes": next(count) * MIB, "least_peak_bytes": None}
        return [Record("largest-batch", {**config, "method": method}, found, WHERE) for method in job.config.methods]
    records = []
    for method in job.config.methods:
        number = next(count)
        seconds = {"median": number / 1000, "low": number / 1000, "high": number / 999}
        metrics = {"peak_bytes": number * MIB, "resident_bytes": MIB, "dynamic_peak_bytes": MIB, "flops": number}
        metrics |= {"seconds_step": seconds, "seconds_training": number + 0.5, "losses": [2.0, number]}
        metrics |= {"seconds_ratio": {"reference": "baseline", "median": 1 + number / 1000}, "categories": {}}
        metrics |= {"store_peak_bytes": 0, "seconds_hidden_share": None, "gradients_difference": 0.0}
        records.append(Record(job.experiment, {**config, "method": method}, {**metrics, "timeline": TIMELINE}, WHERE))
    return records


@pytest.fixture(scope="module")
def gpu(tmp_path_factory):
    """A folder as ``results/gpu`` with records of all jobs."""
    root, count = tmp_path_factory.mktemp("root"), itertools.count(1001)
    for job in gpu_jobs():
        for number, record in enumerate(synthetic_records(job, count)):
            record.save(root / "results" / "gpu" / f"{job.name}-{number}.json")
    return root / "results" / "gpu"


def test_the_status_page_has_every_run_and_no_kind_is_left_out(gpu):
    page = status.page("gpu", gpu.parents[1])
    assert {job.experiment for job in gpu_jobs()} == set(EXPERIMENTS)
    for record in load_records(gpu):
        assert f"| {record.experiment}" in page
        if "largest_batch" in record.metrics:
            assert f"largest batch {record.metrics['largest_batch']} " in page
        elif "points" in record.metrics:
            assert f"| {round(record.metrics['baseline']['measured_peak_bytes'] / MIB, 1)} |" in page
        elif "seconds_step" in record.metrics:
            peak, ms = record.metrics["peak_bytes"] / MIB, 1e3 * record.metrics["seconds_step"]["median"]
            assert f"| {peak} |" in page and f"| {ms:.1f} |" in page
            if record.experiment in ("lm", "synthetic"):
                assert f"| {record.metrics['seconds_training']} |" in page or "seq_len" not in record.config
    assert status.page("gpu", gpu) == "There is no record of a GPU yet.\n"


def tables(gpu):
    """The tables of the chapters, as they make them: ``{name: (Markdown, columns on a GPU)}``."""
    predicted = load_records(status.ROOT / "results" / "cpu")
    ours = {name: [r for r in predicted if r.experiment == f"{name}-predicted"] for name in EXPERIMENTS}
    steps: dict[str, list] = {}
    for row in published_figures():
        steps.setdefault(row["step"], []).append(row)
    of = {name: [{**row, "predicted": MIB, "error": 0.0} for row in found] for name, found in steps.items()}
    rows = training.published_rows(
        load_reference("synthetic"), of["reference-synthetic"], ours["synthetic"], gpu_records("synthetic", gpu)
    )
    yield "synthetic", rows, training.PUBLISHED
    measured = gpu_records("lm", gpu)
    rows = training.published_rows(load_reference("lm"), of["reference-language-model"], ours["lm"], measured)
    yield "lm", rows, training.PUBLISHED
    chunked = [r for r in ours["lm"] if "chunked" in r.config["method"]]
    yield "chunked", [training.measured_figures(r, measured) for r in chunked], training.PUBLISHED
    measured = gpu_records("offload", gpu, total_tokens=offload.GPU.total_tokens)
    rows = offload_report.published_rows(
        load_reference("offload"), of["reference-offload"], [], ours["offload"], measured
    )
    yield "offload", rows, {"gpu_peak": "on a GPU, MiB", "gpu_ms": "ours on a GPU, ms"}
    measured = gpu_records("batch-size", gpu, model="resnet152", trains=False)
    point = {"without": {"peak_bytes": MIB, "seconds": 1.0}}
    curves = dict.fromkeys((4, 8, 16, 32, 64), point)
    rows = batch_report.published_rows(load_reference("mu-two-resnet"), of["reference-resnet"], curves, measured)
    yield "resnet", rows, batch_report.ON_GPU
    rows = bert_report.published_rows(ours["bert"], gpu_records("bert", gpu))
    yield "bert", rows, {"measured": "on a GPU, MiB", "measured_time": "on a GPU, time, %"}


def test_every_column_of_a_gpu_is_filled_by_its_record(gpu):
    for name, rows, columns in tables(gpu):
        headings = {key: title for key, title in columns.items() if "on a GPU" in title}
        own = [row for row in rows if any(row.get(key) is not None for key in headings)]
        assert len(own) == len(rows), name
        text = markdown_table(rows, headings, "A table.", "tab-a")
        missing = sum(row.get(key) is None for row in rows for key in headings)
        assert missing == text.count("*not yet measured*") and missing <= 1, name  # the baseline has no ratio
        assert unrecorded(text, gpu) == [], name


def test_the_records_of_a_t4_are_in_float16_and_those_in_float32_are_not_shown():
    predicted = Record("lm-predicted", record_config(lm.GPU, seq_len=8192, method="baseline"), {}, environment())
    metrics = {"peak_bytes": MIB, "seconds_training": 2.0}
    for dtype, peak in (("float16", "1.0"), ("bfloat16", "1.0"), ("float32", None)):
        measured = Record("lm", predicted.config | {"dtype": dtype, "device": "cuda"}, metrics, WHERE)
        assert training.measured_figures(predicted, [measured])["measured"] == peak


def test_frontier_losses_and_timelines_are_drawn(gpu):
    records = frontier_times.largest(gpu_records("frontier", gpu))
    rows = frontier_times.times_rows(records)
    names = ["Transformer on a a stand-in", "ResNet-50 on a a stand-in", "Transformer on a a stand-in, Inductor"]
    assert sorted(row["model"] for row in rows) == sorted(names)
    losses = training.measured_losses(gpu_records("lm", gpu))
    assert list(losses) == ["2,048 tokens", "4,096 tokens", "8,192 tokens"]
    assert all(list(methods) == ["baseline", "checkpoint"] for methods in losses.values())
    losses_plot(losses, "")
    small = synthetic.SyntheticConfig((32,), dim=32, ff_dim=64, layers=2, head_dim=16)
    at_16k = {r.config["method"]: r.metrics for r in gpu_records("synthetic", gpu, seq_len=16384)}
    figure = overlaid_plot(predicted_timelines(small, 32), at_16k)
    assert [axes.get_title() for axes in figure.axes] == ["baseline", "checkpoint"]
    (line,) = figure.axes[0].lines
    assert list(line.get_ydata()) == [1.0, 3.0, 2.0]
    measured = gpu_records("offload", gpu, total_tokens=offload.GPU.total_tokens)
    predicted = [r for r in load_records(status.ROOT / "results/cpu") if r.experiment == "offload-predicted"]
    figure = overlaid_plot(*({r.config["method"]: r.metrics for r in records} for records in (predicted, measured)))
    assert len(figure.axes) == 4 and training.measured_losses([]) == {}


def test_all_published_configurations_fit_a_t4():
    rows = fit_rows(load_records(status.ROOT / "results" / "cpu"))
    assert len(rows) == 10 and "does not fit" not in str(rows)
    assert all(set(row) == set(FIT_COLUMNS) for row in rows)
    large = Record("bert-predicted", {"seq_len": 1}, {"peak_bytes": 2**34, "flops": 1}, environment())
    assert [fit_rows([large])[0][name] for name in ("t4", "l4")] == ["does not fit", "0.0"]


@pytest.mark.parametrize(
    ("memory", "options", "asked"),
    [
        (2**34, {}, ("t4", "embedded", "float16")),
        (2**37, {"dataset": "wikitext"}, ("full", "wikitext", "bfloat16")),
        (2**37, {"tier": "t4"}, ("t4", "embedded", "float16")),
        (2**37, {"tier": "cpu"}, None),
        (2**37, {"device": "cpu"}, None),
    ],
)
def test_a_chapter_on_a_gpu_runs_the_suites_jobs(memory, options, asked, monkeypatch, capsys):
    Allocator(monkeypatch, (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: type("", (), {"total_memory": memory}))
    runs = []
    monkeypatch.setattr(chapters, "run_suite", lambda *arguments: runs.append(arguments) or Outcome())
    chapters.measure_here("lm", minutes=3, **options)
    printed = capsys.readouterr().out
    if asked is None:
        assert (runs, printed) == ([], "")
        return
    ((jobs, folder, _, minutes),) = runs
    assert (folder, minutes, printed) == (chapters.FOLDER, 3, "no records\n")
    assert (jobs[0].name, jobs[0].config.dataset, jobs[0].config.dtype) == ("lm-L8192", *asked[1:])
    assert jobs[0].minutes == (12.5 if asked[0] == "t4" else 2.0)


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(
    ("options", "words"), [({"device": "cuda"}, "sees no CUDA GPU"), ({"tier": "a100"}, "choose from")]
)
def test_a_chapter_without_a_gpu_runs_nothing(options, words, capsys):
    chapters.measure_here("lm")
    assert capsys.readouterr().out == ""
    raises(ValueError, words, lambda: chapters.measure_here("lm", **options))
