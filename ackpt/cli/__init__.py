"""The command line of ``ackpt``, also ``python -m ackpt``: ``plan``, ``selftest``, ``doctor``.

Read `command_line` first: it holds the parser, the exit statuses and the options that commands share. `plan` has the
options of ``ackpt plan``, and `plan_text` its output.
"""

import sys

from .command_line import parser_of, run
from .plan import add_plan
from .selftest import add_doctor, add_selftest

__all__ = ["main"]

#: The table of commands, in the order of ``ackpt --help``: each adds its options and sets the function that runs it.
COMMANDS = (add_plan, add_selftest, add_doctor)
#: Commands of the study, which is in a checkout and not in the package.
MOVED = ("synthetic", "lm", "offload", "frontier", "batch-size", "bert", "published", "gpu-suite")


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] in MOVED:
        command = f"python -m experiments {argv[0]}"
        print(f"ackpt {argv[0]}: not in the package: run `{command}` in a clone of the repository", file=sys.stderr)
        return 2
    return run(parser_of("ackpt", "Activation checkpointing in PyTorch: plans and checks.", COMMANDS), argv)
