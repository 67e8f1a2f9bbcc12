"""What all packages use: errors, budgets, progress, files that are written in one step, the description of the machine.

Read `errors` first.
"""

__version__ = "0.1.0"
