"""Time per checkpointed region with tiny tensors, against torch's reentrant checkpoint and the cost of each guarantee.

    python benchmarks/region_time.py

Every variant runs forward and backward of the same small region, interleaved in one process on one thread; read the
ratios. "like torch" gives the guarantees that torch's reentrant checkpoint gives and no more.
"""

from __future__ import annotations

import functools

import torch
import torch.utils.checkpoint

import ackpt
from ackpt.metering.meter import compare_seconds

CALLS = 50  # regions per timed run


def variants(function, x) -> dict:
    """``{name: callable}``: forward and backward of one region by each variant."""
    torch_checkpoint = functools.partial(torch.utils.checkpoint.checkpoint, function, x)
    ours = functools.partial(ackpt.checkpoint, function, x)

    off = {"other_rng": False, "unchanged": False, "exact_graph": False}
    reentrant = functools.partial(torch_checkpoint, use_reentrant=True)
    calls = {
        "plain": (lambda: function(x), {}),
        "torch reentrant": (reentrant, {}),
        "torch reentrant, no RNG": (functools.partial(reentrant, preserve_rng_state=False), {}),
        "torch non-reentrant": (functools.partial(torch_checkpoint, use_reentrant=False), {}),
        "ackpt": (ours, {}),
        "ackpt, other RNGs off": (ours, {"other_rng": False}),
        "ackpt, change detection off": (ours, {"unchanged": False}),
        "ackpt, exact graph off": (ours, {"exact_graph": False}),
        "ackpt like torch": (ours, off),
        "ackpt like torch, no RNG": (functools.partial(ours, preserve_rng_state=False), off),
    }
    return {name: functools.partial(_repeat, call, switches) for name, (call, switches) in calls.items()}


def _repeat(call, switches) -> None:
    with ackpt.guarantees(**switches):
        for _ in range(CALLS):
            call().sum().backward()


def compare(rounds: int = 40, reference: str = "torch reentrant"):
    """A ``Comparison`` of all variants on a region of two small linear layers."""
    torch.manual_seed(0)
    region = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8))
    return compare_seconds(variants(region, torch.randn(4, 8, requires_grad=True)), rounds, reference)


def main() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        result = compare()
    finally:
        torch.set_num_threads(threads)
    print(f"torch {torch.__version__}, one thread, {CALLS} regions per run; forward + backward of one region")
    for name, seconds in result.seconds.items():
        ratio = result.ratios[name]
        print(
            f"{name:<30} {seconds.median / CALLS * 1e6:7.0f} us   x{ratio.median:.2f} of {result.reference} "
            f"({ratio.low:.2f} to {ratio.high:.2f})"
        )


if __name__ == "__main__":
    main()
