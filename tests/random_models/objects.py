"""Parts that use objects as Python does: identities, errors, iterators, containers, threads; and strided products."""

import contextlib
import copy
import functools
import itertools
import random
import threading
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .part import WIDTH, Part, at_restart, channels_first, channels_last, per_channel


class ComparesParameters(Part):
    """Looks at what its parameters are: their class, identity, attributes or place in a set."""

    def setup(self, draw, inner):
        self.weight, self.other = nn.Parameter(torch.rand(WIDTH)), nn.Parameter(torch.rand(WIDTH))
        self.weight.scale = 0.5  # pyright: ignore[reportAttributeAccessIssue]
        self.tied = self.weight
        self.how = draw.choice(["isinstance", "type", "is", "in", "attribute", "default", "leaf", "name"])

    def forward(self, x):
        weight = self.weight
        tests = {
            "isinstance": lambda: isinstance(weight, nn.Parameter),
            "type": lambda: type(weight) is nn.Parameter,
            "is": lambda: weight is self.tied and weight is not self.other,
            "in": lambda: weight in {self.tied} and id(weight) in {id(p) for p in self.parameters()},
            "attribute": lambda: weight.scale == 0.5,  # pyright: ignore[reportAttributeAccessIssue]
            "default": lambda: getattr(weight, "scale", None) is not None and not hasattr(self.other, "scale"),
            "leaf": lambda: weight.is_leaf and weight.grad_fn is None,
            "name": lambda: [name for name, p in self.named_parameters() if p is weight] == ["weight"],
        }
        return x * per_channel(x, weight if tests[self.how]() else self.other)


class Swallows(Part):
    """Takes another branch where torch raises an error, or where only a capture would."""

    def setup(self, draw, inner):
        self.how = draw.choice(["view", "value", "suppress", "numpy", "inverse", "finally"])

    def forward(self, x):
        factor = 1.0
        with contextlib.suppress(Exception) if self.how == "suppress" else contextlib.nullcontext():
            try:
                if self.how == "view":
                    channels_last(x).transpose(0, 1).view(-1, WIDTH)
                    factor = 2.0
                elif self.how == "inverse":
                    torch.linalg.inv(torch.zeros(2, 2))
                elif self.how == "numpy":
                    factor = 1.0 + float(x.detach().numpy().size > 0)
                else:
                    factor = 1.5 if float(x.detach().sum()) < float("inf") else 0.5
            except RuntimeError:
                factor = 0.25
        return x * factor


class Iterates(Part, planned=False):
    def setup(self, draw, inner):
        how = draw.choice(["cycle", "generator", "list", "count", "map"])
        self.values = {
            "cycle": lambda: itertools.cycle([0.5, 2.0, 1.5]),
            "generator": lambda: (0.5 + number for number in range(100)),
            "list": lambda: iter([0.5 + number / 10 for number in range(100)]),
            "count": lambda: itertools.count(1),
            "map": lambda: map(float, range(1, 100)),
        }[how]()

    def forward(self, x):
        return (x * next(self.values)).tanh()


class AssignsLater(Part):
    def setup(self, draw, inner):
        self.late: Any = None
        self.how = draw.choice(["module", "parameter", "tensor", "buffer", "number"])

    def forward(self, x):
        if self.late is None:
            if self.how == "buffer":
                del self.late
            made = torch.full((WIDTH,), 0.7)
            if self.how == "module":
                self.late = nn.Linear(WIDTH, WIDTH)
                nn.init.constant_(self.late.weight, 0.1)
                nn.init.zeros_(self.late.bias)
            elif self.how == "buffer":
                self.register_buffer("late", made)
            else:
                self.late = {"parameter": nn.Parameter(made), "tensor": made, "number": 0.7}[self.how]
        if isinstance(self.late, nn.Module):
            return channels_first(self.late(channels_last(x)))
        return x * (self.late if isinstance(self.late, float) else per_channel(x, self.late))


class AssignsData(Part, planned=False):
    """A momentum copy of a weight, whose ``.data`` the forward, or a hook of it, replaces, as in MoCo."""

    def setup(self, draw, inner):
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key = copy.deepcopy(self.query).requires_grad_(False)
        self.replaces = draw.random() < 0.6
        self.hooked = draw.random() < 0.3
        if self.hooked:
            self.key.register_forward_pre_hook(lambda key, args: self.update())

    def update(self):
        for key, query in zip(self.key.parameters(), self.query.parameters()):
            if self.replaces:
                key.data = key.data * 0.9 + query.data * 0.1
            else:
                key.data.mul_(0.9).add_(query.data, alpha=0.1)

    def forward(self, x):
        if not self.hooked:
            self.update()
        x = channels_last(x)
        return channels_first(self.query(x) + self.key(x))


class _OwnCall(nn.Linear):
    def __call__(self, x):
        return super().__call__(x) * 0.5

    def training_step(self, x):
        return self.forward(x).tanh()


