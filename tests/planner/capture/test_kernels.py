"""Results without data have the dtypes and storages of the real ones."""

import pytest
import torch
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensorMode

from ackpt.planner.capture.patches.kernels import true_results

pytestmark = pytest.mark.usefixtures("fresh_results")
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
    "fold": lambda d, p: [aten.col2im(torch.ones(2, 36, 9, dtype=d), (5, 5), (3, 3), (1, 1), (0, 0), (1, 1))],
    "fold of fewer columns": lambda d, p: [
        aten.col2im(torch.ones(4, 1, dtype=d), (5, 5), (2, 2), (1, 1), (0, 0), (5, 5))
    ],
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
    cache, make = FakeTensorMode.cache, FakeTensorMode._make_cache_entry
    mode = FakeTensorMode()
    with pytest.raises(ZeroDivisionError), true_results(mode):
        assert FakeTensorMode.cache == {}
        1 // 0  # noqa: B018
    assert fake_impls.op_implementations_dict == rules
    assert FakeTensorMode.cache is cache and FakeTensorMode._make_cache_entry is make


def again_and_again(operation, *args, **options):
    """What an operation on tensors without data returns three times, and how many of these come from the cache."""
    mode = FakeTensorMode()
    with mode, true_results(mode):
        given = [mode.from_tensor(arg) if isinstance(arg, torch.Tensor) else arg for arg in args]
        hits = FakeTensorMode.cache_hits
        return given, [operation(*given, **options) for _ in range(3)], FakeTensorMode.cache_hits - hits


def test_results_come_from_the_cache_where_nothing_of_them_is_lost():
    _, sums, hits = again_and_again(aten.add.Tensor, torch.ones(3, 4), torch.ones(3, 4))
    assert hits == 2 and len({value.untyped_storage()._cdata for value in sums}) == 3
    (x, *_), views, hits = again_and_again(aten.slice.Tensor, torch.ones(3, 4), 0, 1, 2)
    assert hits == 2 and {value.untyped_storage()._cdata for value in views} == {x.untyped_storage()._cdata}
    (x, _), same, hits = again_and_again(aten.add_.Tensor, torch.ones(3, 4), 1)
    assert hits == 2 and all(value is x for value in same)


def test_a_result_in_the_memory_of_another_is_none_for_the_cache():
    (x, _), pieces, _ = again_and_again(aten.split.Tensor, torch.ones(4, 4), 2)
    assert {piece.untyped_storage()._cdata for piece in sum(map(tuple, pieces), ())} == {x.untyped_storage()._cdata}
    with FakeTensorMode() as mode, true_results(mode):
        x, out = torch.ones(4), torch.empty(4)
        assert all(aten.add.out(x, x, out=out) is out for _ in range(3))
        copies = [aten.clone.default(torch.ones(4, 4)[1:]) for _ in range(2)]
    assert [value.untyped_storage().nbytes() for value in copies] == [48, 48]


def elementwise(operation, *rest):
    return lambda gradient, a, b: [operation(gradient, a, *rest)]


def loss_backward(operation, *rest):
    return lambda gradient, a, b: [operation(gradient, a, b, 1, *rest), operation(gradient.sum(), a, b, 1, *rest)]


WRITES = {
    "mse": loss_backward(aten.mse_loss_backward),
    "smooth l1": loss_backward(aten.smooth_l1_loss_backward, 1.0),
    "huber": loss_backward(aten.huber_loss_backward, 1.0),
    "cross entropy": lambda gradient, a, b: [aten.binary_cross_entropy(a, b, None, 0)],
    "log sigmoid": lambda gradient, a, b: aten.log_sigmoid_forward(a),
    "log softmax": lambda gradient, a, b: [aten._log_softmax_backward_data(gradient, a, 1, torch.float32)],
    "elu": lambda gradient, a, b: [aten.elu_backward(gradient, 1.0, 1.0, 1.0, False, a)],
    "hardswish": elementwise(aten.hardswish_backward),
    "softplus": elementwise(aten.softplus_backward, 1.0, 20.0),
    "hardtanh": elementwise(aten.hardtanh_backward, -1, 1),
}


ORDERS = "nchw nhwc nchw", "nhwc nchw nhwc", "nhwc nhwc nchw", "nchw turned nhwc", "one nhwc nchw"


@pytest.mark.parametrize("orders", ORDERS)
@pytest.mark.parametrize("name", WRITES)
def test_results_of_losses_and_activations_have_the_strides_of_the_kernels(name, orders):
    def made(order):
        if order == "one":
            return torch.rand(1).expand(3, 8, 4, 4)
        places = {"nchw": (0, 1, 2, 3), "nhwc": (0, 3, 1, 2), "turned": (3, 1, 0, 2)}[order]
        shape = {"nchw": (3, 8, 4, 4), "nhwc": (3, 4, 4, 8), "turned": (4, 8, 4, 3)}[order]
        return torch.rand(shape).permute(places)

    def strides():
        return [result.stride() for result in WRITES[name](*map(made, orders.split()))]

    real = strides()
    with true_results(), FakeTensorMode():
        assert strides() == real
