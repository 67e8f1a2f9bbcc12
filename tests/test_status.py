"""The book's status page: every table and notebook is on it, and what it says is what records say."""

import re
import shutil
from pathlib import Path

import pytest
import status
from chapter import source_hash
from conftest import raises

from experiments.results import Record, environment, markdown_table

ROOT = Path(__file__).parent.parent
INCLUDED = re.compile(r"\{include\} \S*results/tables/(\S+\.md)")


@pytest.fixture
def book(tmp_path):
    """A checkout with two chapters, of which the second has a table with a column of a GPU."""
    for name in ("notebooks", "results/tables", "results/gpu"):
        (tmp_path / name).mkdir(parents=True)
    for stem in ("01_one", "02_two"):
        code = f"import x\npath = write('results/tables/{stem}.md')\n"
        code += "rows = report.gpu_records('lm')\n" if stem == "02_two" else ""
        (tmp_path / "notebooks" / f"{stem}.py").write_text(code)
    columns = {"n": "tokens", "cpu": "ours, predicted, MiB"}
    write(tmp_path, "01_one", [{"n": 1, "cpu": 2.0}], columns)
    write(tmp_path, "02_two", [{"n": 1, "cpu": 2.0}, {"n": 2, "cpu": 3.0}], columns | {"gpu": "ours on a GPU, MiB"})
    return tmp_path


def write(root, stem, rows, columns):
    (root / "results" / "tables" / f"{stem}.md").write_text(markdown_table(rows, columns, "A table.", f"tab-{stem}"))


def record(root, experiment, device="cpu", **config):
    where = environment() | {"device": device, "device_name": f"some {device}", "commit": "a" * 40 + "-dirty"}
    found = Record(experiment, config, {"seconds": 12.6}, where)
    return found.save(root / "results" / ("gpu" if device == "cuda" else "runs") / f"{experiment}.json")


def test_every_table_of_the_book_and_every_notebook_is_on_the_page():
    pages = [*(ROOT / "notebooks").glob("*.py"), *(ROOT / "book").glob("*.md")]
    included = {name for path in pages for name in INCLUDED.findall(path.read_text(encoding="utf-8"))}
    assert len(included) > 30
    listed = set(re.findall(r"\{ref\}`(\S+) <tab-", status.page("tables")))
    assert listed == {name.removesuffix(".md") for name in included}
    notebooks = re.findall(r"\{doc\}`(\S+) <notebooks/", status.page("notebooks"))
    assert notebooks == sorted(path.stem for path in (ROOT / "notebooks").glob("*.py"))


def test_every_part_of_the_page_is_asked_for():
    page = (ROOT / "book" / "status.md").read_text(encoding="utf-8")
    assert re.findall(r"```\{status\} (\w+)", page) == list(status.PARTS)


def test_every_cell_that_was_not_measured_is_counted():
    text = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "results" / "tables").glob("*.md"))
    listed = re.findall(r"\| (\d+) of \d+ \|", status.page("missing"))
    left_out = sum(len(table.rows) * len(table.left_out) for table in status.tables())
    assert sum(map(int, listed)) == text.count(status.MISSING) + left_out


def test_a_run_is_shown_with_its_place_and_an_older_source_is_said_to_be_one(book):
    first, second = status.notebook_rows(book)
    assert first["seconds"] == second["seconds"] == "not recorded"
    record(book, "notebook", source="notebooks/01_one.py", sha256=source_hash(book / "notebooks" / "01_one.py"))
    first, second = status.notebook_rows(book)
    assert (first["seconds"], first["commit"], first["source"]) == (13, "aaaaaaaaa and changes", "unchanged")
    assert first["machine"].startswith("some cpu") and second["seconds"] == "not recorded"
    assert [row["cpu"].split(",")[0] for row in status.table_rows(book)] == ["some cpu", "not recorded"]
    (book / "notebooks" / "01_one.py").write_text("other = 1  # results/tables/01_one.md")
    assert status.notebook_rows(book)[0]["source"] == "an older one"


def test_a_table_gets_the_gpu_record_that_its_notebook_reads(book):
    columns = {"n": "tokens", "gpu": "ours on a GPU, MiB"}
    first, second = status.table_rows(book)
    assert first["gpu"] == status.NOTHING and second["gpu"] == status.MISSING
    assert [(row["column"], row["cells"]) for row in status.missing_rows(book)] == [("ours on a GPU, MiB", "2 of 2")]
    record(book, "bert", "cuda")
    write(book, "02_two", [{"n": 1, "gpu": 2.0}, {"n": 2, "gpu": None}], columns)
    raises(ValueError, r"02_two.md has figures of a GPU, and .* has no record of lm", lambda: status.table_rows(book))
    record(book, "lm", "cuda")
    assert status.table_rows(book)[1]["gpu"].startswith("some cuda, aaaaaaaaa and changes, 20")
    assert [row["cells"] for row in status.missing_rows(book)] == ["1 of 2"]
    write(book, "02_two", [{"n": 1, "gpu": 2.0}], columns)
    assert status.page("missing", book) == "Nothing is missing.\n"


def test_kinds_of_figures_come_from_captions_and_headings(book):
    assert [row["also"] for row in status.table_rows(book)] == ["predicted", "predicted"]
    write(book, "01_one", [{"n": 1}], {"n": "Published, MB"})
    assert status.table_rows(book)[0]["also"] == "published by others"
    write(book, "01_one", [{"n": 1}], {"n": "by the data sheet, ms"})
    assert status.table_rows(book)[0]["also"] == "predicted"


def test_a_table_without_a_notebook_or_another_form_is_an_error(book):
    shutil.copy(book / "results/tables/01_one.md", book / "results/tables/03_three.md")
    raises(ValueError, "03_three.md is named by 0 notebooks", lambda: status.table_rows(book))
    (book / "results/tables/03_three.md").write_text("| a | b |\n|---|---|\n| 1 |\n")
    raises(ValueError, "no table of experiments.results.markdown_table", lambda: status.table_rows(book))
