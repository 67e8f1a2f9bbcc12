"""Parts that are typical of scripts: caches outside of modules, hooks in forward, custom operations, seeds."""

import contextlib
import enum
import functools
import random

import numpy as np
import torch
from torch import nn

from .part import WIDTH, Part, at_restart, channels_first, channels_last, per_channel

_LOG: list[torch.Tensor] = []
_BY_LENGTH: dict[tuple, torch.Tensor] = {}


@functools.cache
def _window(length: int) -> torch.Tensor:
    return torch.full((length, length), -1e4).triu(1)


class _Registry:
    tables: dict[int, torch.Tensor] = {}
    weights = torch.ones(WIDTH)


@at_restart
def _restart():
    _LOG.clear()
    _BY_LENGTH.clear()
    _window.cache_clear()
    _Registry.tables.clear()
    _Registry.weights = torch.ones(WIDTH)


class CachesOutside(Part, kind="sequence"):
    """Masks and positions in a cache outside of modules, filled by the first call of each length."""

    def setup(self, draw, inner):
        self.query = nn.Linear(WIDTH, WIDTH)
        self.how = draw.choice(["lru_cache", "dict", "class", "default"])

    def _mask(self, length: int, cache={}) -> torch.Tensor:  # noqa: B006
        if self.how == "lru_cache":
            return _window(length)
        key = (length, "cpu")
        table = {"dict": _BY_LENGTH, "class": _Registry.tables, "default": cache}[self.how]
        if self.how == "class":
            key = length
        if key not in table:
            table[key] = torch.arange(float(length)).neg() * torch.ones(length, 1)
        return table[key]

    def forward(self, x):
        query = self.query(x)
        return (query @ query.transpose(-1, -2) * 0.1 + self._mask(x.shape[-2])).softmax(-1) @ x


class ClassWeights(Part):
    def setup(self, draw, inner):
        self.changes = draw.random() < 0.6

    def between(self, step):
        if self.changes:
            _Registry.weights = _Registry.weights * 1.5

    def forward(self, x):
        return x * per_channel(x, _Registry.weights)


class LogsTensors(Part):
    def setup(self, draw, inner):
        self.how = draw.choice(["detached", "mean", "item later"])

    def between(self, step):
        if self.how == "item later":
            _LOG[:] = [torch.tensor(float(each.sum())) for each in _LOG]

    def forward(self, x):
        _LOG.append(x.detach().mean((0, 1)) if self.how == "mean" else x.detach())
        return x * 0.5


class HooksItsInput(Part):
    def setup(self, draw, inner):
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.residual = draw.random() < 0.6
        self.how = draw.choice(["input", "view", "result"])

    def forward(self, x):
        if self.how == "view":
            x = x.view_as(x)
        if x.requires_grad and self.how != "result":
            x.register_hook(lambda gradient: gradient * 0.5)
        result = channels_first(torch.tanh(self.linear(channels_last(x))))
        if result.requires_grad and self.how == "result":
            result.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
        return x + result if self.residual else result


@torch.library.custom_op("random_models::drop", mutates_args=())
def _drop(x: torch.Tensor) -> torch.Tensor:
    return x * (torch.rand(x.shape) > 0.3)


_drop.register_fake(torch.empty_like)


def _keep_output(ctx, inputs, output):
    ctx.save_for_backward(output)


_drop.register_autograd(lambda ctx, g: g * (ctx.saved_tensors[0] != 0), setup_context=_keep_output)


@torch.library.custom_op("random_models::increase", mutates_args={"x"})
def _increase(x: torch.Tensor) -> None:
    x.add_(1.0)


_increase.register_fake(lambda x: None)


@torch.library.custom_op("random_models::product", mutates_args=())
def _product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (x @ weight).float()  # in the dtype of autocast


_product.register_fake(lambda x, weight: torch.empty_like(x, dtype=torch.float32))


