"""Host time of a planned step where kernels take little time: transformer layers, and blocks of a linear layer each.

    python benchmarks/small_kernels.py [--rounds 100]

Prints processor time per step as a ratio to eager, and per operation that the step executes, views included. The steps
run on one thread, in rounds: in each, every kind of step runs twice, and the second run counts. Kinds: the model, its
plans with no recomputation and with every second layer recomputed, and ``aot_eager``. Then the host time of what a
call does before it runs, in microseconds.
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
from ackpt.graph import lower
from ackpt.planner.capture.call_facts import ModelFacts, WatchedModel


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


class Blocks(nn.Module):
    """Linear layers with an activation function each."""

    def __init__(self, blocks: int = 12, width: int = 64):
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(blocks)))

    def forward(self, x):
        return self.blocks(x).square().mean()


def half(graph, profile, limit_bytes):
    """A policy that recomputes the activations of every second layer."""
    analysis, saved = graph.analysis, set(graph.analysis.must_be_saved)
    for storage in analysis.savable:
        numbers = filter(str.isdigit, graph.nodes[graph.storages[storage].producer].module.split("."))
        if int(next(numbers, 0)) % 2 == 0:
            saved.add(storage)
    return lower(graph, saved)


def compare(name: str, model: nn.Module, x: torch.Tensor, rounds: int) -> None:
    calls: dict[str, Callable] = {
        "eager": model,
        "nothing recomputed": (everything := ackpt.compile(model, x, policy="none")),
        "half recomputed": (recomputing := ackpt.compile(model, x, policy=half)),
        "aot_eager": torch.compile(model, backend="aot_eager"),
    }
    operations = dict.fromkeys(calls, _operations(everything)) | {"half recomputed": _operations(recomputing)}

    def seconds(call) -> float:
        model.zero_grad(set_to_none=True)
        start = time.thread_time()
        call(x).backward()
        return time.thread_time() - start

    for call in calls.values():
        for _ in range(3):
            seconds(call)
    taken = {name: [] for name in calls}
    for _ in range(rounds):
        for kind, call in calls.items():
            seconds(call)
            taken[kind].append(seconds(call))
    print(name)
    for kind, each in taken.items():
        ratio = statistics.median(one / eager for one, eager in zip(each, taken["eager"]))
        median = statistics.median(each)
        print(
            f"  {kind:<20} {1000 * median:6.2f} ms  {ratio:.3f} of eager  {operations[kind]:5d} operations, "
            f"{1e6 * median / operations[kind]:.2f} us each"
        )


def _operations(step) -> int:
    schedule = step.plan.schedule
    return sum(each.kind == "compute" for each in (*schedule.forward, *schedule.backward))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    rounds = parser.parse_args().rounds
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    gc.disable()
    layers = Layers()
    for sizes in ((2, 16), (16, 32)):
        compare(f"12 layers of width 64, {sizes[0]} x {sizes[1]} tokens", layers, torch.randint(0, 100, sizes), rounds)
    compare("12 linear layers of width 64, batch 16", Blocks(), torch.randn(16, 64), 4 * rounds)
    watched = WatchedModel(layers)
    print(
        f"facts of {len(watched.modules)} modules: compared in {_microseconds(watched.facts):.0f} us, "
        f"read in {_microseconds(lambda: ModelFacts(list(layers.modules()))):.0f} us"
    )


def _microseconds(run, times: int = 100) -> float:
    start = time.thread_time()
    for _ in range(times):
        run()
    return 1e6 * (time.thread_time() - start) / times


if __name__ == "__main__":
    main()
