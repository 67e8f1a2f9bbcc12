"""Strides of results for images of one pixel or one channel, which are contiguous and channels last at once."""

import pytest
import torch
import torch.nn.functional as F
from test_kernel_strides import strides
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensorMode

from ackpt.planner.capture.patches.kernels import true_results

aten = torch.ops.aten
IMAGES = {
    "one pixel, channels last": lambda: torch.rand(2, 1, 1, 4).permute(0, 3, 1, 2),
    "one pixel": lambda: torch.rand(2, 4, 1, 1),
    "one channel": lambda: torch.rand(2, 3, 3, 1).permute(0, 3, 1, 2),
    "one image": lambda: torch.rand(1, 3, 3, 4).permute(0, 3, 1, 2),
}
UNARY = (
    *(torch.relu, torch.sigmoid, torch.tanh, torch.exp, torch.rsqrt, torch.square, torch.neg, torch.abs, torch.log1p),
    *(F.silu, F.gelu, F.mish, F.softplus, F.leaky_relu, F.elu, F.hardswish, F.hardsigmoid, F.logsigmoid, F.softsign),
)
OPERATIONS = {
    **{each.__name__: lambda x, each=each: each(x) for each in UNARY},
    **{each.__name__: lambda x, each=each: each(x, x) for each in (torch.add, torch.mul, torch.div, torch.maximum)},
    "add a number": lambda x: x + 2.0,
    "of a number": lambda x: 2.0 / x,
    "clamp": lambda x: x.clamp(0.1, 0.9),
    "masked_fill": lambda x: x.masked_fill(x > 0.5, 0.0),
    "where": lambda x: torch.where(x > 0.5, x, 0.0),
    "threshold_backward": lambda x: aten.threshold_backward(x, x, 0),
    "scale and shift": lambda x: x * torch.rand(x.shape[1], 1, 1) + torch.rand(x.shape[1], 1, 1),
    "nearest": lambda x: aten.upsample_nearest2d(x, [1, 1], None),
    "bilinear": lambda x: aten.upsample_bilinear2d(x, [6, 6], False),
    "nearest_backward": lambda x: aten.upsample_nearest2d_backward(x, x.shape[2:], (*x.shape[:2], 1, 1)),
    "batch_norm": lambda x: aten._native_batch_norm_legit_no_training(x, *_ones(x, 4), 0.1, 1e-5),
    "batch_norm_backward": lambda x: aten.native_batch_norm_backward(
        x, x, *_ones(x, 3), None, None, False, 1e-5, [True] * 3
    ),
    "group_norm": lambda x: aten.native_group_norm(x, *_ones(x, 2), *_groups(x), 1e-5),
    "group_norm_backward": lambda x: aten.native_group_norm_backward(
        x, x, torch.rand(len(x), 1), torch.rand(len(x), 1), *_ones(x, 1), *_groups(x), [True] * 3
    ),
}


def _ones(x, count):
    return [torch.ones(x.shape[1])] * count


def _groups(x):
    return len(x), x.shape[1], x.shape[2] * x.shape[3], 1


def formats(results):
    """What `strides` says, and the memory format of images."""
    results = results if isinstance(results, tuple) else (results,)
    return strides(results), [suggest_memory_format(x) for x in results if x.dim() == 4]


@pytest.mark.parametrize("name", OPERATIONS)
def test_memory_formats_are_those_of_the_kernel(name):
    mode = FakeTensorMode()
    for image in IMAGES.values():
        real = formats(OPERATIONS[name](image()))
        with true_results(mode), mode:
            assert formats(OPERATIONS[name](image())) == real, image
