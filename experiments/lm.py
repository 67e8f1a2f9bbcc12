"""The experiment ``lm``: a language model, trained on text.

Published at dim 1024, 12 layers, vocabulary 50257, wikitext-103-raw-v1, AdamW 3e-4, 500 steps, one sequence a batch of
2048 to 8192 tokens. There the logits take more memory than the blocks, so one method computes the loss in chunks.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from ackpt.models.transformer import LanguageModel, TransformerConfig
from experiments.data import DATASETS, Batch, packed_batches, token_stream
from experiments.steps.failures import STRICT
from experiments.steps.settings import require_lengths, require_positive
from experiments.steps.training import METHODS, OFFLOADED, PLANNED, Task, check_methods, chunks_loss, run_lengths

EXPERIMENT = "lm"
KNOWN = (*METHODS, OFFLOADED, PLANNED)


@dataclass(frozen=True)
class LMConfig:
    """Sizes and settings; lengths in tokens. `tokenizer_vocab` may be smaller than the model's `vocab_size`."""

    seq_lens: tuple[int, ...] = (256, 512)
    batch_size: int = 1
    steps: int = 30
    dim: int = 128
    ff_dim: int = 512
    layers: int = 4
    head_dim: int = 32
    vocab_size: int = 4096
    tokenizer_vocab: int = 4096
    loss_chunks: int = 8
    dataset: str = "embedded"
    dataset_path: str | None = None
    device: str = "cpu"
    dtype: str = "float32"
    learning_rate: float = 3e-4
    seed: int = 0
    methods: tuple[str, ...] = METHODS

    def __post_init__(self):
        check_methods(self.methods, KNOWN)
        require_positive(self, "batch_size", "steps", "loss_chunks")
        require_lengths(self)
        if self.dataset not in DATASETS:
            raise ValueError(f"unknown dataset {self.dataset!r}: choose from {', '.join(DATASETS)}")
        if self.tokenizer_vocab > self.vocab_size:
            raise ValueError(
                f"the tokenizer's vocabulary ({self.tokenizer_vocab}) does not fit the model's ({self.vocab_size})"
            )
        self.model()

    def model(self) -> TransformerConfig:
        return TransformerConfig(
            dim=self.dim, ff_dim=self.ff_dim, layers=self.layers, head_dim=self.head_dim, vocab_size=self.vocab_size
        )


CPU = LMConfig()
GPU = LMConfig(
    seq_lens=(2048, 4096, 8192),
    steps=500,
    dim=1024,
    ff_dim=4096,
    layers=12,
    head_dim=128,
    vocab_size=50257,
    tokenizer_vocab=16384,
    device="cuda",
    dtype="bfloat16",
)


@functools.lru_cache(maxsize=2)
def _stream(dataset, vocab, path):
    return token_stream(dataset, vocab, path)


def task(config: LMConfig, seq_len: int) -> Task:
    """Model and batches of one sequence length; batch i has the same text for every method."""

    @functools.cache
    def batches():
        stream = _stream(config.dataset, config.tokenizer_vocab, config.dataset_path)
        return list(packed_batches(stream, seq_len, config.batch_size, config.steps + 1, config.seed))

    def build():
        torch.manual_seed(config.seed)
        return LanguageModel(config.model())

    def batch(step):
        return batches()[step].to(config.device)

    def example():
        ids = torch.zeros(config.batch_size * seq_len, dtype=torch.int64)
        return Batch(ids, ids.clone(), torch.arange(config.batch_size + 1, dtype=torch.int32) * seq_len, seq_len)

    def tensors(batch):
        return batch.tokens, batch.targets, batch.cu_seqlens

    def arguments(batch, method):
        call = {"tokens": batch.tokens, "cu_seqlens": batch.cu_seqlens, "max_seqlen": seq_len, "targets": batch.targets}
        return {**call, "loss_chunks": config.loss_chunks if chunks_loss(method) else None}

    return Task(
        EXPERIMENT, build, batch, example, tensors, arguments, config.learning_rate, config.device, config.dtype
    )


def run_lm(config: LMConfig = CPU, command: str = "", timed_rounds: int = 5, profiles=None, failures=STRICT):
    """Run the experiment; yields a list of Records, one per method, for each sequence length."""
    return run_lengths(task, config, command, timed_rounds, profiles, failures)
