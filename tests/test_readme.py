"""What the README shows is what happens: its example runs and prints what it says, its commands and files exist."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str, text: str = README) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def output_of(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_it_is_short() -> None:
    assert len(README.splitlines()) <= 100


@pytest.mark.parametrize("number", [0, 1])
def test_an_example_prints_what_the_readme_says(number: int) -> None:
    assert output_of(blocks("python")[number]) == blocks("text")[number]


def test_the_budget_is_kept_as_the_books_first_page_says() -> None:
    page = (ROOT / "book" / "index.md").read_text(encoding="utf-8")
    (example,), (printed,) = blocks("python", page), blocks("text", page)
    if torch.__version__ < "2.13":  # autograd holds the gradient that comes in, half a MiB, until backward ends
        printed = printed.replace("60.6 MiB measured", "61.1 MiB measured")
    assert output_of(example) == printed


def test_the_offload_of_the_details_moves_what_layers_save() -> None:
    page = (ROOT / "book" / "using.md").read_text(encoding="utf-8")
    printed = output_of(blocks("python")[1] + "".join(blocks("python", page))).splitlines()
    (moved,) = (int(line) for line in printed if line.isdecimal())
    assert moved >= 7 * 2**24  # what seven of eight layers save
    assert printed[-1] == "saved: 128 B in 1 tensor, in addition to 256 B of parameters and 64 B of inputs"


def test_ci_runs_the_test_command_of_the_readme() -> None:
    reproduce, tests = (block.strip() for block in blocks("bash"))
    assert reproduce.endswith("nox -s reproduce")
    assert (ROOT / ".ci" / "run").read_text(encoding="utf-8").rstrip().endswith("\n" + tests)


@pytest.mark.parametrize("target", re.findall(r"\]\(([^)]+)\)", README))
def test_every_link_leads_to_a_file_of_the_checkout(target: str) -> None:
    assert (ROOT / target).exists()


@pytest.mark.parametrize("name", sorted(set(re.findall(r"ackpt\.(\w+)\(", README))))
def test_every_function_of_the_readme_is_public(name: str) -> None:
    import ackpt

    assert name in ackpt.__all__
