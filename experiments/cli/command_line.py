"""The command line of the study: ``python -m experiments synthetic | lm | ... | gpu-suite | plan``.

``plan`` is that of ``ackpt``, with the study's models as well. Exit statuses are those of ``ackpt``: 2 for invalid
input, 1 for losses or gradients that differ and for an offload that failed.
"""

from __future__ import annotations

import sys

from ackpt.cli.command_line import parser_of, run
from ackpt.cli.plan import add_plan

from .batch_size import add_batch_size
from .bert import add_bert
from .frontier import add_frontier
from .gpu_suite import add_gpu_suite
from .offload import add_offload
from .published import add_published
from .synthetic_lm import add_lm, add_synthetic

PROGRAM = "python -m experiments"
#: The table of commands, in the order of ``--help``: each adds its options and sets the function that runs it.
COMMANDS = (
    add_synthetic,
    add_lm,
    add_offload,
    add_frontier,
    add_batch_size,
    add_bert,
    add_published,
    add_gpu_suite,
    add_plan,
)


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    parser = parser_of(PROGRAM, "The experiments of the book.", COMMANDS)
    return run(parser, sys.argv[1:] if argv is None else argv, _errors)


def _errors() -> tuple[tuple, tuple]:
    from experiments.data import DataError
    from experiments.steps.gradients import GradientsDiffer
    from experiments.steps.training import LossesDiffer

    return (DataError,), (LossesDiffer, GradientsDiffer)
