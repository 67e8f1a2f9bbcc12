"""Strides of results: tensors without data have those that torch's CPU kernels write, whatever order they read."""

import pytest
import torch
from conftest import assert_as_eager
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import ackpt
from ackpt.planner.capture.patches.kernels import true_results

pytestmark = pytest.mark.usefixtures("fresh_results")

aten = torch.ops.aten
SHAPE = (2, 4, 6, 8)


def w(size):
    return torch.rand(size)


LAYOUTS = {
    "contiguous": lambda: torch.rand(SHAPE) + 0.1,
    "channels last": lambda: (torch.rand(2, 6, 8, 4) + 0.1).permute(0, 3, 1, 2),
    "turned": lambda: (torch.rand(2, 4, 8, 6) + 0.1).transpose(2, 3),
    "reversed": lambda: (torch.rand(8, 6, 4, 2) + 0.1).permute(3, 2, 1, 0),
    "sliced": lambda: (torch.rand(2, 4, 6, 16) + 0.1)[..., ::2],
}
# Of a tensor and a gradient.
OPERATIONS = {
    "layer_norm": lambda x, g: aten.native_layer_norm(x, (8,), w(8), w(8), 1e-5),
    "layer_norm_bw": lambda x, g: aten.native_layer_norm_backward(
        g, x, (8,), torch.rand(2, 4, 6, 1), torch.rand(2, 4, 6, 1), w(8), w(8), [True] * 3
    ),
    "layer_norm_bw, no gradient of the input": lambda x, g: aten.native_layer_norm_backward(
        g, x, (8,), torch.rand(2, 4, 6, 1), torch.rand(2, 4, 6, 1), w(8), w(8), [False, True, True]
    ),
    "bn": lambda x, g: aten._native_batch_norm_legit_functional(
        x, w(4), w(4), torch.zeros(4), torch.ones(4), True, 0.1, 1e-5
    ),
    "bn_bw": lambda x, g: aten.native_batch_norm_backward(g, x, w(4), None, None, w(4), w(4), True, 1e-5, [True] * 3),
    "bn_eval_bw": lambda x, g: aten.native_batch_norm_backward(
        g, x, w(4), w(4), w(4), None, None, False, 1e-5, [True] * 3
    ),
    "gelu_bw": lambda x, g: aten.gelu_backward(g, x),
    "silu_bw": lambda x, g: aten.silu_backward(g, x),
    "threshold_bw": lambda x, g: aten.threshold_backward(g, x, 0),
    "hardsig_bw": lambda x, g: aten.hardsigmoid_backward(g, x),
    "prelu": lambda x, g: aten._prelu_kernel(x, w(4).view(1, 4, 1, 1)),
    "prelu_bw": lambda x, g: aten._prelu_kernel_backward(g, x, w(4).view(1, 4, 1, 1)),
    "glu_bw": lambda x, g: aten.glu_backward(g[:, :2], x, 1),
    "rrelu_bw": lambda x, g: aten.rrelu_with_noise_backward(g, x, x, 0.1, 0.3, True, False),
    "logit_bw": lambda x, g: aten.logit_backward(g, x.clamp(0.1, 0.9)),
    "softmax": lambda x, g: aten._softmax(x, 1, False),
    "lsoftmax": lambda x, g: aten._log_softmax(x, 1, False),
    "maxpool_bw": lambda x, g: aten.max_pool2d_with_indices_backward(
        g[:, :, :3, :4], x, [2, 2], [2, 2], [0, 0], [1, 1], False, torch.zeros(2, 4, 3, 4, dtype=torch.long)
    ),
    "avgpool_bw": lambda x, g: aten.avg_pool2d_backward(g[:, :, :3, :4], x, [2, 2], [2, 2], [0, 0], False, True, None),
    "near": lambda x, g: aten.upsample_nearest2d(x, [12, 16], None),
    "near_bw": lambda x, g: aten.upsample_nearest2d_backward(g, [6, 8], [2, 4, 3, 4]),
    "bil": lambda x, g: aten.upsample_bilinear2d(x, [12, 16], False),
    "bil_bw": lambda x, g: aten.upsample_bilinear2d_backward(g, [6, 8], [2, 4, 3, 4], False),
    "bic": lambda x, g: aten.upsample_bicubic2d(x, [12, 16], False),
    "bic_bw": lambda x, g: aten.upsample_bicubic2d_backward(g, [6, 8], [2, 4, 3, 4], False),
    "rpad_bw": lambda x, g: aten.reflection_pad2d_backward(g, x[:, :, :4, :6], [1, 1, 1, 1]),
    "reppad_bw": lambda x, g: aten.replication_pad2d_backward(g, x[:, :, :4, :6], [1, 1, 1, 1]),
    "scatter": lambda x, g: aten.scatter(x, 1, torch.zeros(SHAPE, dtype=torch.long), g),
    "index_put": lambda x, g: aten.index_put(x, [torch.tensor([0, 1])], g, True),
    "index_add": lambda x, g: aten.index_add(x, 1, torch.arange(4), g),
    "cat": lambda x, g: aten.cat([x, g], 1),
    "stack": lambda x, g: aten.stack([x, g], 1),
    "conv": lambda x, g: aten.convolution(x, torch.rand(5, 4, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1),
    "conv_bw": lambda x, g: aten.convolution_backward(
        g, x, torch.rand(4, 4, 1, 1), [4], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True] * 3
    ),
    "dwconv_bw": lambda x, g: aten.convolution_backward(
        g, x, torch.rand(4, 1, 3, 3), [4], [1, 1], [1, 1], [1, 1], False, [0, 0], 4, [True] * 3
    ),
    "cumsum": lambda x, g: aten.cumsum(x, 1),
    "sort": lambda x, g: aten.sort(x, 1),
    "roll": lambda x, g: aten.roll(x, [1], [1]),
    "where": lambda x, g: aten.where(x > 0.5, x, g),
    "masked_fill": lambda x, g: aten.masked_fill(x, g > 0.5, 0.0),
    "add": lambda x, g: aten.add(x, g),
    "mul": lambda x, g: aten.mul(g, x),
    "sum": lambda x, g: aten.sum(x, [1], True),
    "mean": lambda x, g: aten.mean(x, [1]),
    "pow": lambda x, g: aten.pow(x, 2),
    "tril": lambda x, g: aten.tril(x),
    "triu": lambda x, g: aten.triu(x),
    "rms": lambda x, g: aten._fused_rms_norm(x, [8], w(8), 1e-5),
    "flash": lambda x, g: aten._scaled_dot_product_flash_attention_for_cpu(x, g, x),
    "matmul_bmm": lambda x, g: aten.bmm(x[0], g[0].transpose(1, 2)),
    "clamp": lambda x, g: aten.clamp(x, 0, 1),
    "renorm": lambda x, g: aten.renorm(x, 2, 1, 1.0),
    "relu": lambda x, g: aten.relu(x),
    "flash_bw": lambda x, g: aten._scaled_dot_product_flash_attention_for_cpu_backward(
        g, x, x, x, x, torch.rand(2, 4, 6), 0.0, False
    ),
}


