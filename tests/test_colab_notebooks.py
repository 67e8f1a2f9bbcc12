"""The notebooks that the Colab badges open: plain Markdown, whatever MyST the chapters use."""

import re
import subprocess
import sys
from pathlib import Path

import check_notebooks
import nbformat
import pytest
import set_up_colab
from address import COLAB_FOLDER, ROOT, colab_address, project, repository_address
from chapter import COLAB_CELL, NotebookError, extras_of, prepare, to_text
from colab import Translation, for_colab
from conftest import raises
from markdown_it import MarkdownIt

ADDRESS = repository_address()
CHAPTERS = sorted((ROOT / "book" / "notebooks").glob("*.ipynb"))
NAMES = [path.stem for path in CHAPTERS]
MYST = {
    "directive": r":::|language-(?:\{|%7B)|```",
    "role": r"\{[\w:+-]+\}(?:`|<code)",
    "label": r"<p>\([\w:-]+\)=",
    "option": r"<p>:[\w-]+:",
    "comment": r"<p>%",
    "relative address": r'(?:href|src)="(?!https?:)[^"]*"',
}


def read(path: Path):
    return nbformat.read(path, as_version=4)


def survivors(notebook) -> set[str]:
    """The constructs of MyST that a renderer of plain Markdown leaves in the text of a notebook."""
    render = MarkdownIt("commonmark").enable("table").render
    text = "\n".join(render(cell.source) for cell in notebook.cells if cell.cell_type == "markdown")
    return {name for name, pattern in MYST.items() if re.search(pattern, text)}


def translated(text: str, root: Path = ROOT) -> str:
    return Translation("01_one.py, cell 3", root).markdown(text)


@pytest.mark.parametrize("name", NAMES)
def test_no_myst_remains_in_a_notebook_for_colab(name):
    assert survivors(read(ROOT / COLAB_FOLDER / f"{name}.ipynb")) == set()


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_for_colab_is_its_chapter_without_what_belongs_to_the_page(name):
    chapter, colab = (read(ROOT / folder / f"{name}.ipynb") for folder in ("book/notebooks", COLAB_FOLDER))
    nbformat.validate(colab)
    assert len(colab.cells) == len(chapter.cells)
    assert {key for cell in colab.cells for key in cell.metadata} <= {"cellView", "tags"}
    assert {tag for cell in colab.cells for tag in cell.metadata.get("tags", [])} <= {"measured-time"}
    for ours, theirs in zip(colab.cells, chapter.cells, strict=True):
        if ours.cell_type == "code":
            title, _, rest = ours.source.partition("\n")
            assert ours.outputs == theirs.outputs
            assert theirs.source == (rest if title.startswith("#@title") else ours.source)
    assert ("solution" in str(chapter)) == ("#@title Solution" in str(colab))


@pytest.mark.parametrize("name", NAMES)
def test_the_first_cells_say_what_is_installed_and_which_torch_is_needed(name):
    _, note, install = read(ROOT / COLAB_FOLDER / f"{name}.ipynb").cells[:3]
    (torch,) = (need for need in project()["dependencies"] if need.startswith("torch"))
    assert f"torch {torch.removeprefix('torch>=')} or newer" in note.source
    extras = extras_of(ROOT / "notebooks" / f"{name}.py")
    needed = [name for extra in extras for name in project()["optional-dependencies"][extra]]
    assert [name for name in ("numpy", "tqdm", *needed) if name not in note.source] == []
    assert install.source == COLAB_CELL.format(address=ADDRESS, extras=",".join(extras))
    assert ("hf" in extras) == (name in ("01_where_memory_goes", "03_what_pytorch_offers"))


KEPT = ["install -q .[lm]"]
TORCH = "install -q -U torch>=2.11 torchvision"
CUDA_12 = "--index-url https://download.pytorch.org/whl/cu126 --extra-index-url https://pypi.org/simple"


