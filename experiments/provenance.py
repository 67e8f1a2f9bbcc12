"""Collect the environment of a record: device, versions, threads, commit, date and command."""

from __future__ import annotations

import datetime
import os
import platform
import re
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch


def environment(device: torch.device | str = "cpu", command: str = "") -> dict[str, Any]:
    """The environment of a record: device, versions, threads, commit, day and command.

    ``commit`` is that of the package's checkout, followed by ``-dirty`` if ``ackpt/``, ``notebooks/`` or
    ``pyproject.toml`` have changes. In a copy without git history it is the environment variable ``ACKPT_COMMIT``, or
    None. ``date`` is the day in UTC: two runs on one day give the same bytes.
    A GPU adds ``capability``, ``device_bytes``, ``driver``, ``cuda`` and ``cudnn``.

    Example:
        >>> from experiments.provenance import environment
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
        **(_cuda(device) if device.type == "cuda" and torch.cuda.is_available() else {}),
    }


def _cuda(device) -> dict:
    """The fields that a GPU adds."""
    properties = torch.cuda.get_device_properties(device)
    return {
        "capability": f"{properties.major}.{properties.minor}",
        "device_bytes": properties.total_memory,
        "driver": _driver(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    }


def _driver() -> str | None:
    """The version of NVIDIA's driver, from the system or from nvidia-smi; None if unknown."""
    version = Path("/proc/driver/nvidia/version")
    if version.is_file() and (driver := _driver_in(version.read_text())):
        return driver
    try:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.split("\n")[0].strip() or None if done.returncode == 0 else None


def _driver_in(text: str) -> str | None:
    match = re.search(r"Module.*?\s(\d+\.[\d.]+)", text)
    return match[1] if match else None


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
        return os.environ.get("ACKPT_COMMIT") or None
    commit = _git(root, "rev-parse", "HEAD")
    changes = _git(root, "status", "--porcelain", "--", "ackpt", "notebooks", "pyproject.toml")
    return f"{commit}-dirty" if commit and changes else commit


def _git(folder, *arguments) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
