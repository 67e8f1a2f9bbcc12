"""The offload experiment in one notebook cell: table, bars and timelines.

``run_demo()`` on a free Colab T4 runs the published size, in fp16; that GPU has no flash
attention, so packed sequences go through a memory-efficient kernel. Without a GPU it runs a small size.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import torch


def run_demo(device: str | None = None, *, timed_rounds: int = 3, **overrides: Any) -> dict[str, Any]:
    """Run the offload experiment, print its table and show its figures.

    Args:
        device: ``"cuda"`` (the published size) or ``"cpu"`` (a small one); by default a GPU if there is one.
        timed_rounds: interleaved rounds for the times; 0 measures no times.
        overrides: fields of ``experiments.offload.OffloadConfig``: total_tokens, layers, dim, methods, ...

    Returns:
        ``{"peak": Figure, "time": Figure, "timelines": Figure}``, or an empty dict in IPython, which shows them.

    Raises:
        ValueError: for an unknown device, field or value.
        ImportError: if matplotlib and seaborn are missing.

    Example:
        >>> from experiments.colab import run_demo
        >>> run_demo("tpu")
        Traceback (most recent call last):
        ValueError: unknown device 'tpu': choose cpu or cuda
    """
    from experiments.reports import plots  # before the work: without it there is nothing to show

    from . import offload
    from .reports import offload as offload_report
    from .steps.failures import Failures

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device not in ("cpu", "cuda"):
        raise ValueError(f"unknown device {device!r}: choose cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("no CUDA GPU here: in Colab choose Runtime, Change runtime type, T4 GPU; or device='cpu'")
    base = offload.GPU if device == "cuda" else offload.CPU
    fields = {field.name for field in dataclasses.fields(base)} - {"device"}
    for name in overrides:
        if name not in fields:
            raise ValueError(f"unknown field {name!r}: choose from {', '.join(sorted(fields))}")
    overrides = {name: tuple(value) if isinstance(value, list) else value for name, value in overrides.items()}
    config = dataclasses.replace(base, **overrides)
    failures = Failures()
    records = offload.run_offload(config, "experiments.colab.run_demo()", timed_rounds, failures)
    print(offload_report.text_table(records))
    for method, reason in failures.reasons.items():
        print(f"FAILED: {method}: {reason}")
    figures = offload_report.figures(records)
    if "IPython" not in sys.modules or sys.modules["IPython"].get_ipython() is None:
        return figures
    from IPython.display import Image, display

    for figure in figures.values():
        display(Image(plots.png(figure), width=860))
    return {}