@pytest.mark.parametrize(
    ("torch", "driver", "broken", "calls"),
    [
        ("2.11.0+cu128", "12.4", (), KEPT),
        ("2.13.0", None, (), KEPT),
        ("2.9.0+cu126", "12.4", (), [f"{TORCH} {CUDA_12}", *KEPT]),
        ("2.9.0+cu126", "13.0", (), [TORCH, *KEPT]),
        ("2.9.0+cpu", None, (), [TORCH, *KEPT]),
        (None, None, (), [TORCH, *KEPT]),
        ("2.11.0", None, ("torchvision",), [*KEPT, "uninstall -q -y torchvision"]),
        ("2.11.0", "12.4", ("cuda",), "GPU that torch 2.11.0 cannot use .the driver knows CUDA 12.4."),
        ("2.9.0", "11.4", (), "supports CUDA 11.4 only"),
    ],
)
def test_colab_keeps_a_recent_torch_and_otherwise_gets_one_for_its_driver(torch, driver, broken, calls, monkeypatch):
    made, versions = [], {"torch": torch, "torchvision": "0.1"}

    def run(command, **options):
        if command[0] == "nvidia-smi" and driver is None:
            raise FileNotFoundError
        if command[1:3] == ["-m", "pip"]:
            made.append(" ".join(command[3:]))
        failed = command[1] == "-c" and any(name in command[2] for name in broken) if len(command) > 1 else False
        return subprocess.CompletedProcess(command, int(failed), f"| CUDA Version: {driver}  |", "")

    monkeypatch.setattr(set_up_colab, "installed", versions.get)
    monkeypatch.setattr(set_up_colab.subprocess, "run", run)
    monkeypatch.setattr(set_up_colab.os, "kill", lambda pid, signal: made.append("restart"))
    if isinstance(calls, str):
        raises(RuntimeError, calls, lambda: set_up_colab.set_up("lm"))
    else:
        set_up_colab.set_up("lm")
        assert made == [*calls, *(["restart"] if calls[0] != KEPT[0] and "torch" in sys.modules else [])]


@pytest.mark.parametrize(
    ("myst", "markdown"),
    [
        (":::{admonition} About $x$\n:class: tip\nOne\n\ntwo.\n:::", "> **About $x$**\n>\n> One\n>\n> two."),
        ("::::{admonition} A\n:::{table} B\n| c |\n|---|\n:::\n::::", "> **A**\n>\n> **B**\n>\n> | c |\n> |---|"),
        (":::{admonition} A\n$a\nb$\n```bash\n$x\n$y\n```\n:::", "> **A**\n>\n> $a b$\n> ```bash\n> $x\n> $y\n> ```"),
        ("```{margin}\nAn aside.\n```", "> An aside."),
        (":::{table} Of `x`\n:name: tab-x\n\n| a |\n|---|\n| 1 |\n:::", "**Of `x`**\n\n| a |\n|---|\n| 1 |"),
        ("(label)=\n## Title\n% a comment\n+++\ntext", "## Title\ntext"),
        ("```python\n% {doc}`x`\n:::{note}\n```", "```python\n% {doc}`x`\n:::{note}\n```"),
        ("- one\n  ```python\n  1\n  ```", "- one\n  ```python\n  1\n  ```"),
        ("`{doc}` and `b`, ``{doc}`x` ``", "`{doc}` and `b`, ``{doc}`x` ``"),
        ("$f[i](x)$ and $$ a\n= [b](c) $$", "$f[i](x)$ and $$ a\n= [b](c) $$"),
        ("{py:func}`ackpt.plan`, {py:class}`~ackpt.Plan`, {py:mod}`this <ackpt>`", "`ackpt.plan`, `Plan`, `this`"),
        ("{term}`storage`, {ref}`this table <tab-x>`, [here](#part)", "storage, this table, here"),
        ("{cite:t}`chen2016`", "[Chen et al. (2016)](https://arxiv.org/abs/1604.06174)"),
        ("{cite:t}`griewank2000`", "[Griewank and Walther (2000)](https://doi.org/10.1145/347837.347846)"),
        ("{cite:t}`dao2023`", "[Dao (2023)](https://arxiv.org/abs/2307.08691)"),
        ("{cite:t}`grattafiori2024`", "[Grattafiori et al. (2024)](https://arxiv.org/abs/2407.21783)"),
        ("{cite}`chen2016`", r"[\[chen2016\]](https://arxiv.org/abs/1604.06174)"),
        ("{doc}`../guides/lora`", f"[LoRA and frozen weights]({ADDRESS}/blob/main/book/guides/lora.md)"),
        ("{doc}`using\nit <../using>`", f"[using it]({ADDRESS}/blob/main/book/using.md)"),
        ("[`a`](../using.md#part)", f"[`a`]({ADDRESS}/blob/main/book/using.md)"),
        ("[a](https://example.org/)", "[a](https://example.org/)"),
        (
            "[![a](../_static/colab.svg)](https://example.org/)",
            f"[![a]({ADDRESS}/raw/main/book/_static/colab.svg)](https://example.org/)",
        ),
        ("![a](../_static/colab.svg)", f"![a]({ADDRESS}/raw/main/book/_static/colab.svg)"),
    ],
)
def test_each_construct_becomes_markdown(myst, markdown):
    assert translated(myst) == markdown


