"""What pages show of a GPU comes from records, and these name commits of this repository."""

import dataclasses
import subprocess
from pathlib import Path

import pytest
import status

from experiments.reports.gpu_records import gpu_cells, gpu_columns, gpu_records, not_of_this_repository, unrecorded
from experiments.results import Record, environment, markdown_table

ROOT = Path(__file__).parents[2]
RECORDS, TABLES = ROOT / "results" / "gpu", ROOT / "results" / "tables"
MIB = 2**20


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
    assert with_gpu >= {"04_synthetic_published.md", "04_lm_published.md", "05_published.md", "09_published.md"}
    assert {name: found for name, table in tables.items() if (found := unrecorded(table, RECORDS))} == {}
