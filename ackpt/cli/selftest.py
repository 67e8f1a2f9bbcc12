"""The commands ``ackpt doctor``, which describes this machine, and ``ackpt selftest``, which checks ackpt on it.

A Transformer runs the same step without checkpointing, in regions, in regions with offloaded inputs, and planned at
half the peak. Gradients must be bit-equal, peaks must match the predictions, and the plan must keep its budget. Only
torch's deterministic algorithms run. Gradients that still differ between two steps of the baseline are not compared.
"""

import contextlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import ackpt
from ackpt.core.files import write_text_atomic
from ackpt.core.machine import machine
from ackpt.core.progress import shown
from ackpt.planner.costs.devices import DEVICES, rates_of

from .command_line import writable

BASELINE, OFFLOAD, PLAN, BUDGET = "baseline", "regions, offload", "plan", 0.5
PASSED, WARNING, FAILED = "passed", "warning", "FAILED"
WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
# batch, tokens, layers, width, vocabulary
SIZES = {"cpu": (2, 256, 4, 256, 512), "cuda": (4, 1024, 8, 512, 4096)}
# A CPU's peaks are exact. Some workspaces of a GPU's libraries are unknown, so there a difference is a warning.
TOLERANCE = {"cpu": 0.0, "cuda": 0.02}


def add_selftest(commands) -> None:
    """Add the command and its options."""
    summary = "check gradients, peaks and a budget on this machine, GPU or CPU, in about a minute"
    parser = commands.add_parser("selftest", help=summary, description=f"{summary}. Exits with status 1 if one fails.")
    parser.add_argument("--device", choices=tuple(SIZES), help="default: the GPU if torch sees one")
    parser.add_argument("--out", metavar="FOLDER", help="write a JSON record with device, versions and date there")
    parser.add_argument("--json", action="store_true", help="print the record as JSON instead of lines")
    parser.set_defaults(run=run_selftest_command)


def run_selftest_command(arguments, command: str) -> int:
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    folder = writable(arguments.out, "--out")
    with shown("running the same step with each method"):
        record = run_selftest(device, command)
    text = json.dumps(record, indent=1, sort_keys=True)
    if folder is not None:
        write_text_atomic(folder / f"selftest-{device}.json", text + "\n")
    print(text if arguments.json else text_of(record))
    for line in failed(record):
        print(f"ackpt selftest: {line}", file=sys.stderr)
    return 1 if failed(record) else 0


