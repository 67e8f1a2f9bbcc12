"""What a chapter runs on a GPU: the suite's jobs of its experiments, within its minutes; without a GPU nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from experiments.data import DATASETS
from experiments.reports.gpu_suite import text_outcome, text_table
from experiments.results import environment

from .gpu_suite import records_of, run_suite
from .gpu_suite_jobs import TIERS, jobs

AUTO = "auto"
FOLDER = Path("results", "gpu")
SMALL_BYTES = 20 * 2**30  # a GPU with less memory runs the tier of a T4


def measure_here(
    *experiments: str,
    device: str = AUTO,
    tier: str = AUTO,
    dataset: str = "embedded",
    minutes: float = 10,
    folder: Path = FOLDER,
) -> None:
    """Run the published configurations of the experiments on a GPU and print their table; nothing on a CPU.

    The records are those of ``python -m experiments gpu-suite``, and a job that has records is skipped.

    Args:
        device: ``"cuda"``, ``"cpu"``, or ``"auto"`` for a GPU if torch sees one.
        tier: ``"full"``, ``"t4"`` (in float16, with its times), ``"cpu"`` (nothing), or ``"auto"`` by the GPU's memory.
        dataset: of the language model: ``"embedded"``, or ``"wikitext"``, which needs a network.
        minutes: of wall-clock time; no job starts that should take longer than the rest.
    """
    choices = (device, (AUTO, "cpu", "cuda")), (tier, (AUTO, *TIERS)), (dataset, DATASETS)
    for value, allowed in choices:
        if value not in allowed:
            raise ValueError(f"unknown value {value!r}: choose from {', '.join(allowed)}")
    has_gpu = torch.cuda.is_available()
    if device == "cuda" and not has_gpu:
        raise ValueError(
            "device is cuda and torch sees no CUDA GPU here: choose a runtime with a GPU, or device='auto'"
        )
    if device == "cpu" or tier == "cpu" or not has_gpu:
        return
    if tier == AUTO:
        tier = "t4" if torch.cuda.get_device_properties(0).total_memory < SMALL_BYTES else "full"
    chosen = jobs(tier, experiments)
    reads = {"lm": {"dataset": dataset}}
    chosen = [replace(job, config=replace(job.config, **reads.get(job.experiment, {}))) for job in chosen]
    outcome = run_suite(chosen, folder, f"a chapter on {', '.join(experiments)}", minutes)
    records = records_of(chosen, folder, environment()["commit"])
    print("\n".join([text_table(records), *text_outcome(outcome)]))
