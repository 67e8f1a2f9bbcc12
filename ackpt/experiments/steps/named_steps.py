"""One training step of a named model, by any method: the plain model, checkpointed blocks, a plan within a budget.

A step is forward, backward and AdamW; gradients do not exist before it. It is either run, on tensors with data, or
predicted from shapes: `RunStep` here, `Shapes` in `ackpt.experiments.steps.step_shapes`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

import ackpt
from ackpt.checkpointing.wrapping import apply_activation_checkpointing, remove_activation_checkpointing
from ackpt.errors import BudgetError, did_you_mean
from ackpt.experiments.offload import TOLERANCE, GradientsDiffer
from ackpt.metering.meter import measure
from ackpt.models import BasicBlock, BertBlock, BertForMaskedLM, Block, Bottleneck
from ackpt.policies import POLICIES
from ackpt.workloads.named_models import BUILT_IN, training_step
from ackpt.workloads.planned_shapes import NEEDS_FATES
from ackpt.workloads.step_request import StepRequest, autocast

from .settings import record_metrics
from .training import adamw

PLAIN, PER_BLOCK = "plain", "per-block"
BLOCKS = (BasicBlock, Bottleneck, Block, BertBlock)
UNBOUNDED = ("none", "full")  # policies that need no budget
MASKED_SHARE = 0.15  # of BERT's tokens, Devlin et al. 2018
IGNORED = -100
NEGLIGIBLE = 1e-2


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
            close = did_you_mean(self.model, BUILT_IN)
            raise ValueError(f"unknown model {self.model!r}{close}: choose from {', '.join(BUILT_IN)}")
        if self.dtype not in ("float32", "bfloat16"):
            raise ValueError(f"dtype {self.dtype!r} is not supported here: choose float32, or autocast to bfloat16")
        self.request()

    def request(self) -> StepRequest:
        return StepRequest(self.model, self.batch_size, self.seq_len, self.image_size, dict(self.fields))


@dataclass(frozen=True)
class Method:
    """How a step runs: `policy` None is eager, else a plan within `budget`, as `ackpt.plan` takes them.

    The budget may also be `PER_BLOCK`, that method's predicted peak; `Shapes.resolved` puts its bytes there.
    """

    name: str
    policy: str | None = None
    budget: int | str | None = None


def method(name: str, limit_bytes: int | None = None) -> Method:
    """``plain``, ``per-block``, or a policy of `ackpt.plan`, with ``@`` and a budget: ``auto@0.5``, ``auto@6GiB``.

    ``auto@per-block`` has the predicted peak of per-block as its budget. A policy that needs a budget and has none gets
    `limit_bytes`, that of the whole peak.

    Raises:
        ValueError: for what is none of these.
    """
    from ackpt.budget import dynamic_limit

    if name in (PLAIN, PER_BLOCK):
        return Method(name)
    policy, at, text = name.partition("@")
    known = [policy for policy in POLICIES if policy != NEEDS_FATES]
    if policy not in known:
        close = did_you_mean(policy, [PLAIN, PER_BLOCK, *known])
        raise ValueError(
            f"unknown method {name!r}{close}: choose {PLAIN}, {PER_BLOCK} or a policy with its budget, such as "
            f"auto@0.5; the policies are {', '.join(known)}"
        )
    if not at:
        return Method(name, policy, None if policy in UNBOUNDED else limit_bytes)
    if text != PER_BLOCK:
        dynamic_limit(text, 0, 0)
    return Method(name, policy, text)


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
        return (self.model, self.optimizer, *tensors(self.inputs))

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
        one_step(self.planned.get(method, self.model), self.inputs, self.setting, self.optimizer if train else None)

    def measure(self, method: Method) -> dict:
        """Bytes and FLOPs of a step as they stand in a record; on a GPU, where it cannot be had again, the timeline."""
        measured = measure(partial(self.step, method), self.setting.device, resident=self.resident, warmup=1, repeats=0)
        timeline = {"timeline": measured.timeline.thinned(400).to_json()} if self.setting.device == "cuda" else {}
        return record_metrics(measured) | timeline

    def gradients(self, method: Method) -> dict[str, torch.Tensor]:
        """Of one step from the present weights, every method with the same random numbers; copies on the CPU."""
        torch.manual_seed(self.setting.seed)
        self.step(method, train=False)
        found = {name: p.grad.cpu().clone() for name, p in self.model.named_parameters() if p.grad is not None}
        self.model.zero_grad(set_to_none=True)
        return found


def switch(model, method: Method) -> None:
    """Checkpoint every block of the model, or none, as the method says."""
    if method.name == PER_BLOCK:
        apply_activation_checkpointing(model, BLOCKS)
    else:
        remove_activation_checkpointing(model)


def one_step(model, inputs, setting: Setting, optimizer) -> None:
    where = next(iter(tensors(inputs))).device.type  # fake tensors of a GPU's step lie on the CPU
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


def tensors(inputs: dict) -> tuple:
    return tuple(value for value in inputs.values() if isinstance(value, torch.Tensor))


def require_equal(name: str, found: dict, wanted: dict, exact: bool) -> float:
    """The largest difference of a gradient, relative to its parameter's largest; 0.0 where all bits are equal.

    Raises:
        GradientsDiffer: if it is more than nothing (`exact`) or than `TOLERANCE`, or a gradient is missing. Without
            `exact`, gradients that are `NEGLIGIBLE` beside the largest of all are compared with that share of it: some
            are zero but for rounding, as those of a bias before a softmax.
    """
    if found.keys() != wanted.keys():
        raise GradientsDiffer(f"{name}: not the same parameters have gradients as in the plain model")
    worst = 0.0
    least = 0.0 if exact else NEGLIGIBLE * max(float(other.abs().max()) for other in wanted.values())
    for parameter, mine in found.items():
        other = wanted[parameter]
        if torch.equal(mine, other):
            continue
        scale = max(float(other.abs().max()), least, torch.finfo(other.dtype).tiny)
        difference = float((mine - other).abs().max()) / scale
        if exact or not difference <= TOLERANCE:
            how = "must be equal to the last bit" if exact else f"may differ by {TOLERANCE:g}"
            raise GradientsDiffer(
                f"{name}: the gradient of {parameter} differs from the plain model's by {difference:.3g} of its "
                f"largest entry; it {how}"
            )
        worst = max(worst, difference)
    return worst
