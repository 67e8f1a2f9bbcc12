"""Results without data have the dtypes, strides and storages of the real ones."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_as_eager, measured_step, model_of, raises
from torch import nn
from torch._prims_common import suggest_memory_format
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

import ackpt
from ackpt.planner.capture.patches import kernels
from ackpt.planner.capture.patches.kernels import true_results

pytestmark = [
    pytest.mark.usefixtures("fresh_results", "one_thread"),
    pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning"),
]

aten = torch.ops.aten
HALF, FULL = torch.bfloat16, torch.float32


def x(dtype):
    return torch.ones(3, 4, 5, dtype=dtype)


def w(dtype, size=4):
    return torch.ones(size, dtype=dtype)


def running(dtype):
    return torch.zeros(4, dtype=dtype), torch.ones(4, dtype=dtype)


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
    "few columns": lambda d, p: [aten.col2im(torch.ones(4, 1, dtype=d), (5, 5), (2, 2), (1, 1), (0, 0), (5, 5))],
    "copy of a slice": lambda d, p: [aten.copy.default(torch.ones(12)[1:], torch.ones(11))],
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


# Strides of results: tensors without data have those that torch's CPU kernels write, whatever order they read.


SHAPE = (2, 4, 6, 8)


def v(size):
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
    "layer_norm": lambda x, g: aten.native_layer_norm(x, (8,), v(8), v(8), 1e-5),
    "layer_norm_bw": lambda x, g: aten.native_layer_norm_backward(
        g, x, (8,), torch.rand(2, 4, 6, 1), torch.rand(2, 4, 6, 1), v(8), v(8), [True] * 3
    ),
    "layer_norm_bw, no gradient of the input": lambda x, g: aten.native_layer_norm_backward(
        g, x, (8,), torch.rand(2, 4, 6, 1), torch.rand(2, 4, 6, 1), v(8), v(8), [False, True, True]
    ),
    "bn": lambda x, g: aten._native_batch_norm_legit_functional(
        x, v(4), v(4), torch.zeros(4), torch.ones(4), True, 0.1, 1e-5
    ),
    "bn_bw": lambda x, g: aten.native_batch_norm_backward(g, x, v(4), None, None, v(4), v(4), True, 1e-5, [True] * 3),
    "bn_eval_bw": lambda x, g: aten.native_batch_norm_backward(
        g, x, v(4), v(4), v(4), None, None, False, 1e-5, [True] * 3
    ),
    "gelu_bw": lambda x, g: aten.gelu_backward(g, x),
    "silu_bw": lambda x, g: aten.silu_backward(g, x),
    "threshold_bw": lambda x, g: aten.threshold_backward(g, x, 0),
    "hardsig_bw": lambda x, g: aten.hardsigmoid_backward(g, x),
    "prelu": lambda x, g: aten._prelu_kernel(x, v(4).view(1, 4, 1, 1)),
    "prelu_bw": lambda x, g: aten._prelu_kernel_backward(g, x, v(4).view(1, 4, 1, 1)),
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
    "rms": lambda x, g: aten._fused_rms_norm(x, [8], v(8), 1e-5),
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
def test_one_image_and_a_scalar_or_a_view(number):
    x = torch.rand(1, 64, 32).transpose(1, 2).view(1, 32, 8, 8)  # strides of channels last, except for the batch
    mode = FakeTensorMode()
    with true_results(mode), mode:
        fake = number(mode.from_tensor(x), 2.0)
    assert fake.stride() == number(x, 2.0).stride() == (32, 1, 256, 32)
    x = torch.rand(1, 64, 32)
    with true_results(mode), mode:
        fake = mode.from_tensor(x).transpose(1, 2).view(1, 32, 8, 8)
    assert fake.stride() == x.transpose(1, 2).view(1, 32, 8, 8).stride() == (32, 1, 256, 32)


def test_a_step_with_one_image_of_such_strides():
    def forward(self, tokens):
        image = self.linear(tokens).transpose(1, 2).reshape(1, 32, 8, 8)
        return self.conv(self.norm(image / 1.0 + 0.5).relu()).square().mean()

    torch.manual_seed(0)
    layers = {"linear": nn.Linear(32, 32), "norm": nn.GroupNorm(4, 32), "conv": nn.Conv2d(32, 8, 3, padding=1)}
    model, tokens = model_of(forward, **layers), torch.randn(1, 64, 32)
    assert_as_eager(model, ackpt.compile(model, tokens, policy="none"), tokens)


# Strides of results for images of one pixel or one channel, which are contiguous and channels last at once.


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
OF_IMAGES = {
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
    "batch_norm_bw": lambda x: aten.native_batch_norm_backward(x, x, *_ones(x, 3), None, None, False, 1e-5, [True] * 3),
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


@pytest.mark.parametrize("name", OF_IMAGES)
def test_memory_formats_are_those_of_the_kernel(name):
    mode = FakeTensorMode()
    for image in IMAGES.values():
        real = formats(OF_IMAGES[name](image()))
        with true_results(mode), mode:
            assert formats(OF_IMAGES[name](image())) == real, image


# Captures share fake results under equal settings, and only then.


def error():
    return model_of(lambda self, x: nn.functional.mse_loss(self.layer(x), x), layer=nn.Linear(8, 8))


def results() -> int:
    return sum(map(len, kernels._RESULTS.values()))


def test_an_equal_capture_reuses_all_results():
    graphs, found = [], []
    for rows in (4, 4, 5):
        before = FakeTensorMode.cache_misses
        graphs.append(ackpt.trace(error(), torch.ones(rows, 8)))
        found.append((FakeTensorMode.cache_misses - before, results()))
    (first, known), (second, still), (other, more) = found
    assert first > 0 and second == 0 and known == still < more and 0 < other <= first
    assert graphs[0].hash == graphs[1].hash and graphs[0].bytes() == graphs[1].bytes()


def attention():
    return model_of(
        lambda self, query: nn.functional.scaled_dot_product_attention(query, self.key, self.key).sum(),
        key=nn.Parameter(torch.ones(1, 2, 8, 4)),
    )


def test_the_kernel_of_attention_is_the_one_that_is_enabled_now():
    found = []
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH, SDPBackend.FLASH_ATTENTION):
        with sdpa_kernel(backend):
            graph = ackpt.trace(attention(), torch.ones(1, 2, 8, 4))
        found.append(any("flash_attention" in node.target for node in graph.nodes))
    assert found == [True, False, True]


def test_many_results_are_forgotten(monkeypatch):
    ackpt.trace(error(), torch.ones(4, 8))
    known = results()
    monkeypatch.setattr(kernels, "_MOST_RESULTS", known - 1)
    ackpt.trace(nn.Linear(2, 2), torch.ones(2, 2))
    assert 0 < results() < known


# Recurrent layers: captured as they run, with oneDNN's memory counted.


WORDS = 40


class LanguageModel(nn.Module):
    def __init__(self, layer=nn.LSTM, width=32, layers=2, uses_states=True, **options):
        super().__init__()
        self.uses_states = uses_states
        self.embedding, self.layers = nn.Embedding(WORDS, width), layer(width, width, layers, **options)
        outputs = options.get("proj_size", width) * (2 if options.get("bidirectional") else 1)
        self.head = nn.Linear(outputs, WORDS)

    def forward(self, tokens):
        hidden, state = self.layers(self.embedding(tokens))
        loss = F.cross_entropy(self.head(hidden).flatten(0, 1), tokens.flatten())
        return loss + _mean(state) if self.uses_states else loss


def _mean(state):
    return sum(part.square().mean() for part in (state if isinstance(state, tuple) else (state,)))


def raw(around=contextlib.nullcontext):
    def forward(self, x):
        with self.around():
            return self.layers(x)[0].float().square().mean()

    return model_of(forward, layers=nn.LSTM(8, 8), around=around)


def bfloat16():
    return torch.autocast("cpu", torch.bfloat16)


def tokens(length=6, size=2):
    return torch.randint(WORDS, (length, size), generator=torch.Generator().manual_seed(0))


MODELS = {
    "lstm": lambda: (LanguageModel(), tokens()),
    "lstm, dropout": lambda: (LanguageModel(dropout=0.3), tokens()),
    "lstm, both ways": lambda: (LanguageModel(bidirectional=True, batch_first=True), tokens()),
    "lstm, no bias": lambda: (LanguageModel(bias=False), tokens()),
    "lstm, projected": lambda: (LanguageModel(width=64, proj_size=32), tokens()),
    "lstm, in evaluation": lambda: (LanguageModel(dropout=0.3).eval(), tokens()),
    "lstm, input without a gradient": lambda: (raw(), torch.randn(6, 2, 8)),
    "lstm, autocast": lambda: (raw(bfloat16), torch.randn(6, 2, 8)),
    "lstm, four layers": lambda: (LanguageModel(layers=4, uses_states=False, dropout=0.3), tokens(64, 4)),
    "gru": lambda: (LanguageModel(nn.GRU, dropout=0.3), tokens()),
    "rnn": lambda: (LanguageModel(nn.RNN, dropout=0.3), tokens()),
    "rnn, relu": lambda: (LanguageModel(nn.RNN, nonlinearity="relu"), tokens()),
}


def build(name):
    torch.manual_seed(0)
    model, args = MODELS[name]()
    if "autocast" in name:
        try:
            model(args)
        except RuntimeError as error:
            pytest.skip(f"eager cannot run it on this CPU: {error}")
    return model, args


@pytest.mark.parametrize("name", MODELS)
def test_a_step_is_the_model_bit_for_bit(name):
    model, args = build(name)
    step = ackpt.compile(model, args, policy="full")
    assert_as_eager(model, step, args)
    if name in ("lstm", "lstm, autocast", "gru"):
        for each in (step, ackpt.compile(model, args, policy="none")):
            assert measured_step(model, each, args).dynamic_peak_bytes == each.plan.dynamic_peak_bytes


def test_flops_are_counted():
    model, args = build("lstm")
    step = ackpt.compile(model, args, policy="none")
    per_word = 2 * (2 * 4 * 32 * 32) + 32 * WORDS  # two layers, four gates, from inputs and states; the head
    assert step.plan.flops == 3 * 2 * args.numel() * per_word
    assert ackpt.count_flops(lambda: step(args).backward()) == step.plan.flops
    assert ackpt.count_flops(lambda: model(args).backward()) == step.plan.flops


def untracked(layer, layers):
    """A layer under ``torch.no_grad()``, where oneDNN runs another kernel than in training."""

    def forward(self, x):
        x = self.first(x)
        with torch.no_grad():
            hidden = self.layers(x)[0]
        return self.last(x + hidden / 2).square().mean()

    return model_of(forward, first=nn.Linear(32, 32), layers=layer(32, 32, layers), last=nn.Linear(32, 32))


def test_an_lstm_under_no_grad_is_refused_or_planned_in_parts():
    model, x = untracked(nn.LSTM, 2), torch.randn(4, 10, 32)
    said = r"runs under torch.no_grad\(\) at .*test_kernels.py:\d+.*requires_grad_"
    raises(ackpt.TraceError, said, lambda: ackpt.trace(model, x))
    assert_as_eager(model, ackpt.compile(model, x, budget="1GiB"), x)


@pytest.mark.parametrize("policy", ["none", "full"])
def test_a_gru_that_autograd_does_not_record_runs_as_it_is(policy):
    model, x = untracked(nn.GRU, 2), torch.randn(4, 10, 32)
    assert_as_eager(model, ackpt.compile(model, x, policy=policy, regions=False), x)
