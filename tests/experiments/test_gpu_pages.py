"""Every number that a GPU records is on a page, and every such number on a page is in a record of a known commit."""

import ast
import dataclasses
import itertools
import shutil
import subprocess
from pathlib import Path

import jupytext
import pytest
import status
import torch
from conftest import raises
from stand_in_gpu import Allocator

from experiments import bert, lm, offload, synthetic
from experiments.graph_profile import overlaid_plot
from experiments.predicted_curves import POLICIES, BatchCurves
from experiments.published import Predictions, time_ratios
from experiments.reports import frontier_times, training
from experiments.reports.figures import losses_plot
from experiments.reports.gpu_records import gpu_cells, gpu_columns, gpu_records, not_of_this_repository, unrecorded
from experiments.reports.gpu_suite import FIT_COLUMNS, fit_rows
from experiments.results import Record, environment, load_records, markdown_table
from experiments.steps import predicted
from experiments.steps.offload_methods import OURS
from experiments.steps.predicted import predicted_timelines
from experiments.steps.settings import record_config
from experiments.suite import chapters
from experiments.suite.gpu_suite import Outcome
from experiments.suite.gpu_suite_jobs import EXPERIMENTS, REFERENCES, RESNET, gpu_jobs

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
    config = {name: value for name, value in config.items() if name not in ("batches", "limit", "runs")}
    sizes = [("seq_len", getattr(job.config, "seq_lens", ())), ("batch_size", getattr(job.config, "batches", ()))]
    config |= {name: values[-1] for name, values in sizes if values}
    if job.name.startswith("largest"):
        found = {"largest_batch": next(count), "peak_bytes": next(count) * MIB, "least_peak_bytes": None}
        return [Record("largest-batch", {**config, "method": method}, found, WHERE) for method in job.config.methods]
    records = []
    runs = getattr(job.config, "runs", None) or [{"method": method} for method in job.config.methods]
    for run in runs:
        if job.experiment in REFERENCES:
            config["sizes"] = run
        number, method = next(count), run.get("method", "baseline")
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
    read = set().union(*map(status.gpu_experiments, status.sources()))
    assert read == set(EXPERIMENTS) - {"selftest"} == {kind.partition(",")[0] for kind in SHOWN} | {"frontier"}
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


READS_A_GPU = ("gpu_records(", "fit_rows(")
CHAPTERS = ("04", "08", "09", "12", "14")
KINDS = {synthetic.SyntheticConfig: "synthetic", lm.LMConfig: "lm"}
SMALL = synthetic.SyntheticConfig((32,), dim=32, ff_dim=64, layers=2, head_dim=16)
GIVEN = {"curves": {}, "D": lm.GPU.dim}  # instead of minutes of training, and of chapters that read no records


def stored(experiment):
    """The committed predictions of an experiment; new ones take minutes."""
    return load_records(status.ROOT / "results" / "cpu", f"{experiment}-predicted")


def names_of(cell):
    """The names that a cell reads before it assigns them, and those that it assigns, both outside of functions."""
    reads, made = set(), set()
    for statement in ast.parse(cell).body:
        parts = list(ast.walk(statement))
        local = {each.arg for each in parts if isinstance(each, ast.arg)}
        targets = [each.target for each in parts if isinstance(each, ast.comprehension)]
        local |= {each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)}
        names = [each for each in parts if isinstance(each, ast.Name) and each.id not in local]
        stored = {each.id for each in names if isinstance(each.ctx, ast.Store)}
        loaded = {each.id for each in names if isinstance(each.ctx, ast.Load)}
        is_scope = isinstance(statement, (ast.FunctionDef, ast.ClassDef))
        if is_scope or isinstance(statement, (ast.For, ast.With)):
            loaded -= stored
        reads |= (loaded | (stored if isinstance(statement, ast.AugAssign) else set())) - made
        made |= {statement.name} if is_scope else stored
        made |= {(each.asname or each.name).partition(".")[0] for each in parts if isinstance(each, ast.alias)}
    return reads, made


def cells_to_the_gpu(source):
    """The code cells of a chapter that read records of a GPU, and those that they need, in order."""
    cells = [cell.source for cell in jupytext.read(source).cells if cell.cell_type == "code"]
    names, chosen = [names_of(cell) for cell in cells], set()
    ahead = [index for index, cell in enumerate(cells) if any(text in cell for text in READS_A_GPU)]
    while ahead:
        if (index := ahead.pop()) not in chosen:
            chosen.add(index)
            for name in names[index][0] - GIVEN.keys():
                ahead += [other for other in range(index) if name in names[other][1]][-1:]
    return [cells[index] for index in sorted(chosen)]


