"""One letter, one meaning: `python tools/alphabet.py` compares all formulas with `book/notation.md`.

A symbol is a letter, with its subscript where that is a word: `b` in `b_i`, `P_block` in `P_\\text{block}`. Bars and
primes do not make another symbol. A page's own table of symbols must agree with `book/notation.md`: the two meanings
of a symbol have a word in common.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NOTATION = ROOT / "book" / "notation.md"
GREEK = "alpha|beta|gamma|delta|epsilon|eta|theta|kappa|lambda|mu|nu|pi|rho|sigma|tau|phi|chi|psi|omega|ell"
_CODE = re.compile(r"^```(?!\{math\}).*?^```|(`+)[^`]+?\1", re.MULTILINE | re.DOTALL)
_MATH = re.compile(r"\$\$(.+?)\$\$|\$(.+?)\$|^```\{math\}\n(.+?)^```", re.MULTILINE | re.DOTALL)
_WORDS = re.compile(r"\\(?:text|texttt|textbf|operatorname|mathrm|begin|end)\{[^{}]*\}")
_SYMBOL = re.compile(rf"(?:\\({GREEK})(?![a-zA-Z])|(?<![\\a-zA-Z@])([a-zA-Z])(?![a-zA-Z@]))(_@\w+@)?")

_INDEX = re.compile(r"=.*|_\{.*?\}|_[a-z]\b|_\\sigma|\(.*?\)")  # what is no symbol of its own in a table's first column


def formulas(path: Path) -> list[str]:
    """The formulas in the Markdown of a page, or of a chapter's source."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        cells = [cell for cell in re.split(r"^# %%", text, flags=re.MULTILINE) if cell.startswith(" [markdown]")]
        text = re.sub(r"^# ?", "", "\n".join(cells), flags=re.MULTILINE)
    return ["".join(found) for found in _MATH.findall(_CODE.sub("", text))]


def symbols(formula: str) -> set[str]:
    """The symbols of a formula, Greek letters by their names."""
    bare = _WORDS.sub(" ", re.sub(r"_\\text\{(\w+)\}", r"_@\1@", formula))
    return {(greek or latin) + word.replace("@", "") for greek, latin, word in _SYMBOL.findall(bare)}


def meanings(path: Path) -> dict[str, list[str]]:
    """What the tables of a page say of each symbol in their first column, one entry per row."""
    found = defaultdict(list)
    for line in path.read_text(encoding="utf-8").splitlines():
        cells = re.sub(r"^# ?", "", line).split("|")
        if len(cells) >= 4 and "$" in cells[1]:
            heads = re.findall(r"\$([^$]+)\$", cells[1])
            for name in set().union(*(symbols(_INDEX.sub("", head)) for head in heads)):
                found[name].append(cells[2].strip())
    return found


def shares_a_word(one: str, other: str) -> bool:
    """Whether two meanings have a word of four or more letters in common."""
    first, second = ({word.rstrip("s") for word in re.findall(r"[a-z]{4,}", each.lower())} for each in (one, other))
    return bool(first & second)


def main() -> int:
    """Print what is wrong; 1 if a symbol has no meaning, or several."""
    pages = [*sorted((ROOT / "notebooks").glob("*.py")), *sorted((ROOT / "book").rglob("*.md"))]
    used, defined, wrong = defaultdict(list), meanings(NOTATION), []
    for path in [path for path in pages if path != NOTATION and "_build" not in path.parts]:
        for name in sorted(set().union(*map(symbols, formulas(path)))):
            used[name].append(path.relative_to(ROOT).as_posix())
        for name, rows in sorted(meanings(path).items()):
            if name in defined and not shares_a_word(rows[0], defined[name][0]):
                wrong.append(f"{name}: {defined[name][0]!r} in notation.md, {rows[0]!r} in {path.name}")
    wrong += [f"{name}: {len(rows)} rows of notation.md" for name, rows in sorted(defined.items()) if len(rows) > 1]
    wrong += [f"{name}: not in notation.md, used in {', '.join(used[name])}" for name in sorted({*used} - {*defined})]
    wrong += [f"{name}: in notation.md, used nowhere" for name in sorted({*defined} - {*used})]
    print("\n".join(wrong) or f"{len(defined)} symbols, each with one meaning")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
