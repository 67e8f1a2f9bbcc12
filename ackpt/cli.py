"""The command line: ``ackpt synthetic | lm | offload | ... | plan | gpu-suite | doctor``, also ``python -m ackpt``.

Bad input ends in one line on standard error and exit status 2; a broken promise (losses or gradients that differ,
an offload that failed) in status 1.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import torch

from ackpt.errors import did_you_mean

TIERS = ("cpu", "gpu")


class UsageError(ValueError):
    """An option that does not fit; the message names the way out."""


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    arguments = _parser().parse_args(argv)
    try:
        return arguments.run(arguments, "ackpt " + shlex.join(argv))
    except BrokenPipeError:
        return 1
    except KeyboardInterrupt:
        print("ackpt: interrupted", file=sys.stderr)
        return 130
    except _errors() as error:
        print(f"ackpt {arguments.command}: {' '.join(str(error).split())}", file=sys.stderr)
        return _status(error)


def _errors():
    from ackpt.data import DataError
    from ackpt.results import RecordError

    return (ValueError, OSError, DataError, RecordError, *_broken_promises())


def _broken_promises():
    from ackpt.errors import CheckpointError, OffloadError
    from ackpt.experiments.offload import GradientsDiffer
    from ackpt.experiments.training import LossesDiffer

    return (LossesDiffer, GradientsDiffer, CheckpointError, OffloadError)


def _status(error) -> int:
    return 1 if isinstance(error, _broken_promises()) else 2


class _Parser(argparse.ArgumentParser):
    def parse_known_args(self, args=None, namespace=None):
        """What a command does not know is said by the command, which has the help that lists what it knows."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            hint = did_you_mean(unknown[0], self._option_string_actions)
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return found, unknown

    def error(self, message):
        """One line instead of the whole usage."""
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def _parser() -> argparse.ArgumentParser:
    import ackpt
    from ackpt.cli_batch import add_batch_size, add_bert
    from ackpt.cli_frontier import add_frontier
    from ackpt.cli_plan import add_plan
    from ackpt.cli_suite import add_gpu_suite

    parser = _Parser(prog="ackpt", description="Activation checkpointing in PyTorch: experiments and checks.")
    parser.add_argument("--version", action="version", version=f"ackpt {ackpt.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command", parser_class=_Parser)
    _add_experiment(commands, "synthetic", "Transformer autoencoder on random sequences", run_experiment)
    lm = _add_experiment(commands, "lm", "language model on real text", run_experiment)
    lm.add_argument("--vocab-size", type=int, help="the model's vocabulary")
    lm.add_argument("--tokenizer-vocab", type=int, help="the tokenizer's vocabulary, at most the model's")
    lm.add_argument("--loss-chunks", type=int, help="chunks of the chunked loss head")
    lm.add_argument("--dataset", help="embedded (what every Python carries) or wikitext (wikitext-103-raw-v1)")
    lm.add_argument("--dataset-path", metavar="FOLDER", help="a local copy of wikitext (parquet or arrow)")
    _add_offload(commands)
    add_frontier(commands)
    add_batch_size(commands)
    add_bert(commands)
    add_plan(commands)
    add_gpu_suite(commands)
    doctor = commands.add_parser("doctor", help="what this machine can run, and what is missing")
    doctor.add_argument("--json", action="store_true", help="print JSON")
    doctor.set_defaults(run=run_doctor)
    return parser


