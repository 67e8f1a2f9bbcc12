"""Every script of `examples/` runs as its docstring says, keeps what it promises, and stands in a guide of the book."""

import ast
import re
import runpy
import shutil
import sys
from pathlib import Path

import pytest
from conftest import raises
from forked import output_of

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = sorted((ROOT / "examples").glob("*.py"))
# The others run in this process, which imports torch only once. A plan must be valid in another process.
OWN_PROCESS = ("accelerate_loop", "inductor", "lightning_loop", "lora", "saved_plan", "trainer", "trainer_lengths")
GUIDES = sorted((ROOT / "book" / "guides").glob("*.md"))


def commands(script: Path) -> list[str]:
    """What the docstring of a script says to type, without what needs several machines."""
    docstring = ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or ""
    said = re.findall(r"^ *((?:python|torchrun) .*)$", docstring, re.MULTILINE)
    return [command for command in said if "--standalone" in command or command.startswith("python")]


def run(command: str, folder: Path) -> list[str]:
    """The lines that a command prints, if it succeeds, run in `folder` by processes of its own, on one thread."""
    program, *arguments = command.split()
    arguments = [str(ROOT / one) if one.startswith("examples/") else one for one in arguments]
    ranks = 0
    if program == "torchrun":
        assert arguments[:2] == ["--standalone", "--nproc-per-node"]
        ranks, arguments = int(arguments[2]), arguments[3:]
    return output_of(*arguments, folder=folder, threads=1, ranks=ranks).splitlines()


@pytest.fixture
def run_here(monkeypatch, capsys, one_thread):
    """As `run`, in this process."""

    def run_here(command: str, folder: Path) -> list[str]:
        _, script, *arguments = command.split()
        monkeypatch.chdir(folder)
        monkeypatch.setattr(sys, "argv", [script, *arguments])
        runpy.run_path(str(ROOT / script), run_name="__main__")
        return capsys.readouterr().out.splitlines()

    return run_here


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_an_example_runs_and_prints_measured_bytes(script, tmp_path, run_here):
    if script.stem == "inductor" and shutil.which("g++") is None:
        pytest.skip("Inductor needs a C++ compiler")
    assert len(script.read_text().splitlines()) <= 85
    assert commands(script)
    for command in commands(script):
        is_alone = script.stem in OWN_PROCESS or command.startswith("torchrun")
        printed = (run if is_alone else run_here)(command, tmp_path)
        assert len([line for line in printed if re.search(r"\d MiB", line)]) >= 1, printed


@pytest.mark.parametrize("start", ["python", "torchrun --standalone --nproc-per-node 2"])
def test_a_failed_assertion_of_an_example_is_a_failure(start, tmp_path):
    script = tmp_path / "broken.py"
    script.write_text("import os\nassert os.environ.get('RANK') == '0'\n")  # one of two ranks is enough
    raises(AssertionError, "broken.py", lambda: run(f"{start} {script}", tmp_path))


def test_every_script_is_in_a_guide_and_every_guide_has_one():
    shown = {}
    for guide in GUIDES:
        shown[guide.stem] = re.findall(r"^```\{literalinclude\} (\S+)$", guide.read_text(encoding="utf-8"), re.M)
    paths = [(guide.parent / path).resolve() for guide in GUIDES for path in shown[guide.stem]]
    assert sorted(paths) == SCRIPTS
    assert [stem for stem, found in shown.items() if not found and stem != "index"] == []


def test_every_guide_is_in_the_table_of_contents():
    contents = re.findall(r"file: guides/(\S+)", (ROOT / "book" / "_toc.yml").read_text(encoding="utf-8"))
    assert sorted(contents) == [guide.stem for guide in GUIDES]
