"""The command ``frontier``: its options. The experiment has its table in `reports.frontier`."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

SIZES = (
    "batch_size",
    "seq_len",
    "image_size",
    "layers",
    "dim",
    "heads",
    "ff_dim",
    "width",
    "vocab_size",
    "num_classes",
)
LISTS = {"policy": "policies", "budget": "budgets", "peer": "peers", "setting": "settings", "costs": "costs"}


def add_frontier(commands) -> None:
    """Add the command and its options."""
    summary = "measured peak against recomputed FLOPs of one model, for all policies and torch's own tools"
    parser = commands.add_parser(
        "frontier",
        help=summary,
        description=f"{summary}. Exits with status 1 if the measured peak or FLOPs of a plan differ from the predicted "
        "ones, or if its gradients are not bit-equal. With --compiler inductor, these checks are skipped.",
    )
    add = parser.add_argument
    add(
        "--model",
        help="transformer (default; 6 layers, 2 x 512 tokens), bert (with dropout), resnet50 (8 images of 128 x 128) "
        "or unet (4 images of 64 x 64)",
    )
    for name in SIZES:
        add(f"--{name.replace('_', '-')}", type=int, metavar="N", help="changes this size of the model or batch")
    add("--policy", nargs="+", metavar="POLICY", help="auto full chen-sqrt chen-log revolve rotor min-cut ilp mu-two")
    add(
        "--budget",
        nargs="+",
        type=_share,
        metavar="SHARE",
        help="fractions of the baseline's dynamic peak (default 0.8 ... 0.1)",
    )
    add("--peer", nargs="*", metavar="PEER", help="torch's tools: checkpoint selective memory-budget; no name: none")
    add("--setting", nargs="+", type=float, metavar="F", help="values of activation_memory_budget (default 1 ... 0)")
    add(
        "--costs",
        nargs="+",
        metavar="COSTS",
        help="what the policies minimize: counted (FLOPs and traffic, the default), rates; "
        "with several, auto plans with each",
    )
    add("--device", help="cpu (default) or cuda")
    add("--dtype", help="float32 (default), or autocast to bfloat16 or float16")
    add("--compiler", metavar="NAME", help="eager (default), or inductor, which compiles every step")
    add("--seed", type=int)
    add("--times", type=int, default=0, metavar="ROUNDS", help="interleaved rounds of timing (default 0: none)")
    add("--clock", metavar="CLOCK", help="wall (default), or processor, which leaves out the time of other processes")
    add("--out", metavar="FOLDER", help="write the JSON record, and the figure if matplotlib is installed")
    add("--json", action="store_true", help="print the record as JSON instead of the table")
    parser.set_defaults(run=run_frontier_command)


def _share(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a fraction of the baseline's peak: write a number such as 0.5 (ackpt plan takes bytes)"
        ) from None


def configuration(arguments):
    """The configuration that the options ask for; ValueError for an invalid one."""
    from experiments.frontier import FrontierConfig

    given = {name: value for name, value in vars(arguments).items() if value is not None}
    changes: dict[str, Any] = {field: tuple(given[name]) for name, field in LISTS.items() if name in given}
    named = ("model", "device", "dtype", "compiler", "clock", "seed")
    changes |= {name: given[name] for name in named if name in given}
    return FrontierConfig(sizes={name: given[name] for name in SIZES if name in given}, **changes)


def run_frontier_command(arguments, command: str) -> int:
    from experiments.frontier import run_frontier
    from experiments.reports import frontier as report

    from .options import UsageError, folder_for, require_gpu

    config = configuration(arguments)
    if arguments.times < 0:
        raise UsageError(f"--times must be at least 0, got {arguments.times}")
    require_gpu(config.device, "--device cuda needs a CUDA GPU and torch sees none here: use --device cpu")
    folder = folder_for(arguments.out, config.device)
    record = run_frontier(config, command, arguments.times)
    if folder is not None:
        path = record.save(folder / report.file_name(record))
        _save_figure(report, record, path.with_suffix(".png"))
    print(json.dumps(record.to_json(), indent=1, sort_keys=True) if arguments.json else report.text_table(record))
    broken = report.broken_promises(record)
    for line in broken:
        print(f"python -m experiments frontier: {line}", file=sys.stderr)
    return 1 if broken else 0


def _save_figure(report, record, path) -> None:
    try:
        from experiments.reports import plots
        from experiments.reports.frontier_times import is_by_inductor, time_plot
    except ImportError as error:
        print(f"no figure: {error}", file=sys.stderr)
        return
    if not is_by_inductor(record):
        plots.save(report.frontier_plot(record), path)
    if "seconds_ratio" in record.metrics["eager"]:
        plots.save(time_plot(record), path.with_stem(f"{path.stem}-time"))