def _add_experiment(commands, name, summary, run):
    parser = commands.add_parser(
        name,
        help=summary,
        description=f"{summary}: peak bytes, seconds per step and losses of each method, from one process.",
    )
    add = parser.add_argument
    add("--tier", choices=TIERS, default="cpu", help="default sizes: cpu runs in minutes, gpu is as published")
    methods = (
        "baseline checkpoint chunked-loss checkpoint+chunked-loss checkpoint+offload auto (the peak of checkpoint)"
    )
    add("--method", nargs="+", metavar="METHOD", help=methods)
    add("--seq-len", nargs="+", type=int, metavar="TOKENS", help="tokens per sequence, one or several")
    add("--batch-size", type=int, help="sequences per batch")
    add("--steps", type=int, help="training steps per method")
    add("--dim", type=int, help="model width")
    add("--ff-dim", type=int, help="width of the MLP")
    add("--layers", type=int, help="number of blocks")
    add("--head-dim", type=int, help="width of an attention head; divides --dim")
    add("--lr", type=float, help="AdamW's learning rate")
    add("--profile-dir", metavar="FOLDER", help="torch profiler trace and TensorBoard scalars")
    add("--out", metavar="FOLDER", help="write one JSON record per method and sequence length")
    add_common(add, "bfloat16 or float16", 5)
    parser.set_defaults(run=run)
    return parser


def _add_offload(commands):
    summary = "offload to host memory, against checkpointing alone and other packages"
    parser = commands.add_parser(
        "offload",
        help=summary,
        description=f"{summary}: peak bytes, store, seconds per step and hidden copies of each method, one process.",
    )
    add = parser.add_argument
    add(
        "--tier",
        choices=TIERS,
        help="default sizes: cpu runs in a minute, gpu is as published; as --device if left out",
    )
    methods = "baseline ckpt_classic ckpt_sync_offload ckpt_async_offload offload_sync offload_async save_on_cpu"
    add("--method", nargs="+", metavar="METHOD", help=f"{methods} offload_wrapper trl transformers; default: all")
    add("--total-tokens", type=int, help="tokens of a step, shared by all sequences")
    add("--batch-size", type=int, help="packed sequences that share the tokens")
    add("--num-layers", dest="layers", type=int, metavar="LAYERS", help="number of blocks")
    add("--hidden-dim", dest="dim", type=int, metavar="DIM", help="model width")
    add("--head-dim", type=int, help="width of an attention head; divides --hidden-dim")
    add("--ff-dim", type=int, help="width of the MLP")
    add("--steps", type=int, help="steps whose gradients are compared with the plain model's")
    add("--min-bytes", type=int, metavar="BYTES", help="smaller storages stay on the device")
    add("--out", metavar="FOLDER", help="write one JSON record per method, and figures if matplotlib is installed")
    add_common(add, "bfloat16 or float16", 5, "--repeats")
    parser.set_defaults(run=run_offload_experiment)


def add_common(add, autocast: str, rounds: int, *also_rounds: str) -> None:
    """The options that every experiment has: `autocast` are its dtypes, `rounds` its default of timed rounds."""
    add("--device", help="cpu or cuda")
    add("--dtype", help=f"float32, or autocast to {autocast}")
    add("--seed", type=int)
    timed = "interleaved rounds for the times (0: none)"
    add("--timed-rounds", *also_rounds, type=int, default=rounds, metavar="N", help=timed)
    add("--predict", action="store_true", help="peaks from shapes alone; needs neither a GPU nor the memory")
    add("--json", action="store_true", help="print the records as JSON instead of the table")


OPTIONS = {"seq_len": "seq_lens", "method": "methods", "lr": "learning_rate"}


def configuration(arguments):
    """The experiment's configuration: the tier's, with the options that were given put over it."""
    from ackpt.experiments import lm, offload, synthetic

    module = {"lm": lm, "synthetic": synthetic, "offload": offload}[arguments.command]
    tier = arguments.tier or ("gpu" if arguments.device == "cuda" else "cpu")
    base: Any = module.GPU if tier == "gpu" else module.CPU
    known = {field.name for field in dataclasses.fields(base)}
    changes = {}
    for name, value in vars(arguments).items():
        field = OPTIONS.get(name, name)
        if field in known and value is not None:
            changes[field] = tuple(value) if isinstance(value, list) else value
    if "vocab_size" in changes and "tokenizer_vocab" not in changes:
        changes["tokenizer_vocab"] = min(base.tokenizer_vocab, changes["vocab_size"])
    config = dataclasses.replace(base, **changes)
    _check_device(config, arguments)
    return config


