"""Offloaded steps have the gradients of the baseline; reloaded tensors are unchanged; changes in place are refused."""

import contextlib
import threading

import pytest
import torch
from conftest import Case, assert_same, model_of, plain_call, raises, run_step
from offload_helpers import MODES, SIDE, SIZE, assert_empty, blocks, counts, fresh, matrix, offload, region
from torch import nn

import ackpt
from ackpt.models.transformer import Transformer, TransformerConfig

WAYS = ["checkpoint", "sequential", "applied", "saved_tensors"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tmp_path_factory.mktemp("offload"))


def through(way, chosen):
    """A call of an ``nn.Sequential`` whose saved tensors, or boundaries, are offloaded."""

    def call(model, x):
        if way == "checkpoint":
            for layer in model:
                x = ackpt.checkpoint(layer, x, offload=chosen)
            return x
        if way == "sequential":
            return ackpt.checkpoint_sequential(model, len(model), x, offload=chosen)
        if way == "applied":
            ackpt.apply_activation_checkpointing(model, offload=chosen)
            return model(x)
        with chosen:
            return model(x)

    return call


def chain():
    model = blocks()
    return Case(model, (matrix().requires_grad_(),))


@pytest.mark.parametrize("keep_last", [0, 1])
@pytest.mark.parametrize("store", ["host", "disk"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mode", MODES)
def test_gradients_are_those_of_the_plain_step(mode, way, store, keep_last, folder):
    options = {"folder": folder} if store == "disk" else {}
    chosen = fresh(mode, store, keep_last=keep_last, **options)
    assert_same(run_step(chain, plain_call), run_step(chain, through(way, chosen)))
    out, back = counts(chosen.engine, "copies_out", "copies_in").values()
    # Regions: the first input is the caller's own leaf, the last segment of a chain is no region.
    regions = {"checkpoint": 3, "applied": 3, "sequential": 2}.get(way)
    assert out == regions - keep_last if regions else out > 8
    assert back > 0
    assert_empty(chosen.engine)


def cells(cell):
    """Recurrent cells change parts of one storage in place, each part with a version of its own."""

    def forward(self, x):
        state = (x, x) if isinstance(self.cell, nn.LSTMCell) else x
        for _ in range(3):
            state = self.cell(x, state)
        return state

    return model_of(forward, cell=cell)


def packed():
    return model_of(
        lambda self, x: self.model(x, torch.tensor([0, 7, 20, SIDE], dtype=torch.int32), 13),
        model=Transformer(TransformerConfig(dim=SIDE, ff_dim=48, layers=2, head_dim=8)),
    )


MODELS = {
    "lstm cell": lambda: cells(nn.LSTMCell(SIDE, SIDE)),
    "gru cell": lambda: cells(nn.GRUCell(SIDE, SIDE)),
    "lstm": lambda: nn.LSTM(SIDE, SIDE, 2, dropout=0.1),
    "transformer": packed,
    "encoder": lambda: nn.TransformerEncoderLayer(SIDE, 2, 48),
    "convolutions": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 4, 4)), nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2)
    ),
    "in place": lambda: nn.Sequential(nn.Linear(SIDE, SIDE), nn.ReLU(True), nn.Linear(SIDE, SIDE), nn.SiLU(True)),
    "embedding": lambda: nn.Sequential(
        nn.Flatten(), model_of(lambda self, x: (4 + 4 * x).long()), nn.Embedding(9, SIDE), nn.LayerNorm(SIDE), nn.GELU()
    ),
}


@pytest.mark.parametrize("keep_last", [0, 2])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("mode", MODES)
def test_gradients_of_models(mode, name, keep_last):
    chosen = offload(mode, keep_last=keep_last)

    def build():
        return Case(MODELS[name](), (matrix(),))

    assert_same(run_step(build, plain_call), run_step(build, through("saved_tensors", chosen)))
    assert_empty(chosen.engine)


class Saves(torch.autograd.Function):
    """Saves a tensor that its gradient does not need, and exposes the reloaded tensor."""

    @staticmethod
    def forward(ctx, x, tensor, found):
        ctx.save_for_backward(tensor)
        ctx.found = found
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.found.append(ctx.saved_tensors[0])
        return grad, None, None


