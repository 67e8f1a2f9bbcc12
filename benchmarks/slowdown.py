"""Time and peak of plans with a slowdown, against the model itself: what is modeled, and what is measured.

    python benchmarks/slowdown.py --slowdowns 0.05 0.1 0.2

Prints for each slowdown the modeled and the measured time of a training step, as ratios to eager, and the peak. Times
are those of the processor (`time.process_time`), of interleaved rounds, of which the median of the ratios is taken.
Gradients are compared to the last bit first.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import ackpt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slowdowns", type=float, nargs="+", default=[0.05, 0.1, 0.2])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.manual_seed(0)
    config = GPT2Config(n_layer=options.layers, n_embd=options.width, n_head=4, vocab_size=2048, use_cache=False)
    model = GPT2LMHeadModel(config)
    tokens = torch.randint(2048, (4, 256))
    batch = {"input_ids": tokens, "labels": tokens}
    plain = copy.deepcopy(model)
    steps = {each: ackpt.compile(copy.deepcopy(model), **batch, slowdown=each) for each in options.slowdowns}
    expected = gradients(plain, batch)
    assert all(all(map(torch.equal, expected, gradients(step, batch))) for step in steps.values())
    ratios: dict[float, list[float]] = {each: [] for each in steps}
    for _ in range(options.rounds):
        baseline = seconds(plain, batch)
        for each, step in steps.items():
            ratios[each].append(seconds(step, batch) / baseline)
    print(f"{'slowdown':<10}{'modeled':>10}{'measured':>10}{'peak of the baseline':>24}")
    for each, step in steps.items():
        plan = step.plan
        peak = plan.dynamic_peak_bytes / plan.baseline_dynamic_peak_bytes
        print(f"{each:<10.0%}{1 + plan.cost:>10.3f}{statistics.median(ratios[each]):>10.3f}{peak:>24.3f}")


def gradients(model, batch) -> list[torch.Tensor]:
    torch.manual_seed(1)
    model.zero_grad()
    model(**batch).loss.backward()
    return [parameter.grad for parameter in model.parameters()]


def seconds(model, batch) -> float:
    start = time.process_time()
    gradients(model, batch)
    return time.process_time() - start


if __name__ == "__main__":
    main()
