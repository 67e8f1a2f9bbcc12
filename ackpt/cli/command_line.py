"""The parser of a command line, the exit statuses, and the options that several commands share.

Invalid input ends in one line on standard error and exit status 2; a broken promise (gradients that differ, an offload
that failed) in status 1.
"""

import argparse
import json
import re
import shlex
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ackpt.core import __version__
from ackpt.core.errors import CheckpointError, OffloadError, did_you_mean
from ackpt.core.files import check_folder


class UsageError(ValueError):
    """An option with an invalid value, or incompatible options; the message says what to type instead."""


def field(text: str) -> tuple[str, Any]:
    """Name and value of a ``FIELD=VALUE`` of --set; a value that is not JSON is a string."""
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise ValueError(f"--set {text}: write FIELD=VALUE, as in --set n_layer=48")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def add_set(add, example: str) -> None:
    """Add --set, whose values `field` reads; `example`: fields of the commands' models."""
    add(
        "--set",
        nargs="+",
        action="extend",
        default=[],
        metavar="FIELD=VALUE",
        help=f"fields of the model's configuration, with values as in JSON: {example}",
    )


def writable(folder: str | None, option: str) -> Path | None:
    """The folder, created if need be; None stays None; UsageError if nothing can be written there."""
    if folder is None:
        return None
    try:
        check_folder(folder)
    except OSError as error:
        raise UsageError(f"{option}: cannot write to {folder} ({error.strerror}); name another folder") from error
    return Path(folder)


def run(
    parser: argparse.ArgumentParser, argv: list[str], more_errors: Callable[[], tuple[tuple, tuple]] = lambda: ((), ())
) -> int:
    """Run a command; return its exit status, or that of its error, which `more_errors` may name."""
    arguments = parser.parse_args(argv)
    try:
        return arguments.run(arguments, f"{parser.prog} {shlex.join(argv)}")
    except BrokenPipeError:
        return 1
    except KeyboardInterrupt:
        print(f"{parser.prog}: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        invalid, broken = more_errors()
        is_broken = isinstance(error, (CheckpointError, OffloadError, *broken))
        if not is_broken and not isinstance(error, (ValueError, OSError, *invalid)):
            raise
        print(f"{parser.prog} {arguments.command}: {' '.join(str(error).split())}", file=sys.stderr)
        return 1 if is_broken else 2


def parser_of(program: str, description: str, commands: Iterable[Callable]) -> argparse.ArgumentParser:
    """The parser of a program with these commands, whose errors are one line each."""
    parser = _Parser(prog=program, description=description)
    parser.add_argument("--version", action="version", version=f"ackpt {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="command", parser_class=_Parser)
    for add_command in commands:
        add_command(subparsers)
    return parser


class _Parser(argparse.ArgumentParser):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._negative_number_matcher = re.compile(r"-[\d.]")  # -10% and -1GiB are values of options, which refuse them

    def parse_known_args(self, args=None, namespace=None):
        """Reports an unknown option as the command's own error, which points to the help of that command."""
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            options, option = self._option_string_actions, unknown[0].partition("=")[0]
            hint = did_you_mean(unknown[0], options)
            if "--sweep" in options and option.endswith(("lens", "sizes")):
                hint = ": for several sizes write --sweep seq_len=512,1024 or --sweep batch_size=4,8"
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return parsed, unknown

    def _check_value(self, action, value):
        """Names the command of an option that is written as a command."""
        choices: Any = action.choices
        if isinstance(action, argparse._SubParsersAction) and value not in choices:
            owners = [name for name, each in choices.items() if f"--{value}" in each._option_string_actions]
            hint = f" (did you mean {self.prog} {owners[0]} --{value}?)" if owners else did_you_mean(value, choices)
            raise argparse.ArgumentError(action, f"unknown command {value!r}{hint}: choose from {', '.join(choices)}")
        super()._check_value(action, value)

    def error(self, message):
        """Exits with one line instead of the full usage."""
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")
