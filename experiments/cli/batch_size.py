"""The command ``batch-size``: its options. The experiment has its table in `reports.batch_size`."""

from __future__ import annotations

from .options import UsageError, add_named_step, checked_folder, named_step_changes, numbers, save_and_print, tier_of


def add_batch_size(commands) -> None:
    """Add the command and its options."""
    summary = "memory and latency against batch size, and the largest batch within a memory limit"
    parser = commands.add_parser(
        "batch-size",
        help=summary,
        description=f"{summary}. Batches that fit the machine are measured, others predicted; the table says which.",
    )
    add = parser.add_argument
    add("--model", help="resnet18, resnet50, resnet152, transformer or bert-large")
    add("--batches", type=numbers, metavar="N,N,...", help="batch sizes (default 4,8,16,32,64)")
    add(
        "--limit",
        help="largest peak allowed, such as 6GiB, or auto (default): the baseline's peak at the middle batch size",
    )
    add("--image-size", type=int, metavar="N", help="height and width of images")
    add_named_step(
        add,
        "baseline,per-block,auto@0.5,auto; auto without a budget uses the limit",
        "width=32 for a resnet, dim=256 layers=2 for the others",
    )
    parser.set_defaults(run=run_batch_size_command)


def run_batch_size_command(arguments, command: str) -> int:
    from experiments.batch_size import configuration, run_batch_size
    from experiments.reports import batch_size as report

    if arguments.batches and min(arguments.batches) < 1:
        raise UsageError(f"--batches must be at least 1, got {min(arguments.batches)}")
    changes = named_step_changes(arguments, "batches", "limit", "image_size")
    config = configuration(tier_of(arguments), arguments.model, **changes)
    folder = checked_folder(config, arguments)
    groups = run_batch_size(config, command, arguments.timed_rounds, arguments.predict)
    return save_and_print(groups, report, folder, arguments)
