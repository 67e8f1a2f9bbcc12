"""The commands ``synthetic`` and ``lm``: their options, and the calls of the experiments."""

from __future__ import annotations

from typing import Any

from .options import TIERS, UsageError, add_common, checked_folder, configuration, save_and_print, writable


def add_synthetic(commands) -> None:
    """Add the command ``synthetic`` and its options."""
    _add_experiment(commands, "synthetic", "Transformer autoencoder on random sequences")


def add_lm(commands) -> None:
    """Add the command ``lm`` and its options."""
    add = _add_experiment(commands, "lm", "language model on real text").add_argument
    add("--vocab-size", type=int, help="the model's vocabulary")
    add("--tokenizer-vocab", type=int, help="the tokenizer's vocabulary, at most the model's")
    add("--loss-chunks", type=int, help="number of chunks of the chunked loss")
    add("--dataset", help="embedded (the names of Unicode's characters) or wikitext (wikitext-103-raw-v1)")
    add("--dataset-path", metavar="FOLDER", help="a local copy of wikitext (parquet or arrow)")


def _add_experiment(commands, name, summary):
    parser = commands.add_parser(
        name,
        help=summary,
        description=f"{summary}: peak bytes, seconds per step and losses of each method, in one process.",
    )
    add = parser.add_argument
    add("--tier", choices=TIERS, default="cpu", help="sizes: cpu (default) runs in minutes, gpu is as published")
    methods = (
        "baseline checkpoint chunked-loss checkpoint+chunked-loss checkpoint+offload auto (the peak of checkpoint)"
    )
    add("--method", nargs="+", metavar="METHOD", help=methods)
    add("--seq-len", nargs="+", type=int, metavar="TOKENS", help="tokens per sequence, one or several values")
    add("--batch-size", type=int, help="sequences per batch")
    add("--steps", type=int, help="training steps per method")
    add("--dim", type=int, help="model width")
    add("--ff-dim", type=int, help="width of the MLP")
    add("--layers", type=int, help="number of blocks")
    add("--head-dim", type=int, help="width of an attention head; divides --dim")
    add("--lr", type=float, help="AdamW's learning rate")
    add("--profile-dir", metavar="FOLDER", help="write a torch profiler trace and TensorBoard scalars")
    add("--out", metavar="FOLDER", help="write one JSON record per method and sequence length")
    add_common(add, "bfloat16 or float16", 5)
    parser.set_defaults(run=run_experiment)
    return parser


def run_experiment(arguments, command: str) -> int:
    from experiments.lm import run_lm
    from experiments.reports import training as report
    from experiments.steps.predicted import predict_experiment
    from experiments.steps.profiling import Profiles
    from experiments.synthetic import run_synthetic

    config = configuration(arguments)
    folder = checked_folder(config, arguments)
    if arguments.predict:
        if arguments.profile_dir:
            raise UsageError("--predict runs nothing that could be profiled: leave out --profile-dir")
        groups = predict_experiment(config, command)
    else:
        run: Any = run_lm if arguments.command == "lm" else run_synthetic
        traces = writable(arguments.profile_dir, "--profile-dir")
        groups = run(config, command, arguments.timed_rounds, None if traces is None else Profiles(traces))
    return save_and_print(groups, report, folder, arguments)
