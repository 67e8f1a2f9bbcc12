"""The command ``published``: published measurements on GPUs against predictions from shapes."""

from __future__ import annotations

import sys

from ackpt.core.errors import did_you_mean


def add_published(commands) -> None:
    """Add the command and its options."""
    summary = "memory that others measured on GPUs, predicted from shapes alone"
    parser = commands.add_parser(
        "published",
        help=summary,
        description=f"{summary}: every published figure with its prediction and error. Predictions are stored in "
        "results/predictions/published.json; those whose step or code changed are made again.",
    )
    add = parser.add_argument
    add("--all", action="store_true", help="make all predictions again (about 40 minutes)")
    add("--step", action="append", default=[], metavar="NAME", help="only figures of this training step; repeatable")
    parser.set_defaults(run=run_published_command)


def run_published_command(arguments, command: str) -> int:
    from experiments.published import STEPS, all_predicted
    from experiments.published.report import text_table

    for name in arguments.step:
        if name not in STEPS:
            raise ValueError(f"unknown step {name!r}{did_you_mean(name, STEPS)}: choose from {', '.join(STEPS)}")
    steps = arguments.step or list(STEPS)
    print(text_table(all_predicted(steps, arguments.all, report=lambda line: print(line, file=sys.stderr))))
    return 0
