"""Reloaded tensors equal the saved ones: values, strides, and kind of view."""

import contextlib

import pytest
import torch
from conftest import model_of
from offload_helpers import MODES, SIZE, assert_empty, counts, fresh, matrix, offload, region
from torch import nn

import ackpt


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tmp_path_factory.mktemp("offload"))


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


@pytest.mark.parametrize("kind", ["plain", "expanded", "conjugated", "zero size", "no dimension", "bool"])
@pytest.mark.parametrize("mode", MODES)
def test_every_kind_of_region_input_is_reloaded_unchanged(mode, kind):
    seen = []

    def function(x, other):
        seen.append(other.clone())
        return x * other.abs().float().sum() if other.dtype != torch.bool else x * other.sum()

    x = torch.ones(1, requires_grad=True)
    region(mode)(function, x, KINDS[kind]()).backward()
    assert len(seen) == 2 and torch.equal(*seen)
    assert seen[0].stride() == seen[1].stride()
    assert_empty(offload(mode).engine)


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


def tangents(transform):
    """Uses transforms of torch.func, whose tensors have no storage."""
    return model_of(
        lambda self, x: self.transform(self.layers, x),
        layers=nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)),
        transform=transform,
    )


TRANSFORMS = {
    "jvp": lambda f, x: sum(part.square().sum() for part in torch.func.jvp(f, (x,), (x.cos(),))),
    "vmap": lambda f, x: torch.func.vmap(f)(x).square().sum(),
    "jacfwd": lambda f, x: torch.func.vmap(torch.func.jacfwd(f))(x[:4]).square().sum(),
}


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_tensors_of_torch_func_transforms_stay_on_the_device(name, mode):
    model, x, results = tangents(TRANSFORMS[name]), torch.randn(64, 16), []
    for saving in (contextlib.nullcontext(), ackpt.offload_saved_tensors(mode, min_bytes=0)):
        model.zero_grad()
        with saving:
            loss = model(x)
        loss.backward()
        results.append([each.grad for each in model.parameters() if each.grad is not None])
    assert all(map(torch.equal, *results))
