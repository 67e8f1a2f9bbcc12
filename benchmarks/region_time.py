"""Processor time of regions, as ratios to that of torch's non-reentrant checkpoint, and the cost of each guarantee.

    python benchmarks/region_time.py

Every variant runs forward and backward of the same region, interleaved in one process on one thread: two regions of
tiny tensors, where the time is that of Python, and a large one. "like torch" gives the guarantees that torch's
reentrant checkpoint gives and no more.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
import torch.utils.checkpoint
from torch import nn

import ackpt
from ackpt.metering.meter import compare_seconds

REFERENCE = "torch non-reentrant"
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
        "torch reentrant": (functools.partial(torch_checkpoint, use_reentrant=True), {}),
        REFERENCE: (functools.partial(torch_checkpoint, use_reentrant=False), {}),
        "ackpt": (ours, {}),
        "ackpt, other RNGs off": (ours, {"other_rng": False}),
        "ackpt, change detection off": (ours, {"unchanged": False}),
        "ackpt, exact graph off": (ours, {"exact_graph": False}),
        "ackpt like torch": (ours, OFF),
        "ackpt like torch, no RNG": (functools.partial(ours, preserve_rng_state=False), OFF),
    }
    return {name: functools.partial(_repeat, call, switches, calls) for name, (call, switches) in variants.items()}


def _repeat(call, switches, calls) -> None:
    with ackpt.guarantees(**switches):
        for _ in range(calls):
            call().sum().backward()


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
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
