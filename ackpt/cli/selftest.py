"""The command ``ackpt selftest``: check the package's promises on this machine."""

from __future__ import annotations

import json
import sys

import torch


def add_selftest(commands) -> None:
    """Add the command and its options."""
    summary = "check gradients, peaks and budgets on this machine, GPU or CPU, in at most two minutes"
    parser = commands.add_parser(
        "selftest",
        help=summary,
        description=f"{summary}. Prints a table, and exits with status 1 if a check fails. --out also writes a JSON "
        "record with device, versions and date.",
    )
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), help="default: the GPU if torch sees one")
    add("--rounds", type=int, default=5, metavar="N", help="interleaved rounds of timing (default 5)")
    add("--out", metavar="FOLDER", help="write the record into this folder")
    add("--json", action="store_true", help="print the record as JSON instead of the table")
    parser.set_defaults(run=run_selftest_command)


def run_selftest_command(arguments, command: str) -> int:
    from ackpt.core.files import write_text_atomic

    from .options import writable
    from .selftest_checks import SelftestConfig, failed, run_selftest, text_table

    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    config = SelftestConfig(device, arguments.rounds)
    folder = writable(arguments.out, "--out")
    record = run_selftest(config, command)
    text = json.dumps(record.to_json(), indent=1, sort_keys=True)
    if folder is not None:
        write_text_atomic(folder / f"selftest-{device}.json", text + "\n")
    print(text if arguments.json else text_table(record))
    broken = failed(record)
    for line in broken:
        print(f"ackpt selftest: {line}", file=sys.stderr)
    return 1 if broken else 0