class CallsOtherwise(Part):
    def setup(self, draw, inner):
        self.layer = copy.deepcopy(_OwnCall(WIDTH, WIDTH))
        self.how = draw.choice(["call", "forward", "class", "step", "partial", "method", "map"])
        self.kept = self.layer.forward if draw.random() < 0.3 else None

    def forward(self, x):
        x, layer = channels_last(x), self.layer
        calls = {
            "call": lambda: layer(x),
            "forward": lambda: layer.forward(x),
            "class": lambda: type(layer).forward(layer, x),
            "step": lambda: layer.training_step(x),
            "partial": lambda: functools.partial(layer, x)(),
            "method": lambda: getattr(layer, "forward")(input=x),  # noqa: B009
            "map": lambda: next(iter(map(layer, [x]))),
        }
        return channels_first(calls[self.how]() if self.kept is None else self.kept(x))


class _Slots:
    __slots__ = ("scale", "step")

    def __init__(self):
        self.scale, self.step = torch.ones(WIDTH), 0


class _Holder:
    shared = torch.ones(WIDTH)

    def __init__(self):
        self.state = {"step": 0, "items": [0, {"ema": torch.ones(WIDTH)}]}

    def read(self):
        return self.state["items"][1]["ema"]


_GLOBAL = {"step": 0, "scale": torch.ones(WIDTH)}


@at_restart
def _restart():
    _GLOBAL["scale"], _Holder.shared = torch.ones(WIDTH), torch.ones(WIDTH)


class ReadsElsewhere(Part):
    """Reads a tensor from a container, slots, a helper's method, a class or a global; writes it, or `between` does."""

    def setup(self, draw, inner):
        self.slots, self.holder, self.generator = _Slots(), _Holder(), torch.Generator().manual_seed(3)
        self.how = draw.choice(["slots", "container", "method", "class", "global", "generator"])
        self.writes, self.changes = draw.random() < 0.4, draw.random() < 0.5

    def _read(self):
        if self.how == "generator":
            return torch.rand(WIDTH, generator=self.generator)
        if self.how == "container":
            return self.holder.state["items"][1]["ema"]
        values = {"slots": self.slots.scale, "class": _Holder.shared, "global": _GLOBAL["scale"]}
        return values[self.how] if self.how in values else self.holder.read()

    def between(self, step):
        if self.changes and self.how != "generator":
            self._read().mul_(1.1)

    def forward(self, x):
        value = self._read()
        result = x * per_channel(x, value.clone())
        if self.writes and self.training and self.how != "generator":
            value.mul_(0.9).add_(channels_last(x).detach().flatten(0, -2).mean(0), alpha=0.1)
        return result


class DropsLayers(Part, inner=(1, 2), planned=False):
    def setup(self, draw, inner):
        self.layers, self.how = nn.ModuleList(inner), draw.choice(["python", "torch"])

    def forward(self, x):
        for layer in self.layers:
            if not self.training or (random.random() if self.how == "python" else torch.rand(()).item()) < 0.6:
                x = layer(x)
        return x


class NormalizesTwice(Part):
    def setup(self, draw, inner):
        self.norm = nn.BatchNorm1d(WIDTH, momentum=draw.choice([0.1, None]))

    def forward(self, x):
        rows = channels_last(x)
        first, second = self.norm(rows.reshape(-1, WIDTH)), self.norm(rows.flip(0).reshape(-1, WIDTH).tanh())
        return channels_first((first + second).view(rows.shape))


class DrawsInThread(Part, planned=False):
    def setup(self, draw, inner):
        self.layer, self.how = nn.Linear(WIDTH, WIDTH), draw.choice(["python", "torch"])

    def forward(self, x):
        thread = threading.Thread(target=random.random if self.how == "python" else lambda: torch.rand(3))
        thread.start()
        thread.join()
        return F.dropout(channels_first(self.layer(channels_last(x))), 0.2, self.training)


class StridedProduct(Part):
    def setup(self, draw, inner):
        self.layer = nn.Linear(WIDTH, WIDTH).requires_grad_(draw.random() < 0.4)
        self.cut = draw.choice(["second", "shifted", "transposed", "columns", "expanded", "one of three"])
        self.how = draw.choice(["linear", "matmul", "einsum", "matrix first", "batch of one"])

    def _strided(self, x):
        return {
            "second": lambda: torch.stack([x, x], -2).flatten(-3, -2)[..., ::2, :],
            "shifted": lambda: torch.cat([x[..., :1, :], x], -2)[..., 1:, :],
            "transposed": lambda: x.transpose(-2, -3).contiguous().transpose(-2, -3),
            "columns": lambda: x.mT.contiguous().mT,
            "expanded": lambda: x[:1].expand_as(x),
            "one of three": lambda: torch.cat([x, x, x], -1).unflatten(-1, (3, WIDTH)).unbind(-2)[1],
        }[self.cut]()

    def forward(self, x):
        x, weight = self._strided(channels_last(x)), self.layer.weight
        products = {
            "linear": lambda: self.layer(x),
            "matmul": lambda: x @ weight,
            "einsum": lambda: torch.einsum("...d,kd->...k", x, weight),
            "matrix first": lambda: (weight @ x.mT).mT,
            "batch of one": lambda: x @ weight[(None,) * (x.dim() - 2)],
        }
        return channels_first(products[self.how]())
