"""The experiment ``synthetic``: a Transformer autoencoder on random packed sequences, with and without checkpointing.

Published at dim 1024, 12 layers, bf16 autocast, AdamW, 14 steps, sequence lengths 2048 to 16384, one sequence a batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ackpt.models.transformer import TransformerConfig
from ackpt.planner.workloads.step_request import Autoencoder
from experiments.steps.failures import STRICT
from experiments.steps.settings import require_lengths, require_positive
from experiments.steps.training import METHODS, OFFLOADED, PLANNED, Task, check_methods, run_lengths

EXPERIMENT = "synthetic"
KNOWN = (*METHODS[:2], OFFLOADED, PLANNED)


@dataclass(frozen=True)
class SyntheticConfig:
    """Sizes and settings; lengths in tokens."""

    seq_lens: tuple[int, ...] = (256, 512, 1024)
    batch_size: int = 1
    steps: int = 6
    dim: int = 256
    ff_dim: int = 1024
    layers: int = 8
    head_dim: int = 64
    device: str = "cpu"
    dtype: str = "float32"
    learning_rate: float = 3e-4
    seed: int = 0
    methods: tuple[str, ...] = METHODS[:2]

    def __post_init__(self):
        check_methods(self.methods, KNOWN)
        require_positive(self, "batch_size", "steps")
        require_lengths(self)
        self.model()

    def model(self) -> TransformerConfig:
        return TransformerConfig(dim=self.dim, ff_dim=self.ff_dim, layers=self.layers, head_dim=self.head_dim)


CPU = SyntheticConfig()
GPU = SyntheticConfig(
    seq_lens=(2048, 4096, 8192, 12288, 16384),
    steps=14,
    dim=1024,
    ff_dim=4096,
    layers=12,
    head_dim=128,
    device="cuda",
    dtype="bfloat16",
)


def task(config: SyntheticConfig, seq_len: int) -> Task:
    """Model and batches of one sequence length; batch i is the same for every method."""
    tokens = config.batch_size * seq_len

    def build():
        torch.manual_seed(config.seed)
        return Autoencoder(config.model())

    def batch(step):
        generator = torch.Generator().manual_seed(config.seed * 100_003 + step)
        x = torch.randn(tokens, config.dim, generator=generator)
        return x.to(config.device), offsets().to(config.device)

    def example():
        return torch.empty(tokens, config.dim), offsets()

    def offsets():
        return torch.arange(config.batch_size + 1, dtype=torch.int32) * seq_len

    def arguments(batch, method):
        x, cu_seqlens = batch
        return {"x": x, "cu_seqlens": cu_seqlens, "max_seqlen": seq_len}

    return Task(EXPERIMENT, build, batch, example, tuple, arguments, config.learning_rate, config.device, config.dtype)


def run_synthetic(
    config: SyntheticConfig = CPU, command: str = "", timed_rounds: int = 5, profiles=None, failures=STRICT
):
    """Run the experiment; yields a list of Records, one per method, for each sequence length."""
    return run_lengths(task, config, command, timed_rounds, profiles, failures)
