"""One training step of a named model, by any method: the baseline, per-block checkpointing, a plan within a budget.

A step is forward, backward and AdamW; gradients are allocated during the step. `RunStep` here runs it on tensors with
data; `Shapes` in `experiments.steps.step_shapes` predicts it from shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

import ackpt
from ackpt.checkpointing.wrapping import apply_activation_checkpointing, remove_activation_checkpointing
from ackpt.core.errors import BudgetError, did_you_mean
from ackpt.metering.meter import measure
from ackpt.models import Block
from ackpt.planner.policies import POLICIES
from ackpt.planner.workloads.planned_shapes import NEEDS_FATES
from ackpt.planner.workloads.step_request import BUILT_IN, DTYPES, StepRequest, autocast, training_step
from experiments.models import BasicBlock, BertBlock, BertForMaskedLM, Bottleneck

from .settings import record_metrics
from .training import adamw, backward_and_update, scaler_of

BASELINE, PER_BLOCK = "baseline", "per-block"
BLOCKS = (BasicBlock, Bottleneck, Block, BertBlock)
UNBOUNDED = ("none", "full")  # policies that need no budget
MASKED_SHARE = 0.15  # of BERT's tokens, Devlin et al. 2018
IGNORED = -100


@dataclass(frozen=True)
class Setting:
    """Which step: a model by name, fields of its configuration, sizes of a batch, device and dtype.

    `trains`: whether AdamW's step belongs to it; otherwise it is forward and backward.
    """

    model: str
    batch_size: int
    seq_len: int | None = None
    image_size: int | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    device: str = "cpu"
    dtype: str = "float32"
    learning_rate: float = 1e-4
    seed: int = 0
    trains: bool = True

    def __post_init__(self):
        if self.model not in BUILT_IN:
            close = did_you_mean(self.model, BUILT_IN)
            raise ValueError(f"unknown model {self.model!r}{close}: choose from {', '.join(BUILT_IN)}")
        if self.dtype not in DTYPES:
            raise ValueError(f"unknown dtype {self.dtype!r}: choose from {', '.join(DTYPES)}")
        self.request()

    def request(self) -> StepRequest:
        return StepRequest(self.model, self.batch_size, self.seq_len, self.image_size, dict(self.fields))


@dataclass(frozen=True)
class Method:
    """How a step runs: eager if `policy` is None, else by a plan; `policy` and `budget` as `ackpt.plan` takes them.

    The budget may also be `PER_BLOCK`, for that method's predicted peak; `Shapes.resolved` replaces it by bytes.
    """

    name: str
    policy: str | None = None
    budget: int | str | None = None


def method(name: str, limit_bytes: int | None = None) -> Method:
    """The method called ``baseline``, ``per-block``, or by a policy of `ackpt.plan` and a budget: ``auto@0.5``.

    Budgets are fractions, bytes (``auto@6GiB``), or ``per-block``, the predicted peak of that method. A policy that
    needs a budget and has none gets `limit_bytes`, which bounds the whole peak.

    Raises:
        ValueError: for any other name.
    """
    from ackpt.core.budget import dynamic_limit

    if name in (BASELINE, PER_BLOCK):
        return Method(name)
    policy, at, text = name.partition("@")
    policies = [policy for policy in POLICIES if policy != NEEDS_FATES]
    if policy not in policies:
        close = did_you_mean(policy, [BASELINE, PER_BLOCK, *policies])
        raise ValueError(
            f"unknown method {name!r}{close}: choose {BASELINE}, {PER_BLOCK} or a policy with its budget, such as "
            f"auto@0.5; the policies are {', '.join(policies)}"
        )
    if not at:
        return Method(name, policy, None if policy in UNBOUNDED else limit_bytes)
    if text != PER_BLOCK:
        dynamic_limit(text, 0, 0)
    return Method(name, policy, text)


def needs_limit(name: str) -> bool:
    """Whether the method is a policy without the budget that it needs."""
    return name not in (BASELINE, PER_BLOCK, *UNBOUNDED) and "@" not in name


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
        self.optimizer = adamw(self.model, setting.learning_rate) if setting.trains else None
        self.scaler = scaler_of(setting.device, setting.dtype)
        self.planned: dict[Method, Any] = {}

    @property
    def resident(self) -> tuple:
        return (self.model, *([self.optimizer] if self.optimizer else []), *tensors(self.inputs))

    def prepare(self, method: Method):
        """Plan the method's step; raises NotRun if its budget is infeasible."""
        remove_activation_checkpointing(self.model)
        if method.policy is None or method in self.planned:
            return
        options: dict[str, Any] = {"budget": method.budget, "policy": method.policy}
        options |= {"optimizer": self.optimizer, "scaler": self.scaler} if self.optimizer else {}
        try:
            with autocast(self.setting.device, self.setting.dtype):
                self.planned[method] = ackpt.compile(self.model, **options, **self.inputs)
        except BudgetError as error:
            raise NotRun(str(error)) from error

    def step(self, method: Method, train: bool = True):
        """Run one step, after ``switch``; without `train`, forward and backward only, and the gradients stay."""
        call, optimizer = self.planned.get(method, self.model), self.optimizer if train else None
        one_step(call, self.inputs, self.setting, optimizer, self.scaler)
        if train and optimizer is None:
            self.model.zero_grad(set_to_none=True)

    def switch(self, method: Method) -> None:
        """Prepare the model for steps of the method."""
        switch(self.model, method)

    def measure(self, method: Method) -> dict:
        """Bytes and FLOPs of a step for its record; of a step on a GPU also the timeline."""
        self.switch(method)
        measured = measure(partial(self.step, method), self.setting.device, resident=self.resident, warmup=1, repeats=0)
        timeline = {"timeline": measured.timeline.thinned(400).to_json()} if self.setting.device == "cuda" else {}
        return record_metrics(measured) | timeline

    def gradients(self, method: Method) -> dict[str, torch.Tensor]:
        """The gradients of one step from the present weights, copied to the CPU; all methods draw the same masks."""
        torch.manual_seed(self.setting.seed)
        self.switch(method)
        self.step(method, train=False)
        gradients = {name: p.grad.cpu().clone() for name, p in self.model.named_parameters() if p.grad is not None}
        self.model.zero_grad(set_to_none=True)
        return gradients


