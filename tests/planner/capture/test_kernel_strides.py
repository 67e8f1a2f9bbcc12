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
    "gelu": lambda x, g: aten.gelu(x),
    "gelu_bw": lambda x, g: aten.gelu_backward(g, x),
    "silu_bw": lambda x, g: aten.silu_backward(g, x),
    "mish_bw": lambda x, g: aten.mish_backward(g, x),
    "tanh_bw": lambda x, g: aten.tanh_backward(g, x),
    "sigmoid_bw": lambda x, g: aten.sigmoid_backward(g, x),
    "threshold_bw": lambda x, g: aten.threshold_backward(g, x, 0),
    "leaky_bw": lambda x, g: aten.leaky_relu_backward(g, x, 0.1, False),
    "hardsig_bw": lambda x, g: aten.hardsigmoid_backward(g, x),
    "prelu": lambda x, g: aten._prelu_kernel(x, w(4).view(1, 4, 1, 1)),
    "prelu_bw": lambda x, g: aten._prelu_kernel_backward(g, x, w(4).view(1, 4, 1, 1)),
    "glu": lambda x, g: aten.glu(x, 1),
    "glu_bw": lambda x, g: aten.glu_backward(g[:, :2], x, 1),
    "softshrink_bw": lambda x, g: aten.softshrink_backward(g, x, 0.5),
    "hardshrink_bw": lambda x, g: aten.hardshrink_backward(g, x, 0.5),
    "logsigmoid": lambda x, g: aten.log_sigmoid_forward(x),
    "elu_bw": lambda x, g: aten.elu_backward(g, 1.0, 1.0, 1.0, False, x),
    "rrelu_bw": lambda x, g: aten.rrelu_with_noise_backward(g, x, x, 0.1, 0.3, True, False),
    "logit_bw": lambda x, g: aten.logit_backward(g, x.clamp(0.1, 0.9)),
    "softmax": lambda x, g: aten._softmax(x, 1, False),
    "softmax_bw": lambda x, g: aten._softmax_backward_data(g, x, 1, torch.float32),
    "lsoftmax": lambda x, g: aten._log_softmax(x, 1, False),
    "lsoftmax_bw": lambda x, g: aten._log_softmax_backward_data(g, x, 1, torch.float32),
    "maxpool": lambda x, g: aten.max_pool2d_with_indices(x, [2, 2], [2, 2]),
    "maxpool_bw": lambda x, g: aten.max_pool2d_with_indices_backward(
        g[:, :, :3, :4], x, [2, 2], [2, 2], [0, 0], [1, 1], False, torch.zeros(2, 4, 3, 4, dtype=torch.long)
    ),
    "avgpool": lambda x, g: aten.avg_pool2d(x, [2, 2]),
    "avgpool_bw": lambda x, g: aten.avg_pool2d_backward(g[:, :, :3, :4], x, [2, 2], [2, 2], [0, 0], False, True, None),
    "adapool": lambda x, g: aten._adaptive_avg_pool2d(x, [3, 4]),
    "adapool_bw": lambda x, g: aten._adaptive_avg_pool2d_backward(g[:, :, :3, :4], x),
    "adamax": lambda x, g: aten.adaptive_max_pool2d(x, [3, 4]),
    "adamax_bw": lambda x, g: aten.adaptive_max_pool2d_backward(
        g[:, :, :3, :4], x, torch.zeros(2, 4, 3, 4, dtype=torch.long)
    ),
    "near": lambda x, g: aten.upsample_nearest2d(x, [12, 16], None),
    "near_bw": lambda x, g: aten.upsample_nearest2d_backward(g, [6, 8], [2, 4, 3, 4]),
    "bil": lambda x, g: aten.upsample_bilinear2d(x, [12, 16], False),
    "bil_bw": lambda x, g: aten.upsample_bilinear2d_backward(g, [6, 8], [2, 4, 3, 4], False),
    "bic": lambda x, g: aten.upsample_bicubic2d(x, [12, 16], False),
    "bic_bw": lambda x, g: aten.upsample_bicubic2d_backward(g, [6, 8], [2, 4, 3, 4], False),
    "pad": lambda x, g: aten.constant_pad_nd(x, [1, 1, 1, 1]),
    "rpad": lambda x, g: aten.reflection_pad2d(x, [1, 1, 1, 1]),
    "rpad_bw": lambda x, g: aten.reflection_pad2d_backward(g, x[:, :, :4, :6], [1, 1, 1, 1]),
    "reppad": lambda x, g: aten.replication_pad2d(x, [1, 1, 1, 1]),
    "reppad_bw": lambda x, g: aten.replication_pad2d_backward(g, x[:, :, :4, :6], [1, 1, 1, 1]),
    "index_select": lambda x, g: aten.index_select(x, 1, torch.tensor([0, 2])),
    "gather": lambda x, g: aten.gather(x, 1, torch.zeros(SHAPE, dtype=torch.long)),
    "scatter": lambda x, g: aten.scatter(x, 1, torch.zeros(SHAPE, dtype=torch.long), g),
    "scatter_add": lambda x, g: aten.scatter_add(x, 1, torch.zeros(SHAPE, dtype=torch.long), g),
    "index": lambda x, g: aten.index(x, [torch.tensor([0, 1])]),
    "index1": lambda x, g: aten.index(x, [None, torch.tensor([0, 1])]),
    "index2": lambda x, g: aten.index(x, [torch.tensor([0, 1]), None, torch.tensor([0, 1])]),
    "index_put": lambda x, g: aten.index_put(x, [torch.tensor([0, 1])], g, True),
    "index_add": lambda x, g: aten.index_add(x, 1, torch.arange(4), g),
    "cat": lambda x, g: aten.cat([x, g], 1),
    "stack": lambda x, g: aten.stack([x, g], 1),
    "conv": lambda x, g: aten.convolution(x, torch.rand(5, 4, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1),
    "conv1": lambda x, g: aten.convolution(x, torch.rand(4, 4, 1, 1), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1),
    "conv_bw": lambda x, g: aten.convolution_backward(
        g, x, torch.rand(4, 4, 1, 1), [4], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True] * 3
    ),
    "convT": lambda x, g: aten.convolution(x, torch.rand(4, 5, 2, 2), None, [2, 2], [0, 0], [1, 1], True, [0, 0], 1),
    "dwconv": lambda x, g: aten.convolution(x, torch.rand(4, 1, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 4),
    "dwconv_bw": lambda x, g: aten.convolution_backward(
        g, x, torch.rand(4, 1, 3, 3), [4], [1, 1], [1, 1], [1, 1], False, [0, 0], 4, [True] * 3
    ),
    "cumsum": lambda x, g: aten.cumsum(x, 1),
    "sort": lambda x, g: aten.sort(x, 1),
    "topk": lambda x, g: aten.topk(x, 2, 1),
    "flip": lambda x, g: aten.flip(x, [1]),
    "roll": lambda x, g: aten.roll(x, [1], [1]),
    "where": lambda x, g: aten.where(x > 0.5, x, g),
    "masked_fill": lambda x, g: aten.masked_fill(x, g > 0.5, 0.0),
    "add": lambda x, g: aten.add(x, g),
    "mul": lambda x, g: aten.mul(g, x),
    "addcmul": lambda x, g: aten.addcmul(x, g, g),
    "lerp": lambda x, g: aten.lerp(x, g, 0.5),
    "sum": lambda x, g: aten.sum(x, [1], True),
    "sum2": lambda x, g: aten.sum(x, [0, 2]),
    "mean": lambda x, g: aten.mean(x, [1]),
    "var": lambda x, g: aten.var(x, [1]),
    "amax": lambda x, g: aten.amax(x, [1]),
    "logsumexp": lambda x, g: aten.logsumexp(x, [1]),
    "norm": lambda x, g: aten.linalg_vector_norm(x, 2, [1]),
    "max": lambda x, g: aten.max(x, 1),
    "prod": lambda x, g: aten.prod(x, 1),
    "argmax": lambda x, g: aten.argmax(x, 1),
    "cumprod": lambda x, g: aten.cumprod(x, 1),
    "clone": lambda x, g: aten.clone(x),
    "contiguous": lambda x, g: aten.clone(x, memory_format=torch.contiguous_format),
    "to": lambda x, g: aten._to_copy(x, dtype=torch.float64),
    "zeros_like": lambda x, g: aten.zeros_like(x),
    "new_zeros": lambda x, g: aten.new_zeros(x, [3, 4]),
    "pow": lambda x, g: aten.pow(x, 2),
    "sqrt": lambda x, g: aten.sqrt(x),
    "tril": lambda x, g: aten.tril(x),
    "triu": lambda x, g: aten.triu(x),
    "repeat": lambda x, g: aten.repeat(x, [1, 2, 1, 1]),
    "im2col": lambda x, g: aten.im2col(x, [3, 3], [1, 1], [1, 1], [1, 1]),
    "pixel_shuffle": lambda x, g: aten.pixel_shuffle(x, 2),
    "pixel_unshuffle": lambda x, g: aten.pixel_unshuffle(x, 2),
    "grid": lambda x, g: aten.grid_sampler_2d(x, torch.rand(2, 3, 3, 2), 0, 0, False),
    "grid_bw": lambda x, g: aten.grid_sampler_2d_backward(
        g[:, :, :3, :3], x, torch.rand(2, 3, 3, 2), 0, 0, False, [True, True]
    ),
    "mse_bw": lambda x, g: aten.mse_loss_backward(torch.ones(()), x, g, 1),
    "l1": lambda x, g: aten.sgn(x - g),
    "sl1_bw": lambda x, g: aten.smooth_l1_loss_backward(torch.ones(()), x, g, 1, 1.0),
    "bce_bw": lambda x, g: aten.binary_cross_entropy_backward(torch.ones(()), x.clamp(0.1, 0.9), g.clamp(0.1, 0.9)),
    "bcel": lambda x, g: aten.binary_cross_entropy_with_logits(x, g, None, None, 0),
    "nll2d": lambda x, g: aten.nll_loss2d_forward(x, torch.zeros(2, 6, 8, dtype=torch.long), None, 1, -100),
    "kl": lambda x, g: aten.sub(x, g),
    "rms": lambda x, g: aten._fused_rms_norm(x, [8], w(8), 1e-5),
    "flash": lambda x, g: aten._scaled_dot_product_flash_attention_for_cpu(x, g, x),
    "unfold_bw": lambda x, g: aten.unfold_backward(g[:, :, :, :, None].expand(2, 4, 6, 8, 1), [2, 4, 6, 8], 3, 1, 1),
    "slice_bw": lambda x, g: aten.slice_backward(g, [2, 8, 6, 8], 1, 0, 4, 1),
    "select_bw": lambda x, g: aten.select_backward(g[:, 0], [2, 4, 6, 8], 1, 0),
    "matmul_bmm": lambda x, g: aten.bmm(x[0], g[0].transpose(1, 2)),
    "mm": lambda x, g: aten.mm(x[0, 0], g[0, 0].t()),
    "cdist": lambda x, g: aten._cdist_forward(x[0], g[0], 2.0, None),
    "clamp": lambda x, g: aten.clamp(x, 0, 1),
    "maximum": lambda x, g: aten.maximum(x, g),
    "exp": lambda x, g: aten.exp(x),
    "slice_scatter": lambda x, g: aten.slice_scatter(x, g[:, :2], 1, 0, 2),
    "fill": lambda x, g: aten.fill(x, 0.0),
    "rsqrt": lambda x, g: aten.rsqrt(x),
    "embedding": lambda x, g: aten.embedding(x[0, 0], torch.zeros(3, dtype=torch.long)),
    "embedding_bw": lambda x, g: aten.embedding_dense_backward(g[0, 0], torch.zeros(6, dtype=torch.long), 9, -1, False),
    "renorm": lambda x, g: aten.renorm(x, 2, 1, 1.0),
    "index_fill": lambda x, g: aten.index_fill(x, 1, torch.tensor([0]), 0.0),
    "masked_scatter": lambda x, g: aten.masked_scatter(x, g > 0.5, x),
    "lrelu": lambda x, g: aten.leaky_relu(x),
    "relu": lambda x, g: aten.relu(x),
    "hardtanh_bw": lambda x, g: aten.hardtanh_backward(g, x, 0, 6),
    "hardswish_bw": lambda x, g: aten.hardswish_backward(g, x),
    "softplus_bw": lambda x, g: aten.softplus_backward(g, x, 1, 20),
    "take": lambda x, g: aten.take(x, torch.zeros(3, dtype=torch.long)),
    "diag": lambda x, g: aten.diag_embed(x),
    "atan2": lambda x, g: aten.atan2(x, g),
    "remainder": lambda x, g: aten.remainder(x, g),
    "median": lambda x, g: aten.median(x, 1),
    "kth": lambda x, g: aten.kthvalue(x, 2, 1),
    "mode": lambda x, g: aten.mode(x, 1),
    "lcumsum": lambda x, g: aten.logcumsumexp(x, 1),
    "cummax": lambda x, g: aten.cummax(x, 1),
    "rot90": lambda x, g: aten.rot90(x, 1, [2, 3]),
    "native_dropout": lambda x, g: aten.native_dropout(x, 0.5, True),
    "bernoulli": lambda x, g: aten.bernoulli(x.clamp(0, 1)),
    "rand_like": lambda x, g: aten.rand_like(x),
    "avg3": lambda x, g: aten.avg_pool3d(x, [2, 2, 2]),
    "max1": lambda x, g: aten.avg_pool1d(x[0], [2]),
    "near1": lambda x, g: aten.upsample_nearest1d(x[0], [16], None),
    "lin1": lambda x, g: aten.upsample_linear1d(x[0], [16], False),
    "conv1d": lambda x, g: aten.convolution(x[0], torch.rand(5, 6, 3), None, [1], [1], [1], False, [0], 1),
    "conv1d_bw": lambda x, g: aten.convolution_backward(
        g[0], x[0], torch.rand(6, 6, 3), [6], [1], [1], [1], False, [0], 1, [True] * 3
    ),
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
