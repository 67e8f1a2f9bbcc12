"""One training step of a named model, by any method: the plain model, checkpointed blocks, a plan within a budget.

A step is forward, backward and AdamW; gradients do not exist before it. It is either run, on tensors with data, or
predicted from shapes: `RunStep` and `predicted`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import ackpt
from ackpt.errors import BudgetError
from ackpt.graph.devices import device as device_rates
from ackpt.graph.optimizer import optimizer_bytes
from ackpt.meter import measure
from ackpt.models import BertForMaskedLM
from ackpt.policies import POLICIES
from ackpt.predict import predict
from ackpt.wrap import apply_activation_checkpointing, remove_activation_checkpointing

from .methods import autocast
from .offload import TOLERANCE, GradientsDiffer
from .plan import NEEDS_FATES, PlanConfig, captured
from .plan_models import BUILT_IN, StepRequest, training_step
from .settings import record_metrics
from .training import adamw

PLAIN, PER_BLOCK = "plain", "per-block"
UNBOUNDED = ("none", "full")  # policies that need no budget
AS_ON = "h200"  # the GPU whose choice of kernels a prediction for CUDA follows
MASKED_SHARE = 0.15  # of BERT's tokens, Devlin et al. 2018
IGNORED = -100
ROOM_SHARE = 0.8  # of free memory that a run may take; the rest is for what allocators add


@dataclass(frozen=True)
class Setting:
    """Which step: a model by name, fields of its configuration, sizes of a batch, where and in which precision."""

    model: str
    batch_size: int
    seq_len: int | None = None
    image_size: int | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    device: str = "cpu"
    dtype: str = "float32"
    learning_rate: float = 1e-4
    seed: int = 0

    def __post_init__(self):
        if self.model not in BUILT_IN:
            raise ValueError(f"unknown model {self.model!r}: choose from {', '.join(BUILT_IN)}")
        if self.dtype not in ("float32", "bfloat16"):
            raise ValueError(f"dtype {self.dtype!r} is not supported here: choose float32, or autocast to bfloat16")
        self.request()

    def request(self) -> StepRequest:
        return StepRequest(self.model, self.batch_size, self.seq_len, self.image_size, dict(self.fields))


@dataclass(frozen=True)
class Method:
    """How a step runs: `policy` None is eager, else a plan within `budget`, as `ackpt.plan` takes them."""

    name: str
    policy: str | None = None
    budget: float | int | str | None = None


def method(name: str, limit_bytes: int | None = None) -> Method:
    """``plain``, ``per-block``, or a policy of `ackpt.plan`, with ``@`` and a budget: ``auto@0.5``, ``auto@6GiB``.

    A policy that needs a budget and has none gets `limit_bytes`, that of the whole peak.

    Raises:
        ValueError: for what is none of these.
    """
    from ackpt.graph.budget import dynamic_limit

    if name in (PLAIN, PER_BLOCK):
        return Method(name)
    policy, at, text = name.partition("@")
    known = [policy for policy in POLICIES if policy != NEEDS_FATES]
    if policy not in known:
        raise ValueError(
            f"unknown method {name!r}: choose {PLAIN}, {PER_BLOCK} or a policy with its budget, such as auto@0.5; the "
            f"policies are {', '.join(known)}"
        )
    if not at:
        return Method(name, policy, None if policy in UNBOUNDED else limit_bytes)
    try:
        budget: float | str = float(text)
    except ValueError:
        budget = text
    dynamic_limit(budget, 0, 0)
    return Method(name, policy, budget)


def needs_limit(name: str) -> bool:
    """Whether the method is a policy without the budget that it needs."""
    return name not in (PLAIN, PER_BLOCK, *UNBOUNDED) and "@" not in name


class NotRun(ValueError):
    """A method that cannot run at this size; the message is the reason."""


class RunStep:
    """A model on its device with a batch. `step(method)` runs one step; methods take turns on the same weights."""

    def __init__(self, setting: Setting):
        self.setting = setting
        torch.manual_seed(setting.seed)
        made = training_step(setting.request(), setting.device)
        self.model = made.model.train()
        self.inputs = with_data(made.model, made.inputs, setting.seed)
        self.optimizer = adamw(self.model, setting.learning_rate)
        self.planned: dict[Method, Any] = {}

    @property
    def resident(self) -> tuple:
        return (self.model, self.optimizer, *_tensors(self.inputs))

    def prepare(self, method: Method):
        """Plan the method's step; raises NotRun if its budget cannot be kept."""
        remove_activation_checkpointing(self.model)
        if method.policy is None or method in self.planned:
            return
        options = {"budget": method.budget, "policy": method.policy, "optimizer": self.optimizer}
        try:
            with autocast(self.setting.device, self.setting.dtype):
                self.planned[method] = ackpt.compile(self.model, **options, **self.inputs)
        except BudgetError as error:
            raise NotRun(str(error)) from error

    def step(self, method: Method, train: bool = True):
        """One step; without `train` the gradients stay and the optimizer does nothing."""
        switch(self.model, method)
        _one_step(self.planned.get(method, self.model), self.inputs, self.setting, self.optimizer if train else None)

    def measure(self, method: Method) -> dict:
        """Bytes and FLOPs of a step as they stand in a record."""
        measured = measure(partial(self.step, method), self.setting.device, resident=self.resident, warmup=1, repeats=0)
        return record_metrics(measured)

    def gradients(self, method: Method) -> dict[str, torch.Tensor]:
        """Of one step from the present weights, every method with the same random numbers; copies on the CPU."""
        torch.manual_seed(self.setting.seed)
        self.step(method, train=False)
        found = {name: p.grad.cpu().clone() for name, p in self.model.named_parameters() if p.grad is not None}
        self.model.zero_grad(set_to_none=True)
        return found