def _keep_inputs(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _product_backward(ctx, gradient):
    x, weight = ctx.saved_tensors
    return (gradient @ weight.t()).to(x.dtype), x.flatten(0, -2).float().t() @ gradient.flatten(0, -2)


_product.register_autograd(_product_backward, setup_context=_keep_inputs)


class _Increased(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        _increase(x)
        return x

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad


class OwnOperations(Part):
    """Custom operations: one draws random numbers untagged, one writes into its argument, one depends on autocast."""

    def setup(self, draw, inner):
        self.draws = draw.random() < 0.6
        self.weight = nn.Parameter(torch.rand(WIDTH, WIDTH)) if draw.random() < 0.4 else None

    def forward(self, x):
        if self.weight is not None:
            x = channels_first(_product(channels_last(x), self.weight)).tanh()
        return _drop(torch.relu(x) + 0.1) if self.draws else _Increased.apply(x).tanh()


class Side(enum.Enum):
    left = "left"
    right = "right"


class NamesItsBuffer(Part):
    def setup(self, draw, inner):
        self.register_buffer("left", torch.ones(WIDTH))
        self.register_buffer("right", -torch.ones(WIDTH))
        self.side = draw.choice(["left", Side.left, b"left"])

    def between(self, step):
        if isinstance(self.side, Side):
            self.side = Side.right
        elif isinstance(self.side, bytes):
            self.side = b"right"
        else:
            self.side = "right"

    def forward(self, x):
        name = self.side.value if isinstance(self.side, Side) else self.side
        name = name.decode() if isinstance(name, bytes) else name
        return torch.tanh(x + per_channel(x, getattr(self, name)))


class Decompositions(Part):
    def setup(self, draw, inner):
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.1)
        self.how = draw.choice(["inv", "solve", "cholesky", "logdet", "prod", "maximum", "expm"])

    def forward(self, x):
        matrix = self.weight @ self.weight.t() + torch.eye(WIDTH)
        last = channels_last(x)
        found = {
            "inv": lambda: last @ torch.linalg.inv(matrix),
            "solve": lambda: torch.linalg.solve(matrix, last.flatten(0, -2).t()).t().view_as(last),
            "cholesky": lambda: last @ torch.linalg.cholesky(matrix),
            "logdet": lambda: last * torch.logdet(matrix),
            "prod": lambda: last * torch.sigmoid(last).prod(-1, keepdim=True),
            "maximum": lambda: torch.maximum(last.transpose(0, 1), last.sin().transpose(0, 1)).transpose(0, 1),
            "expm": lambda: last @ torch.linalg.matrix_exp(self.weight),
        }
        return channels_first(found[self.how]())


class SeedsItself(Part, planned=False):
    def setup(self, draw, inner):
        self.how = draw.choice(["fork", "numpy", "python"])

    def forward(self, x):
        if self.how == "fork":
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(3)
                return x * torch.rand(WIDTH if x.dim() == 3 else x.shape[-1])
        if self.how == "numpy":
            np.random.seed(0)  # noqa: NPY002
            return x * float(np.random.rand())  # noqa: NPY002
        random.seed(0)
        return x * (0.5 + random.random())


class SavesLess(Part, planned=False):
    """Saves tensors in bfloat16, by hooks; without submodules, as regions inside of such hooks give other gradients."""

    def setup(self, draw, inner):
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, x):
        halved = torch.autograd.graph.saved_tensors_hooks(lambda t: (t.dtype, t.bfloat16()), lambda p: p[1].to(p[0]))
        with halved if x.is_floating_point() else contextlib.nullcontext():
            return channels_first(torch.tanh(channels_last(x) @ self.weight))


class MakesParameter(Part):
    def setup(self, draw, inner):
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.sets = draw.random() < 0.5

    def forward(self, x):
        if self.sets:
            with torch.no_grad():
                self.scale.copy_(self.scale.clone())
            return x * per_channel(x, self.scale)
        return x * nn.Parameter(torch.full((1,), 1.5))


class Observer(Part):
    """Ranges of channels in buffers that grow at the first call, as observers of quantization keep them."""

    def setup(self, draw, inner):
        self.register_buffer("largest", torch.empty(0))

    def forward(self, x):
        now = channels_last(x).detach().flatten(0, -2).abs().amax(0)
        if self.largest.numel() == 0:
            self.largest.resize_(now.shape)
            self.largest.copy_(now)
        else:
            self.largest.copy_(torch.maximum(self.largest, now))
        return x / (per_channel(x, self.largest.clone()) + 1)


class _Box:
    def __init__(self, x):
        self.x = x


class WritesIntoArgument(Part):
    """Layers that pass an object on and write their result into it, or pop it off a list."""

    def setup(self, draw, inner):
        self.layers = nn.ModuleList([_Writes(WIDTH), _Writes(WIDTH)])
        self.pops = draw.random() < 0.4

    def forward(self, x):
        box = [x] if self.pops else _Box(x)
        for layer in self.layers:
            box = layer(box)
        return box.pop() if isinstance(box, list) else box.x


class _Writes(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, box):
        if isinstance(box, list):
            return [channels_first(torch.sin(self.linear(channels_last(box.pop()))))]
        box.x = channels_first(torch.sin(self.linear(channels_last(box.x))))
        return box