@pytest.fixture(scope="module")
def chapters_in_a_copy(gpu):
    """A folder in which the chapters were executed, as far as they read records of a GPU; what each cell defined."""
    root, threads = gpu.parents[1], torch.get_num_threads()
    shutil.copytree(status.ROOT / "results", root / "results", dirs_exist_ok=True)
    for made in ("tables", "figures"):
        shutil.rmtree(root / "results" / made)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        patch.setattr(bert, "predicted", lambda *_: stored("bert"))
        patch.setattr(offload, "predict_offload", lambda *_: stored("offload"))
        patch.setattr(predicted, "predict_experiment", lambda config, *_: [stored(KINDS[type(config)])])
        patch.setattr(predicted, "predicted_timelines", lambda *_: predicted_timelines(SMALL, 32))
        patch.setattr(Predictions, "entry", lambda self, row, *_: {row["metric"]: row["bytes"]})
        patch.setattr(BatchCurves, "entry", lambda *_: dict.fromkeys(POLICIES, {"peak_bytes": MIB, "seconds": 1.0}))
        patch.setattr(time_ratios.Times, "of", lambda *_: 1.0)
        for source in sorted((status.ROOT / "notebooks").glob("*.py")):
            if not source.name.startswith(CHAPTERS):
                continue
            namespace: dict = {"__name__": source.stem, **GIVEN}
            for cell in cells_to_the_gpu(source):
                exec(compile(cell, str(source), "exec"), namespace)
    torch.set_num_threads(threads)
    return root


SHOWN = {  # the table of an experiment, which records it shows, and which figures of one
    "synthetic": ("14_synthetic", {"method": ("baseline", "checkpoint")}, ("peak", "training")),
    "reference-synthetic": ("14_synthetic", {}, ("peak",)),
    "reference-language-model": ("14_lm", {}, ("peak",)),
    "reference-offload": ("14_offload", {}, ("peak",)),
    "reference-offload, times": ("14_offload_times", {}, ("ms",)),
    "reference-resnet": ("14_resnet", {}, ("peak", "ms")),
    "lm": ("14_lm", {"method": ("baseline", "checkpoint"), "dtype": ("bfloat16",)}, ("peak", "training")),
    "lm, chunked": ("04_chunked", {"method": ("chunked-loss", "checkpoint+chunked-loss")}, ("peak", "training")),
    "offload": ("14_offload", {"method": OURS[:4], "total_tokens": (12_000,)}, ("peak",)),
    "offload, times": ("14_offload_times", {"method": OURS[:4], "total_tokens": (12_000,)}, ("ms",)),
    "batch-size": ("08_resnet", {"model": ("resnet152",), "trains": (False,)}, ("peak",)),
    "batch-size, times": ("08_resnet", {"model": ("resnet152",), "method": ("baseline",)}, ("ms",)),
    "batch-size, ratios": ("08_resnet", {"model": ("resnet152",), "method": RESNET[1:]}, ("time",)),
    "bert": ("09_published", {"method": ("baseline", "per-block", "auto@0.5", "auto@0.3")}, ("peak",)),
    "bert, ratios": ("09_published", {"method": ("per-block", "auto@0.5", "auto@0.3")}, ("time",)),
}


@pytest.mark.parametrize("kind", SHOWN)
def test_executed_chapters_show_every_number_of_their_records(kind, chapters_in_a_copy):
    name, chosen, figures = SHOWN[kind]
    folder = chapters_in_a_copy / "results"
    text = (folder / "tables" / f"{name}.md").read_text(encoding="utf-8")
    cells, records = set(gpu_cells(text)), {}
    for record in load_records(folder / "gpu", kind.partition(",")[0]):
        config = record.config
        if "largest_batch" not in record.metrics and all(config.get(key) in values for key, values in chosen.items()):
            size = tuple(config.get(key) for key in ("method", "seq_len", "total_tokens", "batch_size"))
            records.setdefault(size, []).append(record.metrics)
    assert records
    for size, same in records.items():
        for figure in figures:
            numbers = {
                "peak": [each["peak_bytes"] / MIB for each in same],
                "training": [each["seconds_training"] for each in same],
                "ms": [1e3 * each["seconds_step"]["median"] for each in same],
                "time": [100 * (each["seconds_ratio"]["median"] - 1) for each in same],
            }[figure]
            shown = {form for number in numbers for form in (f"{number:,.1f}", f"{number:.1f}", f"{number:,.2f}")}
            assert shown & cells, (size, figure)
    assert unrecorded(text, folder / "gpu") == []
    assert text.count("*not yet measured*") <= 1  # the baseline has no ratio


