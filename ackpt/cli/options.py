"""What several commands share: options, the configuration that they make, output folders, and printing records."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch

TIERS = ("cpu", "gpu")


OPTIONS = {"seq_len": "seq_lens", "method": "methods", "lr": "learning_rate"}


class UsageError(ValueError):
    """An option that does not fit; the message names the way out."""


def add_common(add, autocast: str, rounds: int, *also_rounds: str) -> None:
    """The options that every experiment has: `autocast` are its dtypes, `rounds` its default of timed rounds."""
    add("--device", help="cpu or cuda")
    add("--dtype", help=f"float32, or autocast to {autocast}")
    add("--seed", type=int)
    timed = "interleaved rounds for the times (0: none)"
    add("--timed-rounds", *also_rounds, type=int, default=rounds, metavar="N", help=timed)
    add("--predict", action="store_true", help="peaks from shapes alone; needs neither a GPU nor the memory")
    add("--json", action="store_true", help="print the records as JSON instead of the table")


def configuration(arguments):
    """The experiment's configuration: the tier's, with the options that were given put over it."""
    from ackpt.experiments import lm, offload, synthetic

    module = {"lm": lm, "synthetic": synthetic, "offload": offload}[arguments.command]
    tier = arguments.tier or ("gpu" if arguments.device == "cuda" else "cpu")
    base: Any = module.GPU if tier == "gpu" else module.CPU
    known = {field.name for field in dataclasses.fields(base)}
    changes = {}
    for name, value in vars(arguments).items():
        field = OPTIONS.get(name, name)
        if field in known and value is not None:
            changes[field] = tuple(value) if isinstance(value, list) else value
    if "vocab_size" in changes and "tokenizer_vocab" not in changes:
        changes["tokenizer_vocab"] = min(base.tokenizer_vocab, changes["vocab_size"])
    config = dataclasses.replace(base, **changes)
    check_device(config, arguments)
    return config


def check_device(config, arguments) -> None:
    from ackpt.workloads.step_request import DTYPES

    if config.dtype not in DTYPES:
        raise UsageError(f"unknown dtype {config.dtype!r}: choose from {', '.join(DTYPES)}")
    if config.device not in ("cpu", "cuda"):
        raise UsageError(f"unknown device {config.device!r}: choose cpu or cuda")
    if config.device == "cpu" and config.dtype == "float16":
        raise UsageError("float16 training needs a GPU: choose float32 or bfloat16 on the CPU")
    if config.device == "cuda" and not arguments.predict and not torch.cuda.is_available():
        what = "--tier gpu needs" if arguments.tier == "gpu" else "--device cuda needs"
        raise UsageError(
            f"{what} a CUDA GPU and torch sees none here: add --predict for the peaks from shapes alone, or use "
            "--tier cpu --device cpu"
        )


def prepared(arguments):
    """Configuration and output folder of an experiment, before any work."""
    config = configuration(arguments)
    folder = writable(arguments.out, "--out")
    if arguments.timed_rounds < 0:
        raise UsageError(f"--timed-rounds must be at least 0, got {arguments.timed_rounds}")
    return config, folder


def printed(records, report, arguments) -> int:
    if arguments.json:
        print(json.dumps([record.to_json() for record in records], indent=1, sort_keys=True))
    else:
        print(report.text_table(records))
    return 0


def writable(folder: str | None, option: str) -> Path | None:
    """The folder, made if need be; an error before the work starts if nothing can be written there."""
    if folder is None:
        return None
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / ".ackpt-write-test"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UsageError(f"{option}: cannot write to {folder} ({error.strerror}); name another folder") from error
    return path
