"""The command line of the study: one module per command, named after it (``synthetic_lm`` has two that share options).

Read `command_line` first: it holds the table of commands. `options` holds the options that commands share.
"""
