"""Describe this machine for records: the device, the versions, the threads and the day, as plain data."""

import datetime
import platform
import re
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from . import __version__


def machine(device: torch.device | str = "cpu") -> dict[str, Any]:
    """Device, versions, threads and the day in UTC; a GPU adds its capability, memory, driver, CUDA and cuDNN."""
    device = torch.device(device)
    return {
        "device": device.type,
        "device_name": _device_name(device),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "ackpt": _package_version(),
        "threads": torch.get_num_threads(),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
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
        return __version__


def _device_name(device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device) if torch.cuda.is_available() else "no GPU"
    cpuinfo = Path("/proc/cpuinfo")
    names = [line for line in cpuinfo.read_text().splitlines() if "model name" in line] if cpuinfo.is_file() else []
    return names[0].split(":", 1)[1].strip() if names else platform.processor() or platform.machine()
