"""Helpers of several commands: errors, options and output folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


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
    """The folder, created if need be; None stays None.

    Raises:
        UsageError: if nothing can be written there.
    """
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
