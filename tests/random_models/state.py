"""Parts that keep state: buffers updated in forward, counters, caches, and tensors set as attributes."""

import functools

import torch
import torch.nn.functional as F
from torch import nn

from .part import WIDTH, Part, at_restart, channels_first, channels_last, per_channel


class MovingAverage(Part):
    def setup(self, draw, inner):
        self.register_buffer("average", torch.zeros(WIDTH))
        self.how = draw.choice(["in place", "lerp", "copy", "anew", "view"])
        self.late = draw.random() < 0.5

    def forward(self, x):
        now = channels_last(x).detach().flatten(0, -2).mean(0)
        before = self.average.clone() if self.late else self.average
        if self.training:
            if self.how == "in place":
                self.average.mul_(0.9).add_(now, alpha=0.1)
            elif self.how == "lerp":
                self.average.lerp_(now, 0.1)
            elif self.how == "copy":
                self.average.copy_(0.9 * self.average + 0.1 * now)
            elif self.how == "view":
                self.average[:4] += now[:4]
            else:
                self.average = 0.9 * self.average + 0.1 * now
        return x * (1 + 0.1 * per_channel(x, before if self.late else self.average))


class CountsInBuffer(Part):
    def setup(self, draw, inner):
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.steps += 1
        return x * (1 - 0.5 ** self.steps.float())


class CountsInAttribute(Part, planned=False):
    def setup(self, draw, inner):
        self.calls = 0
        self.branches = draw.random() < 0.5

    def forward(self, x):
        self.calls += 1
        if self.branches:
            return x.tanh() if self.calls % 2 else x.sin().tanh()
        return x * min(1.0, self.calls / 4)


class CountsInContainer(Part, planned=False):
    def setup(self, draw, inner):
        self.calls = [0]
        self.analysis = {}
        self.how = draw.choice(["path", "factor", "dict", "extra"])

    def forward(self, x):
        self.calls[0] += 1
        if self.how == "factor":
            return x * (0.5 + 0.1 * self.calls[0])
        if self.how == "dict":
            if "seen" not in self.analysis:
                self.analysis["seen"] = True
                return x.sin().exp().sin()
            return x.sin().exp()
        x = x.sin() if self.calls[0] % 2 else x.cos()
        return x.exp().sin() if self.how == "path" or self.calls[0] % 2 else x.exp()


class MaskCache(Part, kind="sequence"):
    def setup(self, draw, inner):
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.how = draw.choice(["buffer", "attribute", "dict"])
        self.masks = {}
        self.mask = None
        if self.how == "buffer":
            del self.mask
            self.register_buffer("mask", None, persistent=False)

    def _mask(self, length, device):
        if self.how == "dict":
            if length not in self.masks:
                self.masks[length] = torch.ones(length, length, device=device).triu(1).bool()
            return self.masks[length]
        if self.mask is None or self.mask.shape[0] < length:
            self.mask = torch.ones(length, length, device=device).triu(1).bool()
        return self.mask[:length, :length]

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = (q @ k.transpose(-1, -2)).masked_fill(self._mask(x.shape[1], x.device), -1e4)
        return scores.softmax(-1) @ v


@functools.lru_cache(maxsize=8)
def _positions(length, width):
    angles = torch.arange(length)[:, None] / 100 ** (torch.arange(width) / width)
    return angles.sin()


at_restart(_positions.cache_clear)
_TABLES: dict = {}
at_restart(_TABLES.clear)


class CachedPositions(Part, kind="sequence"):
    def setup(self, draw, inner):
        self.how = draw.choice(["lru_cache", "global", "each time"])

    def forward(self, x):
        length = x.shape[1]
        if self.how == "lru_cache":
            return x + _positions(length, WIDTH)
        if self.how == "global":
            if length not in _TABLES:
                _TABLES[length] = torch.arange(length)[:, None].expand(length, WIDTH) * 0.01
            return x + _TABLES[length]
        return x + _positions.__wrapped__(length, WIDTH)


