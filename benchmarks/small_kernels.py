"""Host time of a planned step: 12 layers of width 64 on 16 sequences of 32 tokens, where kernels take little time.

    python benchmarks/small_kernels.py [--steps 100]

Prints CPU time per step as a ratio to eager, on one thread, with the steps interleaved: with no recomputation, with the
model itself run under a budget that it keeps, with recomputation at half the peak, and by ``aot_eager``. Then the host
time of what a call does before it runs, in microseconds.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
import warnings
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

import ackpt
from ackpt.planner.capture.model_facts import ModelFacts, WatchedModel


class Layers(nn.Module):
    """Transformer layers between an embedding and a loss."""

    def __init__(self, layers: int = 12, width: int = 64, vocabulary: int = 100):
        super().__init__()
        self.embed, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, activation="gelu")
            for _ in range(layers)
        )

    def forward(self, tokens):
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), tokens.flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, help="of each kind")
    steps = parser.parse_args().steps
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, tokens = Layers(), torch.randint(0, 100, (16, 32))
    calls: dict[str, Callable] = {
        "eager": model,
        "nothing recomputed": ackpt.compile(model, tokens, policy="none"),
        "budget of 1 GiB": ackpt.compile(model, tokens, budget="1GiB"),
        "half the peak": (half := ackpt.compile(model, tokens, budget=0.5)),
        "aot_eager": torch.compile(model, backend="aot_eager"),
    }

    def seconds(call) -> float:
        model.zero_grad(set_to_none=True)
        start = time.process_time()
        call(tokens).backward()
        return time.process_time() - start

    for call in calls.values():
        for _ in range(3):
            seconds(call)
    gc.disable()
    taken = {name: [] for name in calls}
    for _ in range(steps):
        for name, call in calls.items():
            taken[name].append(seconds(call))
    for name, each in taken.items():
        ratio = statistics.median(one / eager for one, eager in zip(each, taken["eager"]))
        print(f"{name:<20} {1000 * statistics.median(each):6.2f} ms  {ratio:.3f} of eager")
    print(f"planned cost at half the peak: {half.plan.cost:.3f}")
    watched = WatchedModel(model)
    print(
        f"facts of {len(watched.modules)} modules: compared in {_microseconds(watched.facts):.0f} us, "
        f"read in {_microseconds(lambda: ModelFacts(list(model.modules()))):.0f} us"
    )


def _microseconds(run, times: int = 100) -> float:
    start = time.process_time()
    for _ in range(times):
        run()
    return 1e6 * (time.process_time() - start) / times


if __name__ == "__main__":
    main()
