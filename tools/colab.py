"""How does an executed chapter become the notebook that the Colab badges open?

Colab shows Markdown, not MyST. `for_colab` replaces every directive and role of a chapter by plain Markdown: tables are
included, links lead to the published repository, and interactive figures become pictures. A construct that it does not
know raises NotebookError, so none reaches a reader. `reproduce` writes the result, and `check_notebooks` compares it.
"""

from __future__ import annotations

import copy
import hashlib
import posixpath
import re
import textwrap
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import nbformat
from address import BRANCH, COLAB_FOLDER, ROOT, colab_address, project, repository_address
from chapter import EXTRAS, MEASURED, NotebookError, extras_of
from nbformat import NotebookNode
from nbformat.v4 import new_notebook
from pybtex.database import parse_file
from pybtex.richtext import Text

CHAPTERS = "book/notebooks"  # links and included files are relative to this folder
FENCE = re.compile(r"(?P<indent> *)(?P<fence>`{3,}|~{3,}|:{3,})(?P<name>\{[^}]*\})?(?P<argument>.*)")
OPTION = re.compile(r":([\w-]+):\s*(.*)")
DROPPED = re.compile(r"\s*%|\s*\+\+\+|\([\w:-]+\)=\s*$")  # comments, cell breaks, labels
MATH = r"\$\$.*?\$\$|\$(?:[^$\n]|\n(?!\n))+\$"
INLINE = re.compile(
    rf"\\.|{MATH}|(?:\{{(?P<role>[\w:+-]+)\}})?(?P<ticks>`+)(?P<text>.+?)(?<!`)(?P=ticks)(?!`)"
    r"|(?P<image>!?)\[(?P<label>(?:[^\[\]]|\[[^\]]*\])*)\]\((?P<target>[^()\s]+)\)",
    re.DOTALL,
)
INSTALL_NOTE = """\
**Setting up Colab.** The next cell clones [the repository]({address}) and installs `ackpt` from it with pip. The
clone also holds `experiments`, which the chapters import and which is not installed. pip also installs those of these
packages that are missing: {packages}.

`ackpt` requires {torch}. If Colab's own torch is recent enough, the cell keeps it, and the downloads are small.
Otherwise it installs a torch and a torchvision that belong together and that the GPU's driver supports, a download of
gigabytes that takes minutes. If torch was already imported, the runtime then restarts: run the cell again."""


def for_colab(notebook: NotebookNode, root: Path = ROOT) -> NotebookNode:
    """The executed chapter in plain Markdown; tables and figures are those in `root/results`.

    A note on the installation follows the badge. Raises NotebookError, with chapter and cell, for MyST that has no
    translation, and for links, tables, figures and citations that do not exist.
    """
    chapter = Path(notebook.metadata.ackpt.source).name
    cells = copy.deepcopy(notebook.cells)
    source = ROOT / "notebooks" / chapter
    cells[1].source += f"\n\n{install_note(extras_of(source) if source.is_file() else EXTRAS)}"
    for index, cell in enumerate(cells):
        tags, page = cell.metadata.get("tags", []), cell.metadata.get("mystnb", {})
        kept: dict = {"tags": [MEASURED]} if MEASURED in tags else {}  # lets `check_same` accept other times
        if cell.cell_type == "markdown":
            cell.source = Translation(f"{chapter}, cell {index}", root).markdown(cell.source)
        elif title := "Solution" if "solution" in tags else "How the figure is drawn" if "image" in page else "":
            cell.source = f"#@title {title}\n{cell.source}"
            kept["cellView"] = "form"  # Colab folds the code
        cell.metadata = nbformat.from_dict(kept)
        cell.id = f"{index:02d}-{hashlib.sha256(cell.source.encode()).hexdigest()[:8]}"
    metadata = {name: notebook.metadata[name] for name in ("kernelspec", "language_info")}
    return new_notebook(cells=cells, metadata=nbformat.from_dict(metadata))


def install_note(extras: tuple[str, ...] = EXTRAS) -> str:
    """What the install cell does, from pyproject.toml; without the requirements of the package's extras."""
    about = project()
    needs = {re.split(r"[^\w-]", text)[0]: text for text in about["dependencies"]}
    names = [name for name in needs if name != "torch"]
    names += [name for extra in extras for name in about["optional-dependencies"][extra]]
    torch = needs["torch"].replace("torch>=", "torch ") + " or newer"
    return INSTALL_NOTE.format(address=repository_address(), packages=", ".join(names), torch=torch)