class Rotary(Part, kind="sequence", planned=False):
    def setup(self, draw, inner):
        self.query = nn.Linear(WIDTH, WIDTH)
        self.longest = 0
        self.register_buffer("frequencies", 1 / 10 ** (torch.arange(WIDTH // 2) / 4), persistent=False)

    def _extend(self, length):
        if length > self.longest:
            self.longest = length
            angles = torch.outer(torch.arange(length).float(), self.frequencies)
            self.register_buffer("cos", angles.cos(), persistent=False)
            self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x):
        self._extend(x.shape[1])
        cos, sin = self.cos[: x.shape[1]], self.sin[: x.shape[1]]
        one, other = self.query(x).chunk(2, -1)
        return torch.cat([one * cos - other * sin, one * sin + other * cos], -1)


class KeepsItsOutput(Part, planned=False):
    def setup(self, draw, inner):
        self.detached = draw.random() < 0.7
        self.last = None

    def forward(self, x):
        x = torch.tanh(x)
        self.last = x.detach() if self.detached else x
        return x * 0.5


class ReadsLastStep(Part, planned=False):
    """A recurrent memory over steps: the detached output of the step before is part of this one."""

    def setup(self, draw, inner):
        self.memory = None

    def forward(self, x):
        if self.memory is not None and self.memory.shape == x.shape:
            x = x + 0.1 * self.memory
        x = torch.tanh(x)
        self.memory = x.detach()
        return x


class Queue(Part):
    """A memory bank: a buffer as a ring, with its place in a buffer or a number, as in MoCo."""

    def setup(self, draw, inner):
        self.register_buffer("queue", torch.zeros(6, WIDTH))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))
        self.number = 0
        self.how = draw.choice(["number", "index_copy", "item", "roll"])

    @torch.no_grad()
    def _put(self, row):
        if self.how == "number":
            self.queue[self.number] = row
            self.number = (self.number + 1) % 6
        elif self.how == "index_copy":
            self.queue.index_copy_(0, self.place, row[None])
            self.place.add_(1).remainder_(6)
        elif self.how == "item":
            self.queue[int(self.place)] = row
            self.place[0] = (int(self.place) + 1) % 6
        else:
            self.queue.copy_(torch.cat([self.queue[1:], row[None]]))

    def forward(self, x):
        out = x + 0.1 * per_channel(x, self.queue.clone().mean(0))
        if self.training:
            self._put(channels_last(x).flatten(0, -2).mean(0))
        return out


class Codebook(Part):
    """Vector quantization: nearest codes, a straight-through gradient, codes updated by moving averages."""

    def setup(self, draw, inner):
        self.register_buffer("codes", torch.randn(5, WIDTH))
        self.register_buffer("sizes", torch.ones(5))
        self.side_loss = None
        self.commits = draw.random() < 0.3

    def forward(self, x):
        last = channels_last(x)
        flat = last.reshape(-1, WIDTH)
        distances = flat.pow(2).sum(1, keepdim=True) - 2 * flat @ self.codes.t() + self.codes.pow(2).sum(1)
        places = distances.argmin(1)
        found = F.embedding(places, self.codes).view_as(last)
        if self.training:
            hot = F.one_hot(places, 5).to(flat.dtype)
            with torch.no_grad():
                self.sizes.mul_(0.9).add_(hot.sum(0), alpha=0.1)
                self.codes.mul_(0.9).add_((hot.t() @ flat) / self.sizes[:, None], alpha=0.1)
        if self.commits:
            self.side_loss = F.mse_loss(last, found.detach())
        return channels_first(last + (found - last).detach())


class MomentumTwin(Part, planned=False):
    """A layer and a slow copy of it, whose parameters its forward updates."""

    def setup(self, draw, inner):
        self.fast = nn.Linear(WIDTH, WIDTH)
        self.slow = nn.Linear(WIDTH, WIDTH)
        self.slow.requires_grad_(False)

    @torch.no_grad()
    def _follow(self):
        for fast, slow in zip(self.fast.parameters(), self.slow.parameters()):
            slow.mul_(0.9).add_(fast, alpha=0.1)

    def forward(self, x):
        if self.training:
            self._follow()
        last = channels_last(x)
        with torch.no_grad():
            target = self.slow(last)
        return channels_first(self.fast(last) + 0.1 * target)
