"""The command line: one module per command, named like it (``synthetic_lm``: two that share their options).

Read `command_line` first: it holds the table of commands and the exit statuses. `options` holds what commands share;
`plan_text` and `plan_fsdp` are what ``ackpt plan`` prints, the latter for a model sharded by FSDP2.
"""

from .command_line import main

__all__ = ["main"]
