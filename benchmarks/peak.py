"""Peak bytes of a chain and of a language-model step: ackpt, torch's reentrant checkpoint, and the prediction.

    python benchmarks/peak.py

Bytes are exact and repeat, so this is a test as well: the exit status is 1 if ackpt's peak is above torch's anywhere,
or if a chain's measured peak is not the predicted one to the byte.
"""

from __future__ import annotations

import functools
import sys

import torch
import torch.utils.checkpoint
from torch._subclasses.fake_tensor import FakeTensorMode

import ackpt
from ackpt.models.transformer import Block
from experiments.lm import LMConfig, task
from experiments.steps.training import adamw, configure, one_step

KIB = 1024


def torch_checkpoint(function, *args):
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=True, preserve_rng_state=False)


def chain_step(layers, x, checkpoint):
    """Forward and backward through a chain, every layer one region."""

    def step():
        value = x
        for layer in layers:
            value = layer(value) if checkpoint is None else checkpoint(layer, value)
        value.sum().backward()
        x.grad = None

    return step


def chain(length: int) -> dict[str, int]:
    """Dynamic peaks of a chain of blocks of three layers each: plain, torch, ackpt, predicted for ackpt."""

    def make():
        layer = torch.nn.Sequential(torch.nn.Tanh(), torch.nn.Sigmoid(), torch.nn.Tanh())
        return [layer] * length, torch.zeros(64, KIB, requires_grad=True)

    layers, x = make()
    measured = {
        name: ackpt.measure(chain_step(layers, x, checkpoint), resident=[x], repeats=0).dynamic_peak_bytes
        for name, checkpoint in (("plain", None), ("torch", torch_checkpoint), ("ackpt", ackpt.checkpoint))
    }
    with FakeTensorMode():
        layers, x = make()
    predicted = ackpt.predict(chain_step(layers, x, ackpt.checkpoint), resident=[x])
    return {**measured, "predicted": predicted.dynamic_peak_bytes}


def lm_step(seq_len: int) -> dict[str, int]:
    """Dynamic peaks of a training step of a small language model, its blocks checkpointed or not."""
    config = LMConfig(seq_lens=(seq_len,), steps=1, layers=6, vocab_size=1024, tokenizer_vocab=1024)
    job = task(config, seq_len)

    def measure(meter, switch_on):
        model, batch = job.build(), job.example()
        switch_on(model)
        optimizer = adamw(model, 1e-4)
        step = functools.partial(one_step, job, model, optimizer, batch, "baseline")
        resident = (model, optimizer, *job.tensors(batch))
        return meter(step, resident=resident).dynamic_peak_bytes

    exact = functools.partial(ackpt.measure, repeats=0)
    with FakeTensorMode():
        predicted = measure(ackpt.predict, lambda model: configure(model, "checkpoint"))
    return {
        "plain": measure(exact, lambda model: None),
        "torch": measure(exact, _wrap_torch),
        "ackpt": measure(exact, lambda model: configure(model, "checkpoint")),
        "predicted": predicted,
    }


def _wrap_torch(model):
    for block in model.modules():
        if isinstance(block, Block):
            block.forward = functools.partial(torch_checkpoint, block.forward)


def main() -> int:
    status = 0
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads; dynamic peak in KiB")
    print(f"{'':24} {'plain':>10} {'torch':>10} {'ackpt':>10} {'predicted':>10}")
    for name, peaks, exact in (
        *((f"chain of {length} blocks", chain(length), True) for length in (8, 32, 128)),
        *((f"language model, L = {length}", lm_step(length), False) for length in (256, 512)),
    ):
        columns = " ".join(f"{peaks[key] / KIB:10.1f}" for key in ("plain", "torch", "ackpt", "predicted"))
        wrong = peaks["ackpt"] > peaks["torch"] or (exact and peaks["ackpt"] != peaks["predicted"])
        print(f"{name:24} {columns}{'  <- above torch or not as predicted' if wrong else ''}")
        status = max(status, int(wrong))
    return status


if __name__ == "__main__":
    sys.exit(main())
