"""The command ``ackpt plan``: its options, and the call of `ackpt.planner.workloads.planned_shapes`."""

import argparse
import functools
import importlib.util
import json
import re
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ackpt.core.budget import dynamic_limit, is_share, split_budget
from ackpt.core.errors import did_you_mean
from ackpt.core.files import RecordError, check_writable
from ackpt.core.progress import shown
from ackpt.planner.costs.devices import DEVICES, device
from ackpt.planner.workloads.step_request import (
    BUILT_IN,
    DTYPES,
    FROM_FILE,
    OPTIMIZERS,
    TRANSFORMERS,
    UNSHARDED,
    Lora,
    StepRequest,
    dtype_called,
    dtype_of_file,
    no_configuration,
    optimizer_kind,
    unknown_model,
)

from .command_line import UsageError, add_set, field

EXAMPLES = """examples:
  ackpt plan hf:BertConfig --batch-size 16 --seq-len 512 --autocast float16 --device-profile t4
  ackpt plan hf:GPT2Config --set n_layer=48 n_embd=1600 n_head=25 --seq-len 1024 --budget 24GiB
  ackpt plan hf:LlamaConfig --seq-len 2048 --dtype bfloat16 --lora r=16 targets=q_proj,v_proj --device-profile l4
  ackpt plan hf:LlamaConfig --dtype bfloat16 --device-profile h200 --sweep seq_len=256:2048 --budget "120GiB reserved"
  ackpt plan lm --seq-len 512 --explain --html explanation.html
  ackpt plan hf:GPT2Config --lengths lengths.txt --batch-size 16 --device-profile l4
  ackpt plan hf:path/to/config.json --batch-size 1 --seq-len 8192 --dtype bfloat16 --device-profile h200
  ackpt plan hf:path/to/config.json --seq-len 8192 --dtype bfloat16 --fsdp 16 64 --shard-dtype float32 --budget 80GiB
  ackpt plan --model model.py:make --batch-size 2 --seq-len 4096 --dtype bfloat16 --fsdp 2x8 --shard-dtype float32
"""