def numbers(count, dtype=torch.float32):
    return torch.arange(count).remainder(120).to(dtype)


def complex_numbers(count):
    return torch.complex(numbers(count), numbers(count).neg())


KINDS = {
    "plain": lambda: numbers(100),
    "transposed": lambda: numbers(60).reshape(6, 10).t(),
    "every other": lambda: numbers(101)[1::2],
    "at an odd offset": lambda: numbers(1001)[777:],
    "column": lambda: numbers(90).reshape(9, 10)[:, 3],
    "expanded": lambda: numbers(7)[2:3].expand(5, 4, 1),
    "overlapping": lambda: numbers(50).as_strided((6, 4), (3, 2), 5),
    "channels last": lambda: numbers(120).reshape(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "permuted": lambda: numbers(120).reshape(2, 3, 4, 5).permute(3, 0, 2, 1),
    "no dimension": lambda: numbers(100)[99],
    "zero size": lambda: numbers(0).reshape(3, 0),
    "empty slice": lambda: numbers(10)[4:4],
    "bool": lambda: numbers(77).gt(30)[5:],
    "int8": lambda: numbers(77, torch.int8)[70:],
    "int64": lambda: numbers(77, torch.int64)[3:8],
    "uint8 as int32": lambda: numbers(400, torch.uint8).view(torch.int32)[90:],
    "bfloat16": lambda: numbers(77, torch.bfloat16)[13:],
    "float64": lambda: numbers(77, torch.float64)[::3],
    "float8": lambda: numbers(77).to(torch.float8_e4m3fn)[1:],
    "complex": lambda: complex_numbers(50)[45:],
    "complex128": lambda: complex_numbers(50).to(torch.complex128)[7:9],
    "conjugated": lambda: complex_numbers(50)[1:].conj(),
    "negated": lambda: complex_numbers(50).conj().imag[3:],
    "conjugated and negated": lambda: torch._neg_view(complex_numbers(50)).conj(),
    "real part": lambda: torch.view_as_real(complex_numbers(50))[40:],
    "diagonal": lambda: numbers(100).reshape(10, 10).diagonal(),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("store", ["host", "disk"])
@pytest.mark.parametrize("mode", MODES)
def test_every_kind_of_tensor_is_reloaded_unchanged(mode, store, kind, folder):
    chosen = fresh(mode, store, **({"folder": folder} if store == "disk" else {}))
    x, found = torch.zeros(1, requires_grad=True), []
    with chosen:
        y = Saves.apply(Saves.apply(x, KINDS[kind](), found), matrix(), [])
        assert counts(chosen.engine, "copies_out")["copies_out"] == 1 + min(1, KINDS[kind]().numel())
    chosen.engine.reset_stats()
    y.backward()
    (back,), expected = found, KINDS[kind]()
    assert (back.dtype, back.shape, back.stride()) == (expected.dtype, expected.shape, expected.stride())
    assert (back.is_conj(), back.is_neg()) == (expected.is_conj(), expected.is_neg())
    if expected.dtype == torch.float8_e4m3fn:
        back, expected = back.view(torch.uint8), expected.view(torch.uint8)
    assert torch.equal(back, expected) and torch.equal(back.resolve_conj(), expected.resolve_conj())
    again = mode == "sync"  # the matrix that was saved behind it; else its source is still here
    assert counts(chosen.engine, "copies_in") == {"copies_in": again + min(1, expected.numel())}
    assert counts(chosen.engine, "bytes_in")["bytes_in"] <= again * SIZE + expected.untyped_storage().nbytes()
    del y
    assert_empty(chosen.engine)


def test_sparse_tensors_and_subclasses_stay():
    class Sub(torch.Tensor):
        pass

    chosen = fresh("sync")
    x, found = torch.zeros(1, requires_grad=True), []
    kinds = [lambda: matrix().to_sparse(), lambda: matrix().to_sparse_csr(), lambda: matrix().as_subclass(Sub)]
    for make in kinds[:1] + kinds[2:]:
        with chosen:
            y = Saves.apply(x, make(), found)
        y.backward()
    assert [tensor.layout for tensor in found] == [torch.sparse_coo, torch.strided]
    assert torch.equal(found[0].to_dense(), matrix()) and torch.equal(found[1], matrix())
    assert counts(chosen.engine, "copies_out") == {"copies_out": 0}


TRANSFORMS = {
    "jvp": lambda f, x: sum(part.square().sum() for part in torch.func.jvp(f, (x,), (x.cos(),))),
    "vmap": lambda f, x: torch.func.vmap(f)(x).square().sum(),
    "jacfwd": lambda f, x: torch.func.vmap(torch.func.jacfwd(f))(x[:4]).square().sum(),
}


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_tensors_of_torch_func_transforms_stay_on_the_device(name, mode):
    model = model_of(
        lambda self, x: self.transform(self.layers, x),
        layers=nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)),
        transform=TRANSFORMS[name],
    )
    x, results = torch.randn(64, 16), []
    for saving in (contextlib.nullcontext(), ackpt.offload_saved_tensors(mode, min_bytes=0)):
        model.zero_grad()
        with saving:
            loss = model(x)
        loss.backward()
        results.append([each.grad for each in model.parameters() if each.grad is not None])
    assert all(map(torch.equal, *results))


