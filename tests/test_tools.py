"""The reproduction pipeline: what is published comes from its source and loads nothing; the check of public types."""

import json
from pathlib import Path

import check_address
import check_offline
import check_same
import nbformat
import pytest
from address import colab_address
from chapter import NotebookError, prepare, problems, refuse_accidents, to_text
from check_types import incomplete
from conftest import raises
from IPython.core.inputtransformer2 import TransformerManager
from nbformat.v4 import new_code_cell, new_notebook, new_output
from reproduce import reproduce

ADDRESS = "https://github.com/someone/something"
CHAPTER = """\
# %% [markdown]
# # A title

# %%
from pathlib import Path

Path("results/tables/sum.md").write_text(f"{1 + 1} bytes")
Path("results/cpu/run.json").write_text('{"metrics": {"bytes": 2}}')

# %% tags=["measured-time", "nbval-ignore-output"]
import time

print(time.perf_counter_ns())

# %% tags=["solution"]
print("done")

# %% [markdown]
# It is done.
#
# ## Summary
#
# All is done.
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "notebooks" / "01_first.py").write_text(CHAPTER)
    (tmp_path / "results" / "reference").mkdir(parents=True)
    (tmp_path / "results" / "reference" / "published.json").write_text("{}")
    return tmp_path


def written(top: Path) -> set[str]:
    files = (p for p in top.rglob("*") if p.is_file() and ".reproduce" not in p.parts)
    return {str(p.relative_to(top)) for p in files}


def test_reproducing_twice_gives_the_same_bytes_but_for_measured_times(checkout: Path, tmp_path: Path) -> None:
    for name in ("first", "second"):
        reproduce(checkout, tmp_path / name, only=[])
    assert written(tmp_path / "first") == {
        "book/colab/01_first.ipynb",
        "book/notebooks/01_first.ipynb",
        "results/cpu/run.json",
        "results/runs/01_first.json",
        "results/tables/sum.md",
    }
    assert check_same.differences(tmp_path / "first", tmp_path / "second") == []
    notebook = nbformat.read(tmp_path / "first/book/notebooks/01_first.ipynb", as_version=4)
    nbformat.validate(notebook)
    other = nbformat.read(tmp_path / "second/book/notebooks/01_first.ipynb", as_version=4)
    assert notebook.cells[-3].outputs != other.cells[-3].outputs
    assert problems(checkout / "notebooks/01_first.py", tmp_path / "first/book/notebooks/01_first.ipynb") == []


def test_on_a_gpu_notebooks_get_parameters_and_records_are_kept(checkout: Path, monkeypatch) -> None:
    chapter = CHAPTER.replace(
        "# %% [markdown]\n# It is done.",
        """# %% tags=["parameters"]
device, minutes = "auto", 10

# %%
import os

print(device, minutes, os.environ.get("CUDA_VISIBLE_DEVICES"))
if device == "cuda":
    Path("results/gpu/new.json").write_text("{}")

# %% [markdown]
# It is done.""",
    )
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (checkout / "notebooks" / "01_first.py").write_text(chapter)
    (checkout / "notebooks" / "02_without.py").write_text(CHAPTER.replace("run.json", "other.json"))
    (checkout / "results" / "gpu").mkdir()
    (checkout / "results" / "gpu" / "old.json").write_text("{}")
    monkeypatch.setattr("experiments.results.environment", lambda *_: {"commit": "a" * 40 + "-dirty"})
    raises(NotebookError, "commit the changes of this checkout first", lambda: reproduce(checkout, checkout, [], 60))
    monkeypatch.setattr("experiments.results.environment", lambda *_: {"commit": "a" * 40})
    monkeypatch.setattr("reproduce.record_run", lambda *_: None)
    reproduce(checkout, checkout, [], 60)
    first = checkout / "book" / "notebooks" / "01_first.ipynb"
    assert "cuda 60.0 None" in first.read_text() and problems(checkout / "notebooks" / "01_first.py", first) == []
    reproduce(checkout, checkout, [])
    assert "auto 10 \\n" in first.read_text()
    assert {path.name for path in (checkout / "results" / "gpu").iterdir()} == {"new.json", "old.json"}


def test_a_failing_notebook_changes_nothing_and_names_its_cell(checkout: Path) -> None:
    (checkout / "notebooks" / "02_second.py").write_text("# %% [markdown]\n# # Two\n\n# %%\n1 / 0\n")
    before = written(checkout)
    with pytest.raises(NotebookError, match=r"02_second.py, cell 3: ZeroDivisionError: division by zero") as raised:
        reproduce(checkout, checkout, only=[])
    assert written(checkout) == before
    log = checkout / ".reproduce" / "02_second.log"
    assert str(log) in str(raised.value) and "1 / 0" in log.read_text()


