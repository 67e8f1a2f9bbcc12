"""Where a record is made: device, versions, threads, commit, day and command."""

from __future__ import annotations

import datetime
import platform
import subprocess
from importlib import metadata
from pathlib import Path

import torch


def environment(device="cpu", command: str = "") -> dict:
    """Where a record is made: device, versions, threads, commit, day and command.

    ``commit`` is that of the checkout the package lies in, with ``-dirty`` behind it when ``ackpt/``, ``notebooks/``
    or ``pyproject.toml`` have changes, or None for an installed package. ``date`` is the day in UTC: two runs on one
    day give the same bytes.

    Example:
        >>> from ackpt.provenance import environment
        >>> environment()["device"]
        'cpu'
    """
    device = torch.device(device)
    return {
        "device": device.type,
        "device_name": _device_name(device),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "ackpt": _package_version(),
        "threads": torch.get_num_threads(),
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "command": command,
    }


def _package_version() -> str:
    try:
        return metadata.version("ackpt")
    except metadata.PackageNotFoundError:
        import ackpt

        return ackpt.__version__


def _device_name(device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device) if torch.cuda.is_available() else "no GPU"
    cpuinfo = Path("/proc/cpuinfo")
    names = [line for line in cpuinfo.read_text().splitlines() if "model name" in line] if cpuinfo.is_file() else []
    return names[0].split(":", 1)[1].strip() if names else platform.processor() or platform.machine()


def _commit() -> str | None:
    root = Path(__file__).parent.parent
    # A package installed into a virtual environment inside somebody's checkout is not part of that.
    if _git(root, "ls-files", "--error-unmatch", str(Path(__file__))) is None:
        return None
    commit = _git(root, "rev-parse", "HEAD")
    changes = _git(root, "status", "--porcelain", "--", "ackpt", "notebooks", "pyproject.toml")
    return f"{commit}-dirty" if commit and changes else commit


def _git(folder, *arguments) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
