"""Published ratios of times, such as checkpointed / baseline, and the ratios predicted from the rates in data sheets.

The rows are facts in ``results/reference/published-ratios.json``. A step is captured from shapes; the time of a method
is that of its schedule on the row's GPU, each operation at the roofline, and one pass of the optimizer over parameters,
gradients and state. All blocks of a model take the same time, so steps with two and with four blocks determine the
time for any number. Communication between GPUs and kernel launches count as zero.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

import ackpt
from ackpt.metering.gpus import gpu
from ackpt.planner.capture.joint_graph import JointGraph
from ackpt.planner.costs.devices import DEVICES, Device
from ackpt.planner.costs.profiles import Profile, fused
from ackpt.planner.schedule.simulator import simulate
from ackpt.planner.workloads.planned_shapes import CapturedCudaChoices, PlanConfig, captured
from ackpt.planner.workloads.step_request import StepRequest, autocast, training_step
from experiments.results import REFERENCES, RecordError, load_reference, markdown_table, write_text_atomic

from .predictions import digest, version_of
from .time_ratio_models import dense_net, megatron_layers, reference_model

REFERENCE = "published-ratios"
FILE = REFERENCES.parent / "predictions" / "time-ratios.json"
_CODE = (
    "ackpt/planner/costs",
    "ackpt/planner/schedule/simulator.py",
    "ackpt/planner/schedule/schedule.py",
    "ackpt/planner/policies/selective.py",
    "ackpt/planner/policies/manual.py",
)
_CODE += tuple(f"experiments/published/{name}.py" for name in ("time_ratios", "time_ratio_models", "reference"))
FEW, MORE = 2, 4  # blocks of the steps that are captured
ADAM_PASSES = 7  # reads parameters, gradients and two states; writes parameters and states
# ``_multi_tensor_adamw`` in torch/optim/adam.py: mul (2), lerp (3), mul (2), addcmul (3), sqrt (2), div (2), add (2),
# addcdiv (4)
FOREACH_ADAM_PASSES = 20
LARGE = 0.15  # an error that needs an explanation
_TITAN_X = Device("titan-x-pascal", 12 * 10**9, {"float32": 11e12}, 480e9, 16e9, "NVIDIA TITAN X (Pascal) product page")
_GPUS = {**DEVICES, _TITAN_X.name: _TITAN_X}


class Step(NamedTuple):
    """A captured step, its costs on a GPU, and the seconds that are the same for all methods."""

    graph: JointGraph
    profile: Profile
    rest: float


class Times:
    """Predicted times, kept in `file` under keys that depend on the step, the GPU, the method and the code.

    ``predicted``: the number of predictions made since the file was read.
    """

    def __init__(self, file: Path = FILE):
        self.file, self.predicted = file, 0
        self.stored: dict[str, float] = self._read() if file.is_file() else {}
        self.used: set[str] = set()
        self._code = version_of(_CODE)

    def _read(self) -> dict[str, float]:
        try:
            return json.loads(self.file.read_text(encoding="utf-8"))["seconds"]
        except (ValueError, KeyError, TypeError) as error:
            raise RecordError(f"{self.file} cannot be read: delete it and predict again") from error

    def of(self, row: dict[str, Any], is_second: bool = False, repeat: bool = False) -> float:
        """Seconds of the step of a row by its method; `is_second`: those in the denominator of its ratio."""
        sizes = {**row["sizes"], **row.get("sizes_against", {})} if is_second else row["sizes"]
        arguments = (row["step"], row["gpu"], row["against" if is_second else "method"], sizes)
        key = digest([*arguments, self._code])
        self.used.add(key)
        if repeat or key not in self.stored:
            self.stored[key] = float(f"{_seconds(*arguments):.9g}")
            self.predicted += 1
        return self.stored[key]

    def save(self) -> None:
        """Write the predictions that were used."""
        lines = ",\n".join(f'    "{key}": {self.stored[key]!r}' for key in sorted(self.used))
        write_text_atomic(self.file, f'{{\n  "seconds": {{\n{lines}\n  }}\n}}\n')


def ratios(times: Times | None = None, repeat: bool = False) -> list[dict[str, Any]]:
    """The published ratios with ``ratio``, ``predicted`` and relative ``error``, in the order of their file.

    Times that were not predicted before are stored. `repeat`: predict all of them, and store nothing.

    Example:
        >>> from experiments.published.time_ratios import ratios
        >>> max(ratios(), key=lambda row: row["ratio"])["method"]
        'checkpointing'
    """
    times = times or Times()
    found = [compared(row, times, repeat) for row in load_reference(REFERENCE)["rows"]]
    if times.predicted and not repeat:
        times.save()
    return found


def compared(row: dict[str, Any], times: Times, repeat: bool = False) -> dict[str, Any]:
    """A row with its ratio, the predicted one and the error."""
    first, second = row["figures"]
    ratio = second / first if row["unit"].endswith("/s") else first / second
    predicted = times.of(row, False, repeat) / times.of(row, True, repeat)
    return {**row, "ratio": ratio, "predicted": predicted, "error": predicted / ratio - 1}


def shares(row: dict[str, Any], times: Times | None = None) -> tuple[float, float]:
    """The predicted times of a row as fractions of the published ones; its unit must be a time."""
    times, unit = times or Times(), {"s": 1.0, "ms": 1e-3}[row["unit"]]
    first, second = (
        times.of(row, is_second) * row["batches"] / (unit * figure)
        for is_second, figure in zip((False, True), row["figures"])
    )
    return first, second


def table(found: list[dict[str, Any]], caption: str, name: str) -> str:
    """A table of rows as `ratios` gives them; an error of more than `LARGE` is in bold."""
    columns = {"source": "source", "what": "step", "gpu": "device", "compared": "times"}
    columns |= {"ratio": "published", "predicted": "predicted", "error": "error (%)"}
    lines = []
    for row in found:
        error = f"{100 * row['error']:+.1f}"
        text = f"**{error}**" if abs(row["error"]) > LARGE else error
        compared = f"{row['method']} / {row['against']}"
        line = {**row, "compared": compared, "ratio": f"{row['ratio']:.3f}", "predicted": f"{row['predicted']:.3f}"}
        lines.append({**line, "error": text})
    return markdown_table(lines, columns, caption, name)


def _seconds(step: str, where: str, method: str, sizes: dict[str, Any]) -> float:
    """The time of one batch: of ``repeats`` steps of the sizes."""
    sizes = dict(sizes)
    repeats, blocks = sizes.pop("repeats", 1), sizes.pop("blocks", None)
    key = tuple(sorted((name, _frozen(value)) for name, value in sizes.items()))
    if blocks is None:
        return _time(step, where, method, key, 0, repeats)
    few, more = (_time(step, where, method, key, count, repeats) for count in (FEW, MORE))
    return few + (more - few) * (blocks - FEW) / (MORE - FEW)


def _frozen(value):
    return tuple(sorted(value.items())) if isinstance(value, dict) else value


def _time(step: str, where: str, method: str, key: tuple, blocks: int, repeats: int) -> float:
    made = _STEPS[step](where, blocks, **dict(key))
    return repeats * METHODS[method](made) + made.rest


@cache
def _named(
    where: str, blocks: int, model, depth, batch, length, fields=(), compiled=False, ranks=1, **dtypes: str
) -> Step:
    """The step of a named model; ``depth``: the field of its configuration with the number of blocks."""
    dtype = getattr(torch, dtypes.get("dtype", "float32"))
    request = StepRequest(model, batch, length, None, {**dict(fields), depth: blocks}, dtype)
    config = PlanConfig(request, dtypes.get("autocast", "float32"), "none", where)
    graph = captured(training_step(request), config, _GPUS[where])
    return _costed(graph, _GPUS[where], compiled, ADAM_PASSES / ranks)


@cache
def _layers(where: str, blocks: int, **sizes) -> Step:
    """Layers of Megatron-LM, one rank of those that share each layer."""
    model, *inputs = megatron_layers(blocks, **sizes)
    with CapturedCudaChoices(gpu(where).capability):
        graph = ackpt.trace(model, *inputs, differentiate="all")
    return _costed(graph, _GPUS[where], False, 0)


@cache
def _images(where: str, blocks: int, **sizes) -> Step:
    model, *inputs = dense_net(**sizes)
    return _costed(ackpt.trace(model, *inputs), _GPUS[where], False, 0)


def _costed(graph: JointGraph, where: Device, compiled: bool, passes: float) -> Step:
    profile = ackpt.profile(graph, where)
    profile = fused(graph, profile, where) if compiled else profile
    return Step(graph, profile, passes * graph.bytes()["parameter"] / where.memory_bytes_per_second)


@cache
def _reference(where: str, blocks: int, experiment: str, tokens: int) -> Step:
    """The published model of a reference experiment, with the passes of torch's default AdamW."""
    model, inputs, dtype = reference_model(experiment, blocks, tokens)
    with autocast("cpu", dtype), CapturedCudaChoices(gpu(where).capability):
        graph = ackpt.trace(model, *inputs)
    return _costed(graph, _GPUS[where], False, FOREACH_ADAM_PASSES)


