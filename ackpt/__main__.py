"""``python -m ackpt``."""

from ackpt.cli import main

raise SystemExit(main())
