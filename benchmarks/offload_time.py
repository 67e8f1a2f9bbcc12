"""Time of asynchronous offload against synchronous, where copies are a large part of the step (CPU, real copies).

Run it with `OMP_NUM_THREADS=1 python benchmarks/offload_time.py`, so that the copying thread has a core of its own.
Steps are interleaved in one process; the ratio is the median of the ratios within each round.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch

import ackpt
from ackpt.metering.meter import compare_seconds

FUNCTIONS = {"tanh": torch.tanh, "sigmoid": torch.sigmoid, "softplus": torch.nn.functional.softplus}


def chain(function, layers, x, offload):
    h = x * 1
    with offload:
        for _ in range(layers):
            h = function(h)
        loss = h.sum()
    loss.backward()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, nargs="+", default=[1, 4, 16], help="size of one activation")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print("function   MiB  copies/step  async/sync (low .. high)  misses  hidden")
    for name, function in FUNCTIONS.items():
        for size in arguments.mib:
            x = torch.randn(size * 2**18, requires_grad=True)
            modes = {mode: ackpt.offload_saved_tensors(mode) for mode in ("sync", "async")}
            steps = {mode: partial(chain, function, arguments.layers, x, offload) for mode, offload in modes.items()}
            engine = modes["sync"].engine
            result = compare_seconds(steps, arguments.rounds, reference="sync")
            engine.reset_stats()
            for _ in range(arguments.rounds):
                steps["sync"]()
            share = engine.stats()["seconds_copying"] / arguments.rounds / result.seconds["sync"].median
            engine.reset_stats()
            for _ in range(arguments.rounds):
                steps["async"]()
            stats = engine.stats()
            hidden = 1 - stats["seconds_stalled"] / stats["seconds_copying"]
            ratio = result.ratios["async"]
            print(
                f"{name:9} {size:4}  {share:10.0%}   x{ratio.median:.2f} ({ratio.low:.2f} .. {ratio.high:.2f})"
                f"{stats['pool_misses']:12}  {hidden:6.0%}"
            )


if __name__ == "__main__":
    main()
