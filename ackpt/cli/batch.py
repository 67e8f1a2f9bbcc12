"""The commands ``ackpt batch-size`` and ``ackpt bert``: their options, and from them to the experiments."""

from __future__ import annotations

import argparse
from typing import Any

from .options import TIERS, UsageError, add_common, check_device, printed, writable


def add_batch_size(commands) -> None:
    """The subcommand and its options."""
    summary = "memory and latency against the batch size, and the largest batch within a limit"
    parser = commands.add_parser(
        "batch-size",
        help=summary,
        description=f"{summary}: measured where a batch fits the machine, else predicted, and the table says which.",
    )
    add = parser.add_argument
    add("--model", help="resnet18, resnet50, resnet152, transformer or bert-large")
    add("--batches", type=_numbers, metavar="N,N,...", help="batch sizes (default 4,8,16,32,64)")
    add(
        "--limit",
        help="memory of the whole peak, such as 6GiB, or auto (default): what the plain step takes at the middle batch",
    )
    add("--image-size", type=int, metavar="N", help="height and width of images")
    _add_options(
        add,
        "plain,per-block,auto@0.5,auto; auto without a budget keeps the limit",
        "width=32 for a resnet, dim=256 layers=2 for the others",
    )
    parser.set_defaults(run=run_batch_size_command)


def add_bert(commands) -> None:
    """The subcommand and its options."""
    summary = "BERT's masked-language-model step: checkpointed layers against plans of policy auto"
    parser = commands.add_parser(
        "bert",
        help=summary,
        description=f"{summary}: peak, breakdown, FLOPs and seconds. The cpu tier measures a small BERT and predicts "
        "BERT-large at batch 8 of 512 tokens on a GPU; the gpu tier measures that.",
    )
    add = parser.add_argument
    add("--batch-size", type=int, metavar="N", help="sequences of a batch")
    _add_options(add, "plain,per-block,auto@0.5 and other budgets", "dim=256 layers=2")
    parser.set_defaults(run=run_bert_command)


def _add_options(add, methods: str, fields: str) -> None:
    add("--tier", choices=TIERS, help="default sizes: cpu is small, gpu as published; as --device if left out")
    add("--methods", type=_names, metavar="M,M,...", help=f"{methods}; any policy of ackpt.plan, @ and a budget")
    add("--seq-len", type=int, metavar="N", help="tokens of a sequence")
    add(
        "--set",
        nargs="+",
        action="extend",
        default=[],
        metavar="FIELD=VALUE",
        help=f"fields of the model's configuration, values as in JSON: {fields}",
    )
    add("--lr", type=float, help="AdamW's learning rate")
    add("--out", metavar="FOLDER", help="write one JSON record per run")
    add_common(add, "bfloat16", 3)


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of whole numbers such as 4,8,16") from None


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def run_batch_size_command(arguments, command: str) -> int:
    from ackpt.experiments.batch_size import configuration, run_batch_size
    from ackpt.experiments.reports import batch_size as report

    if arguments.batches and min(arguments.batches) < 1:
        raise UsageError(f"--batches must be at least 1, got {min(arguments.batches)}")
    config = configuration(_tier(arguments), arguments.model, **_changes(arguments, "batches", "limit", "image_size"))
    folder = _checked(config, arguments)
    records = run_batch_size(config, command, arguments.timed_rounds, arguments.predict)
    return _saved(records, report, folder, arguments)


def run_bert_command(arguments, command: str) -> int:
    from ackpt.experiments.bert import configuration, run_bert
    from ackpt.experiments.reports import bert as report

    config = configuration(_tier(arguments), **_changes(arguments, "batch_size"))
    folder = _checked(config, arguments)
    records = run_bert(config, command, arguments.timed_rounds, arguments.predict)
    return _saved(records, report, folder, arguments)


def _tier(arguments) -> str:
    return arguments.tier or ("gpu" if arguments.device == "cuda" else "cpu")


def _changes(arguments, *names: str) -> dict[str, Any]:
    """The options that were given, by the names of the configuration."""
    from .plan import _field

    given = {name: getattr(arguments, name) for name in (*names, "methods", "seq_len", "device", "dtype", "seed")}
    given["learning_rate"] = arguments.lr
    given["fields"] = dict(map(_field, arguments.set)) or None
    return {name: value for name, value in given.items() if value is not None}


def _checked(config, arguments):
    """The folder for records; what cannot work is refused before any work."""
    check_device(config, arguments)
    if arguments.timed_rounds < 0:
        raise UsageError(f"--timed-rounds must be at least 0, got {arguments.timed_rounds}")
    return writable(arguments.out, "--out")


def _saved(groups, report, folder, arguments) -> int:
    """Write each record as soon as it is there, then print all."""
    records = []
    for group in groups:
        for record in group:
            records.append(record)
            if folder is not None:
                record.save(folder / report.file_name(record))
    return printed(records, report, arguments)