def switch(model, method: Method) -> None:
    """Checkpoint every block of the model, or none, depending on the method."""
    if method.name == PER_BLOCK:
        apply_activation_checkpointing(model, BLOCKS)
    else:
        remove_activation_checkpointing(model)


def one_step(model, inputs, setting: Setting, optimizer, scaler=None) -> None:
    device = next(iter(tensors(inputs))).device.type  # of a GPU's step without data, the CPU
    with autocast(device, setting.dtype):
        loss = model(**inputs)
    backward_and_update(loss, optimizer, scaler)


def with_data(model, inputs: dict, seed: int) -> dict:
    """The inputs filled: normal images, uniform tokens and classes; BERT's labels ask for `MASKED_SHARE` of them."""
    generator = torch.Generator().manual_seed(seed)
    filled = {}
    for name, value in inputs.items():
        if not isinstance(value, torch.Tensor):
            filled[name] = value
            continue
        if name == "cu_seqlens":
            data = torch.arange(value.numel(), dtype=value.dtype) * inputs["max_seqlen"]
        elif value.is_floating_point():
            data = torch.randn(value.shape, generator=generator, dtype=value.dtype)
        else:
            classes = getattr(model.config, "num_classes", None) or model.config.vocab_size
            data = torch.randint(classes, value.shape, generator=generator)
            if name == "labels" and isinstance(model, BertForMaskedLM):
                masked = torch.rand(value.shape, generator=generator) < MASKED_SHARE
                masked.view(-1)[0] = True
                data = torch.where(masked, data, IGNORED)
        filled[name] = data.to(value.device)
    return filled


def tensors(inputs: dict) -> tuple:
    return tuple(value for value in inputs.values() if isinstance(value, torch.Tensor))
