"""Being there when autograd starts: it tells nobody, but all of torch's Python enters its engine by one function."""

from __future__ import annotations

import contextlib
from typing import Any

import torch


@contextlib.contextmanager
def around_backward(context):
    """Inside, every run of backward that Python starts runs within ``context()``."""
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
