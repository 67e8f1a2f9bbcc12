"""The command line: one module per command, named after it (``synthetic_lm`` has two that share options).

Read `command_line` first: it holds the table of commands and the exit statuses. `options` holds the options that
commands share. `plan_text` writes the output of ``ackpt plan``, and `plan_fsdp` that for a model sharded by FSDP2.
"""

from .command_line import main

__all__ = ["main"]
