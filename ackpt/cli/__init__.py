"""The command line: one module per command. `command_line` holds the table of commands and the exit statuses."""

from .command_line import main

__all__ = ["main"]
