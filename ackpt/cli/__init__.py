"""The command line: ``ackpt plan | selftest | doctor``, one module per command, named after it.

Read `command_line` first: it holds the table of commands and the exit statuses. `options` holds the options that
commands share. `plan_text` writes the output of ``ackpt plan``, and `plan_fsdp` that for a model sharded by FSDP2.
`selftest_checks` holds what ``ackpt selftest`` checks.
"""

from .command_line import main

__all__ = ["main"]