def add_plan(commands) -> None:
    """Add the command and its options."""
    summary = "peak and plan of a model's training step, from shapes alone: needs neither a GPU nor the memory"
    parser = commands.add_parser(
        "plan",
        help=summary,
        description=f"{summary}. Prints the peak by category, what the plan saves and recomputes, and the ten "
        "largest activations.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add, flag = parser.add_argument, functools.partial(parser.add_argument, action="store_true")
    add(
        "model",
        metavar="MODEL",
        nargs="?",
        help=f"{', '.join(BUILT_IN)}; or hf: and a configuration of transformers: the name of its class, such as "
        "hf:GPT2Config, or the path of a config.json",
    )
    add(
        "--model",
        dest="model_of_file",
        metavar="FILE.py:FUNCTION",
        help="your own model, in place of MODEL: the function is called with batch_size, seq_len (if given) and the "
        "fields of --set, and returns the model and a dict of the arguments of the call that returns its loss; it runs "
        "on the meta device, so nothing is filled",
    )
    add("--batch-size", type=int, metavar="N", help="sequences or images per batch (default 1)")
    add("--seq-len", type=int, metavar="N", help="tokens per sequence; required for models that read tokens")
    add("--image-size", type=int, metavar="N", help="height and width (default: the model's, or 224)")
    add(
        "--lengths",
        metavar="FILE",
        help="report on all batches of a data set: the number of tokens of each sequence, one number a line or a list "
        "as JSON; with --batch-size, --tokens-per-batch or --packed",
    )
    add(
        "--tokens-per-batch", type=int, metavar="N", help="with --lengths, the most tokens of a batch, padding included"
    )
    add("--packed", type=int, metavar="N", help="with --lengths, pack sequences to rows of N tokens, one row per batch")
    add_set(add, "n_layer=48 dropout=0.0")
    add(
        "--lora",
        nargs="+",
        metavar="FIELD=VALUE",
        help="train LoRA adapters of a frozen hf: model: fields of peft's LoraConfig, such as r=16 "
        "targets=q_proj,v_proj, or the path of an adapter_config.json",
    )
    add(
        "--dtype",
        help="dtype of parameters and images: float32, bfloat16 or float16 (default: config.json's, or float32)",
    )
    add("--quantize", help=argparse.SUPPRESS)  # is refused, and the error says what to do
    add("--autocast", metavar="DTYPE", help="run the forward under autocast to bfloat16 or float16")
    add(
        "--optimizer",
        default="adamw",
        help=f"the optimizer, whose state and step the peak includes: {', '.join(OPTIMIZERS)}, or a class as "
        "module:Class, such as torch.optim:NAdam; the default is adamw, adamw-8bit is that of bitsandbytes, and none "
        "plans forward and backward alone",
    )
    flag("--clip-gradients", help="torch.nn.utils.clip_grad_norm_ runs before the optimizer's step")
    flag("--grad-scaler", help="torch.amp.GradScaler scales the loss, as is usual with --autocast float16")
    flag("--accumulation", help="gradients of earlier batches exist, as after the first batch of an optimizer step")
    add(
        "--device-profile",
        metavar="DEVICE",
        help="plan the step for a GPU, and say whether it fits the GPU's memory; several GPUs, as in t4,l4, get one "
        f"line each. One of {', '.join(DEVICES)}",
    )
    add(
        "--allocator",
        metavar="SETTINGS",
        help="with --device-profile, settings as in PYTORCH_CUDA_ALLOC_CONF, such as expandable_segments:True "
        "(default: those in the environment)",
    )
    add(
        "--context-mib",
        type=int,
        metavar="N",
        help="size of the CUDA context in MiB, instead of the known size for the device; nvidia-smi shows it for a "
        "process that has only created a tensor",
    )
    add(
        "--budget",
        help="upper bound on the peak: bytes, resident memory included, such as 6GiB, or a fraction of the baseline's "
        "dynamic peak, such as 0.5; with --device-profile also what the allocator reserves, such as '15GiB reserved'",
    )
    add(
        "--slowdown",
        metavar="SHARE",
        help="the lowest peak whose modeled time is at most this share above the baseline's, such as 10%%; with "
        "--budget: keep the budget, and refuse a plan that adds more",
    )
    add(
        "--policy",
        help="one of ackpt.plan: none saves all that backward needs, full recomputes each block, auto recomputes as "
        "little as the budget allows, selective checkpoints what the next three options choose; default: none without "
        "a budget, auto with one",
    )
    add(
        "--every-n-layers",
        type=int,
        metavar="N",
        help="checkpoint every N-th repeated block (policy selective): as transformers the blocks 0, N, ...; with "
        "--fsdp as torchtitan, whose first one is N - 1",
    )
    add(
        "--save",
        metavar="RESULTS",
        help="what checkpointed blocks save besides their inputs (policy selective): inputs (nothing, the default), "
        "matmuls (results of matrix products, convolutions and attention) or every-second-matmul (torchtitan's choice)",
    )
    flag("--offload-blocks", help="offload inputs of checkpointed blocks (policy selective; needs --device-profile)")
    add(
        "--chunk-head",
        nargs="?",
        const=True,
        default=False,
        type=_chunk_head,
        metavar="auto",
        help="run the head of a language model, from its last matrix product to the loss, in chunks of tokens, in as "
        "many as the budget needs; auto: only if the budget needs it",
    )
    add(
        "--fsdp",
        nargs="+",
        metavar="N",
        help="plan one of N ranks over which FSDP2 shards parameters, gradients and the optimizer's state, with "
        "--batch-size per rank; RxN: R replicas of the shards (HSDP); with several, the output names the fewest ranks "
        "that fit",
    )
    add("--fsdp-version", metavar="TORCH", help="with --fsdp, the version of torch, from 2.4 on (default: 2.13)")
    flag("--keep-last-block", help="with --fsdp, the last block has reshard_after_forward=False, as in torchtitan")
    flag("--hold-outputs", help="with --fsdp, the loop refers to the outputs until the next forward has returned")
    add("--shard-dtype", metavar="DTYPE", help="with --fsdp, dtype of shards and optimizer state (default: --dtype)")
    add("--reduce-dtype", metavar="DTYPE", help="with --fsdp, dtype in which gradients are reduced (default: --dtype)")
    add(
        "--sweep",
        metavar="OPTION=VALUES",
        help="print one line for each batch_size, seq_len, image_size or device_profile, and the largest size that "
        "fits: seq_len=1024:16384 doubles from 1024 on, and then tries multiples of 1024; batch_size=4,8,12 tries "
        "these three sizes",
    )
    add(
        "--largest",
        metavar="OPTION",
        help="the largest batch_size, seq_len or image_size that fits the device, or the budget in bytes: an open "
        "sweep, which begins at 1, 128 or 32 and doubles while the step fits",
    )
    flag("--explain", help="show what saves activations and where, what is live at the peak, and what reduces it")
    add("--html", metavar="FILE", help="write that explanation as a web page, which needs no network")
    add("--memory-viz", metavar="FILE", help="write the step as a snapshot for pytorch.org/memory_viz (.pickle)")
    add(
        "--output",
        metavar="FILE",
        help="write the plan as JSON for ackpt.Plan.load; ackpt.compile(..., plan=) runs a plan made without "
        "--device-profile, for the same model and the printed inputs, each a tensor of its own",
    )
    flag("--json", help="print JSON")
    parser.set_defaults(run=run_plan_command)


def _chunk_head(value: str) -> str:
    """The value of ``--chunk-head``, which takes the next word if that is no option."""
    if value != "auto":
        raise argparse.ArgumentTypeError(
            f"{value!r} is not 'auto': write --chunk-head alone, or --chunk-head auto, after the model, as in ackpt "
            "plan hf:GPT2Config --chunk-head"
        )
    return value


def run_plan_command(arguments, command: str) -> int:
    if (arguments.model is None) == (arguments.model_of_file is None):
        raise UsageError("give MODEL, such as hf:GPT2Config, or --model FILE.py:FUNCTION, and not both")
    if arguments.quantize is not None:
        raise UsageError(
            f"--quantize {arguments.quantize}: ackpt plan makes no quantized weights. Return them from a function, "
            "--model FILE.py:FUNCTION, or load the model and call ackpt.apply_budget(model, batch, budget=...)"
        )
    arguments.model = arguments.model or arguments.model_of_file
    _check_names(arguments)
    with shown("importing the planner"):
        text = _answer(arguments)
    print(text)
    return 0


def _answer(arguments) -> str:
    """The text that the command prints."""
    from ackpt.planner.workloads.planned_shapes import run_plan

    from . import plan_text

    if arguments.lengths is not None or arguments.tokens_per_batch or arguments.packed:
        report = _lengths(arguments)
        return json.dumps({"model": arguments.model, **report.to_json()}, indent=1) if arguments.json else str(report)
    if arguments.largest is not None:
        arguments.sweep = _open_sweep(arguments, plan_text.SIZES)
    if arguments.sweep is None and "," in (arguments.device_profile or ""):
        arguments.sweep, arguments.device_profile = f"{plan_text.DEVICE}={arguments.device_profile}", None
    if arguments.sweep is not None:
        _require_alone("--sweep prints one line per plan", arguments, *_OF_ONE_PLAN, "fsdp")
        sweep = plan_text.Sweep.parsed(arguments.sweep)
        if getattr(arguments, sweep.option) is not None:
            option = f"--{sweep.option.replace('_', '-')} {getattr(arguments, sweep.option)}"
            raise UsageError(f"--sweep {arguments.sweep} gives the values of {option.split()[0]}: leave out {option}")
        rows = sweep.run(configuration(arguments, **{sweep.option: sweep.values[0]}))
        return json.dumps(sweep.to_json(rows), indent=1) if arguments.json else sweep.text(rows)
    config = configuration(arguments)
    html, snapshot = _writable_file(arguments.html, "--html"), _writable_file(arguments.memory_viz, "--memory-viz")
    if shardings := _shardings(arguments):
        model, plans = plan_text.run_sharded(config, shardings)
        if arguments.json:
            return json.dumps(plan_text.sharded_json(model, shardings, plans), indent=1)
        return plan_text.sharded_text(model, shardings, plans)
    output = _writable_file(arguments.output, "--output")
    planned = run_plan(config)
    if output is not None:
        planned.plan.save(output)
    explanation = plan_text.explanation(planned) if arguments.explain or html or snapshot else None
    written = []
    if explanation is not None:
        written += [explanation.to_html(html)] if html else []
        written += [explanation.to_memory_viz(snapshot)] if snapshot else []
    explained = explanation if arguments.explain else None
    if arguments.json:
        return json.dumps(plan_text.to_json(planned, explained), indent=1)
    parts = [plan_text.text(planned), *([] if explained is None else [str(explained)])]
    parts += [] if output is None else [plan_text.how_it_runs(planned, str(output))]
    return "\n\n".join([*parts, *(f"written to {path}" for path in written)])


def _open_sweep(arguments, first_sizes: dict[str, int]) -> str:
    """The sweep of ``--largest``."""
    if arguments.sweep is not None:
        raise UsageError("--largest is a sweep without an end: leave out --sweep")
    if arguments.device_profile is None and (arguments.budget is None or is_share(arguments.budget)):
        raise UsageError("--largest needs an amount of memory: give --device-profile, or --budget in bytes")
    name = arguments.largest.replace("-", "_")
    if name not in first_sizes:
        close = did_you_mean(name, first_sizes)
        raise UsageError(f"--largest {arguments.largest}: write {', '.join(first_sizes)}{close}")
    return f"{name}={first_sizes[name]}:"


def _check_names(arguments) -> None:
    """Refuse a wrong device, model or configuration before the imports that planning needs, which take seconds."""
    for name in filter(None, (arguments.device_profile or "").split(",")):
        device(name)
    dynamic_limit(split_budget(arguments.budget)[0], 0, 0)
    optimizer_kind(arguments.optimizer)
    for name in (arguments.dtype, arguments.autocast):
        dtype_called(name or "float32")
    name = arguments.model.removeprefix(TRANSFORMERS)
    if name == arguments.model:
        if arguments.model_of_file is not None and FROM_FILE not in name:
            raise UsageError(
                f"--model {name}: write a Python file and the name of a function in it, as in model.py:make"
            )
        if FROM_FILE not in name and name not in BUILT_IN:
            raise unknown_model(name, BUILT_IN)
        return
    dtype_of_file(arguments.model)  # raises for a file that is no configuration
    package = importlib.util.find_spec("transformers")
    if package is None or package.origin is None or name.endswith(".json") or Path(name).exists():
        return
    files = Path(package.origin).parent.glob("models/*/configuration_*.py")
    classes = {each for file in files for each in re.findall(r"^class (\w+)\(", file.read_text("utf-8"), re.MULTILINE)}
    if name not in classes:
        close = "".join(f" (did you mean {each!r}?)" for each in get_close_matches(name, classes, 1))
        raise no_configuration("transformers", name, close)


def configuration(arguments, **changes):
    """The configuration that the options ask for, with `changes` of options; ValueError for a wrong one."""
    from ackpt.planner.workloads.planned_shapes import PlanConfig

    arguments = argparse.Namespace(**{**vars(arguments), **changes})
    dtype = dtype_called(arguments.dtype or dtype_of_file(arguments.model) or "float32")
    options = _options_of_selective(arguments)
    return PlanConfig(
        step=StepRequest(
            model=arguments.model,
            batch_size=1 if arguments.batch_size is None else arguments.batch_size,
            seq_len=arguments.seq_len,
            image_size=arguments.image_size,
            fields=dict(map(field, arguments.set)),
            dtype=DTYPES[dtype],
            lora=Lora.parsed(arguments.lora) if arguments.lora else None,
        ),
        autocast=dtype_called(arguments.autocast or "float32"),
        optimizer=arguments.optimizer,
        device=arguments.device_profile,
        budget=arguments.budget,
        slowdown=arguments.slowdown,
        policy=arguments.policy or (SELECTIVE if options else None),
        context_mib=arguments.context_mib,
        accumulation=arguments.accumulation,
        clipping=arguments.clip_gradients,
        scaling=arguments.grad_scaler,
        options=options,
        chunk_head=arguments.chunk_head,
        allocator=arguments.allocator,
        hold_outputs=arguments.hold_outputs,
    )


SELECTIVE = "selective"


def _options_of_selective(arguments) -> dict[str, Any]:
    given = {
        "every_n_layers": arguments.every_n_layers,
        "save": arguments.save,
        "offload": arguments.offload_blocks or None,
    }
    options = {name: value for name, value in given.items() if value is not None}
    if options and arguments.policy not in (None, SELECTIVE):
        raise UsageError(
            f"--every-n-layers, --save and --offload-blocks are options of policy {SELECTIVE}: leave out --policy "
            f"{arguments.policy}"
        )
    return options


def _lengths(arguments):
    """The report of --lengths."""
    from ackpt.planner.workloads.lengths import batching, fits_of_plan

    if arguments.lengths is None:
        raise UsageError("--tokens-per-batch and --packed make batches of the sequences of --lengths: give a file")
    sizes = "seq_len", "image_size", "sweep", "largest"
    plans = "policy", "slowdown", "every_n_layers", "save", "offload_blocks", "fsdp"
    _require_alone("--lengths reports on all batches of a data set", arguments, *_OF_ONE_PLAN, *sizes, *plans)
    if "," in (arguments.device_profile or ""):
        raise UsageError(f"--lengths reports on one device: give one of --device-profile {arguments.device_profile}")
    lengths, name_of = lengths_in(Path(arguments.lengths))
    sizes = arguments.batch_size, arguments.tokens_per_batch, arguments.packed
    batches = batching(*sizes, said=lambda name: f"--{name.replace('_', '-')}")
    return fits_of_plan(configuration(arguments, batch_size=1, seq_len=1), lengths, batches, name_of)


def lengths_in(path: Path) -> tuple[list[int], Callable[[int], str]]:
    """The lengths in a file, one number a line or a list as JSON, and a function that names the place of each.

    Raises:
        ValueError: for a file that cannot be read, is empty, or has other content; names the line.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")  # editors may write a byte order mark
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--lengths {path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if text.lstrip()[:1] == "[":
        try:
            numbers = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"--lengths {path}, line {error.lineno}: this is not JSON: {error.msg}") from error
        return numbers, lambda at: f"entry {at + 1} of {path}"
    lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    numbers = []
    for number, line in lines:
        try:
            numbers.append(int(line))
        except ValueError:
            raise ValueError(f"--lengths {path}, line {number}: {line!r} is not a number of tokens") from None
    return numbers, lambda at: f"line {lines[at][0]} of {path}"


_OF_ONE_PLAN = "output", "explain", "html", "memory_viz"


def _require_alone(reason: str, arguments, *options: str) -> None:
    for option in options:
        if getattr(arguments, option):
            raise UsageError(f"{reason}: leave out --{option.replace('_', '-')}; --json prints all plans as data")


def _shardings(arguments) -> list:
    """One `Sharding` for each number of ranks in --fsdp; [] without it."""
    from ackpt.planner.sharding.sharding import Sharding

    names = {"--shard-dtype": arguments.shard_dtype, "--reduce-dtype": arguments.reduce_dtype}
    others = {"--fsdp-version": arguments.fsdp_version, "--keep-last-block": arguments.keep_last_block or None}
    for option, name in {**names, **others, "--hold-outputs": arguments.hold_outputs or None}.items():
        if name is not None and arguments.fsdp is None:
            raise UsageError(f"{option} says how --fsdp shards: give --fsdp as well")
    if arguments.fsdp is None:
        return []
    if arguments.optimizer in UNSHARDED:
        raise UsageError(
            f"--fsdp shards an optimizer's state like its parameters, which that of {arguments.optimizer} is not: use "
            "adamw"
        )
    _require_alone("--fsdp makes a plan for each block, not one of the whole step", arguments, *_OF_ONE_PLAN)
    if arguments.slowdown is not None:
        raise UsageError("--fsdp plans each block within a budget: leave out --slowdown")
    if arguments.accumulation or str(arguments.budget).endswith("reserved"):
        raise UsageError(
            "--fsdp plans allocated bytes of a step without earlier gradients: leave out --accumulation and 'reserved'"
        )
    if arguments.grad_scaler or arguments.offload_blocks:
        raise UsageError("--fsdp plans a step without scaling and offload: leave out --grad-scaler, --offload-blocks")
    if arguments.hold_outputs and arguments.chunk_head:
        raise UsageError("--chunk-head never has all logits, which --hold-outputs keeps: leave out one of them")
    parameters, reduction = (
        None if name is None else DTYPES[dtype_called(name, f"{option} ")] for option, name in names.items()
    )
    options = {"version": _version(arguments.fsdp_version or "2.13"), "keeps_last": arguments.keep_last_block}
    meshes = [_mesh(text) for text in arguments.fsdp]
    return [Sharding(ranks, parameters, reduction, replicas=replicas, **options) for replicas, ranks in meshes]


def _mesh(text: str) -> tuple[int, int]:
    """Replicas and ranks per replica."""
    if not (found := re.fullmatch(r"(?:(\d+)x)?(-?\d+)", text)):
        raise UsageError(f"--fsdp {text}: write the number of ranks, such as 8, or replicas x ranks, such as 4x8")
    replicas, ranks = int(found[1] or 1), int(found[2])
    if ranks < 2 or replicas < 1:
        raise UsageError(f"--fsdp {text}: shard over at least 2 ranks, or leave --fsdp out")
    return replicas, ranks


def _version(text: str) -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", text)
    if found is None or (version := (int(found[1]), int(found[2]))) < (2, 4):
        raise UsageError(f"--fsdp-version {text}: give a version of torch that has FSDP2, from 2.4 on, such as 2.13")
    return version


def _writable_file(name: str | None, option: str) -> Path | None:
    if name is None:
        return None
    try:
        return check_writable(name)
    except RecordError as error:
        raise UsageError(f"{option}: {error}") from error
