"""The line about capture and planning: on a terminal, after a delay, with the stage; silent everywhere else."""

import io
import os
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import ackpt
from ackpt.core import progress
from ackpt.planner.explain import explanation


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


class Slow(nn.Sequential):
    """Waits in the capture until the line is there."""

    def forward(self, input):
        progress.sys.stderr.wait_for("capturing the step")  # pyright: ignore
        return super().forward(input)


def test_compile_and_trace_show_progress(terminal):
    ackpt.compile(Slow(nn.Linear(8, 8), nn.Tanh()), torch.ones(4, 8))
    assert shown_on(terminal) == ""
    terminal.truncate(0)
    ackpt.trace(Slow(nn.Linear(8, 8), nn.Tanh()), torch.ones(4, 8))
    assert "capturing the step" in terminal.getvalue()


def test_an_audit_and_planned_regions_show_it(terminal):
    class Waiting(nn.Sequential):
        text = ""

        def forward(self, input):
            progress.sys.stderr.wait_for(self.text)  # pyright: ignore
            return super().forward(input)

    model = Waiting(nn.Linear(8, 8), nn.Tanh())
    model.text = "ackpt: audit: running the step"
    ackpt.audit(model, torch.ones(4, 8), compare_budget=False)
    assert shown_on(terminal) == ""
    model.text = "recording the first step"
    ackpt.compile(model, torch.ones(4, 8), budget="1GiB", regions=True)(torch.ones(4, 8)).sum().backward()
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


def test_a_measurement_shows_one_line_of_progress(terminal):
    x = torch.ones(4, 8)
    terminal.is_terminal = False
    step = ackpt.compile(nn.Linear(8, 8), x)
    terminal.is_terminal = True
    wider = torch.ones(5, 8)

    def run():
        terminal.wait_for("ackpt: measuring the step")
        step(wider).sum().backward()

    ackpt.measure(run, resident=[step, x, wider], repeats=0)
    assert len(step.history) == 2 and shown_on(terminal) == ""


def waits_for(terminal, text):
    def wait(*args):
        terminal.wait_for(text)

    return wait


def test_predict_explain_and_profile_show_progress(terminal, monkeypatch):
    layer, x = nn.Linear(8, 8, device="meta"), torch.ones(4, 8, device="meta")
    wait = waits_for(terminal, "ackpt: predicting the step")
    ackpt.predict(lambda: (wait(), layer(x).sum().backward()), resident=[layer, x])
    terminal.truncate(terminal.seek(0))
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    found = explanation.suggestions
    wait = waits_for(terminal, "simulating what would reduce the peak")
    monkeypatch.setattr(explanation, "suggestions", lambda *args: (wait(), found(*args))[1])
    ackpt.explain(model, torch.ones(4, 8))
    terminal.truncate(terminal.seek(0))
    assert shown_on(terminal) == ""


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
