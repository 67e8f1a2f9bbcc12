"""The command ``offload``: its options. The experiment has its table in `reports.offload`."""

from __future__ import annotations

import sys
from pathlib import Path

from .options import TIERS, add_common, checked_folder, configuration, save_and_print


def add_offload(commands) -> None:
    """Add the command and its options."""
    summary = "offload to host memory, compared with checkpointing alone and with other packages"
    parser = commands.add_parser(
        "offload",
        help=summary,
        description=f"{summary}: peak bytes, store, seconds per step and overlap of each method, in one process.",
    )
    add = parser.add_argument
    add(
        "--tier",
        choices=TIERS,
        help="default sizes: cpu runs in a minute, gpu is as published; without it, the tier of --device",
    )
    methods = "baseline ckpt_classic ckpt_sync_offload ckpt_async_offload offload_sync offload_async save_on_cpu"
    add("--method", nargs="+", metavar="METHOD", help=f"{methods} offload_wrapper trl transformers; default: all")
    add("--total-tokens", type=int, help="tokens per step, over all sequences")
    add("--batch-size", type=int, help="number of packed sequences that share the tokens")
    add("--num-layers", dest="layers", type=int, metavar="LAYERS", help="number of blocks")
    add("--hidden-dim", dest="dim", type=int, metavar="DIM", help="model width")
    add("--head-dim", type=int, help="width of an attention head; divides --hidden-dim")
    add("--ff-dim", type=int, help="width of the MLP")
    add("--steps", type=int, help="steps whose gradients are compared with the baseline's")
    add("--min-bytes", type=int, metavar="BYTES", help="storages smaller than this are not offloaded")
    add("--out", metavar="FOLDER", help="write one JSON record per method, and figures if matplotlib is installed")
    add_common(add, "bfloat16 or float16", 5, "--repeats")
    parser.set_defaults(run=run_offload_experiment)


def run_offload_experiment(arguments, command: str) -> int:
    from experiments.offload import predict_offload, run_offload
    from experiments.reports import offload as report

    config = configuration(arguments)
    folder = checked_folder(config, arguments)
    if arguments.predict:
        records = predict_offload(config, command)
    else:
        records = run_offload(config, command, arguments.timed_rounds)
    status = save_and_print([records], report, folder, arguments)
    if folder is not None:
        _save_figures(report, records, folder)
    return status


def _save_figures(report, records, folder: Path) -> None:
    """Write the figures that are the same in every run: all but that of the times."""
    try:
        from experiments.reports import plots
    except ImportError as error:
        print(f"no figures: {error}", file=sys.stderr)
        return
    for name, figure in report.figures(records).items():
        if name != "time":
            plots.save(figure, folder / f"{records[0].experiment}-T{records[0].config['total_tokens']}-{name}.png")
