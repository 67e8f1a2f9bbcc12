"""How does a `notebooks/NN_topic.py` become the notebook that is committed?

`prepare` turns the source into cells (with the Colab badge and the Colab-only install cell added), `normalise` takes
out of the executed notebook whatever differs between two runs or two machines, and `problems` compares a committed
notebook with its source.
"""

from __future__ import annotations

import hashlib
import re
from itertools import pairwise
from pathlib import Path

import jupytext
import nbformat
from address import COLAB_FOLDER, colab_address, repository_address
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell
from nbstripout import strip_output

MEASURED = "measured-time"
KEPT_CELL_METADATA = ("tags", "mystnb")
SOLUTION_PROMPTS = {"code_prompt_show": "Show the solution", "code_prompt_hide": "Hide the solution"}
DRAWING_PROMPTS = {"code_prompt_show": "Show how it is drawn", "code_prompt_hide": "Hide how it is drawn"}
EXTRAS = ("lm", "plots", "plan")  # that the install cell of every chapter installs
COLAB_CELL = """\
import os
import runpy
import sys

if "google.colab" in sys.modules and not os.path.exists("noxfile.py"):
    !test -d ackpt || git clone -q --depth 1 {address} ackpt
    %cd -q ackpt
    runpy.run_path("tools/set_up_colab.py")["set_up"]("{extras}")
elif os.path.exists("../_toc.yml"):  # opened where it is committed: work from the top of the checkout
    os.chdir("../..")
sys.path.insert(0, os.getcwd())  # the chapters import `experiments`, a folder of the checkout"""


class NotebookError(ValueError):
    """A notebook that cannot be published as it is; the message names the cell and the way out."""


def source_hash(source: Path) -> str:
    """The sha256 of a notebook's source, in hex."""
    return hashlib.sha256(source.read_bytes()).hexdigest()


def extras_of(source: Path) -> tuple[str, ...]:
    """The extras of the package that a chapter needs: `EXTRAS`, and ``hf`` if it imports transformers or peft."""
    needs = re.search(r"^\s*(?:from|import) (?:transformers|peft)\b", source.read_text(encoding="utf-8"), re.MULTILINE)
    return (*EXTRAS, "hf") if needs else EXTRAS


def prepare(source: Path, address: str | None = None) -> NotebookNode:
    """The notebook of a py:percent source, ready to execute.

    The badge and the Colab cell follow the first cell, which must be Markdown and hold the title; NotebookError when
    it does not. On the page a cell tagged `solution` is folded whole, and so is the text after it, up to the next
    heading, label or directive. A cell with `alt="..."`, the description of the figure that it draws, shows the figure
    alone.
    """
    address = address or repository_address()
    notebook = jupytext.read(source, fmt="py:percent")
    for before, cell in pairwise(notebook.cells):
        if "solution" in before.metadata.get("tags", []) and cell.cell_type == "markdown":
            cell.source = _fold_explanation(cell.source)
    for cell in notebook.cells:
        _add_page_metadata(cell)
    if not notebook.cells or not notebook.cells[0].source.startswith("# "):
        raise NotebookError(f"{source.name}: the first cell must be a Markdown cell that starts with '# Title'")
    opens = colab_address(address, f"{COLAB_FOLDER}/{source.stem}.ipynb")
    notebook.cells[1:1] = [
        new_markdown_cell(f"[![Open in Colab](../_static/colab.svg)]({opens})"),
        new_code_cell(
            COLAB_CELL.format(address=address, extras=",".join(extras_of(source))), metadata={"tags": ["remove-cell"]}
        ),
    ]
    _clean_metadata(notebook)
    notebook.metadata = nbformat.from_dict(
        {
            "ackpt": {"source": f"notebooks/{source.name}", "sha256": source_hash(source)},
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        }
    )
    return notebook


def normalise(executed: NotebookNode) -> NotebookNode:
    """The executed notebook without run times, machine names and other accidents of the run."""
    notebook = strip_output(
        executed,
        keep_output=True,
        keep_count=True,
        keep_id=True,
        extra_keys=["metadata.papermill", "cell.metadata.papermill", "cell.metadata.execution"],
    )
    _clean_metadata(notebook)
    notebook.metadata.language_info = {"name": "python"}
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = _merge_streams(cell.outputs)
    return notebook


