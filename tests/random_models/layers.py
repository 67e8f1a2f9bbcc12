"""Layers for sequences and for any shape: attention, recurrence, gates, custom functions, casts, views."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from .part import WIDTH, Part, channels_first, channels_last


class Linear(Part):
    def setup(self, draw, inner):
        self.linear = nn.Linear(WIDTH, WIDTH, bias=draw.random() < 0.7)
        acts = [nn.ReLU(True), nn.SiLU(True), nn.GELU(), nn.LeakyReLU(0.1, True), nn.Hardswish(), nn.PReLU(), nn.ELU()]
        self.act = draw.choice(acts)

    def forward(self, x):
        return channels_first(self.act(self.linear(channels_last(x))))


class Gated(Part):
    def setup(self, draw, inner):
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.how = draw.choice(["chunk", "split", "index", "unbind", "glu"])

    def forward(self, x):
        both = self.up(channels_last(x))
        if self.how == "glu":
            return channels_first(self.down(F.glu(both, -1)))
        if self.how == "chunk":
            one, gate = both.chunk(2, -1)
        elif self.how == "split":
            one, gate = torch.split(both, [2 * WIDTH, 2 * WIDTH], -1)
        elif self.how == "index":
            one, gate = both[..., ::2], both[..., 1::2]
        else:
            one, gate = both.unflatten(-1, (2, 2 * WIDTH)).unbind(-2)
        return channels_first(self.down(one * F.silu(gate)))


class Attention(Part, kind="sequence"):
    """Attention by torch's function, with a mask, dropout, both or causal; or with an optional mask and own softmax."""

    def setup(self, draw, inner):
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.how = draw.choice(["plain", "causal", "mask", "dropout", "bias", "eager"])
        self.bias = nn.Parameter(torch.zeros(2, 1, 1))

    def forward(self, x, mask=None):
        heads = self.qkv(x).view(*x.shape[:2], 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        q, k, v = heads.unbind(0)
        length = x.shape[1]
        dropout = 0.2 if self.how in ("dropout", "eager") and self.training else 0.0
        if self.how == "eager":
            scores = torch.matmul(q, k.transpose(-2, -1)) * 0.5 + self.bias
            if mask is not None:
                scores = scores + mask
            found = F.dropout(scores.softmax(-1), dropout) @ v
        else:
            if self.how == "mask":
                mask = torch.ones(length, length, dtype=torch.bool).tril()
            elif self.how == "bias":
                mask = self.bias.expand(2, length, length)
            found = F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal=self.how == "causal")
        return self.out(found.transpose(1, 2).reshape(x.shape))


class TorchAttention(Part, kind="sequence"):
    def setup(self, draw, inner):
        self.layer = draw.random() < 0.5
        if self.layer:
            self.encoder = nn.TransformerEncoderLayer(
                WIDTH, 2, 16, 0.1, batch_first=True, norm_first=draw.random() < 0.5
            )
        else:
            self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.1, batch_first=True)
        self.weights = draw.random() < 0.5

    def forward(self, x):
        if self.layer:
            return self.encoder(x)
        found, _ = self.attention(x, x, x, need_weights=self.weights)
        return x + found


class RelativePositions(Part, kind="sequence"):
    """Swin's bias: a table indexed by a buffer."""

    def setup(self, draw, inner):
        self.table = nn.Parameter(torch.randn(64, 1) * 0.1)
        self.register_buffer("index", (torch.arange(32)[:, None] - torch.arange(32)) % 64)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x):
        length = x.shape[1]
        q, k, v = self.qkv(x).reshape(*x.shape[:2], 3, WIDTH).unbind(2)
        bias = self.table[self.index[:length, :length].reshape(-1)].view(length, length)
        return (q @ k.transpose(1, 2) + bias).softmax(-1) @ v


class Recurrent(Part, kind="sequence"):
    def setup(self, draw, inner):
        cls = draw.choice([nn.LSTM, nn.GRU])
        self.layers = cls(WIDTH, 32, draw.choice([1, 2]), batch_first=True, dropout=0.0)
        self.out = nn.Linear(32, WIDTH)

    def forward(self, x):
        self.layers.flatten_parameters()
        return self.out(self.layers(x)[0])