def strides(results):
    """Shape, strides where they matter, and dtype of every result."""
    results = results if isinstance(results, (tuple, list)) else [results]
    return [
        None
        if r is None
        else (r.dtype, [(size, stride if size > 1 else 0) for size, stride in zip(r.shape, r.stride())])
        for r in results
    ]


@pytest.mark.parametrize("name", OPERATIONS)
def test_strides_are_those_of_the_kernel(name):
    mode = FakeTensorMode()
    for one, layout in LAYOUTS.items():
        for other in {one, "contiguous", "channels last"}:
            real = strides(OPERATIONS[name](layout(), LAYOUTS[other]()))
            with mode, true_results(mode):
                assert strides(OPERATIONS[name](layout(), LAYOUTS[other]())) == real, (one, other)


@pytest.mark.parametrize("number", [torch.add, torch.sub, torch.mul, torch.div])
def test_one_image_and_a_scalar(number):
    x = torch.rand(1, 64, 32).transpose(1, 2).view(1, 32, 8, 8)  # strides of channels last, except for the batch
    mode = FakeTensorMode()
    with true_results(mode), mode:
        fake = number(mode.from_tensor(x), 2.0)
    assert fake.stride() == number(x, 2.0).stride() == (32, 1, 256, 32)


def test_a_view_as_one_image():
    x = torch.rand(1, 64, 32)
    mode = FakeTensorMode()
    with true_results(mode), mode:
        fake = mode.from_tensor(x).transpose(1, 2).view(1, 32, 8, 8)
    assert fake.stride() == x.transpose(1, 2).view(1, 32, 8, 8).stride() == (32, 1, 256, 32)


def test_a_step_with_one_image_of_such_strides():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.norm, self.conv = nn.Linear(32, 32), nn.GroupNorm(4, 32), nn.Conv2d(32, 8, 3, padding=1)

        def forward(self, tokens):
            image = self.linear(tokens).transpose(1, 2).reshape(1, 32, 8, 8)
            return self.conv(self.norm(image / 1.0 + 0.5).relu()).square().mean()

    torch.manual_seed(0)
    model, tokens = Model(), torch.randn(1, 64, 32)
    assert_as_eager(model, ackpt.compile(model, tokens, policy="none"), tokens)
