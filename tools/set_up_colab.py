"""Install what a chapter needs into Colab's Python; the first cell of every notebook calls `set_up` in a fresh clone.

Colab's torch is kept if it is recent enough. Otherwise a torch and a torchvision that belong together are installed,
built for a version of CUDA that the driver supports. A torchvision that cannot be imported is removed, since no chapter
needs it and transformers imports it. Uses the standard library alone, and does not import torch into this process.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

WHEELS = "https://download.pytorch.org/whl"
# torch on PyPI needs a driver for CUDA 13; builds for 12.6 run with every driver for CUDA 12.
INDICES = ((13, 0), []), ((12, 0), ["--index-url", f"{WHEELS}/cu126", "--extra-index-url", "https://pypi.org/simple"])
GPU_WORKS = "import torch; torch.zeros(1, device='cuda').add(1).item()"


def set_up(extras: str) -> None:
    """Install the package of the current folder with these extras, such as ``"lm,plots"``.

    Raises:
        RuntimeError: if something cannot be installed, or if there is a GPU that torch cannot use.
    """
    least, driver = least_torch(), driver_cuda()
    replaced = not is_recent(installed("torch"), least)
    if replaced:
        print(f"installing torch {least} or newer, with torchvision: this takes minutes", flush=True)
        pip("install", "-q", "-U", f"torch>={least}", "torchvision", *index_of(driver))
    pip("install", "-q", f".[{extras}]")
    if installed("torchvision") and not runs("import torchvision"):
        print("removing a torchvision that cannot be imported; no chapter needs it", flush=True)
        pip("uninstall", "-q", "-y", "torchvision")
    if driver and not runs(GPU_WORKS):
        raise RuntimeError(
            f"this machine has a GPU that torch {installed('torch')} cannot use (the driver knows CUDA "
            f"{driver[0]}.{driver[1]}): choose Runtime, Disconnect and delete runtime, and run the notebook again, or "
            "choose a runtime without a GPU"
        )
    if replaced and "torch" in sys.modules:
        print("torch was replaced, so the runtime restarts now: run this cell again, then the rest", flush=True)
        os.kill(os.getpid(), 9)  # Colab starts a new process


def least_torch(project: Path = Path("pyproject.toml")) -> str:
    """The oldest torch that the package allows."""
    (version,) = re.findall(r'"torch>=([\d.]+)"', project.read_text(encoding="utf-8"))
    return version


def installed(name: str) -> str | None:
    """The version of an installed package, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def is_recent(version: str | None, least: str) -> bool:
    """Whether a version such as ``"2.9.0+cu126"`` is at least another."""
    return version is not None and _numbers(version) >= _numbers(least)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version.partition("+")[0])[:2]))


def driver_cuda() -> tuple[int, int] | None:
    """The newest CUDA that the driver supports, by nvidia-smi; None without a GPU."""
    try:
        done = subprocess.run(["nvidia-smi"], capture_output=True, text=True, timeout=60)
    except OSError:
        return None
    found = re.search(r"CUDA Version:\s*(\d+)\.(\d+)", done.stdout)
    return (int(found[1]), int(found[2])) if found else None


def index_of(driver: tuple[int, int] | None) -> list[str]:
    """The options of pip for wheels that run with the driver."""
    if driver is None:
        return []
    for least, options in INDICES:
        if driver >= least:
            return options
    raise RuntimeError(f"the GPU's driver supports CUDA {driver[0]}.{driver[1]} only: choose another runtime")


def runs(code: str) -> bool:
    """Whether the code runs in a Python of its own."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def pip(*arguments: str) -> None:
    """Run pip; RuntimeError with the last line of its errors if it fails."""
    done = subprocess.run([sys.executable, "-m", "pip", *arguments], capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise RuntimeError(f"pip {' '.join(arguments)} failed: {reason}")
