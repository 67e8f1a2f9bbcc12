"""``python -m experiments``."""

from experiments.cli.command_line import main

raise SystemExit(main())
