"""Processor time of regions, as ratios to that of torch's non-reentrant checkpoint, and the cost of each guarantee.

    python benchmarks/region_time.py [--blocks] [--rounds N] [WIDTH ...]

Every variant runs forward and backward of the same region, interleaved in one process on one thread: two regions of
tiny tensors, where the time is that of Python, and a large one. "like torch" gives the guarantees that torch's
reentrant checkpoint gives and no more. ``--blocks`` compares the blocks of five models of transformers instead, at
widths 64, 256 and 512 or the given ones, with their FLOPs and dynamic peaks. There, "torch reentrant" shows what an
inner backward and a recomputation to the end cost, and the distance from "ackpt like torch" to "ackpt" the guarantees.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn

import ackpt
from ackpt.checkpointing.wrapping import repeated_blocks
from ackpt.metering.meter import compare_seconds

REFERENCE, REENTRANT, LIKE_TORCH = "torch non-reentrant", "torch reentrant", "ackpt like torch"
OFF = {"other_rng": False, "unchanged": False, "exact_graph": False}


def regions() -> Iterator[tuple[str, nn.Module, torch.Tensor, int, int]]:
    """``(name, module, input, regions per timed run, rounds)``."""

    def normal(*shape):
        return torch.randn(*shape, requires_grad=True)

    layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    yield "three layers of width 8", layers, normal(4, 8), 50, 40
    small = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    yield "TransformerEncoderLayer of width 64, 2 x 16 tokens", small, normal(2, 16, 64), 10, 40
    large = nn.TransformerEncoderLayer(512, 8, batch_first=True)
    yield "TransformerEncoderLayer of width 512, 8 x 256 tokens", large, normal(8, 256, 512), 1, 5


def variants(function, x, calls: int) -> dict:
    """``{name: callable}``: forward and backward of `calls` regions by each variant."""
    torch_checkpoint = functools.partial(torch.utils.checkpoint.checkpoint, function, x)
    ours = functools.partial(ackpt.checkpoint, function, x)
    variants = {
        "plain": (lambda: function(x), {}),
        REENTRANT: (functools.partial(torch_checkpoint, use_reentrant=True), {}),
        REFERENCE: (functools.partial(torch_checkpoint, use_reentrant=False), {}),
        "ackpt": (ours, {}),
        "ackpt, other RNGs off": (ours, {"other_rng": False}),
        "ackpt, change detection off": (ours, {"unchanged": False}),
        "ackpt, exact graph off": (ours, {"exact_graph": False}),
        LIKE_TORCH: (ours, OFF),
        "ackpt like torch, no RNG": (functools.partial(ours, preserve_rng_state=False), OFF),
    }
    return {name: functools.partial(_repeat, call, switches, calls) for name, (call, switches) in variants.items()}


def _repeat(call, switches, calls) -> None:
    with ackpt.guarantees(**switches):
        for _ in range(calls):
            call().sum().backward()


def models(width: int) -> Iterator[tuple[str, nn.Module, dict]]:
    """``(name, model, batch)`` of two blocks each, on 512 tokens, or images of as many patches or pixels."""
    import transformers

    sizes: Any = {
        "hidden_size": width,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 4 * width,
    }
    # Blocks of torch's reentrant checkpoint get gradients only if an input has one.
    tokens = {"inputs_embeds": torch.randn(2, 256, width, requires_grad=True)}
    config: Any = transformers.LlamaConfig(**sizes, vocab_size=8, use_cache=False)
    yield "Llama", transformers.LlamaModel(config), tokens
    config = transformers.GPT2Config(n_embd=width, n_layer=2, n_head=4, vocab_size=8, use_cache=False)
    yield "GPT-2", transformers.GPT2Model(config), tokens
    yield "BERT", transformers.BertModel(transformers.BertConfig(**sizes, vocab_size=8)), tokens
    images = {"pixel_values": torch.randn(2, 3, 64, 64)}
    yield "ViT", transformers.ViTModel(transformers.ViTConfig(**sizes, image_size=64, patch_size=4)), images
    config = transformers.ResNetConfig(embedding_size=width, hidden_sizes=[width] * 2, depths=[1, 1])
    config.layer_type = "basic"
    yield "ResNet", transformers.ResNetModel(config), images


def reentrant(forward, *args, **kwargs):
    """torch's reentrant checkpoint, which takes no keywords."""
    return torch.utils.checkpoint.checkpoint(functools.partial(forward, **kwargs), *args, use_reentrant=True)


def like_torch(forward, *args, **kwargs):
    with ackpt.guarantees(**OFF):
        return ackpt.checkpoint(forward, *args, **kwargs)


CHECKPOINTS = {
    "plain": None,
    REENTRANT: reentrant,
    REFERENCE: functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False),
    LIKE_TORCH: like_torch,
    "ackpt": ackpt.checkpoint,
}


def compare_blocks(width: int, rounds: int) -> None:
    for name, model, batch in models(width):
        blocks = repeated_blocks(model.train()).values()
        forwards = [block.forward for block in blocks]

        def step(checkpoint, model=model, batch=batch, blocks=blocks, forwards=forwards):
            for block, forward in zip(blocks, forwards):
                block.forward = forward if checkpoint is None else functools.partial(checkpoint, forward)
            torch.manual_seed(0)
            model.zero_grad()
            for tensor in batch.values():
                tensor.grad = None
            model(**batch)[0].square().mean().backward()

        runs = {label: functools.partial(step, call) for label, call in CHECKPOINTS.items()}
        for run in [*runs.values()] * 4:
            run()
        ratios = compare_seconds(runs, rounds, REFERENCE, clock="processor").ratios
        flops = {label: ackpt.count_flops(run) for label, run in runs.items()}
        peaks = {label: ackpt.measure(run, resident=[model, *batch.values()], repeats=0) for label, run in runs.items()}
        print(f"{name} of width {width}; time over that of {REFERENCE}, FLOPs over those of plain, dynamic peak")
        for label, ratio in ratios.items():
            time = f"{ratio.median:.3f} ({ratio.low:.3f} to {ratio.high:.3f})"
            peak = f"{peaks[label].dynamic_peak_bytes:,} bytes"
            print(f"  {label:<20} {time}  {flops[label] / flops['plain']:.4f}  {peak}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--blocks", action="store_true")
    parser.add_argument("--rounds", type=int, default=10, help="of --blocks")
    parser.add_argument("widths", nargs="*", type=int, default=[64, 256, 512])
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if options.blocks:
        for width in options.widths:
            compare_blocks(width, options.rounds)
        return
    print(f"torch {torch.__version__}, one thread, processor time of forward + backward")
    for name, module, x, calls, rounds in regions():
        runs = variants(module, x, calls)
        for run in runs.values():
            run()  # the first runs of a region are compared call by call
        print(f"{name}: {rounds} rounds of {calls} regions, times that of {REFERENCE}")
        for label, ratio in compare_seconds(runs, rounds, REFERENCE, clock="processor").ratios.items():
            print(f"  {label:<30} {ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f})")


if __name__ == "__main__":
    main()
