"""The environment of a record: what `ackpt.core.machine` says, the commit and the command."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import torch

from ackpt.core.machine import machine


def environment(device: torch.device | str = "cpu", command: str = "") -> dict[str, Any]:
    """The environment of a record: device, versions, threads, commit, day and command.

    ``commit`` is that of the checkout, followed by ``-dirty`` if ``ackpt/``, ``experiments/``,
    ``notebooks/`` or ``pyproject.toml`` have changes. In a copy without git history it is the environment
    variable ``ACKPT_COMMIT``, or None. ``date`` is the day in UTC: two runs on one day give the same bytes.
    A GPU adds ``capability``, ``device_bytes``, ``driver``, ``cuda`` and ``cudnn``.

    Example:
        >>> from experiments.provenance import environment
        >>> environment()["device"]
        'cpu'
    """
    return {**machine(device), "commit": _commit(), "command": command}


def _commit() -> str | None:
    root = Path(__file__).parent.parent
    # A package installed into a virtual environment inside somebody's checkout is not part of that.
    if _git(root, "ls-files", "--error-unmatch", str(Path(__file__))) is None:
        return os.environ.get("ACKPT_COMMIT") or None
    commit = _git(root, "rev-parse", "HEAD")
    changes = _git(root, "status", "--porcelain", "--", "ackpt", "experiments", "notebooks", "pyproject.toml")
    return f"{commit}-dirty" if commit and changes else commit


def _git(folder, *arguments) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