def test_a_chapter_is_linked_by_its_title_in_colab():
    address = colab_address(ADDRESS, "book/colab/05_offload.ipynb")
    title = re.findall(r"^# # (.+)$", (ROOT / "notebooks" / "05_offload.py").read_text(encoding="utf-8"), re.M)[0]
    assert translated("{doc}`05_offload`") == f"[{title}]({address})"
    assert translated("[there](05_offload.ipynb#part)") == f"[there]({address})"


def test_tables_and_figures_come_from_the_results_of_the_same_run(tmp_path):
    results = tmp_path / "results"
    for name, text in (("tables/x.md", ":::{table} A caption\n| a |\n|---|\n:::\n"), ("figures/x.png", "")):
        (results / name).parent.mkdir(parents=True)
        (results / name).write_text(text)
    include = "text\n```{include} ../../results/tables/x.md\n```\ntext"
    assert translated(include, tmp_path) == "text\n**A caption**\n\n| a |\n|---|\ntext"
    address = f"{ADDRESS}/raw/main/results/figures/x.png"
    figure = "```{figure} ../../results/figures/x.png\n:alt: Bars\nThe caption.\n```"
    assert translated(figure, tmp_path) == f"![Bars]({address})\n\nThe caption."
    explorer = "```{frontier-explorer} x.json\n:image: ../../results/figures/x.png\n:alt: Bars.\n```"
    assert translated(explorer, tmp_path) == f"![Bars.]({address})\n\n*Bars. In the book, this figure is interactive.*"


@pytest.mark.parametrize(
    ("myst", "complaint"),
    [
        (":::{dropdown} More\ntext\n:::", r"cannot translate the directive \{dropdown\}"),
        ("```{include} ../using.md\n:lines: 1\n```", r"cannot translate the directive \{include\} with the options"),
        (":::{admonition} A\n{eq}`x`\n:::", r"cannot translate the role \{eq\}`x`"),
        ("{numref}`tab-x`", r"cannot translate the role \{numref\}`tab-x`"),
        ("{ref}`tab-x`", r"cannot translate the role \{ref\}`tab-x`"),
        ("{cite}`nobody1900`", "'nobody1900' is not in book/references.bib"),
        ("{doc}`99_none`", "there is no file book/notebooks/99_none.ipynb"),
        ("[a](none.md)", "there is no file book/notebooks/none.md"),
        ("```{include} ../../results/tables/none.md\n```", "there is no file results/tables/none.md"),
        (":::{admonition} A\ntext", "the fence ':::{admonition} A' has no counterpart"),
        ("text\n:::", "the fence ':::' has no counterpart"),
    ],
)
def test_a_construct_without_translation_is_an_error_with_chapter_and_cell(myst, complaint):
    raises(NotebookError, f"^01_one.py, cell 3: .*{complaint}", lambda: translated(myst))


def test_the_cell_of_an_error_is_the_one_of_the_chapter(tmp_path):
    source = tmp_path / "01_one.py"
    source.write_text("# %% [markdown]\n# # One\n\n# %%\n1\n\n# %% [markdown]\n# {unknown}`x`\n")
    raises(NotebookError, "^01_one.py, cell 4: ", lambda: for_colab(prepare(source)))


def test_check_notebooks_sees_a_changed_table_and_an_edited_notebook(tmp_path):
    source = tmp_path / "01_one.py"
    source.write_text("# %% [markdown]\n# # One\n#\n# ```{include} ../../results/tables/x.md\n# ```\n")
    table, chapter, colab = (
        tmp_path / name for name in ("results/tables/x.md", "book/notebooks/01_one.ipynb", "book/colab/01_one.ipynb")
    )
    for path in (table, chapter, colab):
        path.parent.mkdir(parents=True)
    chapter.write_text(to_text(prepare(source)))

    def found() -> list[str]:
        return check_notebooks.colab_problems(chapter, colab, tmp_path)

    assert found() == ["book/colab/01_one.ipynb: 01_one.py, cell 0: there is no file results/tables/x.md"]
    table.write_text("| 1 |")
    assert found() == ["book/colab/01_one.ipynb: never written"]
    colab.write_text(to_text(for_colab(prepare(source), tmp_path)))
    assert found() == []
    table.write_text("| 2 |")
    assert found() == ["book/colab/01_one.ipynb: differs from its chapter or from a table that it includes"]
