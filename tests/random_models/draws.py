"""Parts that draw random numbers: of torch, Python, numpy, and generator objects."""

import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from .part import WIDTH, Part, at_restart


class Dropouts(Part):
    def setup(self, draw, inner):
        self.how = draw.choice(["module", "in place", "function", "alpha", "feature alpha"])
        self.dropout = nn.Dropout(0.3, inplace=self.how == "in place")

    def forward(self, x):
        if self.how == "function":
            return F.dropout(x, 0.3, self.training)
        if self.how == "alpha":
            return F.alpha_dropout(x, 0.2, self.training)
        if self.how == "feature alpha":
            return F.feature_alpha_dropout(x, 0.2, self.training)
        return self.dropout(x * 1.5)


class Dropout2d(Part, kind="image"):
    def setup(self, draw, inner):
        self.dropout = nn.Dropout2d(0.3)

    def forward(self, x):
        return self.dropout(x)


class DropPath(Part, inner=(1, 2)):
    """Stochastic depth: timm's per sample, torchvision's, or by a value on the host."""

    def setup(self, draw, inner):
        self.inner = nn.Sequential(*inner)
        self.how = draw.choice(["sample", "batch", "host"])

    def forward(self, x):
        if not self.training:
            return x + self.inner(x)
        shape = (x.shape[0],) + (1,) * (x.dim() - 1)
        if self.how == "sample":
            return x + self.inner(x) * x.new_empty(shape).bernoulli_(0.7).div_(0.7)
        if self.how == "batch":
            noise = torch.empty([1] * x.dim(), dtype=x.dtype).bernoulli_(0.7)
            return x + self.inner(x) * noise
        return x + self.inner(x) if torch.rand(1).item() < 0.7 else x


class LayerDrop(Part, inner=(1, 1), planned=False):
    """fairseq's layer drop: Python's random numbers decide whether a layer runs."""

    def setup(self, draw, inner):
        self.inner = inner[0]
        self.source = draw.choice(["random", "numpy"])

    def forward(self, x):
        number = random.random() if self.source == "random" else np.random.rand()  # noqa: NPY002
        return x if self.training and number < 0.4 else self.inner(x)


_LOCAL = random.Random(0)


@at_restart
def _restart():
    _LOCAL.seed(0)


class OwnGenerator(Part, planned=False):
    def setup(self, draw, inner):
        self.how = draw.choice(["torch", "numpy", "python", "file"])
        self.generator = torch.Generator().manual_seed(3)
        self.numpy = np.random.default_rng(3)
        self.python = random.Random(3)

    def forward(self, x):
        if self.how == "torch":
            return x + 0.1 * torch.randn(x.shape, generator=self.generator)
        if self.how == "numpy":
            return x * float(self.numpy.uniform(0.5, 1.5))
        return x * (self.python if self.how == "python" else _LOCAL).uniform(0.5, 1.5)


class Noise(Part):
    def setup(self, draw, inner):
        self.how = draw.choice(["normal", "uniform", "gumbel", "rrelu", "permuted", "multinomial"])

    def forward(self, x):
        if self.how == "normal":
            return x + 0.1 * torch.randn_like(x)
        if self.how == "uniform":
            return x * torch.empty_like(x).uniform_(0.5, 1.5)
        if self.how == "gumbel":
            return x * F.gumbel_softmax(x, tau=1.0, dim=-1)
        if self.how == "rrelu":
            return F.rrelu(x.contiguous(), training=self.training)  # else: a documented difference (guarantees.md)
        if self.how == "permuted":
            return 0.5 * x + 0.5 * x[torch.randperm(x.shape[0])]
        chosen = torch.multinomial(x.detach().flatten(1).softmax(-1), WIDTH)
        return x + 0.1 * x.flatten(1).gather(1, chosen).mean()


class Mixup(Part, planned=False):
    def forward(self, x):
        factor = np.random.beta(1.0, 1.0)  # noqa: NPY002
        return factor * x + (1 - factor) * x.flip(0)
