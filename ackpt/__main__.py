"""``python -m ackpt``."""

from ackpt.cli.command_line import main

raise SystemExit(main())
