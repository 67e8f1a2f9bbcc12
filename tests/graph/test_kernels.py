"""Results without data have the dtypes and storages of the real ones."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensorMode

from ackpt.graph.kernels import true_results

aten = torch.ops.aten
HALF, FULL = torch.bfloat16, torch.float32


def x(dtype):
    return torch.ones(3, 4, 5, dtype=dtype)


def w(dtype, size=4):
    return torch.ones(size, dtype=dtype)


def running(dtype):
    return torch.zeros(4, dtype=dtype), torch.ones(4, dtype=dtype)


def copy_of_slice():
    base = torch.ones(12)
    return [aten.copy.default(base[1:], torch.ones(11))]


def batch_norm_backward(d, p, mask):
    return aten.native_batch_norm_backward(x(d), x(d), w(p), None, None, w(p), w(p), True, 1e-5, mask)


CASES = {
    "layer norm": lambda d, p: aten.native_layer_norm(x(d), (5,), w(p, 5), w(p, 5), 1e-5),
    "group norm": lambda d, p: aten.native_group_norm(x(d), w(p), w(p), 3, 4, 5, 2, 1e-5),
    "batch norm": lambda d, p: aten._native_batch_norm_legit_functional(x(d), w(p), w(p), *running(p), True, 0.1, 1e-5),
    "batch norm again": lambda d, p: aten._native_batch_norm_legit.no_stats(x(d), w(p), w(p), True, 0.1, 1e-5),
    "batch norm in eval": lambda d, p: aten._native_batch_norm_legit_no_training(
        x(d), w(p), w(p), *running(p), 0.1, 1e-5
    ),
    "group norm backward": lambda d, p: aten.native_group_norm_backward(
        x(d), x(d), torch.ones(3, 2, dtype=p), torch.ones(3, 2, dtype=p), w(p), 3, 4, 5, 2, [True, True, True]
    ),
    "batch norm backward": lambda d, p: batch_norm_backward(d, p, [True, True, True]),
    "batch norm backward, no gradient of the input": lambda d, p: batch_norm_backward(d, p, [False, True, True]),
    "copy of a slice": lambda d, p: copy_of_slice(),
}


def described(results):
    return [None if r is None else (r.dtype, tuple(r.shape), r.untyped_storage().nbytes()) for r in results]


@pytest.mark.parametrize("dtypes", [(HALF, FULL), (HALF, HALF), (FULL, FULL)], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_results_are_described_as_the_kernels_return_them(case, dtypes):
    real = described(CASES[case](*dtypes))
    mode = FakeTensorMode()
    with mode, true_results(mode):
        assert [described(CASES[case](*dtypes)) for _ in range(2)] == [real, real]


def test_torchs_own_rules_are_put_back():
    rules = dict(fake_impls.op_implementations_dict)
    mode = FakeTensorMode()
    with pytest.raises(ZeroDivisionError), true_results(mode):
        assert not mode.cache_enabled
        1 // 0  # noqa: B018
    assert fake_impls.op_implementations_dict == rules and mode.cache_enabled
