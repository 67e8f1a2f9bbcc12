"""The command line: ``ackpt synthetic | lm | ... | plan | published | gpu-suite | doctor``, also ``python -m ackpt``.

Invalid input ends in one line on standard error and exit status 2; a broken promise (losses or gradients that
differ, an offload that failed) in status 1.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from typing import Any

from ackpt.errors import did_you_mean

from .batch_size import add_batch_size
from .bert import add_bert
from .doctor import add_doctor
from .frontier import add_frontier
from .gpu_suite import add_gpu_suite
from .offload import add_offload
from .plan import add_plan
from .published import add_published
from .selftest import add_selftest
from .synthetic_lm import add_lm, add_synthetic

#: The table of commands, in the order of ``ackpt --help``: each adds its options and sets the function that runs it.
COMMANDS = (
    add_synthetic,
    add_lm,
    add_offload,
    add_frontier,
    add_batch_size,
    add_bert,
    add_plan,
    add_published,
    add_gpu_suite,
    add_selftest,
    add_doctor,
)


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    arguments = _parser().parse_args(argv)
    try:
        return arguments.run(arguments, "ackpt " + shlex.join(argv))
    except BrokenPipeError:
        return 1
    except KeyboardInterrupt:
        print("ackpt: interrupted", file=sys.stderr)
        return 130
    except _errors() as error:
        print(f"ackpt {arguments.command}: {' '.join(str(error).split())}", file=sys.stderr)
        return _status(error)


def _errors():
    from ackpt.data import DataError
    from ackpt.files import RecordError

    return (ValueError, OSError, DataError, RecordError, *_broken_promises())


def _broken_promises():
    from ackpt.errors import CheckpointError, OffloadError
    from ackpt.experiments.steps.gradients import GradientsDiffer
    from ackpt.experiments.steps.training import LossesDiffer

    return (LossesDiffer, GradientsDiffer, CheckpointError, OffloadError)


def _status(error) -> int:
    return 1 if isinstance(error, _broken_promises()) else 2


class _Parser(argparse.ArgumentParser):
    def parse_known_args(self, args=None, namespace=None):
        """Reports an unknown option as the command's own error, which points to the help of that command."""
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            known, option = self._option_string_actions, unknown[0].partition("=")[0]
            hint = did_you_mean(unknown[0], known)
            if "--sweep" in known and option.endswith(("lengths", "lens", "sizes")):
                hint = ": for several sizes write --sweep seq_len=512,1024 or --sweep batch_size=4,8"
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return parsed, unknown

    def _check_value(self, action, value):
        """Names the command of an option that is written as a command."""
        choices: Any = action.choices
        if isinstance(action, argparse._SubParsersAction) and value not in choices:
            owners = [name for name, each in choices.items() if f"--{value}" in each._option_string_actions]
            hint = f" (did you mean ackpt {owners[0]} --{value}?)" if owners else did_you_mean(value, choices)
            raise argparse.ArgumentError(action, f"unknown command {value!r}{hint}: choose from {', '.join(choices)}")
        super()._check_value(action, value)

    def error(self, message):
        """Exits with one line instead of the full usage."""
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def _parser() -> argparse.ArgumentParser:
    import ackpt

    parser = _Parser(prog="ackpt", description="Activation checkpointing in PyTorch: experiments and checks.")
    parser.add_argument("--version", action="version", version=f"ackpt {ackpt.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command", parser_class=_Parser)
    for add_command in COMMANDS:
        add_command(commands)
    return parser
