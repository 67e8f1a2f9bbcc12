"""A language model on batches padded to the longest of 30 lengths: time of planning and training, against eager.

    python benchmarks/variable_lengths.py --budget 110MiB

Prints, per length, the plan of its first step, the seconds of that step and of the model's own first step of that
length, and where the time of all first steps goes, relative to eager training: a loop in which every length occurs
once. Which of the two comes first alternates from length to length, because the first one also pays for memory that
the process gets from the system. Of the recomputation, the lower bounds of all lengths are the part that the budget
forces on every schedule. Results are bit-equal, which is checked. Seconds are those of the processor
(`time.process_time`), which other processes disturb less; use one thread (``OMP_NUM_THREADS=1``), because the threads
of a process add up.
"""

from __future__ import annotations

import argparse
import logging
import random
import statistics
import time
import warnings
from collections.abc import Callable

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import ackpt
from ackpt.planner.step import plans, variants
from ackpt.planner.step.plans import Plans


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
    compiled = timed_calls(plans, "compiled_schedule")
    searched = timed_calls(Plans, "_search")
    chosen = timed_calls(variants.Variants, "serving")
    eager = first = recomputed = forced = 0.0
    lines: list[tuple[float, str, Callable]] = []
    beyond: dict[bool, list[float]] = {False: [], True: []}  # by whether a schedule was compiled
    for at, length in enumerate(lengths):
        inputs = batch(length, given.mask)
        events, before, chosen_before = len(step.history), len(compiled), sum(chosen)
        calls = [("eager", model), ("planned", step)]
        seconds, gradients = {}, {}
        for name, call in calls if at % 2 else reversed(calls):
            seconds[name], gradients[name] = timed(model, call, inputs)
        make_plan = step._ackpt_variants._last[-1].make_plan
        eager, first = eager + seconds["eager"], first + seconds["planned"]
        newly, choosing = compiled[before:], sum(chosen) - chosen_before
        if len(step.history) > events:
            beyond[bool(newly)].append(choosing)
        kinds = [event.kind for event in step.history[events:]] + ["compiled"] * len(newly)
        is_same = all(map(torch.equal, gradients["eager"], gradients["planned"]))
        line = (
            f"length {length:4}: {', '.join(kinds) or 'known':14}  same {is_same}, eager {seconds['eager']:.3f} s, "
            f"planned {seconds['planned']:.3f} s, of it choosing and compiling {1000 * choosing:.0f} ms"
        )
        lines.append((seconds["eager"], line, make_plan))
    for model_seconds, line, make_plan in lines:  # afterwards, because a description in full takes time
        plan = make_plan()
        bound = plan.lower_bound or 0.0
        recomputed, forced = recomputed + plan.cost * model_seconds, forced + bound * model_seconds
        print(f"{line}, cost {plan.cost:.1%}, lower bound {bound:.1%}, peak {plan.peak_bytes:,}")
    others = sum(chosen) - sum(compiled) - sum(searched)
    rows = {
        "eager steps": eager,
        "planned steps": first,
        f"- compiling {len(compiled)} schedules": sum(compiled),
        f"- searching {len(searched)} times": sum(searched),
        "- choosing schedules, other": others,
        "- recomputation of the plans, by their cost": recomputed,
        "  of it lower bound of any schedule": forced,
    }
    for name, seconds in rows.items():
        print(f"{name:44} {seconds:6.2f} s {seconds / eager:6.3f}")
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
