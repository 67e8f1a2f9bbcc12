"""Parts that hold other parts: lists in lists, dicts, blocks called twice or shared, hooks, parametrizations."""

import dataclasses

import torch
from torch import nn
from torch.func import functional_call
from torch.nn.utils import parametrizations, parametrize

from .part import WIDTH, Part, channels_first, channels_last


class ListsInList(Part, inner=(2, 4)):
    """x-transformers' layout: a ModuleList of ModuleLists, [norm, layer, residual], whose members are called."""

    def setup(self, draw, inner):
        self.layers = nn.ModuleList([nn.ModuleList([nn.LayerNorm(WIDTH), block]) for block in inner])
        self.scales = draw.random() < 0.5

    def forward(self, x):
        for norm, block in self.layers:  # pyright: ignore[reportGeneralTypeIssues]
            found = block(channels_first(norm(channels_last(x))))
            x = x + (0.5 * found if self.scales else found)
        return x


class NamedBranches(Part, inner=(2, 3)):
    """A ModuleDict whose branches are chosen by name and summed."""

    def setup(self, draw, inner):
        self.branches = nn.ModuleDict({f"branch{place}": block for place, block in enumerate(inner)})
        self.route = ["branch0", "branch1"]

    def between(self, step):
        self.route.reverse()

    def forward(self, x):
        return sum(self.branches[name](x) for name in self.route) / 2  # pyright: ignore[reportReturnType]


class Chain(nn.Sequential):
    def forward(self, input, skip=None, scale: float = 1.0):  # pyright: ignore[reportIncompatibleMethodOverride]
        x = input
        for module in self:
            x = module(x)
        return x * scale if skip is None else (x * scale).add_(skip)


class SequentialSubclass(Part, inner=(1, 3)):
    def setup(self, draw, inner):
        self.chain = Chain(*inner)
        self.skips = draw.random() < 0.5

    def forward(self, x):
        return self.chain(x, skip=x if self.skips else None, scale=0.5)


class CalledTwice(Part, inner=(1, 2)):
    """A block that is called twice (ALBERT), or once more on half of the batch."""

    def setup(self, draw, inner):
        self.block = nn.Sequential(*inner)
        self.repeats = draw.choice([2, 3])

    def forward(self, x):
        for _ in range(self.repeats):
            x = self.block(x)
        return x


class SharedWeights(Part):
    def setup(self, draw, inner):
        first = nn.Linear(WIDTH, WIDTH)
        self.how = draw.choice(["module", "parameter", "transposed"])
        second = first if self.how == "module" else nn.Linear(WIDTH, WIDTH)
        if self.how == "parameter":
            second.weight = first.weight
        self.layers = nn.ModuleList([nn.Sequential(first, nn.Tanh()), nn.Sequential(second, nn.Tanh())])

    def forward(self, x):
        x = channels_last(x)
        if self.how == "transposed":
            weight = self.layers[0][0].weight  # pyright: ignore[reportIndexIssue]
            return channels_first(torch.tanh(x @ weight) @ weight.t())
        for layer in self.layers:
            x = layer(x)
        return channels_first(x)


@dataclasses.dataclass
class Outputs:
    hidden: torch.Tensor
    extra: torch.Tensor | None = None


class Structured(Part, inner=(1, 2)):
    def setup(self, draw, inner):
        self.block = _Structured(draw.choice(["dict", "tuple", "dataclass"]), inner)
        self.uses = draw.random() < 0.5

    def forward(self, x):
        found = self.block(hidden=x, mask=None, gate=x.mean() if self.uses else None)
        if isinstance(found, dict):
            return found["hidden"] + found["extra"].mean()
        if isinstance(found, tuple):
            return found[0]
        return found.hidden if found.extra is None else found.hidden * torch.sigmoid(found.extra)