def test_only_a_full_run_removes_results_that_no_notebook_writes(
    checkout: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    stale = checkout / "results" / "tables" / "stale.md"
    stale.parent.mkdir()
    stale.write_text("old")
    reproduce(checkout, tmp_path / "elsewhere", only=["01"])
    assert "results/tables/stale.md" not in written(tmp_path / "elsewhere"), "one chapter writes its own files only"
    reproduce(checkout, checkout, only=["01"])
    assert stale.exists()
    reproduce(checkout, checkout, only=[])
    assert not stale.exists() and "results/tables/stale.md" in capsys.readouterr().out
    assert (checkout / "results/reference/published.json").exists()


def test_prepare_adds_the_badge_and_the_colab_cell_from_one_address(checkout: Path) -> None:
    notebook = prepare(checkout / "notebooks/01_first.py", ADDRESS)
    title, badge, install = notebook.cells[:3]
    assert title.source == "# A title"
    assert colab_address(ADDRESS, "book/colab/01_first.ipynb") in badge.source
    assert "someone/something/blob/main/" in badge.source
    assert '"google.colab" in sys.modules' in install.source and ADDRESS in install.source
    assert install.metadata.tags == ["remove-cell"]
    assert compile(TransformerManager().transform_cell(install.source), "cell", "exec")
    solution, text = notebook.cells[-2:]
    assert solution.metadata.tags == ["solution", "hide-cell"]
    assert solution.metadata.mystnb.code_prompt_show == "Show the solution"
    folded = ":::{admonition} Explanation\n:class: dropdown\nIt is done.\n:::"
    assert text.source == f"{folded}\n\n## Summary\n\nAll is done."
    assert to_text(notebook) == to_text(prepare(checkout / "notebooks/01_first.py", ADDRESS))


@pytest.mark.parametrize(
    ("output", "complaint"),
    [
        (new_output("stream", name="stderr", text="careful"), "cell 0: wrote to stderr"),
        (new_output("stream", name="stdout", text="/home/me/checkout/file.py"), "a path of this machine"),
        (new_output("display_data", {"image/png": "AAAA"}), "a figure needs a description"),
    ],
)
def test_outputs_that_must_not_be_published_are_refused(output, complaint: str) -> None:
    notebook = new_notebook(cells=[new_code_cell("f()", outputs=[output])])
    raises(NotebookError, complaint, lambda: refuse_accidents(notebook, "01_first.py", ["/home/me/checkout"]))


def test_problems_sees_a_changed_source_and_an_edited_notebook(checkout: Path) -> None:
    source, committed = checkout / "notebooks/01_first.py", checkout / "book/notebooks/01_first.ipynb"
    assert problems(source, committed) == ["01_first.ipynb: never executed"]
    reproduce(checkout, checkout, only=[])
    assert problems(source, committed) == []
    assert problems(source, committed, address=ADDRESS) == ["01_first.ipynb, cell 1: is not the cell of 01_first.py"]
    text = committed.read_text()
    committed.write_text(text.replace("done", "well done"))
    assert problems(source, committed) == ["01_first.ipynb, cell 5: is not the cell of 01_first.py"]
    committed.write_text(text)
    source.write_text(CHAPTER + "\n# %%\n2 + 2\n")
    assert problems(source, committed) == [
        "01_first.ipynb: executed from another version of 01_first.py",
        "01_first.ipynb, cell 7: is not the cell of 01_first.py",
    ]


def test_check_same_names_the_field_and_the_cell(tmp_path: Path) -> None:
    for name, loss, seconds, text in (("a", 1.0, 0.5, "x"), ("b", 1.5, 0.7, "y")):
        folder = tmp_path / name
        folder.mkdir()
        record = {"metrics": {"loss": [2.0, loss], "seconds": seconds, "seconds_step": {"median": seconds}}}
        (folder / "run.json").write_text(json.dumps({**record, "environment": {"date": name, "torch": "2.13"}}))
        cell = new_code_cell("f()", id="one", outputs=[new_output("stream", text=text)])
        times = new_code_cell("g()", id="two", metadata={"tags": ["measured-time"]})
        times.outputs = [new_output("stream", text=text)]
        (folder / "n.ipynb").write_text(to_text(new_notebook(cells=[cell, times])))
        (folder / "figure.png").write_bytes(text.encode())
    (tmp_path / "a" / "only.md").write_text("")
    assert check_same.differences(tmp_path / "a", tmp_path / "b") == [
        "figure.png: other bytes",
        "n.ipynb, cell 0",
        "only.md: written by one run only",
        "run.json, field metrics.loss[1]",
    ]


def test_check_offline_finds_what_a_page_loads_and_leaves_links_alone(tmp_path: Path) -> None:
    page = (
        '<link rel="canonical" href="https://book.example/"><a href="https://paper.example/">paper</a>'
        '<script src="//cdn.example/a.js"></script><img src="https://badge.example/b.svg">'
        '<script>load("https://cdn.example/late.js")</script><script src="_static/own.js"></script>'
    )
    (tmp_path / "page.html").write_text(page)
    (tmp_path / "style.css").write_text("@import url('https://fonts.example/f.css'); a {background: url(own.png)}")
    assert check_offline.external(tmp_path) == [
        "page.html: //cdn.example/a.js",
        "page.html: https://badge.example/b.svg",
        "page.html: https://cdn.example/late.js",
        "style.css: https://fonts.example/f.css",
    ]


def test_the_address_of_this_project_is_in_one_place() -> None:
    assert [place.split(":")[0] for place in check_address.places()] == ["pyproject.toml"]


def symbol(name, category="function", problem=None, **more):
    error = {"file": "a.py", "severity": "error", "message": str(problem), "range": {"start": {"line": 6}}}
    known = {"isTypeKnown": problem is None, "isTypeAmbiguous": False}
    return {"name": name, "category": category, "diagnostics": [error] if problem else [], **known, **more}


SYMBOLS = [
    symbol("p.inner.f", problem="no annotation", alternateNames=["p.f"]),
    symbol("p.inner.hidden", problem="no annotation"),
    symbol("p.C", "class"),
    symbol("p.C.method", "method", problem="no return type"),
    symbol("p.g", alternateNames=["p.inner.g"]),
    symbol("p.g.something", problem="of a module that is called like a function"),
]


def test_missing_types_of_public_names_and_members_are_named():
    assert incomplete(SYMBOLS, ["p.f", "p.C", "p.g"]) == [
        "a.py:7: p.inner.f: no annotation",
        "a.py:7: p.C.method: no return type",
    ]


def test_a_name_that_pyright_does_not_know_is_an_error():
    raises(ValueError, "pyright does not know p.gone", lambda: incomplete(SYMBOLS, ["p.g", "p.gone"]))
