"""``chunked_cross_entropy`` equals F.cross_entropy of hidden @ weight.T and never allocates all logits."""

import functools
import itertools

import pytest
import torch
import torch.nn.functional as F
from conftest import raises, raises_cleanly
from torch.profiler import ProfilerActivity, profile

import ackpt


def inputs(rows=13, dim=8, vocabulary=11, dtype=torch.float64, ignored=(2, 7), ignore_index=-100):
    torch.manual_seed(0)
    hidden = torch.randn(rows, dim, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocabulary, dim, dtype=dtype, requires_grad=True)
    targets = torch.randint(0, vocabulary, (rows,))
    targets[[row for row in ignored if row < rows]] = ignore_index
    return hidden, weight, targets


def full(hidden, weight, targets, chunks=None, **options):
    logits = F.linear(hidden, weight)
    return F.cross_entropy(logits if logits.dtype == torch.float64 else logits.float(), targets, **options)


def loss_and_gradients(loss_of, hidden, weight, targets, **options):
    """The loss and both gradients."""
    hidden, weight = (tensor.detach().requires_grad_(tensor.requires_grad) for tensor in (hidden, weight))
    loss = loss_of(hidden, weight, targets, **options)
    if loss.requires_grad:
        (loss * torch.linspace(1, 2, loss.numel(), dtype=loss.dtype).view(loss.shape)).sum().backward()
    return [loss.detach(), hidden.grad, weight.grad]


def assert_close(made, **options):
    expected = loss_and_gradients(full, *made, **{key: value for key, value in options.items() if key != "chunks"})
    found = loss_and_gradients(ackpt.chunked_cross_entropy, *made, **options)
    for one, other in zip(expected, found):
        assert (one is None) == (other is None)
        if one is not None:
            assert one.dtype == other.dtype
            torch.testing.assert_close(one, other, equal_nan=True)


OPTIONS = list(itertools.product(["mean", "sum", "none"], [-100, 3, 0], [1, 2, 5, 13, 100]))


