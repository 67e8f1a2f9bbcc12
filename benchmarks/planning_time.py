"""CPU seconds and memory of capture and planning, for models without data.

    python benchmarks/planning_time.py [MODEL ...] [--budget 0.5]

Each model is captured and planned in a process of its own, on one thread. `RSS` is by how much both raise the largest
resident set of the process. Costs are fractions of the baseline step: a change of the planner must not raise them.
Where the budget is infeasible, the plan is that of the smallest feasible budget.
GPT-2 and T5 need transformers.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import ackpt
from experiments.models import resnet152

Call = tuple[nn.Module, dict[str, Any]]  # a model and the keywords that it is called with


class Recurrent(nn.Module):
    """A GRU cell, called once for every step of a sequence, and a loss."""

    def __init__(self, width: int = 256):
        super().__init__()
        self.cell, self.head = nn.GRUCell(width, width), nn.Linear(width, 1)

    def forward(self, sequence):
        hidden = torch.zeros_like(sequence[0])
        for item in sequence:
            hidden = self.cell(item, hidden)
        return self.head(hidden).square().mean()


class Layers(nn.Module):
    """Two layers of `nn.GRU`, and a loss."""

    def __init__(self, width: int = 128):
        super().__init__()
        self.gru, self.head = nn.GRU(width, width, num_layers=2, batch_first=True), nn.Linear(width, 1)

    def forward(self, sequences):
        return self.head(self.gru(sequences)[0]).square().mean()


def gpt2(layers: int) -> Call:
    import transformers

    tokens = torch.zeros(8, 1024, dtype=torch.long)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=layers))
    return model, {"input_ids": tokens, "labels": tokens, "use_cache": False}


def t5(layers: int = 24) -> Call:
    import transformers

    tokens = torch.zeros(8, 512, dtype=torch.long)
    sizes = {"d_model": 1024, "d_ff": 4096, "d_kv": 64, "num_heads": 16, "num_layers": layers}
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0))
    return model, {"input_ids": tokens, "labels": tokens, "use_cache": False}


def resnet() -> Call:
    return resnet152(), {"images": torch.zeros(32, 3, 224, 224), "labels": torch.zeros(32, dtype=torch.long)}


def gru(steps: int) -> Call:
    return Recurrent(), {"sequence": torch.zeros(steps, 64, 256)}


MODELS: dict[str, Callable[[], Call]] = {
    "gpt2-12": lambda: gpt2(12),
    "gpt2-48": lambda: gpt2(48),
    "resnet152": resnet,
    "t5-large": t5,
    "gru": lambda: gru(260),
    "gru-layers": lambda: (Layers(), {"sequences": torch.zeros(16, 128, 128)}),
}


def report(name: str, budget: str | float) -> None:
    torch.set_num_threads(1)
    ackpt.plan(ackpt.trace(nn.Linear(2, 2), torch.ones(1, 2)), 1.0)  # imports what a first plan needs
    with torch.device("meta"):
        model, kwargs = MODELS[name]()
    start, before = time.process_time(), _peak_bytes()
    graph = ackpt.trace(model, **kwargs)
    capture = time.process_time() - start
    try:
        plan = ackpt.plan(graph, budget)
    except ackpt.BudgetError as error:
        assert error.least_bytes is not None
        plan = ackpt.plan(graph, error.least_bytes)
    planning = time.process_time() - start - capture
    grown = (_peak_bytes() - before) / 2**20
    bound = "" if plan.lower_bound is None else f", lower bound {plan.lower_bound:.6f}"
    print(
        f"{name:<10} {len(graph.nodes):6} nodes  capture {capture:6.1f} s  planning {planning:6.1f} s"
        f"  RSS +{grown:5.0f} MiB  cost {plan.cost:.6f}{bound}, peak {plan.peak_bytes}",
        flush=True,
    )


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"some of {', '.join(MODELS)}; by default all")
    parser.add_argument("--budget", type=float, default=0.5, help="fraction of the baseline's dynamic peak")
    options = parser.parse_args()
    if unknown := set(options.models) - set(MODELS):
        parser.error(f"unknown model {', '.join(sorted(unknown))}; the models are {', '.join(MODELS)}")
    context = multiprocessing.get_context("spawn")
    for name in options.models or MODELS:
        process = context.Process(target=report, args=(name, options.budget))
        process.start()
        process.join()


if __name__ == "__main__":
    main()
