"""The command ``ackpt selftest``: check the promises of the package on this machine, in at most two minutes.

A Transformer runs steps without checkpointing, in regions, in regions with offloaded inputs, and planned at half the
peak. Gradients must be bit-equal, peaks must match the predictions, and the plan must keep its budget. Times are
compared with the planner's.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import ackpt
from ackpt.checkpointing.wrapping import apply_activation_checkpointing, remove_activation_checkpointing
from ackpt.core.files import write_text_atomic
from ackpt.core.machine import machine
from ackpt.metering.meter import compare_seconds, measure, memory_format
from ackpt.planner.costs.devices import DEVICES, rates_of
from ackpt.planner.workloads.step_request import autocast

from .command_line import writable

BUDGET = 0.5
SIZES = {
    "cpu": {"batch_size": 2, "seq_len": 256, "layers": 4, "dim": 256, "heads": 4, "ff_dim": 1024, "vocab_size": 512},
    "cuda": {"batch_size": 4, "seq_len": 1024, "layers": 8, "dim": 512, "heads": 8, "ff_dim": 2048, "vocab_size": 4096},
}
# Some workspaces of a GPU's libraries are unknown; on a CPU, peaks are equal to the byte.
TOLERANCE = {"cpu": 0.0, "cuda": 0.02}
RESERVED, RESERVED_TOLERANCE = "reserved_peak_bytes", 0.1  # segments have 2 or 20 MiB


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


@dataclass(frozen=True)
class SelftestConfig:
    """`device` is ``"cpu"`` or ``"cuda"``; `rounds` of interleaved steps are timed."""

    device: str = "cpu"
    rounds: int = 5
    seed: int = 0

    def __post_init__(self):
        if self.device not in SIZES:
            raise ValueError(f"unknown device {self.device!r}: choose cpu or cuda")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("torch sees no CUDA GPU here: use --device cpu, or install a CUDA build of torch")
        if self.rounds < 1:
            raise ValueError(f"rounds must be at least 1, got {self.rounds}")


@dataclass(frozen=True)
class Method:
    """A way to run the step: `on` prepares the model and yields the call; `shapes_only`: it runs on fake tensors."""

    on: Callable[[Workload], Any]
    shapes_only: bool = True
    offload: Any = None


@dataclass(frozen=True)
class Report:
    """What was checked, what came out and where: plain data."""

    config: dict[str, Any]
    metrics: dict[str, Any]
    environment: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        return {"schema": "ackpt.selftest", "version": 1, **asdict(self)}


def run_selftest(config: SelftestConfig, command: str = "") -> Report:
    """Run all checks; the report has the ``methods`` and their ``checks``, each ``passed`` or not.

    Per method: ``predicted_peak_bytes`` and ``measured_peak_bytes`` (dynamic, on a GPU the allocator's),
    ``gradients_difference`` (0.0: bit-equal) and ``seconds_ratio`` to the model's own step; if it is known, also
    ``predicted_ratio``, and for offload ``seconds_hidden_share`` of the copies.
    """
    work = _workload(config, config.device)
    regions = ackpt.plan(ackpt.trace(work.model, *work.args), policy="full")
    step = ackpt.compile(work.model, *work.args, budget=BUDGET)
    methods = _methods(step)
    if config.device == "cuda":  # libraries allocate their workspaces at the first call, and never free them
        work.step(work.model, config.seed)
    measured: dict[str, dict[str, Any]] = {}
    wanted: list[torch.Tensor] = []  # the baseline's gradients, on the CPU: host memory counts in no peak
    for name, method in methods.items():
        with method.on(work) as call:
            measured[name] = _peaks(work, call, config.seed)
            gradients = [parameter.grad for parameter in work.model.parameters()]
            wanted = wanted or [gradient.cpu() for gradient in gradients if gradient is not None]
            measured[name]["gradients_difference"] = difference(gradients, wanted)
            if method.offload is not None:
                measured[name] |= _copies(method, partial(work.step, call, config.seed), config.device)
        if method.shapes_only:
            measured[name] |= _predicted(config, method)
        else:
            measured[name]["predicted_peak_bytes"] = step.plan.dynamic_peak_bytes
    for name, ratio in _times(work, methods, config).items():
        measured[name]["seconds_ratio"] = ratio
    measured["regions"]["predicted_ratio"] = 1 + regions.cost
    measured["plan"] |= {"predicted_ratio": 1 + step.plan.cost, "limit_bytes": step.plan.limit_bytes}
    checks = _checks(measured, TOLERANCE[config.device])
    where = {**machine(config.device), "command": command}
    settings = {**asdict(config), "sizes": SIZES[config.device], "budget": BUDGET, "threads": where["threads"]}
    return Report(settings, {"methods": measured, "checks": checks}, where)


def failed(record: Report) -> list[str]:
    """The checks that did not pass, each as one line."""
    return [f"{check['check']}: {check['found']}" for check in record.metrics["checks"] if not check["passed"]]


def text_table(record: Report) -> str:
    """The methods and the checks in lines for a terminal."""
    where = record.environment
    lines = [
        f"{where['device_name']}, torch {where['torch']}, {where['threads']} threads",
        "",
        f"{'method':<18} {'predicted peak':>15} {'measured peak':>15} {'time, expected':>15} {'measured':>9}",
    ]
    for name, row in record.metrics["methods"].items():
        expected = f"x {row['predicted_ratio']:.2f}" if "predicted_ratio" in row else ""
        peaks = [memory_format(row[key]) for key in ("predicted_peak_bytes", "measured_peak_bytes")]
        ratio = f"x {row['seconds_ratio']['median']:.2f}"
        lines.append(f"{name:<18} {peaks[0]:>15} {peaks[1]:>15} {expected:>15} {ratio:>9}")
    overlap = record.metrics["methods"]["regions, offload"]["seconds_hidden_share"]
    if overlap is not None and where["device"] == "cuda":  # on a CPU, nothing is copied over a link
        lines += ["", f"{100 * overlap:.0f} % of the time of copies to host memory and back overlaps with compute"]
    lines.append("")
    for check in record.metrics["checks"]:
        lines.append(f"{'passed' if check['passed'] else 'FAILED'}  {check['check']}: {check['found']}")
    return "\n".join(lines)


def _methods(step) -> dict[str, Method]:
    offload = ackpt.offload_saved_tensors("async", min_bytes=0)

    @contextlib.contextmanager
    def regions(work: Workload, **options) -> Iterator[Any]:
        apply_activation_checkpointing(work.model, check_fn=lambda module: module in work.blocks, **options)
        try:
            yield work.model
        finally:
            remove_activation_checkpointing(work.model)

    return {
        "baseline": Method(lambda work: contextlib.nullcontext(work.model)),
        "regions": Method(regions),
        "regions, offload": Method(partial(regions, offload=offload), offload=offload),
        "plan": Method(lambda work: contextlib.nullcontext(step), shapes_only=False),
    }


def _workload(config: SelftestConfig, device: str = "cpu") -> Workload:
    torch.manual_seed(config.seed)
    made = transformer(**SIZES[config.device])
    if device == "cpu":
        return made
    return replace(made, model=made.model.to(device), args=tuple(each.to(device) for each in made.args))


def _peaks(work: Workload, call: Any, seed: int) -> dict[str, Any]:
    """Peaks of one step; on a GPU also those of its allocator."""
    work.model.zero_grad(set_to_none=True)  # gradients of an earlier step are no part of this one
    resident = (work.model, *work.args)
    measurement = measure(partial(work.step, call, seed), work.device, resident=resident, warmup=0, repeats=0)
    return {"measured_peak_bytes": measurement.dynamic_peak_bytes, **measurement.allocator}


def _predicted(config: SelftestConfig, method: Method) -> dict[str, int]:
    """The dynamic peak of the step in bytes, and on a GPU the reserved bytes, from shapes alone."""
    with FakeTensorMode():
        work = _workload(config)
        with method.on(work) as call, _kernels(config.device):
            resident = (work.model, *work.args)
            step = partial(work.step, call, config.seed)
            prediction = ackpt.predict(step, resident=resident, device=_device_name(config.device), warmup=0)
    reserved = {f"predicted_{name}": prediction.allocator[name] for name in (RESERVED,) if name in prediction.allocator}
    return {"predicted_peak_bytes": prediction.dynamic_peak_bytes, **reserved}


def _device_name(device: str) -> str:
    """The name of this machine's GPU among those with known rates, if it has one."""
    rates = rates_of(torch.cuda.get_device_properties(0)) if device == "cuda" else None
    return rates.name if rates is not None and rates.name in DEVICES else device


def _kernels(device: str):
    from ackpt.planner.workloads.planned_shapes import kernels_of_a_gpu  # imports the planner

    return kernels_of_a_gpu() if device == "cuda" else contextlib.nullcontext()


def _copies(method: Method, step, device: str) -> dict[str, Any]:
    """The fraction of the copies' time that overlaps with compute, in one more step."""
    method.offload.engine.reset_stats()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
    stats = method.offload.engine.stats()
    copying, stalled = stats["seconds_copying"], stats["seconds_stalled"]
    return {"seconds_hidden_share": max(0.0, 1 - stalled / copying) if copying else None}


def _times(work: Workload, methods: dict[str, Method], config: SelftestConfig) -> dict[str, Any]:
    def run(method: Method) -> None:
        with method.on(work) as call:
            work.step(call, config.seed)

    steps = {name: partial(run, method) for name, method in methods.items()}
    return compare_seconds(steps, config.rounds, device=config.device).to_json()["seconds_ratio"]


def _checks(measured: dict[str, dict[str, Any]], tolerance: float) -> list[dict[str, Any]]:
    checks = []

    def check(title: str, passed: bool, result: str) -> None:
        checks.append({"check": title, "passed": passed, "found": result})

    for name, row in measured.items():
        if name != "baseline":
            worst = row["gradients_difference"]
            result = "bit-equal to the baseline's" if not worst else f"they differ by {worst:.2g} of the largest"
            check(f"gradients of {name}", worst == 0.0, result)
        predicted, real = row["predicted_peak_bytes"], row["measured_peak_bytes"]
        error = real / predicted - 1
        passed = abs(error) <= tolerance if tolerance else predicted == real
        check(f"peak of {name}", passed, f"{real:,} bytes measured, {predicted:,} predicted ({error:+.2%})")
        if RESERVED in row and f"predicted_{RESERVED}" in row:
            real, predicted = row[RESERVED], row[f"predicted_{RESERVED}"]
            passed = abs(real / predicted - 1) <= RESERVED_TOLERANCE
            result = f"{real:,} bytes measured, {predicted:,} predicted ({real / predicted - 1:+.2%})"
            check(f"reserved bytes of {name}", passed, result)
    plan = measured["plan"]
    within = plan["measured_peak_bytes"] <= plan["limit_bytes"]
    check("budget of plan", within, f"{plan['measured_peak_bytes']:,} of {plan['limit_bytes']:,} bytes")
    return checks


@dataclass(frozen=True)
class Workload:
    """A model, the tensors it is called with, and the blocks that a user would checkpoint one by one.

    ``dtype``: that of autocast around the forward; none with float32.
    """

    model: nn.Module
    args: tuple[Tensor, ...]
    blocks: tuple[nn.Module, ...]
    dtype: str = "float32"

    @property
    def device(self) -> str:
        return self.args[0].device.type

    def autocast(self):
        """The autocast context for the forward and for its capture."""
        return autocast(self.device, self.dtype)

    def step(self, call, seed: int) -> None:
        """Run one forward and backward through `call`, which takes the arguments and returns the loss."""
        self.model.zero_grad(set_to_none=True)
        torch.manual_seed(seed)
        with self.autocast():
            loss = call(*self.args)
        loss.backward()


def difference(mine, wanted) -> float:
    """The largest difference of two lists of tensors, relative to each tensor's largest element; 0.0: to the bit."""
    worst = 0.0
    for one, other in zip(mine, wanted, strict=True):
        other = other.to(one.device)
        if not torch.equal(one, other):
            one, other = one.double(), other.double()
            off = float((one - other).abs().max() / other.abs().max().clamp_min(1e-300))
            worst = max(worst, off if math.isfinite(off) else sys.float_info.max)
    return worst


class _Block(nn.Module):
    """One pre-norm layer of causal attention and MLP: [batch, tokens, dim] -> the same shape."""

    def __init__(self, dim: int, heads: int, ff_dim: int):
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.up, self.down = nn.Linear(dim, ff_dim), nn.Linear(ff_dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class _Transformer(nn.Module):
    """A Transformer of torch's own modules; its loss reads all logits at once."""

    def __init__(self, layers: int, dim: int, heads: int, ff_dim: int, vocab_size: int):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, dim)
        self.blocks = nn.ModuleList(_Block(dim, heads, ff_dim) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(dim), nn.Linear(dim, vocab_size, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def transformer(batch_size: int, seq_len: int, vocab_size: int, **sizes: int) -> Workload:
    """A language model and its batch; `sizes`: layers, dim, heads and ff_dim."""
    model = _Transformer(vocab_size=vocab_size, **sizes)
    tokens = torch.randint(vocab_size, (batch_size, seq_len))
    return Workload(model, (tokens, tokens.roll(-1, 1)), tuple(model.blocks))
