"""`ackpt.fits`: its peaks are those that training measures, batch by batch, and its largest batches are the largest."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import measured_step, raises
from dynamic_steps import Words, gpt2
from torch import nn

import ackpt
from ackpt.cli.plan import lengths_in
from ackpt.planner.costs.devices import device
from ackpt.planner.workloads.lengths import Peaks, _Steps, fits_of_plan, shapes
from ackpt.planner.workloads.planned_shapes import PlanConfig, run_plan
from ackpt.planner.workloads.step_request import StepRequest

MIB = 2**20
FIELDS = {"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 100, "bos_token_id": 0, "eos_token_id": 0}


def tokens(size, length):
    return torch.zeros(size, length, dtype=torch.long)


def batch(size, length):
    return {"input_ids": tokens(size, length), "labels": tokens(size, length)}


def measured(model, step, shape) -> int:
    return measured_step(model, step, loss=lambda outputs: outputs.loss, warmup=0, **batch(*shape)).peak_bytes


def test_the_peaks_of_all_batches_equal_the_measured_ones():
    model, draw = gpt2(), random.Random(1)
    lengths = [draw.randint(5, 64) for _ in range(205)]  # the last batch has one sequence
    found = ackpt.fits(model, lengths, batch_size=4, budget="2.5MiB")
    epoch = found.methods["none"].random
    longest = max(length for _, length in epoch.shapes)
    sizes = {0: (2, 4), 1: (2, longest)}
    options = {"dynamic": {"input_ids": sizes, "labels": sizes}}
    full = ackpt.compile(model, policy="full", **options, **batch(4, longest)).plan
    steps = {
        "none": ackpt.compile(model, policy="none", **options, **batch(4, longest)),
        "full": ackpt.compile(model, plan=full, **batch(4, longest)),
        "auto": ackpt.compile(model, budget="2.5MiB", **options, **batch(4, longest)),
    }
    for policy, step in steps.items():
        peaks = found.methods[policy].random
        known = {shape: size for shape, size in zip(peaks.shapes, peaks.bytes) if shape[0] > 1}
        assert len(peaks.shapes) == 52
        assert known == {shape: measured(model, step, shape) for shape in known}
    alone = epoch.shapes[-1]
    assert alone[0] == 1
    assert epoch.bytes[-1] == measured(model, ackpt.compile(model, policy="none", **batch(*alone)), alone)
    none, auto = found.methods["none"], found.methods["auto"]
    assert none.random.exceeding == sum(size > 2.5 * MIB for size in none.random.bytes) > 0
    assert auto.random.exceeding == 0 <= auto.recompute_flops < found.methods["full"].recompute_flops
    assert 0 < auto.added_time < found.methods["full"].added_time


def test_batches_of_one_sequence():
    model = gpt2(n_layer=1)
    lengths = [*range(8, 60)]
    found = ackpt.fits(model, lengths, batch_size=1).methods["none"].sorted
    step = ackpt.compile(model, policy="none", dynamic={name: {1: (2, 64)} for name in batch(1, 8)}, **batch(1, 59))
    assert len(set(found.shapes)) == 52
    assert list(found.bytes) == [measured(model, step, shape) for shape in found.shapes]


@pytest.mark.parametrize(
    ("kind", "number", "expected"),
    [
        ("batch_size", 2, [(2, 5), (2, 9), (1, 4)]),
        ("tokens_per_batch", 10, [(2, 5), (1, 9), (2, 4)]),
        ("packed", 10, [(1, 8), (1, 10), (1, 4)]),
    ],
)
def test_batches_are_formed_in_the_order_of_the_lengths(kind, number, expected):
    assert shapes((kind, number), [3, 5, 9, 1, 4]) == expected


def test_percentiles_are_peaks_of_batches():
    peaks = Peaks(((1, 1),) * 200, tuple(range(200, 0, -1)), None)
    assert [peaks.percentile(percent) for percent in (1, 50, 99, 100)] == [2, 100, 198, 200]
    assert Peaks(((1, 3), (1, 7), (1, 4)), (5, 9, 7), 1).worst == (1, 7)


@pytest.mark.parametrize("kind", ["batch_size", "tokens_per_batch", "packed"])
def test_the_largest_batch_fits_and_the_next_does_not(kind):
    model, draw, budget = Words(), random.Random(0), 160 * 1024
    lengths = [draw.randint(5, 30) for _ in range(200)] + [60]

    def exceeding(policy, number):
        """How many batches exceed the budget in both orders, and whether at most 1 % of the shuffled ones do."""
        method = ackpt.fits(model, lengths, **{kind: number}, batch=tokens).methods[policy]
        in_random, in_sorted = ([peak > budget for peak in epoch.bytes] for epoch in (method.random, method.sorted))
        return sum(in_random) + sum(in_sorted), 100 * sum(in_random) <= len(in_random)

    found = ackpt.fits(model, lengths, **{kind: 4 if kind == "batch_size" else 60}, batch=tokens, budget=budget)
    method = found.methods["none"]
    assert 0 < method.largest <= method.largest_for_99
    assert exceeding("none", method.largest)[0] == 0 < exceeding("none", method.largest + 1)[0]
    assert exceeding("none", method.largest_for_99)[1] and not exceeding("none", method.largest_for_99 + 1)[1]
    assert found.methods["none"].largest <= found.methods["full"].largest <= found.methods["auto"].largest


def test_the_search_needs_no_capture_for_one_sequence(monkeypatch):
    captured, capture = [], _Steps._captured
    monkeypatch.setattr(_Steps, "_captured", lambda steps, shape: captured.append(shape) or capture(steps, shape))
    method = ackpt.fits(Words(), [30] * 21, batch_size=3, batch=tokens, budget="1GiB").methods["none"]
    assert method.largest == 21 and captured == [(3, 30)]  # 21 sequences in batches of 4 leave one


def test_a_batch_fits_a_gpu_as_its_own_plan_says():
    context = device("l4").memory_bytes // MIB - 40  # leaves 40 MiB
    config = PlanConfig(StepRequest("hf:GPT2Config", 1, 1, None, FIELDS), device="l4", context_mib=context)
    method = fits_of_plan(config, [100] * 60, ("batch_size", 4), str).methods["none"]
    for size, is_within in ((method.largest, True), (method.largest + 1, False)):
        config = replace(config, step=StepRequest("hf:GPT2Config", size, 100, None, FIELDS))
        assert run_plan(config).memory.fits is is_within
    planned = run_plan(replace(config, step=StepRequest("hf:GPT2Config", 4, 100, None, FIELDS)))
    assert set(method.random.bytes) == {planned.plan.peak_bytes} and method.random.exceeding == 0


def test_a_model_with_data_is_planned_for_a_gpu_as_its_configuration_is():
    fields = {"n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": 100, "n_positions": 64}
    fields |= {"bos_token_id": 0, "eos_token_id": 0}
    step = StepRequest("hf:GPT2Config", 1, 1, None, fields)
    config = PlanConfig(step, autocast="bfloat16", optimizer="none", device="l4")
    model = gpt2(n_layer=1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.autocast("cpu", torch.bfloat16):
        found = ackpt.fits(model, [40, 9, 33, 21], batch_size=2, device="l4")
    expected = fits_of_plan(config, [40, 9, 33, 21], ("batch_size", 2), str)
    assert found.methods["none"].random.bytes == expected.methods["none"].random.bytes
    assert found == expected
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_model_without_data_has_the_same_peaks_up_to_workspace():
    build = lambda: Words()  # noqa: E731
    lengths = [9, 12, 30, 7]
    real = ackpt.fits(build(), lengths, batch_size=2, batch=tokens)
    without = ackpt.fits(ackpt.from_shapes(build), lengths, batch_size=2, batch=tokens)
    for policy in ("none", "full"):
        pairs = zip(real.methods[policy].random.bytes, without.methods[policy].random.bytes)
        assert all(0 <= one - other < 1024 for one, other in pairs)


def test_the_optimizer_counts():
    plain = ackpt.fits(Words(), [9, 12], batch_size=1, batch=tokens).methods["none"].random.bytes
    adam = ackpt.fits(Words(), [9, 12], batch_size=1, batch=tokens, optimizer="adamw").methods["none"].random.bytes
    parameters = sum(parameter.nbytes for parameter in Words().parameters())
    assert all(more >= less + 2 * parameters for less, more in zip(plain, adam))


@pytest.mark.parametrize(
    ("lengths", "options", "message"),
    [
        ([], {"batch_size": 2}, "there are no lengths"),
        ([3, 0], {"batch_size": 2}, r"lengths\[1\] is 0: a length is a positive integer"),
        ([3, -1], {"batch_size": 2}, r"lengths\[1\] is -1: a length is a positive integer"),
        ([3, 2.5], {"batch_size": 2}, r"lengths\[1\] is 2.5: a length is a positive integer"),
        (["a"], {"batch_size": 2}, r"lengths\[0\] is 'a': a length is a positive integer"),
        ([3, 65], {"batch_size": 2}, r"lengths\[1\] is 65, longer than the 64 positions of the model"),
        ([3, 9], {"tokens_per_batch": 8}, r"lengths\[1\] is 9, which exceeds tokens_per_batch=8"),
        ([3, 9], {"packed": 65}, "packed=65 exceeds the 64 positions of the model"),
        ([3], {}, "no way to make batches: give one of batch_size, tokens_per_batch and packed"),
        ([3], {"batch_size": 2, "packed": 9}, "batch_size and packed to make batches: give one of"),
        ([3], {"batch_size": 0}, "batch_size must be an integer of at least 1, got 0"),
        (torch.tensor([3.0]), {"batch_size": 1}, r"lengths\[0\] is 3.0: a length is a positive integer"),
        (torch.tensor([[3]]), {"batch_size": 1}, r"lengths\[0\] is \[3\]: a length is a positive integer"),
        ([3], {"batch_size": 1, "budget": 0.5}, "0.5 is a fraction, which bounds every batch by its own baseline"),
        ([3], {"batch_size": 1, "budget": "1GiB reserved"}, "bounds reserved bytes: give allocated ones, as in '1GiB'"),
        ([3], {"batch_size": 1, "device": "l5"}, "l5"),
    ],
)
def test_bad_arguments_are_refused(lengths, options, message):
    raises(ValueError, message, lambda: ackpt.fits(gpt2(), lengths, **options))


def test_lengths_may_be_any_iterable():
    lengths = [9, 12, 30, 7]
    expected = ackpt.fits(Words(), lengths, batch_size=2, batch=tokens)
    for given in (torch.tensor(lengths), iter(lengths), np.array(lengths)):
        assert ackpt.fits(Words(), given, batch_size=2, batch=tokens) == expected
    with pytest.raises(TypeError, match=r"lengths must be the lengths of all sequences, .* got 9"):
        ackpt.fits(Words(), 9, batch_size=2, batch=tokens)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda size, length: tokens(2, length), r"every number of sequences, such as batch\(1, 9\) and batch\(2, 9\)"),
        (lambda size, length: tokens(size, 9), r"every length, such as batch\(1, 9\) and batch\(1, 1033\)"),
    ],
)
def test_a_batch_that_does_not_use_its_arguments_is_refused(make, named):
    with pytest.raises(
        ValueError, match=f"batch= returns arguments of the same sizes for {named}: use both of its arguments"
    ):
        ackpt.fits(Words(), [3, 9], batch_size=2, batch=make)


def test_inputs_of_a_fixed_size_need_no_length():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 6 * 6, 10))
    images = lambda size, _: torch.zeros(size, 3, 8, 8)  # noqa: E731
    found = ackpt.fits(model, [1] * 100, batch_size=8, batch=images, budget=200_000).methods["none"]
    assert set(found.random.shapes) == {(8, 1), (4, 1)} and 8 < found.largest < 100
    graph = ackpt.trace(model, images(found.largest, 1))
    assert (
        ackpt.plan(graph).peak_bytes
        <= 200_000
        < ackpt.plan(ackpt.trace(model, images(found.largest + 1, 1))).peak_bytes
    )
    with pytest.raises(ValueError, match="same sizes for every number of sequences"):
        ackpt.fits(model, [1] * 9, batch_size=2, batch=lambda *_: images(2, 1))


def test_padded_batches_and_packed_rows_use_their_arguments():
    padded = ackpt.fits(Words(), [3, 9], batch_size=1, batch=lambda size, length: tokens(size, -(-length // 16) * 16))
    assert len(set(padded.methods["none"].random.bytes)) == 1
    ackpt.fits(Words(), [3, 9], packed=16, batch=lambda _, length: tokens(1, length))


def test_the_smallest_budget_for_all_batches():
    lengths = [5, 9, 60, 12]
    most = max(ackpt.fits(Words(), lengths, batch_size=2, batch=tokens).methods["none"].random.bytes)
    found = ackpt.fits(Words(), lengths, batch_size=2, batch=tokens, budget=most // 2)
    least = found.smallest_budget
    assert most // 2 < least < most and found.to_json()["smallest_budget"] == least
    assert "the budget is infeasible for 1 of the random batches, which count with their lowest peak" in str(found)
    assert "the smallest feasible budget for all batches is" in str(found) and f"({least} bytes)" in str(found)
    for budget, smallest, exceeding in ((least, None, 0), (least - 1, least, 1)):
        found = ackpt.fits(Words(), lengths, batch_size=2, batch=tokens, budget=budget)
        assert (found.smallest_budget, found.methods["auto"].random.exceeding) == (smallest, exceeding)


def test_a_model_with_unknown_arguments_is_refused():
    with pytest.raises(TypeError, match="Words is not a model of transformers.* give batch=, a function"):
        ackpt.fits(Words(), [3], batch_size=1)


def test_files_of_lengths_are_read(tmp_path):
    path = tmp_path / "lengths"
    path.write_text("12\n\n7\n")
    numbers, name_of = lengths_in(path)
    assert numbers == [12, 7] and name_of(1) == f"line 3 of {path}"
    path.write_text("12\n7\n", encoding="utf-8-sig")
    assert lengths_in(path)[0] == [12, 7]
    path.write_text("[12, 7]")
    numbers, name_of = lengths_in(path)
    assert numbers == [12, 7] and name_of(1) == f"entry 2 of {path}"