def test_executed_chapters_draw_what_a_gpu_measured(chapters_in_a_copy):
    results = chapters_in_a_copy / "results"
    assert {path.name for path in (results / "figures").glob("*_measured.png")} == set(status.FIGURES)
    drawn, committed = (folder / "figures/04_losses.png" for folder in (results, status.ROOT / "results"))
    assert drawn.read_bytes() != committed.read_bytes()
    table = (results / "tables" / "09_models.md").read_text(encoding="utf-8")
    assert table.count("a stand-in") == 3
    assert (results / "tables" / "12_fits.md").read_text() == (status.ROOT / "results/tables/12_fits.md").read_text()


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
    at_16k = {r.config["method"]: r.metrics for r in gpu_records("synthetic", gpu, seq_len=16384)}
    figure = overlaid_plot(predicted_timelines(SMALL, 32), at_16k)
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


ROOT = Path(__file__).parents[2]
RECORDS, TABLES = ROOT / "results" / "gpu", ROOT / "results" / "tables"


def git(*arguments):
    return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True).stdout.strip()


HEAD = git("rev-parse", "HEAD")
in_git = pytest.mark.skipif(not HEAD, reason="needs the repository's history")


def a_record(method="baseline", peak=100 * MIB, commit=HEAD, device="cuda", **config):
    where = environment() | {"device": device, "device_name": "a GPU", "commit": commit}
    metrics = {"peak_bytes": peak, "reserved_peak_bytes": 2 * peak}
    return Record("lm", {"seq_len": 8, "dtype": "bfloat16", "method": method, **config}, metrics, where)


def saved(folder, *records):
    for place, record in enumerate(records):
        record.save(folder / f"{place}.json")
    return folder


def test_a_record_of_a_cpu_does_not_count_for_a_gpu(tmp_path):
    saved(tmp_path, a_record(device="cpu"), a_record("checkpoint"))
    assert [record.config["method"] for record in gpu_records("lm", tmp_path)] == ["checkpoint"]


@in_git
def test_records_that_name_no_commit_of_this_repository_are_found(tmp_path):
    wrong = ["0" * 40, f"{HEAD}-dirty", None, HEAD[:12]]
    saved(tmp_path, a_record(), *(a_record(commit=commit) for commit in wrong))
    named = [f"{place}.json: {commit}" for place, commit in enumerate(wrong, 1)]
    assert not_of_this_repository(tmp_path, ROOT) == named


@in_git
@pytest.mark.skipif(git("rev-parse", "--is-shallow-repository") == "true", reason="a shallow clone knows few commits")
def test_every_record_of_a_gpu_names_a_commit_of_this_repository():
    assert not_of_this_repository(RECORDS, ROOT) == []


def test_numbers_without_a_record_are_found(tmp_path):
    columns = {"method": "method", "theirs": "published", "peak": "ours on a GPU, MiB", "memory": "ours on a GPU, %"}
    row = {"method": "checkpoint", "theirs": 9919.3, "peak": 25.0, "memory": -75.0}
    table = markdown_table([row, {**row, "peak": None}], columns, "A table.", "tab-a")
    assert gpu_columns(table) == [2, 3] and gpu_cells(table) == ["25.0", "75.0", "75.0"]
    assert unrecorded(table, tmp_path / "none") == ["25.0", "75.0", "75.0"]
    saved(tmp_path, a_record(), a_record("checkpoint", 25 * MIB))
    assert unrecorded(table, tmp_path) == []
    saved(tmp_path, a_record(), dataclasses.replace(a_record("checkpoint", 30 * MIB)))
    assert unrecorded(table, tmp_path) == ["25.0", "75.0", "75.0"]


def test_every_number_of_a_gpu_in_the_books_tables_is_in_a_record():
    tables = {path.name: path.read_text(encoding="utf-8") for path in sorted(TABLES.glob("*.md"))}
    with_gpu = {table.path.name for table in status.tables() if table.on_gpu}
    assert with_gpu >= {"14_synthetic.md", "14_lm.md", "14_offload.md", "09_published.md"}
    assert {name: found for name, table in tables.items() if (found := unrecorded(table, RECORDS))} == {}