@pytest.mark.parametrize(("reduction", "ignore_index", "chunks"), OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_to_torch(reduction, ignore_index, chunks, dtype):
    made = inputs(dtype=dtype, ignore_index=ignore_index)
    for label_smoothing in (0.0, 0.1, 1.0):
        options = {"reduction": reduction, "ignore_index": ignore_index, "label_smoothing": label_smoothing}
        assert_close(made, **options, chunks=chunks)


@pytest.mark.parametrize("needs", [(True, False), (False, True), (False, False)])
def test_only_the_gradients_that_are_needed(needs):
    hidden, weight, targets = inputs()
    assert_close((hidden.requires_grad_(needs[0]), weight.requires_grad_(needs[1]), targets))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("rows", [4, 0])
def test_all_rows_ignored(reduction, rows):
    """torch's loss is nan for the mean of nothing; its gradients are zero."""
    made = inputs(rows=rows, ignored=range(4))
    expected, found = (
        loss_and_gradients(each, *made, reduction=reduction) for each in (full, ackpt.chunked_cross_entropy)
    )
    assert expected[0].isnan() == found[0].isnan() == (reduction == "mean")
    for one, other in zip(expected[1:], found[1:]):
        assert torch.equal(one, other) and other.abs().sum() == 0


def test_large_logits_do_not_overflow():
    hidden, weight, targets = inputs(dtype=torch.float32)
    made = ((hidden * 1e4).detach().requires_grad_(), weight, targets)
    assert_close(made)
    assert all(value.isfinite().all() for value in loss_and_gradients(ackpt.chunked_cross_entropy, *made))


@pytest.mark.parametrize("hidden_dtype", [torch.float32, torch.bfloat16])
def test_equal_to_torch_under_autocast(hidden_dtype):
    """The matrix products run in bf16 as F.linear's would; loss and softmax in fp32."""
    hidden, weight, targets = inputs(dtype=torch.float32, rows=64, dim=32, vocabulary=50)
    hidden = hidden.detach().to(hidden_dtype).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        expected = loss_and_gradients(full, hidden, weight, targets)
        found = loss_and_gradients(ackpt.chunked_cross_entropy, hidden, weight, targets)
    assert found[0].dtype == torch.float32 and found[1].dtype == hidden_dtype and found[2].dtype == torch.float32
    torch.testing.assert_close(expected[0], found[0], rtol=1e-6, atol=0)
    exact = loss_and_gradients(
        full, hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_(), targets
    )
    for place in (1, 2):
        error = (found[place].double() - exact[place]).norm() / exact[place].norm()
        torchs = (expected[place].double() - exact[place]).norm() / exact[place].norm()
        assert error <= 1.5 * torchs + 1e-6


def test_bfloat16_without_autocast_is_close_to_torch():
    hidden, weight, targets = inputs(dtype=torch.bfloat16, rows=64, dim=32, vocabulary=50)
    found = loss_and_gradients(ackpt.chunked_cross_entropy, hidden, weight, targets)
    expected = loss_and_gradients(full, hidden, weight, targets)
    assert found[0].dtype == torch.float32 and found[1].dtype == found[2].dtype == torch.bfloat16
    for one, other in zip(expected, found):
        torch.testing.assert_close(one.float(), other.float(), rtol=3e-2, atol=3e-3)


def test_a_second_backward_needs_retain_graph():
    hidden, weight, targets = inputs()
    loss = ackpt.chunked_cross_entropy(hidden, weight, targets)
    loss.backward(retain_graph=True)
    first = hidden.grad.clone(), weight.grad.clone()
    (loss * 3).backward()
    torch.testing.assert_close(hidden.grad, 4 * first[0])
    torch.testing.assert_close(weight.grad, 4 * first[1])
    raises(RuntimeError, "second time", loss.backward)


@pytest.mark.parametrize("inside", [True, False])
def test_equal_to_torch_with_a_checkpointed_model(inside):
    hidden, weight, targets = inputs()
    expected = loss_and_gradients(lambda h, w, t: full(h.sin(), w, t), hidden, weight, targets)

    def loss(hidden, weight, targets):
        if inside:
            return ackpt.checkpoint(lambda h: ackpt.chunked_cross_entropy(h.sin(), weight, targets), hidden)
        return ackpt.chunked_cross_entropy(ackpt.checkpoint(torch.sin, hidden), weight, targets)

    for one, other in zip(expected, loss_and_gradients(loss, hidden, weight, targets)):
        torch.testing.assert_close(one, other)


def test_strided_inputs_are_accepted():
    hidden, weight, targets = inputs(rows=12)
    assert_close((hidden.detach().t().contiguous().t().requires_grad_(), weight, targets.flip(0)), chunks=5)
    assert_close((hidden, weight.detach().t().contiguous().t().requires_grad_(), targets), chunks=5)
    assert_close((hidden.detach()[::2].requires_grad_(), weight, targets[::2]), chunks=4)


def test_nothing_as_large_as_the_logits_is_allocated():
    rows, vocabulary, chunks = 256, 2048, 16
    made = inputs(rows=rows, vocabulary=vocabulary, dtype=torch.float32)

    def peak(loss_of):
        loss_and_gradients(loss_of, *made)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            loss_and_gradients(loss_of, *made)
        sizes, alive, highest = [], 0, 0
        for event in sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
            if event.name() == "[memory]":
                sizes.append(event.nbytes())
                alive += event.nbytes()
                highest = max(highest, alive)
        return max(sizes), highest

    logits = rows * vocabulary * 4
    gradients = 2 * (rows + vocabulary) * 8 * 4
    largest, highest = peak(lambda *args: ackpt.chunked_cross_entropy(*args, chunks))
    assert largest == logits // chunks
    assert highest <= 3 * logits // chunks + gradients
    assert peak(full)[1] >= 2 * logits


ERRORS = {
    "hidden": (lambda h, w, t: (h[None], w, t), {}, ValueError, r"hidden \[N, D\].* got \[1, 13, 8\]"),
    "weight": (lambda h, w, t: (h, w.t(), t), {}, ValueError, r"weight \[V, D\].*\[8, 11\]"),
    "targets": (lambda h, w, t: (h, w, t[None]), {}, ValueError, r"targets \[N\]; got .*\[1, 13\]"),
    "rows": (lambda h, w, t: (h, w, t[1:]), {}, ValueError, "13 rows but there are 12 targets"),
    "integers": (lambda h, w, t: (h.long(), w, t), {}, TypeError, "hidden must be floating point"),
    "probabilities": (lambda h, w, t: (h, w, t.double()), {}, TypeError, "targets int64; got .*float64"),
    "dtypes": (lambda h, w, t: (h.float(), w, t), {}, TypeError, "hidden is torch.float32 but weight is torch.float64"),
    "no chunk": (lambda h, w, t: (h, w, t), {"chunks": 0}, ValueError, "at least 1, got 0"),
    "fraction": (lambda h, w, t: (h, w, t), {"chunks": 1.5}, ValueError, "whole number .* got 1.5"),
    "truth": (lambda h, w, t: (h, w, t), {"chunks": True}, ValueError, "got True"),
    "reduction": (lambda h, w, t: (h, w, t), {"reduction": "all"}, ValueError, "of mean, sum, none, got 'all'"),
    "smoothing": (lambda h, w, t: (h, w, t), {"label_smoothing": 2}, ValueError, "from 0 to 1, got 2"),
    "too large": (lambda h, w, t: (h, w, t.where(t < 0, 11)), {}, IndexError, "from 11 to 11, outside of the 11 rows"),
    "below zero": (lambda h, w, t: (h, w, t.where(t >= 0, -1)), {}, IndexError, "classes from -1 to 9"),
    "other ignored": (lambda h, w, t: (h, w, t), {"ignore_index": -1}, IndexError, "-100 to .*hold ignore_index"),
}


@pytest.mark.parametrize(("change", "options", "error", "message"), ERRORS.values(), ids=ERRORS)
def test_invalid_arguments_are_refused(change, options, error, message):
    made = change(*inputs())
    with raises_cleanly(error, message):
        ackpt.chunked_cross_entropy(*made, **options)


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
def test_second_derivatives_are_refused():
    hidden, weight, targets = inputs()
    loss = ackpt.chunked_cross_entropy(hidden, weight, targets)
    grad, backward = functools.partial(torch.autograd.grad, loss, hidden), loss.backward
    for differentiate in (grad, backward):
        with raises_cleanly(ackpt.CheckpointError, "create_graph=True .* use F.cross_entropy"):
            differentiate(create_graph=True)
    assert hidden.grad is None
