"""What kernels allocate in addition to the shapes of their results: predicted bytes equal measured ones."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import ackpt
from ackpt.metering.kernel_memory import cuda_temporaries
from ackpt.metering.prediction import predict
from ackpt.metering.run_alone import in_own_thread, run_operation

pytestmark = pytest.mark.usefixtures("one_thread")

LOSSES = {
    "mse_loss": lambda x, y: F.mse_loss(x, y),
    "mse_loss, sum": lambda x, y: F.mse_loss(x, y, reduction="sum"),
    "smooth_l1_loss": lambda x, y: F.smooth_l1_loss(x, y),
    "soft_margin_loss": lambda x, y: F.soft_margin_loss(x, y.sign()),
    "binary_cross_entropy": lambda x, y: F.binary_cross_entropy(x.sigmoid(), y.sigmoid()),
    "mse_loss, none": lambda x, y: F.mse_loss(x, y, reduction="none").sum(),
    "l1_loss": lambda x, y: F.l1_loss(x, y),
}


def step_of(loss, model, x, y):
    def step():
        model.zero_grad()
        loss(model(x), y).backward()

    return step


@pytest.mark.parametrize("where", ["fake", "meta"])
@pytest.mark.parametrize("name", LOSSES)
def test_predicted_as_measured(name, where):
    sizes = ((4, 4), (6, 4), (6, 4))
    model, x, y = nn.Linear(*sizes[0]), *(torch.randn(size) for size in sizes[1:])
    measured = ackpt.measure(step_of(LOSSES[name], model, x, y), "cpu", resident=(model, x, y), repeats=0)
    with FakeTensorMode() if where == "fake" else torch.device("meta"):
        model, x, y = nn.Linear(*sizes[0]), *(torch.empty(size) for size in sizes[1:])
    predicted = predict(step_of(LOSSES[name], model, x, y), resident=(model, x, y))
    # What the forward has left: the loss, and what it keeps for backward. The peak has the operations' workspaces.
    assert predicted.timeline.live[predicted.timeline.boundary] == measured.timeline.live[measured.timeline.boundary]


ALONE = {
    "mse_loss": lambda x, y, reduction: (x, y, reduction),
    "smooth_l1_loss": lambda x, y, reduction: (x, y, reduction, 1.0),
    "huber_loss": lambda x, y, reduction: (x, y, reduction, 1.0),
    "soft_margin_loss": lambda x, y, reduction: (x, y, reduction),
    "binary_cross_entropy": lambda x, y, reduction: (x, y, None, reduction),
    "binary_cross_entropy_with_logits": lambda x, y, reduction: (x, y, None, None, reduction),
    "mse_loss_backward": lambda x, y, reduction: (x if not reduction else x.mean(), x, y, reduction),
    "soft_margin_loss_backward": lambda x, y, reduction: (x if not reduction else x.mean(), x, y, reduction),
}


@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("name", ALONE)
def test_losses_allocate_on_a_gpu_what_the_same_code_allocates_on_the_cpu(name, reduction):
    operation = getattr(torch.ops.aten, name).default
    args = ALONE[name](torch.rand(64, 8), torch.rand(64, 8), reduction)
    taken, _ = in_own_thread(lambda: run_operation(operation, (args, {})))
    scalars = taken.workspace % 1024
    assert scalars <= 16 and taken.workspace - scalars == sum(cuda_temporaries(operation, args))


aten = torch.ops.aten


@pytest.mark.parametrize(
    ("operation", "dtype", "options", "copied"),
    [
        (aten.sum.dim_IntList, torch.bool, {}, 8),
        (aten.sum.default, torch.int32, {}, 8),
        (aten.sum.default, torch.int64, {}, 0),
        (aten.sum.dim_IntList, torch.bfloat16, {}, 0),
        (aten.sum.dim_IntList, torch.bfloat16, {"dtype": torch.float32}, 0),
        (aten.mean.dim, torch.float32, {"dtype": torch.float64}, 8),
        (aten.cumsum.default, torch.bool, {}, 8),
        (aten.cumsum.default, torch.float16, {"dtype": torch.float32}, 4),
    ],
)
def test_reductions_on_a_gpu_convert_their_input(operation, dtype, options, copied):
    """``make_reduction_from_out_ty`` in ReduceOpsUtils.h; the published bytes of sparsemax show it."""
    x = torch.empty(6, 5, dtype=dtype, device="meta")
    assert sum(cuda_temporaries(operation, (x, [1]), options)) == 30 * copied


@pytest.mark.parametrize(
    ("shape", "dim", "taken"),
    [
        ((300, 4096), -1, [4096 * 8]),  # sorted in place, one block for each slice
        ((200, 5000), 1, [8_000_000, 4_000_000 + 8_000_000 + 255]),
        ((100, 5000), 1, [4_000_000, 4_000_000, 2_000_000, 6_000_000 + 255]),
        ((5000,), 0, [40_000, 60_000 + 255]),
        ((5000, 200), 0, [4_000_000, 4_000_000, 8_000_000, 8_000_000, 4_000_000 + 8_000_000 + 255]),
        ((0, 5000), 1, []),
    ],
)
def test_sorting_on_a_gpu_takes_copies_of_keys_and_indices(shape, dim, taken):
    """``sort_cuda_kernel`` in cuda/Sort.cpp, in float32: 4 bytes of a key and 8 of its index."""
    x = torch.empty(shape, device="meta")
    assert cuda_temporaries(aten.sort.default, (x, dim)) == taken
    assert cuda_temporaries(aten.sort.stable, (x,), {"stable": True, "dim": dim}) == taken


@pytest.mark.parametrize(("dtype", "moments"), [(torch.float32, 0), (torch.bfloat16, 2 * 3 * 2)])
def test_group_norm_on_a_gpu_takes_factors_in_float32(dtype, moments):
    """For 3 images of 8 channels in 2 groups, by channel and by group (cuda/group_norm_kernel.cu)."""
    x, weight = torch.empty(3, 8, 10, dtype=dtype, device="meta"), torch.empty(8, dtype=dtype, device="meta")
    sizes = 3, 8, 10, 2
    forward = cuda_temporaries(aten.native_group_norm.default, (x, weight, weight, *sizes, 1e-5))
    assert sum(forward) == 4 * (48 + moments)
    statistics = torch.empty(3, 2, dtype=dtype, device="meta")
    backward = aten.native_group_norm_backward.default
    taken = cuda_temporaries(backward, (x, x, statistics, statistics, weight, *sizes, [True] * 3))
    assert taken == [24 * 4, 24 * 4, 6 * 4, 6 * 4, 24 * 4]


def test_layer_norm_on_a_gpu_keeps_its_moments_in_float32():
    with FakeTensorMode():
        norm, x = nn.LayerNorm(8, dtype=torch.bfloat16), torch.empty(4096, 8, dtype=torch.bfloat16)
    found = predict(lambda: norm(x).sum().backward(), resident=(norm, x), device="cuda", round_to=1, warmup=0)
    scalars = 2 * 2  # the sum, and the gradient of 1 that backward begins with
    assert found.timeline.live[found.timeline.boundary] == 2 * 4096 * 4 + scalars


OPERATIONS = {
    "sort": lambda y: torch.sort(y, -1)[0],
    "topk": lambda y: torch.topk(y, 3, -1)[0],
    "unfold": lambda y: y.unfold(0, 3, 1).mean(-1),
    "absolute value of complex": lambda y: torch.complex(y, y * 2).abs(),
    "fft": lambda y: torch.fft.fft(y).abs(),
    "product with an expanded row": lambda y: (y[:1] * 1.5).expand(32, 16) * y,
    "numbers": lambda y: (y * 2 + 1) / 3 * 0.5,
    "product in place": lambda y: (y + 1).mul_(2).div_(3),
    "median": lambda y: y.median(0)[0],
    "depthwise convolution": lambda y: F.conv1d(y[None], torch.ones(32, 1, 3), groups=32, padding=1),
    "bicubic": lambda y: F.interpolate(y[None, None], scale_factor=2, mode="bicubic"),
    "scatter_reduce": lambda y: y.scatter_reduce(0, torch.zeros(32, 16, dtype=torch.long), y, "amax"),
    "singular values": lambda y: torch.linalg.svdvals(y),
    "einsum": lambda y: torch.einsum("ab,cb->ac", y, y),
    "logdet": lambda y: torch.logdet(y.t() @ y + torch.eye(16)),
    "largest of bags": lambda y: F.embedding_bag(torch.arange(60).view(15, 4) % 32, y, mode="max"),
    "mean of bags": lambda y: F.embedding_bag(torch.arange(60).view(15, 4) % 32, y, mode="mean"),
    "rows by index": lambda y: y[torch.arange(5), :],
    "take": lambda y: y.take(torch.arange(5)),
    "other dtypes": lambda y: (y.bfloat16() @ y.bfloat16().t()).float() + y.double().sum(),
    "batch norm": lambda y: F.batch_norm(y, None, None, training=True),
    "solve": lambda y: torch.linalg.solve(y[:16] + 16 * torch.eye(16), y[:16]),
}


def of_operation(operation, fake: bool):
    with FakeTensorMode() if fake else contextlib.nullcontext():
        torch.manual_seed(0)
        model, x = nn.Linear(16, 16), torch.randn(32, 16)
        return (predict if fake else ackpt.measure)(
            lambda: operation(model(x)).sum().backward(), resident=(model, x), **({} if fake else {"repeats": 0})
        )


@pytest.mark.parametrize("name", OPERATIONS)
def test_workspaces_and_saved_numbers_are_predicted_on_the_cpu(name):
    predicted = of_operation(OPERATIONS[name], True)
    assert predicted.unknown_workspace == ()
    assert predicted.peak_bytes == of_operation(OPERATIONS[name], False).peak_bytes


def test_operations_that_do_not_run_are_named():
    with FakeTensorMode():
        x = torch.empty(1 << 25, requires_grad=True)
    predicted = predict(lambda: x.cumsum(0).mul(2).sum().backward(), resident=(x,), warmup=0)
    assert "aten.cumsum.default" in predicted.unknown_workspace
    assert not {"aten.mul.Tensor", "aten.ones_like.default"} & {*predicted.unknown_workspace}
    assert "without the workspace of aten." in repr(predicted)
    assert predicted.to_json()["unknown_workspace"] == [*predicted.unknown_workspace]


UNKNOWN = {
    "CumprodBackward0": lambda y: y.cumprod(1),
    "ProdBackward1": lambda y: y.prod(1),
    "aten.nanmedian.default": lambda y: y.nanmedian(),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_operations_that_depend_on_values_are_named(name):
    assert of_operation(UNKNOWN[name], True).unknown_workspace == (name,)


@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}])
def test_an_lstm_is_predicted_with_what_its_forward_keeps(options):
    def step(x, model):
        model.zero_grad()
        model(x)[0].square().mean().backward()

    peaks = []
    for make, count in ((contextlib.nullcontext, ackpt.measure), (FakeTensorMode, predict)):
        with make():
            model, x = nn.LSTM(16, 8, **options), torch.randn(20, 4, 16)
        counted = count(lambda: step(x, model), resident=(model, x))  # noqa: B023
        peaks.append(counted.peak_bytes)
    assert counted.unknown_workspace == () and peaks[0] == peaks[1]


@torch.library.custom_op("kernel_memory_test::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    raise AssertionError("a prediction must not run the user's code")


@doubled.register_fake
def _(x):
    return torch.empty_like(x)


def test_operations_of_the_user_do_not_run():
    with FakeTensorMode():
        x = torch.empty(4)
    assert predict(lambda: doubled(x), resident=(x,)).unknown_workspace == ("kernel_memory_test.doubled.default",)
