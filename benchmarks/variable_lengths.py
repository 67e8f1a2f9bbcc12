"""A language model on batches padded to the longest of 30 lengths: time of planning and training, against eager.

    python benchmarks/variable_lengths.py --budget 110MiB

Prints, per length, the plan and the time of the step beyond the model's own, and the totals of one process: eager and
planned steps are interleaved, length by length. Results are bit-equal, which is checked; times are for this machine.
"""

from __future__ import annotations

import argparse
import logging
import random
import time
import warnings

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import ackpt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", default="110MiB")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--lengths", type=int, default=30)
    parser.add_argument("--mask", action="store_true", help="with an attention mask of ones and zeros")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=given.layers, n_embd=given.width, n_head=4, vocab_size=2048, n_positions=512, use_cache=False
    )
    model = GPT2LMHeadModel(config)
    lengths = random.Random(0).sample(range(32, 257), given.lengths)
    budget = float(given.budget) if given.budget.replace(".", "").isdecimal() else given.budget
    start = time.perf_counter()
    step = ackpt.compile(model, **batch(lengths[0], given.mask), budget=budget)
    step.prepare(**batch(lengths[1], given.mask))
    first = time.perf_counter() - start
    totals, known = {"eager": 0.0, "planned": 0.0}, {"eager": 0.0, "planned": 0.0}
    print(f"first two lengths captured and planned in {first:.1f} s")
    for length in lengths:
        inputs = batch(length, given.mask)
        events = len(step.history)
        seconds, gradients = {}, {}
        for name, call in (("eager", model), ("planned", step)):
            seconds[name], gradients[name] = timed(model, call, inputs)
            totals[name] += seconds[name]
        same = all(torch.equal(one, other) for one, other in zip(*gradients.values()))
        again = {name: timed(model, call, inputs)[0] for name, call in (("eager", model), ("planned", step))}
        known = {name: known[name] + again[name] for name in again}
        kinds = ", ".join(event.kind for event in step.history[events:]) or "known"
        new = seconds["planned"] - again["planned"]
        print(
            f"length {length:4}: {kinds:16} cost {step.plan.cost:6.1%}, peak {step.plan.peak_bytes:,}, same {same}, "
            f"eager {again['eager']:.3f} s, planned {again['planned']:.3f} s, first time +{1000 * new:.0f} ms"
        )
    for name, seconds in (("first time", totals), ("again", known)):
        ratio = seconds["planned"] / seconds["eager"]
        print(
            f"{len(lengths)} lengths, {name}: eager {seconds['eager']:.1f} s, planned {seconds['planned']:.1f} s, "
            f"ratio {ratio:.2f}"
        )


def batch(length: int, with_mask: bool) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 2048, (8, length))
    if not with_mask:
        return {"input_ids": ids, "labels": ids}
    mask = torch.ones_like(ids)
    mask[0, length // 2 :] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids}


def timed(model, call, inputs):
    model.zero_grad(set_to_none=True)
    torch.manual_seed(0)
    start = time.perf_counter()
    call(**inputs).loss.backward()
    seconds = time.perf_counter() - start
    return seconds, [parameter.grad for parameter in model.parameters()]


if __name__ == "__main__":
    main()
