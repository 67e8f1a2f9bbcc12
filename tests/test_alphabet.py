"""The book's symbols: what a formula contains, and whether `book/notation.md` gives each one meaning."""

import alphabet
import pytest


@pytest.mark.parametrize(
    ("formula", "expected"),
    [
        (r"m_i = m_{i-1} + b_i - b_i^-", {"m", "i", "b"}),
        (r"P_\text{block} = 4 d^2 + 2 d f", {"P_block", "d", "f"}),
        (r"\text{peak}_\text{early} = \tfrac{n}{k} \text{ a byte}", {"n", "k"}),
        (r"\bar y\, W, \quad k' \le 2\rho/\lambda", {"y", "W", "k", "rho", "lambda"}),
        (r"\operatorname{softmax}(z) - \frac{\sqrt[3] n}{\ell}", {"z", "n", "ell"}),
        (r"\begin{aligned} x &= 1 \end{aligned} \in 2^{10}", {"x"}),
    ],
)
def test_symbols_of_formulas(formula, expected):
    assert alphabet.symbols(formula) == expected


def test_formulas_are_found_in_markdown_only(tmp_path):
    chapter = tmp_path / "01_chapter.py"
    chapter.write_text("# %% [markdown]\n# With $a$, `$b$` and\n#\n# $$ c\n# = d $$\n\n# %%\nprint('$e$')\n")
    assert alphabet.formulas(chapter) == ["a", " c\n= d "]


def test_every_symbol_of_the_notation_is_defined_once():
    defined = alphabet.meanings(alphabet.NOTATION)
    assert {"T", "T_seq", "P_block", "sigma", "beta"} <= set(defined)
    assert {name: rows for name, rows in defined.items() if len(rows) > 1} == {}


def test_meanings_agree_if_they_share_a_word():
    assert alphabet.shares_a_word("tokens in the batch", "a token of a sequence")
    assert not alphabet.shares_a_word("segments of a chain", "chunks of the loss")


def test_every_symbol_of_the_book_has_one_meaning(capsys):
    assert alphabet.main() == 0, capsys.readouterr().out