def _check_device(config, arguments) -> None:
    from ackpt.experiments.methods import DTYPES

    if config.dtype not in DTYPES:
        raise UsageError(f"unknown dtype {config.dtype!r}: choose from {', '.join(DTYPES)}")
    if config.device not in ("cpu", "cuda"):
        raise UsageError(f"unknown device {config.device!r}: choose cpu or cuda")
    if config.device == "cpu" and config.dtype == "float16":
        raise UsageError("float16 training needs a GPU: choose float32 or bfloat16 on the CPU")
    if config.device == "cuda" and not arguments.predict and not torch.cuda.is_available():
        what = "--tier gpu needs" if arguments.tier == "gpu" else "--device cuda needs"
        raise UsageError(
            f"{what} a CUDA GPU and torch sees none here: add --predict for the peaks from shapes alone, or use "
            "--tier cpu --device cpu"
        )


def run_experiment(arguments, command: str) -> int:
    from ackpt.experiments import report
    from ackpt.experiments.lm import run_lm
    from ackpt.experiments.predicted import predict_experiment
    from ackpt.experiments.profiling import Profiles
    from ackpt.experiments.synthetic import run_synthetic

    config, folder = _prepared(arguments)
    if arguments.predict:
        if arguments.profile_dir:
            raise UsageError("--predict runs nothing that could be profiled: leave out --profile-dir")
        groups = predict_experiment(config, command)
    else:
        run: Any = run_lm if arguments.command == "lm" else run_synthetic
        traces = _writable(arguments.profile_dir, "--profile-dir")
        groups = run(config, command, arguments.timed_rounds, None if traces is None else Profiles(traces))
    records = []
    for group in groups:
        for record in group:
            records.append(record)
            if folder is not None:
                record.save(folder / report.file_name(record))
    return _printed(records, report, arguments)


def run_offload_experiment(arguments, command: str) -> int:
    from ackpt.experiments import offload_report as report
    from ackpt.experiments.offload import predict_offload, run_offload

    config, folder = _prepared(arguments)
    if arguments.predict:
        records = predict_offload(config, command)
    else:
        records = run_offload(config, command, arguments.timed_rounds)
    if folder is not None:
        for record in records:
            record.save(folder / report.file_name(record))
        _save_figures(report, records, folder)
    return _printed(records, report, arguments)


def _prepared(arguments):
    """Configuration and output folder of an experiment, before any work."""
    config = configuration(arguments)
    folder = _writable(arguments.out, "--out")
    if arguments.timed_rounds < 0:
        raise UsageError(f"--timed-rounds must be at least 0, got {arguments.timed_rounds}")
    return config, folder


def _printed(records, report, arguments) -> int:
    if arguments.json:
        print(json.dumps([record.to_json() for record in records], indent=1, sort_keys=True))
    else:
        print(report.text_table(records))
    return 0


def _save_figures(report, records, folder: Path) -> None:
    """What does not change from run to run; times stay out of files."""
    try:
        from ackpt import plots
    except ImportError as error:
        print(f"no figures: {error}", file=sys.stderr)
        return
    for name, figure in report.figures(records).items():
        if name != "time":
            plots.save(figure, folder / f"{records[0].experiment}-T{records[0].config['total_tokens']}-{name}.png")


def _writable(folder: str | None, option: str) -> Path | None:
    """The folder, made if need be; an error before the work starts if nothing can be written there."""
    if folder is None:
        return None
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / ".ackpt-write-test"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UsageError(f"{option}: cannot write to {folder} ({error.strerror}); name another folder") from error
    return path


def run_doctor(arguments, command: str) -> int:
    from ackpt.doctor import examine, text

    findings = examine()
    print(json.dumps(findings, indent=1) if arguments.json else text(findings))
    return 0