class Scan(Part, kind="sequence"):
    """A state space model as a loop over time: rows written into one tensor, stacked, or cumulative sums."""

    def setup(self, draw, inner):
        self.decay = nn.Parameter(torch.zeros(WIDTH))
        self.how = draw.choice(["write", "stack", "cumsum"])

    def forward(self, x):
        if self.how == "cumsum":
            return x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]
        state, out, rows = torch.zeros_like(x[:, 0]), torch.empty_like(x), []
        for step in range(x.shape[1]):
            state = torch.sigmoid(self.decay) * state + x[:, step]
            out[:, step] = state
            rows.append(state)
        return torch.tanh(out if self.how == "write" else torch.stack(rows, 1))


class Spectral(Part, kind="sequence"):
    """FNet's and GFNet's mixing by Fourier transforms, with a complex weight."""

    def setup(self, draw, inner):
        self.weight = nn.Parameter(torch.randn(WIDTH // 2 + 1, 2))

    def forward(self, x):
        found = torch.fft.rfft(x, dim=-1, norm="ortho") * torch.view_as_complex(self.weight)
        return torch.fft.irfft(found, n=WIDTH, dim=-1, norm="ortho")


class Experts(Part):
    def setup(self, draw, inner):
        self.gate = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.dense = draw.random() < 0.6

    def forward(self, x):
        last = channels_last(x)
        flat = last.reshape(-1, WIDTH)
        weights, chosen = self.gate(flat).softmax(-1).max(-1)
        out = torch.zeros_like(flat)
        for place, expert in enumerate(self.experts):
            if self.dense:
                out = out + expert(flat) * ((chosen == place) * weights)[:, None]
            else:
                rows = torch.where(chosen == place)[0]
                out.index_add_(0, rows, expert(flat[rows]) * weights[rows, None])
        return channels_first(out.view_as(last))


class _Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        (x,) = ctx.saved_tensors
        gate = torch.sigmoid(x)
        return grad * (gate * (1 + x * (1 - gate)))


class _Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        return -ctx.factor * grad, None


class CustomFunctions(Part):
    """Own autograd functions: timm's swish, a gradient that is reversed by a factor that changes."""

    def setup(self, draw, inner):
        self.factor = 0.5
        self.changes = draw.random() < 0.5
        self.reverse = draw.random() < 0.5

    def between(self, step):
        self.factor += self.changes * 0.25

    def forward(self, x):
        return _Reverse.apply(x, self.factor) if self.reverse else _Swish.apply(x)


class Autocast(Part, inner=(1, 2)):
    def setup(self, draw, inner):
        self.inner = nn.Sequential(*inner)
        self.enabled = draw.random() < 0.7

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16, enabled=self.enabled):
            found = self.inner(x.float())
        return found.to(x.dtype)


class WithoutGradient(Part, inner=(1, 2)):
    def setup(self, draw, inner):
        self.inner = nn.Sequential(*inner)
        self.detaches = draw.random() < 0.5
        self.freezes = draw.random() < 0.5
        self.inner.requires_grad_(not self.freezes)

    def forward(self, x):
        if self.detaches:
            return x + 0.5 * self.inner(x.detach())
        with torch.set_grad_enabled(not self.freezes):
            found = self.inner(x)
        return x + 0.5 * found


class TorchCheckpoint(Part):
    """A library's own switch: torch's checkpoint around its layers (no norms, whose statistics torch updates twice)."""

    def setup(self, draw, inner):
        self.inner = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, WIDTH))

    def forward(self, x):
        last = channels_last(x)
        if self.training and torch.is_grad_enabled():
            return channels_first(torch_checkpoint(self.inner, last, use_reentrant=False))
        return channels_first(self.inner(last))


class Views(Part):
    def setup(self, draw, inner):
        self.how = draw.choice(["write", "roll", "einsum", "transpose", "pad", "expand", "stride"])
        self.weight = nn.Parameter(torch.eye(WIDTH) + 0.1)

    def forward(self, x):
        if self.how == "write":
            x = x * 1.0
            x[:, 1:] += 0.5 * x[:, :-1].clone()
            x.view(x.shape[0], -1)[:, ::3].mul_(0.5)
            return x
        if self.how == "roll":
            return torch.roll(x, shifts=(1, 2), dims=(1, 2)) + x
        if self.how == "einsum":
            return channels_first(torch.einsum("...c,cd->...d", channels_last(x), self.weight))
        if self.how == "transpose":
            return (x.transpose(0, 1).contiguous() * 2).transpose(0, 1)
        if self.how == "pad":
            return F.pad(x, (1, 1))[..., 1:-1] * F.pad(x, (0, 1))[..., 1:]
        if self.how == "expand":
            return x + x.mean(1, keepdim=True).expand_as(x)
        return torch.cat([x[..., ::2], x[..., 1::2]], -1).tanh()