class _Structured(nn.Module):
    def __init__(self, how, inner):
        super().__init__()
        self.how, self.inner = how, nn.Sequential(*inner)

    def forward(self, hidden, mask=None, gate=None, **unused):
        out = self.inner(hidden)
        if gate is not None:
            out = out * gate
        if self.how == "dict":
            return {"hidden": out, "extra": out.detach().mean(), "name": "block"}
        return (out, None, 3) if self.how == "tuple" else Outputs(out, gate)


class Hooked(Part, inner=(1, 2)):
    def setup(self, draw, inner):
        self.block = nn.Sequential(*inner, nn.Tanh())
        self.how = draw.choice(["input", "output", "inner", "keep", "backward", "tensor", "backward pre"])
        self.features: dict = {}
        if self.how == "input":
            self.block.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))
        elif self.how == "output":
            self.block.register_forward_hook(lambda module, args, output: output + args[0])
        elif self.how == "inner":
            self.block[-1].register_forward_hook(lambda module, args, output: output * 2)
        elif self.how == "keep":
            self.block[-1].register_forward_hook(self._keep)
        elif self.how == "backward":
            self.block.register_full_backward_hook(lambda module, grads, outer: (grads[0] * 0.5,))
        elif self.how == "backward pre":
            self.block[-1].register_full_backward_pre_hook(lambda module, grads: (grads[0] * 0.5,))

    def _keep(self, module, args, output):
        self.features["last"] = output

    def forward(self, x):
        if self.how == "tensor":
            x = x * 1.0
            if x.requires_grad:
                x.register_hook(lambda grad: grad * 0.5)
        x = self.block(x)
        return x + self.features.pop("last").mean() if self.how == "keep" else x


class Reparametrized(Part):
    """Weights that hooks or parametrizations compute: spectral and weight norm, old and new."""

    def setup(self, draw, inner):
        self.how = draw.choice(["spectral", "weight", "old spectral", "old weight", "own"])
        layer = nn.Linear(WIDTH, WIDTH)
        if self.how == "spectral":
            layer = parametrizations.spectral_norm(layer)
        elif self.how == "weight":
            layer = parametrizations.weight_norm(layer)
        elif self.how == "old spectral":
            layer = nn.utils.spectral_norm(layer)
        elif self.how == "own":
            parametrize.register_parametrization(layer, "weight", _Symmetric())
        else:
            layer = nn.utils.weight_norm(layer)
        self.layer = layer

    def forward(self, x):
        return channels_first(self.layer(channels_last(x)))


class _Symmetric(nn.Module):
    def forward(self, weight):
        return weight.triu() + weight.triu(1).transpose(-1, -2)


class Functional(Part, inner=(1, 2)):
    """A block called with other parameters by ``functional_call``, as meta-learning does.

    Not one with torch's checkpoint inside, whose recomputation silently takes the module's own parameters.
    """

    def setup(self, draw, inner):
        self.block = nn.Sequential(*inner)

    def forward(self, x):
        if any(type(module).__name__ == "TorchCheckpoint" for module in self.block.modules()):
            return self.block(x)
        scaled = {name: parameter * 0.9 for name, parameter in self.block.named_parameters()}
        return functional_call(self.block, scaled, (x,))


class CallsForward(Part, inner=(1, 2), planned=False):
    def setup(self, draw, inner):
        self.block = inner[0]
        self.others = list(inner[1:])

    def forward(self, x):
        x = self.block.forward(x)
        for other in self.others:
            x = other(x)
        return x


class SideLoss(Part, inner=(1, 2), planned=False):
    """A block that leaves an auxiliary loss in an attribute, which the model collects."""

    def setup(self, draw, inner):
        self.block = nn.Sequential(*inner)
        self.side_loss = None

    def forward(self, x):
        x = self.block(x)
        self.side_loss = 0.01 * x.square().mean()
        return x


class Residual(Part, inner=(1, 3)):
    def setup(self, draw, inner):
        self.block = nn.Sequential(*inner)
        self.in_place = draw.random() < 0.4

    def forward(self, x):
        if self.in_place:
            found = self.block(x) * 0.5
            found += x
            return found
        return x + self.block(x)
