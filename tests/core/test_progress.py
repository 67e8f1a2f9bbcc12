"""The line about capture and planning: on a terminal, after a delay, with the stage; silent everywhere else."""

import functools
import io
import os
import re
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import ackpt
from ackpt.cli import main
from ackpt.core import progress


class Terminal(io.StringIO):
    """A stderr that says that it is a terminal, and lets the test wait for a text."""

    is_terminal = True

    def isatty(self):
        return self.is_terminal

    def wait_for(self, text):
        for _ in range(500):
            if text in self.getvalue():
                return
            time.sleep(0.01)
        raise AssertionError(f"{text!r} is not in {self.getvalue()!r}")


@pytest.fixture
def terminal(monkeypatch):
    stream = Terminal()
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=stream))  # pytest sets that of sys itself
    monkeypatch.setattr(progress, "_DELAY_SECONDS", 0.0)
    monkeypatch.setattr(progress, "_INTERVAL_SECONDS", 0.001)
    return stream


def shown_on(stream) -> str:
    """What remains on the last line of the terminal."""
    line: list[str] = []
    column = 0
    for character in stream.getvalue():
        if character == "\r":
            column = 0
        elif character == "\n":
            line, column = [], 0
        else:
            line[column : column + 1] = character
            column += 1
    return "".join(line).strip()


def test_the_line_names_the_stage_and_disappears(terminal):
    with progress.shown():
        terminal.wait_for("ackpt: planning")
        for block in progress.counted("ab", "searching: block"):
            terminal.wait_for(f"ackpt: searching: block {'ab'.index(block) + 1} of 2")
        with progress.shown():  # such as a plan within a call
            progress.stage("compiling the schedule")
            terminal.wait_for("compiling the schedule")
        assert "compiling" in shown_on(terminal) and "\n" not in terminal.getvalue()
    assert shown_on(terminal) == ""
    assert not [thread for thread in threading.enumerate() if thread.name == "ackpt-progress"]


def test_the_line_disappears_with_an_interrupt(terminal):
    with pytest.raises(KeyboardInterrupt), progress.shown():
        terminal.wait_for("planning")
        raise KeyboardInterrupt
    assert shown_on(terminal) == ""
    with progress.shown():
        progress.stage("capturing the step")
        terminal.wait_for("capturing")


class Waiting(nn.Sequential):
    """Waits in its forward until the line says what is done."""

    text = ""

    def forward(self, input):
        progress.sys.stderr.wait_for(f"ackpt: {self.text}")  # pyright: ignore
        return super().forward(input)


def regions(model, x):
    ackpt.compile(model, x, budget="1GiB", regions=True)(x).sum().backward()


SHOWN = {
    "capturing the step": ackpt.compile,
    "capturing": ackpt.trace,
    "audit: running the step": functools.partial(ackpt.audit, compare_budget=False),
    "recording the first step": regions,
    "measuring the step": lambda model, x: ackpt.measure(lambda: model(x), resident=[model, x], repeats=0),
    "predicting the step": lambda model, x: ackpt.predict(lambda: model.to("meta")(x.to("meta")).sum().backward()),
}


@pytest.mark.parametrize("text", SHOWN)
def test_long_calls_show_what_they_do(terminal, text):
    model = Waiting(nn.Linear(8, 8), nn.Tanh())
    model.text = text
    SHOWN[text](model, torch.ones(4, 8))
    assert shown_on(terminal) == ""


def test_nothing_is_written_to_a_pipe_or_before_the_delay(terminal, monkeypatch):
    terminal.is_terminal = False
    with progress.shown():
        assert not [thread for thread in threading.enumerate() if thread.name == "ackpt-progress"]
    terminal.is_terminal = True
    monkeypatch.setattr(progress, "_DELAY_SECONDS", 1000.0)
    ackpt.compile(nn.Linear(8, 8), torch.ones(4, 8))
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=None))
    with progress.shown():
        progress.stage("capturing the step")
    assert terminal.getvalue() == ""


def test_stages_name_the_work_that_they_are_part_of(terminal):
    with progress.about("seq len 16"):
        progress.stage("capturing the step")
        terminal.wait_for("ackpt: seq len 16: capturing the step [00:0")
        with progress.shown():
            progress.stage("searching")
            terminal.wait_for("ackpt: seq len 16: searching")
    assert shown_on(terminal) == ""


def test_the_line_is_no_wider_than_the_terminal(terminal, monkeypatch):
    monkeypatch.setattr(progress.shutil, "get_terminal_size", lambda: os.terminal_size((20, 24)))
    with progress.shown():
        progress.stage("measuring the workspace of operations")
        terminal.wait_for("\rackpt: measuring th")
        assert len(shown_on(terminal)) == 19


def test_one_line_shows_a_whole_sweep(terminal, capsys):
    assert main(["plan", "lm", "--set", "layers=1", "--sweep", "seq_len=8,16"]) == 0
    shown = terminal.getvalue()
    assert "ackpt: importing the planner" in shown and "ackpt: seq len 16: capturing the step" in shown
    assert len(re.findall(r"\r +\r", shown)) == 1  # it is erased once, at the end
    assert capsys.readouterr().out.splitlines()[-1].startswith("16 ") and shown_on(terminal) == ""