_STEPS: dict[str, Callable[..., Step]] = {
    "named": _named,
    "megatron-layer": _layers,
    "densenet": _images,
    "reference": _reference,
}


def _policy(policy: str, **options) -> Callable[[Step], float]:
    def time(step: Step) -> float:
        plan = ackpt.plan(step.graph, policy=policy, profile=step.profile, **options)
        return _simulated(step, plan)

    return time


def _simulated(step: Step, plan) -> float:
    found = simulate(step.graph, step.profile, plan.schedule).seconds
    assert found is not None
    return found


def _copied_at_once(step: Step) -> float:
    """Checkpointing, and copies that nothing overlaps with."""
    checkpointed = ackpt.plan(step.graph, policy="selective", profile=step.profile)
    moved = ackpt.plan(step.graph, policy="selective", profile=step.profile, offload=True)
    copies = step.profile.swap_seconds
    assert copies is not None
    return _simulated(step, checkpointed) + 2 * sum(copies[storage] for storage in moved.schedule.offloaded)


def _recomputing(chosen: Callable[[Any], bool], but_last_of: str = "") -> Callable[[Step], float]:
    """A step that recomputes the activations of the chosen nodes, except for the last one in each module so called."""

    def time(step: Step) -> float:
        nodes = [node for node in step.graph.nodes[: step.graph.boundary] if chosen(node)]
        last = {node.module: node.name for node in nodes if but_last_of and node.module.endswith(but_last_of)}
        savable = ackpt.plan(step.graph, policy="none", profile=step.profile).fates
        names = {node.name for node in nodes} & set(savable) - set(last.values())
        return _policy("manual", fates=dict.fromkeys(sorted(names), "recomputed"))(step)

    return time


#: What a published time was measured with -> the time of a step.
METHODS: dict[str, Callable[[Step], float]] = {
    "baseline": _policy("none"),
    "checkpointing": _policy("selective"),
    "every second layer": _policy("selective", every_n_layers=2),
    "every second matmul saved": _policy("selective", save="every-second-matmul"),
    "checkpointing, offload": _policy("selective", offload=True),
    "checkpointing, offload that waits": _copied_at_once,
    "attention core recomputed": _recomputing(lambda node: node.module.endswith(".core"), but_last_of=".core"),
    "concatenation and norm recomputed": _recomputing(
        lambda node: node.target == "aten.cat.default" or node.module.endswith((".norm1", ".relu1"))
    ),
}
