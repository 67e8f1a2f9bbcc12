"""Helpers of several commands: options, their configuration, and printing records."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import torch

from ackpt.cli.command_line import UsageError, add_set, field, writable
from experiments.results import GPU_FOLDER, devices_in

TIERS = ("cpu", "gpu")
FIELDS = {"seq_len": "seq_lens", "method": "methods", "lr": "learning_rate"}  # of a configuration, by option


def numbers(text: str) -> tuple[int, ...]:
    """The value of an option such as ``4,8,16``."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of whole numbers: write them as in 4,8,16") from None


def names(text: str) -> tuple[str, ...]:
    """The value of an option such as ``lm,offload``."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def add_common(add, autocast: str, rounds: int, *also_rounds: str) -> None:
    """Add the options of every experiment: `autocast` are its dtypes, `rounds` its default of timed rounds."""
    add("--device", help="cpu or cuda")
    add("--dtype", help=f"float32, or autocast to {autocast}")
    add("--seed", type=int)
    timed = "interleaved rounds of timing (0: none)"
    add("--timed-rounds", *also_rounds, type=int, default=rounds, metavar="N", help=timed)
    add("--predict", action="store_true", help="predict peaks from shapes alone; needs neither a GPU nor the memory")
    add("--json", action="store_true", help="print the records as JSON instead of the table")


def add_named_step(add, methods: str, fields: str) -> None:
    """Add the options of ``batch-size`` and ``bert``, which run a step of a named model by named methods."""
    add("--tier", choices=TIERS, help="default sizes: cpu small, gpu as published; without it, the tier of --device")
    add("--methods", type=names, metavar="M,M,...", help=f"{methods}; any policy of ackpt.plan, with @ before a budget")
    add("--seq-len", type=int, metavar="N", help="tokens per sequence")
    add_set(add, fields)
    add("--lr", type=float, help="AdamW's learning rate")
    add("--out", metavar="FOLDER", help="write one JSON record per run")
    add_common(add, "bfloat16", 3)


def named_step_changes(arguments, *options: str) -> dict[str, Any]:
    """The fields that the options of `add_named_step`, and more `options`, change in a configuration."""
    fields = (*options, "methods", "seq_len", "device", "dtype", "seed")
    changes = {name: getattr(arguments, name) for name in fields}
    changes["learning_rate"] = arguments.lr
    changes["fields"] = dict(map(field, arguments.set)) or None
    return {name: value for name, value in changes.items() if value is not None}


def tier_of(arguments) -> str:
    """--tier, or by default the tier that runs on --device."""
    return arguments.tier or ("gpu" if arguments.device == "cuda" else "cpu")


def configuration(arguments):
    """The configuration of ``synthetic``, ``lm`` or ``offload``: the tier's, changed by the options that were given."""
    from experiments import lm, offload, synthetic
    from experiments.steps.settings import on_this_gpu

    module = {"lm": lm, "synthetic": synthetic, "offload": offload}[arguments.command]
    base: Any = module.GPU if tier_of(arguments) == "gpu" else module.CPU
    fields = {each.name for each in dataclasses.fields(base)}
    changes = {}
    for option, value in vars(arguments).items():
        name = FIELDS.get(option, option)
        if name in fields and value is not None:
            changes[name] = tuple(value) if isinstance(value, list) else value
    if "vocab_size" in changes and "tokenizer_vocab" not in changes:
        changes["tokenizer_vocab"] = min(base.tokenizer_vocab, changes["vocab_size"])
    config = dataclasses.replace(base, **changes)
    return config if "dtype" in changes else on_this_gpu(config)


def checked_folder(config, arguments) -> Path | None:
    """The folder for records, or None; an invalid device, dtype or number of rounds is refused before the work.

    Raises:
        UsageError: naming the option.
    """
    from ackpt.planner.workloads.step_request import DTYPES

    if config.dtype not in DTYPES:
        raise UsageError(f"unknown dtype {config.dtype!r}: choose from {', '.join(DTYPES)}")
    if config.device not in ("cpu", "cuda"):
        raise UsageError(f"unknown device {config.device!r}: choose cpu or cuda")
    if config.device == "cpu" and config.dtype == "float16":
        raise UsageError("float16 training needs a GPU: choose float32 or bfloat16 on the CPU")
    needing = "--tier gpu needs" if arguments.tier == "gpu" else "--device cuda needs"
    device = "cpu" if arguments.predict else config.device
    require_gpu(
        device,
        f"{needing} a CUDA GPU and torch sees none here: add --predict for the peaks from shapes alone, or use "
        "--tier cpu --device cpu",
    )
    if arguments.timed_rounds < 0:
        raise UsageError(f"--timed-rounds must be at least 0, got {arguments.timed_rounds}")
    return folder_for(arguments.out, device)


def require_gpu(device: str, message: str) -> None:
    """UsageError with the message if the device is a GPU and torch sees none."""
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError(message)


def folder_for(out: str | None, device: str) -> Path | None:
    """The folder for records made on `device`; UsageError if it has records of the other device, or is `GPU_FOLDER`."""
    if out is None:
        return None
    other = GPU_FOLDER.resolve() == Path(out).resolve() and device == "cpu"
    if other or devices_in(out) - {device}:
        raise UsageError(
            f"--out {out}: this run makes records of device {device}, and that folder is for the other device; name "
            "another folder, or give --device"
        )
    return writable(out, "--out")


def save_and_print(groups, report, folder: Path | None, arguments) -> int:
    """Write every record as soon as its group is complete, then print all records; returns the exit status."""
    records = []
    for group in groups:
        for record in group:
            records.append(record)
            if folder is not None:
                record.save(folder / report.file_name(record))
    if arguments.json:
        print(json.dumps([record.to_json() for record in records], indent=1, sort_keys=True))
    else:
        print(report.text_table(records))
    return 0
