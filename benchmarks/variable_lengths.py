"""A language model on batches padded to the longest of 30 lengths: time of planning and training, against eager.

    python benchmarks/variable_lengths.py --budget 110MiB

Prints, per length, the plan of its first step, the seconds of a step, and what the first step takes beyond the next one
in which nothing is planned, and where the time of all first steps goes, relative to eager training. Of the
recomputation, the lower bounds of all lengths are the part that the budget forces on every schedule. Eager and planned
steps are interleaved, length by length. Results are bit-equal, which is checked. Seconds are those of the processor
(`time.process_time`), which other processes disturb less; use one thread (``OMP_NUM_THREADS=1``), because the threads
of a process add up.
"""

from __future__ import annotations

import argparse
import logging
import math
import random
import statistics
import time
import warnings
from collections.abc import Callable

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import ackpt
from ackpt.dynamic_plans import DynamicPlans
from ackpt.running import dynamic_step, variants


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
    start = time.process_time()
    step = ackpt.compile(model, **batch(lengths[0], given.mask), budget=budget)
    step.prepare(**batch(lengths[1], given.mask))
    print(f"first two lengths captured and planned in {time.process_time() - start:.1f} s")
    compiled = timed_calls(dynamic_step, "compiled_schedule")
    measured = timed_calls(variants, "measured_baseline")
    searched = timed_calls(DynamicPlans, "_search")
    eager = again = recomputed = forced = first = compiling = 0.0
    lines: dict[int, tuple[float, str, Callable]] = {}
    beyond: dict[bool, list[float]] = {False: [], True: []}  # by whether a schedule was compiled
    schedules = 0  # compiled in first steps
    for length in lengths:
        inputs = batch(length, given.mask)
        events, before = len(step.history), len(compiled)
        model_seconds, expected = timed(model, model, inputs)
        new_seconds, gradients = timed(model, step, inputs)
        is_new, newly = len(step.history) > events, compiled[before:]
        make_plan = step._ackpt_planned._last[-1].make_plan  # of the first step; later ones may run a cheaper schedule
        known_seconds = math.inf
        while math.isinf(known_seconds):
            before = len(step.history)
            seconds, _ = timed(model, step, inputs)
            known_seconds = seconds if len(step.history) == before else math.inf
        model_seconds = min(timed(model, model, inputs)[0], model_seconds)
        known_seconds = min(known_seconds, new_seconds)
        eager, again, first = eager + model_seconds, again + known_seconds, first + new_seconds
        compiling, schedules = compiling + sum(newly), schedules + len(newly)
        if is_new:
            beyond[bool(newly)].append(new_seconds - known_seconds)
        kinds = [event.kind for event in step.history[events:]] + ["compiled"] * len(newly)
        lines[length] = (
            model_seconds,
            f"length {length:4}: {', '.join(kinds) or 'known':14}  same {all(map(torch.equal, expected, gradients))}, "
            f"eager {model_seconds:.3f} s, planned {known_seconds:.3f} s, "
            f"first time +{1000 * (new_seconds - known_seconds):.0f} ms",
            make_plan,
        )
    for model_seconds, line, make_plan in lines.values():  # afterwards, because a description in full takes time
        plan = make_plan()
        bound = plan.lower_bound or 0.0
        recomputed, forced = recomputed + plan.cost * model_seconds, forced + bound * model_seconds
        print(f"{line}, cost {plan.cost:.1%}, lower bound {bound:.1%}, peak {plan.peak_bytes:,}")
    rows = {
        "eager steps": eager,
        "recomputation": again - eager,
        "- by the plans": recomputed,
        "- lower bound of any schedule": forced,
        f"compiling {schedules} schedules": compiling,
        "measuring the model's own step once": sum(measured),
        f"searching {len(searched)} times": sum(searched),
        "choosing schedules, other": first - again - compiling - sum(measured) - sum(searched),
        "all first steps": first,
    }
    for name, seconds in rows.items():
        print(f"{name:40} {seconds:6.2f} s {seconds / eager:6.3f}")
    for is_compiled, seconds in beyond.items():
        if seconds:
            schedule = "newly compiled" if is_compiled else "known"
            print(f"a new length, {schedule} schedule: median {1000 * statistics.median(seconds):.0f} ms")


def timed_calls(owner, name: str) -> list[float]:
    """The seconds of every later call of a function of a module or class."""
    function, seconds = getattr(owner, name), []

    def call(*args, **kwargs):
        start = time.process_time()
        try:
            return function(*args, **kwargs)
        finally:
            seconds.append(time.process_time() - start)

    setattr(owner, name, call)
    return seconds


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
    start = time.process_time()
    call(**inputs).loss.backward()
    seconds = time.process_time() - start
    return seconds, [parameter.grad for parameter in model.parameters()]


if __name__ == "__main__":
    main()