def to_text(notebook: NotebookNode) -> str:
    """The notebook as JSON with a fixed order of keys and a final newline."""
    return nbformat.writes(notebook, sort_keys=True).rstrip("\n") + "\n"


def refuse_accidents(notebook: NotebookNode, name: str, private: list[str]) -> None:
    """Raise NotebookError for what must not be published.

    That is an output on stderr, one that holds a text in `private` (paths of this machine), and a figure without
    alternative text.
    """
    for index, cell in enumerate(notebook.cells):
        described = "image" in cell.metadata.get("mystnb", {})
        for output in cell.get("outputs", []):
            if "image/png" in output.get("data", {}) and not described:
                raise NotebookError(f'{name}, cell {index}: a figure needs a description: `# %% alt="..."`')
            if output.get("name") == "stderr":
                raise NotebookError(
                    f"{name}, cell {index}: wrote to stderr, which differs between machines; silence or print it:\n"
                    f"{output.text}"
                )
            for path in private:
                if path in str(output):
                    raise NotebookError(f"{name}, cell {index}: its output holds {path!r}, a path of this machine")


def problems(source: Path, committed: Path, address: str | None = None) -> list[str]:
    """What keeps the executed notebook from being the one that `source` gives; empty when nothing does."""
    if not committed.exists():
        return [f"{committed.name}: never executed"]
    notebook = nbformat.read(committed, as_version=4)
    found = []
    if notebook.metadata.get("ackpt", {}).get("sha256") != source_hash(source):
        found.append(f"{committed.name}: executed from another version of {source.name}")
    expected = prepare(source, address)
    theirs = [(cell.cell_type, cell.source, cell.metadata) for cell in notebook.cells]
    ours = [(cell.cell_type, cell.source, cell.metadata) for cell in expected.cells]
    if theirs != ours:
        different = [i for i, pair in enumerate(zip(theirs, ours, strict=False)) if pair[0] != pair[1]]
        first = different[0] if different else min(len(theirs), len(ours))
        found.append(f"{committed.name}, cell {first}: is not the cell of {source.name}")
    if any(c.cell_type == "code" and c.source and c.execution_count is None for c in notebook.cells):
        found.append(f"{committed.name}: holds cells that were not executed")
    return found


def is_measured(cell: NotebookNode) -> bool:
    """Whether the cell's output holds measured times or provenance, and so may differ between two runs."""
    return MEASURED in cell.metadata.get("tags", [])


def _fold_explanation(text: str) -> str:
    """`text`, with what comes before its first heading, label or directive folded."""
    explanation, *rest = re.split(r"^(?=#|:::|```\{|\([\w-]+\)=$)", text, maxsplit=1, flags=re.MULTILINE)
    if not explanation.strip():
        return text
    folded = f":::{{admonition}} Explanation\n:class: dropdown\n{explanation.strip()}\n:::"
    return "\n\n".join([folded, *rest])


def _add_page_metadata(cell: NotebookNode) -> None:
    tags = cell.metadata.get("tags", [])
    page: dict = dict(cell.metadata.get("mystnb", {}))
    if "solution" in tags:
        cell.metadata["tags"] = [*tags, "hide-cell"]
        page.update(SOLUTION_PROMPTS)
    if "alt" in cell.metadata:
        if "solution" not in tags:
            cell.metadata["tags"] = [*tags, "hide-input"]
            page.update(DRAWING_PROMPTS)
        # The class keeps the theme from changing the colors of figures on the dark page.
        page["image"] = {"alt": cell.metadata["alt"], "classes": "dark-light"}
    if page:
        cell.metadata["mystnb"] = page


def _clean_metadata(notebook: NotebookNode) -> None:
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    for index, cell in enumerate(notebook.cells):
        cell.metadata = nbformat.from_dict(
            {key: cell.metadata[key] for key in KEPT_CELL_METADATA if cell.metadata.get(key)}
        )
        digest = hashlib.sha256(cell.source.encode()).hexdigest()[:8]
        cell.id = f"{index:02d}-{digest}"


def _merge_streams(outputs: list[NotebookNode]) -> list[NotebookNode]:
    """Join neighbouring pieces of one stream: where the kernel cut it depends on its speed."""
    merged: list[NotebookNode] = []
    for output in outputs:
        last = merged[-1] if merged else None
        if last and output.output_type == last.output_type == "stream" and output.name == last.name:
            last.text += output.text
        else:
            merged.append(output)
    return merged
