"""BERT's masked-language-model step: per-block checkpointing, and plans of policy auto at several budgets.

Published for BERT-large on one GPU with a per-module switch (average memory and time of the whole run). The small
tier measures a small BERT and predicts the published one from shapes, as on a GPU. `of_blocks` and `saved_in` show
which activations of the blocks a plan saves.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ackpt.planner.schedule.plan import SAVED, Activation, Plan
from experiments.results import Record, environment
from experiments.steps.failures import STRICT
from experiments.steps.named_steps import BASELINE, PER_BLOCK, Setting, method, needs_limit
from experiments.steps.settings import on_this_gpu, record_config
from experiments.steps.step_shapes import Shapes

from .batch_size import record, step_metrics

EXPERIMENT = "bert"
MODEL = "bert-large"
METHODS = (BASELINE, PER_BLOCK, "auto@0.6", "auto@0.5", "auto@0.4", "auto@0.3")
_BLOCK = re.compile(r"(?:.*\.)?blocks\.(\d+)(?:\.|$)")


@dataclass(frozen=True)
class BertStepConfig:
    """Sizes and settings: `batch_size` sequences of `seq_len` tokens; `fields` change BERT-large's configuration."""

    batch_size: int = 8
    seq_len: int = 512
    fields: Mapping[str, Any] = field(default_factory=dict)
    device: str = "cuda"
    dtype: str = "bfloat16"
    learning_rate: float = 1e-4
    seed: int = 0
    methods: tuple[str, ...] = METHODS

    def __post_init__(self):
        if not self.methods:
            raise ValueError(f"give at least one method, such as {', '.join(METHODS)}")
        for name in self.methods:
            method(name)
            if needs_limit(name):
                raise ValueError(f"method {name!r} needs a budget: write {name}@0.5 or {name}@6GiB")
        self.setting()

    def setting(self) -> Setting:
        sizes = {"seq_len": self.seq_len, "fields": self.fields, "device": self.device, "dtype": self.dtype}
        return Setting(MODEL, self.batch_size, **sizes, learning_rate=self.learning_rate, seed=self.seed)


GPU = BertStepConfig()
CPU = BertStepConfig(
    seq_len=128,
    fields={"dim": 128, "ff_dim": 512, "layers": 4, "heads": 8, "vocab_size": 640},
    device="cpu",
    dtype="float32",
)


def configuration(tier: str = "cpu", **changes) -> BertStepConfig:
    """The tier's configuration with `changes`; other fields of the model keep the tier's values."""
    base = CPU if tier == "cpu" else GPU
    if "fields" in changes:
        changes["fields"] = {**base.fields, **changes["fields"]}
    config = replace(base, **changes)
    return config if "dtype" in changes else on_this_gpu(config)


def run_bert(
    config: BertStepConfig = CPU, command: str = "", timed_rounds: int = 3, predict_only: bool = False, failures=STRICT
):
    """Run the experiment; yields lists of Records, one per method.

    The first list is that of the configuration, measured if it fits the machine and not `predict_only`. The small
    tier's is followed by predictions of the published sizes, in records of the experiment ``bert-predicted``.

    Raises:
        GradientsDiffer: if a method's gradients are not those of the baseline; on the CPU they must be bit-equal.
    """
    yield _records(config, command, timed_rounds, predict_only, failures)
    if config.device == "cpu" and not predict_only:
        yield predicted(replace(GPU, methods=config.methods), command)


def predicted(config: BertStepConfig = GPU, command: str = "") -> list[Record]:
    """One Record per method, from shapes alone."""
    return _records(config, command, 0, True)


def _records(config: BertStepConfig, command: str, timed_rounds: int, predict_only: bool, failures=STRICT):
    methods = [method(name) for name in dict.fromkeys(config.methods)]
    metrics = step_metrics(Shapes(config.setting()), methods, timed_rounds, predict_only, failures)
    settings = record_config(replace(config, fields=dict(config.fields)), model=MODEL, seq_len=config.seq_len)
    settings["threads"] = torch.get_num_threads()
    where = environment("cpu" if predict_only else config.device, command)
    names = [each.name for each in methods if each.name in metrics]
    return [record(EXPERIMENT, {**settings, "method": name}, metrics[name], where) for name in names]


def of_blocks(plan: Plan) -> dict[int, list[Activation]]:
    """``{block: its activations}`` of a plan for BERT, in the order of the forward."""
    blocks = defaultdict(list)
    for activation in plan.activations:
        if block := _BLOCK.match(activation.module):
            blocks[int(block[1])].append(activation)
    return dict(blocks)


def saved_in(plans: dict[str, Plan]) -> list[dict]:
    """One row per activation of a block: its ``bytes``, and under every name the number of blocks that save it.

    Raises:
        ValueError: if the blocks do not save the same activations.
    """
    rows: list[dict] = []
    for name, plan in plans.items():
        blocks = of_blocks(plan).values()
        try:
            alike = list(zip(*blocks, strict=True))  # the same activation of every block
        except ValueError as error:
            raise ValueError("the blocks have different numbers of activations: they are not alike") from error
        if not rows:
            rows = [{"bytes": activations[0].bytes} for activations in alike]
        pairs = [(row, each) for row, activations in zip(rows, alike, strict=True) for each in activations]
        if not alike or any(each.bytes != row["bytes"] for row, each in pairs):
            raise ValueError("the blocks have activations of different sizes: they are not alike")
        for row, activations in zip(rows, alike):
            row[name] = sum(activation.fate == SAVED for activation in activations)
    return rows
