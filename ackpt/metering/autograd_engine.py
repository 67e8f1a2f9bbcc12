"""``around_backward``: run every backward within a context.

Autograd has no hook for the start of a backward. But all of torch's Python code enters the engine through one function,
``torch.autograd.graph._engine_run_backward``, which ``torch.autograd`` imports; this module replaces that name.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch


@contextlib.contextmanager
def around_backward(context):
    """While this context is active, every backward that Python code starts runs within ``context()``."""
    autograd: Any = torch.autograd
    engine = autograd._engine_run_backward

    def run_backward(*args, **kwargs):
        with context():
            return engine(*args, **kwargs)

    autograd._engine_run_backward = run_backward
    try:
        yield
    finally:
        autograd._engine_run_backward = engine