CHANGES = {
    "the saved tensor": lambda h, y: h.add_(1),
    "a view of it": lambda h, y: h[0].mul_(2),
    "a detached view": lambda h, y: h.detach().zero_(),
    "its result": lambda h, y: y.detach().zero_(),
}


@pytest.fixture
def gate(monkeypatch):
    opened, move = threading.Event(), ackpt.offloading.transport._move

    def waits(*args):
        opened.wait()
        move(*args)

    monkeypatch.setattr(ackpt.offloading.transport, "_move", waits)
    yield opened
    opened.set()


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("keep_last", [0, 1, 2])
def test_a_change_in_place_is_refused_or_gradients_are_right(mode, change, kept, keep_last):
    x = matrix().requires_grad_()
    with offload(mode, keep_last=keep_last):
        h = x * 2
        y = h.sin()
        z = y.exp()
    with torch.no_grad():
        CHANGES[change](h, y)
    if not kept:
        del h, y
    refused_or_right(z.sum(), x)
    h = y = z = None
    assert_empty(offload(mode).engine)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("release", [0, 2])
def test_a_change_in_place_during_the_copy_is_refused_or_gradients_are_right(gate, change, release):
    x = matrix().requires_grad_()
    with offload("async", lookahead_bytes=1 << 20):
        h = x * 2
        y = h.sin()
        z = y.exp()
        with torch.no_grad():
            CHANGES[change](h, y)
        gate.set()
        del h, y
        for _ in range(release):
            z = z * 1
    refused_or_right(z.sum(), x)
    del z
    assert_empty(offload("async").engine)


def refused_or_right(loss, x):
    try:
        loss.backward()
    except (ackpt.OffloadError, ackpt.CheckpointError) as error:
        assert "in place" in str(error) or "in-place" in str(error)
    else:
        other = x.detach().clone().requires_grad_()
        (other * 2).sin().exp().sum().backward()
        assert torch.equal(x.grad, other.grad)


@pytest.mark.parametrize("guarded", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_an_input_of_a_region_changed_in_place_is_refused_or_gradients_are_right(mode, guarded):
    x = matrix().requires_grad_()
    with ackpt.guarantees(unchanged=guarded):
        h = x * 2
        y = region(mode)(torch.sin, h)
        z = region(mode)(torch.exp, y).sum()
    with torch.no_grad():
        h.add_(1)
    refused_or_right(z, x)
    del y, z
    assert_empty(offload(mode).engine)


def test_a_tensor_that_stays_and_is_changed_in_place_is_refused():
    x = matrix().requires_grad_()
    with offload("sync", min_bytes=1 << 20):
        h = x * 2
        z = h.sin().sum()
    with torch.no_grad():
        h.add_(1)
    raises(ackpt.OffloadError, r"shape \[32, 32\].* at version 1, and was at 0", z.backward)