def run_selftest(device: str = "cpu", command: str = "") -> dict[str, Any]:
    """Run all checks on ``"cpu"`` or ``"cuda"`` and return their record; the peaks of its ``methods`` are dynamic."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("torch sees no CUDA GPU here: use --device cpu, or install a CUDA build of torch")
    rows, gradients = {}, {}
    with deterministic():
        _measured(BASELINE, device)  # a GPU's libraries allocate workspaces at their first call, and never free them
        _, again = _measured(BASELINE, device)
        for method in (BASELINE, "regions", OFFLOAD, PLAN):
            rows[method], gradients[method] = _measured(method, device)
    metrics = {"methods": rows, "checks": checks(rows, gradients, again, TOLERANCE[device])}
    config = {"device": device, "sizes": [*SIZES[device]], "budget": BUDGET}
    where = {**machine(device), "command": command}
    return {"schema": "ackpt.selftest", "version": 2, "config": config, "metrics": metrics, "environment": where}


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Inside, torch runs deterministic algorithms only; cuBLAS reads its variable at its first call in a process."""
    was = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    with mock.patch.dict(os.environ, {WORKSPACE: os.environ.get(WORKSPACE, ":4096:8")}):
        torch.use_deterministic_algorithms(True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(was[0], warn_only=was[1])


class _Model(nn.Sequential):
    """A language model of torch's own blocks: tokens and targets -> the loss."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(super().forward(tokens).flatten(0, 1), targets.flatten())


def _step(method: str, device: str, sizes: tuple[int, ...]) -> tuple[list[Any], Callable[[], None], Any]:
    """A new model prepared for the method, with its batch; its step; its plan, if it has one."""
    batch_size, tokens, layers, width, vocabulary = sizes
    torch.manual_seed(0)
    with torch.device(device):
        encoder = nn.TransformerEncoderLayer
        blocks = [encoder(width, width // 64, 4 * width, batch_first=True, norm_first=True) for _ in range(layers)]
        model = _Model(nn.Embedding(vocabulary, width), *blocks, nn.Linear(width, vocabulary))
        batch = [torch.randint(vocabulary, (batch_size, tokens)) for _ in range(2)]
    for block in blocks:
        block.self_attn.dropout = 0.0  # with it, attention on a CPU saves all its scores
    plan = ackpt.apply_budget(model, batch, budget=BUDGET).plan if method == PLAN else None
    if method not in (BASELINE, PLAN):
        offload = ackpt.offload_saved_tensors("async", min_bytes=0) if method == OFFLOAD else None
        ackpt.apply_activation_checkpointing(model, check_fn=encoder, offload=offload)

    def step() -> None:
        torch.manual_seed(1)
        model(*batch).backward()

    return [model, *batch], step, plan


def _measured(method: str, device: str) -> tuple[dict[str, Any], list[Tensor]]:
    """The predicted and measured peaks of one step, and its gradients, on the CPU: host memory counts in no peak."""
    from ackpt.planner.workloads.planned_shapes import kernels_of_a_gpu  # imports the planner

    on_gpu = device == "cuda"
    resident, step, plan = _step(method, device, SIZES[device])
    measured = ackpt.measure(step, device, resident=resident, warmup=0, repeats=0)
    row = {"measured_peak_bytes": measured.dynamic_peak_bytes, **measured.allocator}
    gradients = [each.grad.cpu() for each in resident[0].parameters()]
    if plan is not None:
        return row | {"predicted_peak_bytes": plan.dynamic_peak_bytes, "limit_bytes": plan.limit_bytes}, gradients
    rates = rates_of(torch.cuda.get_device_properties(0)) if on_gpu else None
    name = rates.name if rates is not None and rates.name in DEVICES else device
    with FakeTensorMode(), kernels_of_a_gpu() if on_gpu else contextlib.nullcontext():
        resident, step, _ = _step(method, "cpu", SIZES[device])
        predicted = ackpt.predict(step, resident=resident, device=name, warmup=0)
    return row | {"predicted_peak_bytes": predicted.dynamic_peak_bytes}, gradients


def checks(rows: dict, gradients: dict, again: list[Tensor], tolerance: float) -> list[dict[str, str]]:
    """What was checked, with its result and what it found; `again`: gradients of a second step of the baseline."""
    made = []

    def check(title: str, off: float, passes: float, warns: float, found: str) -> None:
        result = PASSED if off <= passes else WARNING if off <= warns else FAILED
        made.append({"check": title, "result": result, "found": found})

    wanted, always = gradients[BASELINE], float("inf")
    equal = [index for index, one in enumerate(wanted) if torch.equal(one, again[index])]
    found = f"{(off := len(wanted) - len(equal))} of {len(wanted)} differ between two equal steps without ackpt"
    check("gradients of baseline, twice", off, 0, always, found)
    for name, row in rows.items():
        if name != BASELINE:
            off = sum(not torch.equal(gradients[name][index], wanted[index]) for index in equal)
            check(f"gradients of {name}", off, 0, 0, f"{off} of {len(equal)} differ from the baseline's")
        predicted, real = row["predicted_peak_bytes"], row["measured_peak_bytes"]
        found = f"{real:,} bytes measured, {predicted:,} predicted ({real / predicted - 1:+.2%})"
        check(f"peak of {name}", abs(real / predicted - 1), tolerance, always if tolerance else 0, found)
    real, limit = rows[PLAN]["measured_peak_bytes"], rows[PLAN]["limit_bytes"]
    check("budget of plan", real / limit - 1, 0, tolerance, f"{real:,} of {limit:,} bytes")
    return made


def failed(record: dict[str, Any]) -> list[str]:
    """The checks that failed, each as one line; warnings are not among them."""
    return [f"{each['check']}: {each['found']}" for each in record["metrics"]["checks"] if each["result"] == FAILED]


def text_of(record: dict[str, Any]) -> str:
    """The machine and the checks in lines for a terminal."""
    where = record["environment"]
    lines = [f"{each['result']}  {each['check']}: {each['found']}" for each in record["metrics"]["checks"]]
    return "\n".join([f"{where['device_name']}, torch {where['torch']}, {where['threads']} threads", *lines])


OPTIONAL = {  # by package: the extra that installs it, and what needs it
    "tokenizers": ("lm", "the language-model experiment"),
    "datasets": ("lm", "--dataset wikitext"),
    "tensorboard": ("profile", "--profile-dir"),
    "matplotlib": ("plots", "figures"),
    "seaborn": ("plots", "figures"),
    "scipy": ("plan", "the lower bound of a plan's cost"),
    "transformers": ("hf", "ackpt plan hf:..."),
}


def add_doctor(commands) -> None:
    """Add the command and its options."""
    summary = "what this machine can run, and how to install what is missing"
    parser = commands.add_parser("doctor", help=summary, description=f"{summary}.")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run_doctor)


def run_doctor(arguments, command: str) -> int:
    """Print facts about this machine: its first GPU or the CPU, versions, optional packages."""
    where = machine("cuda" if torch.cuda.is_available() else "cpu")
    packages = [
        {"name": name, "for": purpose, "installed": importlib.util.find_spec(name) is not None, "install": install}
        for name, (extra, purpose) in OPTIONAL.items()
        for install in [f'pip install "ackpt[{extra}]"']
    ]
    if arguments.json:
        print(json.dumps({**where, "packages": packages}, indent=1))
        return 0
    for name, value in where.items():
        print(f"{name:<12} {value}")
    if not torch.cuda.is_available():
        print("no CUDA GPU: ackpt plan gives peaks and plans for GPUs, from shapes")
    for each in packages:
        state = "ok" if each["installed"] else f"missing: {each['install']}"
        print(f"{each['name']:<12} {each['for']:<32} {state}")
    return 0