def switch(model, method: Method) -> None:
    """Checkpoint the repeated blocks of the model, or none of them, as the method says."""
    if method.name == PER_BLOCK:
        apply_activation_checkpointing(model)
    else:
        remove_activation_checkpointing(model)


def _one_step(model, inputs, setting: Setting, optimizer) -> None:
    where = next(iter(_tensors(inputs))).device.type  # fake tensors of a GPU's step lie on the CPU
    with autocast(where, setting.dtype):
        loss = model(**inputs)
    loss.backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def with_data(model, inputs: dict, seed: int) -> dict:
    """The inputs filled: normal images, uniform tokens and classes; BERT's labels ask for `MASKED_SHARE` of them."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, value in inputs.items():
        if not isinstance(value, torch.Tensor):
            found[name] = value
            continue
        if name == "cu_seqlens":
            data = torch.arange(value.numel(), dtype=value.dtype) * inputs["max_seqlen"]
        elif value.is_floating_point():
            data = torch.randn(value.shape, generator=generator, dtype=value.dtype)
        else:
            classes = getattr(model.config, "num_classes", None) or model.config.vocab_size
            data = torch.randint(classes, value.shape, generator=generator)
            if name == "labels" and isinstance(model, BertForMaskedLM):
                kept = torch.rand(value.shape, generator=generator) < MASKED_SHARE
                kept.view(-1)[0] = True
                data = torch.where(kept, data, IGNORED)
        found[name] = data.to(value.device)
    return found


def _tensors(inputs: dict) -> tuple:
    return tuple(value for value in inputs.values() if isinstance(value, torch.Tensor))


def require_equal(name: str, found: dict, wanted: dict, exact: bool) -> float:
    """The largest difference of a gradient, relative to its parameter's largest; 0.0 where all bits are equal.

    Raises:
        GradientsDiffer: if it is more than nothing (`exact`) or than `TOLERANCE`, or a gradient is missing.
    """
    if found.keys() != wanted.keys():
        raise GradientsDiffer(f"{name}: not the same parameters have gradients as in the plain model")
    worst = 0.0
    for parameter, mine in found.items():
        other = wanted[parameter]
        if torch.equal(mine, other):
            continue
        difference = float((mine - other).abs().max() / other.abs().max().clamp_min(torch.finfo(other.dtype).tiny))
        if exact or not difference <= TOLERANCE:
            how = "must be equal to the last bit" if exact else f"may differ by {TOLERANCE:g}"
            raise GradientsDiffer(
                f"{name}: the gradient of {parameter} differs from the plain model's by {difference:.3g} of its "
                f"largest entry; it {how}"
            )
        worst = max(worst, difference)
    return worst


class Shapes:
    """The same step on tensors without data: predictions for any size, on the CPU or as on a GPU."""

    def __init__(self, setting: Setting):
        self.setting = setting
        self._found: tuple | None = None

    def predicted(self, method: Method) -> dict:
        """Bytes and FLOPs of a step as they stand in a record; raises NotRun if the budget cannot be kept."""
        return self._eager(method) if method.policy is None else self._planned(method)

    def _eager(self, method: Method) -> dict:
        with FakeTensorMode():
            made = training_step(self.setting.request(), "cpu")
        switch(made.model, method)
        optimizer = adamw(made.model, self.setting.learning_rate)
        step = partial(_one_step, made.model, made.inputs, self.setting, optimizer)
        resident = (made.model, optimizer, *_tensors(made.inputs))
        return record_metrics(predict(step, resident=resident, device=self.setting.device))

    def _planned(self, method: Method) -> dict:
        graph, profile = self._graph()
        try:
            plan = ackpt.plan(graph, method.budget, method.policy or "auto", profile=profile)
        except BudgetError as error:
            raise NotRun(str(error)) from error
        sizes = graph.bytes()
        resident = {"parameters": "parameter", "buffers": "buffer", "inputs": "input"}
        categories = {name: sizes[kind] for name, kind in resident.items()}
        return {
            "peak_bytes": plan.peak_bytes,
            "resident_bytes": plan.resident_bytes,
            "dynamic_peak_bytes": plan.dynamic_peak_bytes,
            "categories": {
                **categories,
                "optimizer": graph.optimizer_bytes,
                **plan.timeline.at(plan.timeline.peak_index),
            },
            "flops": plan.flops,
            "cost": plan.cost,
        }

    def _graph(self):
        """Captured once, for all policies."""
        if self._found is None:
            cuda = self.setting.device == "cuda"
            where = device_rates(AS_ON) if cuda else None
            with FakeTensorMode():
                made = training_step(self.setting.request(), "cpu")
            wanted = PlanConfig(
                self.setting.request(), self.setting.dtype, optimizer="none", device=AS_ON if cuda else None
            )
            graph = captured(made, wanted, where)
            optimizer = adamw(made.model, self.setting.learning_rate)
            graph.optimizer_bytes, graph.optimizer_step_bytes = optimizer_bytes(optimizer, on_cpu=not cuda)
            self._found = graph, ackpt.profile(graph)
        return self._found


def free_bytes(device: str) -> int | None:
    """Memory that is free now; None where the system does not say."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    with contextlib.suppress(OSError), open("/proc/meminfo") as lines:
        return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")), None)
    return None


def does_not_fit(peak_bytes: int, device: str) -> str | None:
    """Why a step of that predicted peak is not run here, or None."""
    room = free_bytes(device)
    if room is None or peak_bytes <= ROOM_SHARE * room:
        return None
    return f"its peak of {peak_bytes >> 20} MiB is more than {ROOM_SHARE:.0%} of {room >> 20} MiB of free memory"


def threads() -> int:
    """Threads that compute; part of a record's configuration, since they change no byte but the seconds."""
    return torch.get_num_threads() or os.cpu_count() or 1