@dataclass
class Translation:
    """From MyST to Markdown, for one cell; `where` names it in errors."""

    where: str
    root: Path

    def markdown(self, text: str) -> str:
        """Translate a text of paragraphs, code blocks and directives."""
        lines, plain, blocks = text.split("\n"), [], []
        while lines:
            line = lines.pop(0)
            opening = FENCE.fullmatch(line)
            if opening is None:
                if not DROPPED.match(line):
                    plain.append(line)
                continue
            closing = re.compile(rf"\s*{opening['fence']}{opening['fence'][0]}*\s*")
            end = next((number for number, line in enumerate(lines) if closing.fullmatch(line)), None)
            if end is None or (opening["fence"][0] == ":" and not opening["name"]):
                raise self.error(f"the fence {line.strip()!r} has no counterpart")
            body, lines = lines[:end], lines[end + 1 :]
            if opening["name"]:
                body = textwrap.dedent("\n".join(body)).split("\n")
                block = self.directive(opening["name"][1:-1], opening["argument"].strip(), body)
                block = textwrap.indent(block, opening["indent"])
            else:
                block = "\n".join([line, *body, opening["indent"] + opening["fence"]])
            blocks += [self.inline("\n".join(plain)), block]
            plain = []
        text = "\n".join([*blocks, self.inline("\n".join(plain))])
        return re.sub(r"\n{3,}", "\n\n", text).strip("\n")

    def directive(self, name: str, argument: str, body: list[str]) -> str:
        """Translate a directive."""
        options = {}
        while body and (option := OPTION.fullmatch(body[0])):
            options[option[1]] = option[2]
            body = body[1:]
        text = "\n".join(body)
        if name == "admonition":
            return quote(f"**{self.inline(argument)}**\n\n{self.markdown(text)}")
        if name == "margin" and not options:
            return quote(self.markdown(text))
        if name == "include" and not options:
            return self.markdown(self.file(argument).read_text(encoding="utf-8"))
        if name == "table":
            return f"**{self.inline(argument)}**\n\n{self.markdown(text)}"
        if name in ("figure", "image"):
            picture = f"![{options.get('alt', '')}]({self.address(argument, 'raw')})"
            return f"{picture}\n\n{self.markdown(text)}"
        if name in ("frontier-explorer", "schematic-explorer") and {"image", "alt"} <= set(options):
            picture = f"![{options['alt']}]({self.address(options['image'], 'raw')})"
            return f"{picture}\n\n*{options['alt']} In the book, this figure is interactive.*"
        raise self.error(f"tools/colab.py cannot translate the directive {{{name}}} with the options {options}")

    def inline(self, text: str) -> str:
        """Translate the roles, links and images of paragraphs."""
        return INLINE.sub(self._inline, text)

    def _inline(self, match: re.Match) -> str:
        if match["role"]:
            return self.role(match["role"], " ".join(match["text"].split()))
        if match["target"] is None:  # math, code or an escaped character
            return match[0]
        label, target = self.inline(match["label"]), match["target"]
        if target.startswith("#"):
            return label
        if not re.match(r"[a-z]+:", target):
            target = self.address(target, "raw" if match["image"] else "blob")
        return f"{match['image']}[{label}]({target})"

    def role(self, name: str, text: str) -> str:
        """Translate a role."""
        explicit = re.fullmatch(r"(.*?)\s*<([^<>]+)>", text)
        title, target = explicit.groups() if explicit else (None, text)
        if name == "doc":
            file = self.file(f"{target}.ipynb", f"{target}.md")
            heading, end = (r"^# # (.+)$", ".ipynb") if file.suffix == ".py" else (r"^# (.+)$", ".md")
            title = title or re.findall(heading, file.read_text(encoding="utf-8"), re.MULTILINE)[0]
            return f"[{title}]({self.address(target + end, 'blob')})"
        if name in ("cite", "cite:t"):
            return ", ".join(self.citation(key.strip(), textual=name == "cite:t") for key in text.split(","))
        if name.startswith("py:"):
            return f"`{title or (target.rpartition('.')[2] if target[0] == '~' else target)}`"
        if name in ("ref", "term") and (title or name == "term"):
            return title or target
        raise self.error(f"tools/colab.py cannot translate the role {{{name}}}`{text}`")

    def citation(self, key: str, textual: bool) -> str:
        """A link to the paper: authors and year, or the key in brackets, as in the book."""
        if key not in bibliography():
            raise self.error(f"{key!r} is not in book/references.bib")
        entry = bibliography()[key]
        doi = f"https://doi.org/{entry.fields['doi']}" if "doi" in entry.fields else None
        address = entry.fields.get("url") or doi or self.address("../bibliography.md", "blob")
        if not textual:
            return rf"[\[{key}\]]({address})"
        names = [str(Text.from_latex(" ".join([*p.prelast_names, *p.last_names]))) for p in entry.persons["author"]]
        several = len(names) > 2 or names[-1] == "others"
        authors = f"{names[0]} et al." if several else " and ".join(names)
        return f"[{authors} ({entry.fields['year']})]({address})"

    def address(self, path: str, kind: str) -> str:
        """The published address of a file: Colab's for a chapter, else GitHub's."""
        if self.file(path).parent == ROOT / "notebooks":
            return colab_address(repository_address(), f"{COLAB_FOLDER}/{Path(path.partition('#')[0]).name}")
        return f"{repository_address()}/{kind}/{BRANCH}/{published(path)}"

    def file(self, *paths: str) -> Path:
        """The first of these files that exists; the source of a chapter."""
        for path in map(published, paths):
            if path.startswith(CHAPTERS):
                file = (ROOT / "notebooks" / Path(path).name).with_suffix(".py")
            else:
                file = (self.root if path.startswith("results/") else ROOT) / path
            if file.is_file():
                return file
        raise self.error(f"there is no file {published(paths[0])}")

    def error(self, text: str) -> NotebookError:
        """The error, with the place."""
        return NotebookError(f"{self.where}: {text}")


def published(path: str) -> str:
    """The path in the repository of a path relative to the chapters."""
    return posixpath.normpath(posixpath.join(CHAPTERS, path.partition("#")[0]))


def quote(text: str) -> str:
    """The text as a block quote; formulas go on one line, as Colab would show the quote's `>` in them."""
    parts = re.split(r"(^```.*?^```$)", text, flags=re.DOTALL | re.MULTILINE)
    parts[::2] = [re.sub(MATH, lambda m: m[0].replace("\n", " "), part, flags=re.DOTALL) for part in parts[::2]]
    return "\n".join(f"> {line}".rstrip() for line in "".join(parts).split("\n"))


@cache
def bibliography() -> dict:
    """The entries of book/references.bib by key."""
    return parse_file(str(ROOT / "book" / "references.bib")).entries
