"""Capture a model without data as `torch.compile` runs it, if it cannot be captured otherwise.

Many models read tensor values unless ``torch.compiler.is_compiling()`` returns True. Captured that way, they may use
other formulas, so a step that is planned from such a capture never runs.
"""

from __future__ import annotations

import contextlib
import weakref

import torch

from ackpt.core.errors import warn

_WARNED: weakref.WeakKeyDictionary[torch.nn.Module, set[str]] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def compiling():
    """Make ``torch.compiler.is_compiling()`` return True inside; models check it before they read tensor values."""
    was, torch.compiler._is_compiling_flag = torch.compiler._is_compiling_flag, True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = was


def note(reason: str) -> str:
    """The note in a plan from a capture as ``torch.compile`` runs the model; `reason`: why."""
    return f"captured as torch.compile runs it, because {reason}; the model's own step may differ"


def warned(model: torch.nn.Module, reason: str) -> None:
    """Warn about such a capture, once per model and reason: a model may have many captures."""
    if reason not in _WARNED.setdefault(model, set()):
        _WARNED[model].add(reason)
        warn(f"The model was captured as torch.compile runs it, because {reason}; the model's own step may differ.")
