"""The command ``ackpt doctor``: what this machine can run, and how to install what is missing."""

from __future__ import annotations

import importlib.util
import json
import os
import platform

import torch

OPTIONAL = (
    ("tokenizers", "lm", "the language-model experiment"),
    ("datasets", "lm", "--dataset wikitext"),
    ("tensorboard", "profile", "--profile-dir"),
    ("matplotlib", "plots", "figures"),
    ("seaborn", "plots", "figures"),
    ("scipy", "plan", "the lower bound of a plan's cost"),
    ("transformers", "hf", "ackpt plan hf:..."),
)


def add_doctor(commands) -> None:
    """Add the command and its options."""
    summary = "what this machine can run, and how to install what is missing"
    parser = commands.add_parser("doctor", help=summary, description=f"{summary}.")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run_doctor)


def run_doctor(arguments, command: str) -> int:
    findings = examine()
    print(json.dumps(findings, indent=1) if arguments.json else text(findings))
    return 0


def examine() -> dict:
    """Facts about this machine as plain data: device, versions, optional packages."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cuda": torch.cuda.is_available(),
        "gpus": [_gpu(index) for index in range(torch.cuda.device_count())] if torch.cuda.is_available() else [],
        "packages": [
            {
                "name": name,
                "for": purpose,
                "installed": importlib.util.find_spec(name) is not None,
                "install": f'pip install "ackpt[{extra}]"',
            }
            for name, extra, purpose in OPTIONAL
        ],
    }


def _gpu(index: int) -> dict:
    properties = torch.cuda.get_device_properties(index)
    return {
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "varlen_attention": (properties.major, properties.minor) >= (8, 0),
    }


def text(findings: dict) -> str:
    """The findings in lines for a terminal."""
    lines = [
        f"python {findings['python']}, torch {findings['torch']}, {findings['cores']} cores, "
        f"{findings['threads']} threads",
    ]
    for gpu in findings["gpus"]:
        attention = "varlen attention" if gpu["varlen_attention"] else "attention per sequence"
        lines.append(f"GPU {gpu['name']}, {gpu['memory_bytes'] / 2**30:.0f} GiB, {attention}")
    if not findings["cuda"]:
        lines.append("no CUDA GPU: ackpt plan gives peaks and plans for GPUs, from shapes")
    for package in findings["packages"]:
        state = "ok" if package["installed"] else f"missing: {package['install']}"
        lines.append(f"{package['name']:<12} {package['for']:<32} {state}")
    return "\n".join(lines)
