"""The command ``bert``: its options. The experiment has its table in `reports.bert`."""

from __future__ import annotations

from .options import add_named_step, checked_folder, named_step_changes, save_and_print, tier_of


def add_bert(commands) -> None:
    """Add the command and its options."""
    summary = "BERT's masked-language-model step: per-block checkpointing against plans of policy auto"
    parser = commands.add_parser(
        "bert",
        help=summary,
        description=f"{summary}; prints peak, breakdown, FLOPs and seconds. The cpu tier measures a small BERT and "
        "predicts BERT-large with 8 sequences of 512 tokens on a GPU; the gpu tier measures BERT-large.",
    )
    add = parser.add_argument
    add("--batch-size", type=int, metavar="N", help="sequences per batch")
    add_named_step(add, "baseline,per-block,auto@0.5 and other budgets", "dim=256 layers=2")
    parser.set_defaults(run=run_bert_command)


def run_bert_command(arguments, command: str) -> int:
    from experiments.bert import configuration, run_bert
    from experiments.reports import bert as report

    config = configuration(tier_of(arguments), **named_step_changes(arguments, "batch_size"))
    folder = checked_folder(config, arguments)
    groups = run_bert(config, command, arguments.timed_rounds, arguments.predict)
    return save_and_print(groups, report, folder, arguments)
