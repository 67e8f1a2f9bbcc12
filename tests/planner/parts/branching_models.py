"""Small models that cannot become one graph, each with a batch, and what one of their steps gives and takes."""

import random

import torch
import torch.nn.functional as F
from conftest import measured_step, model_of, seed
from planned_models import Mean, Residuals
from torch import nn


def feed_forward(width: int = 16) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


def mixture(name: str):
    """A causal language model of transformers whose experts gather their tokens by ``nonzero``."""
    import transformers

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 2, "use_cache": False}
    if name == "Mixtral":
        config = transformers.MixtralConfig(**sizes, **heads, num_local_experts=4)
        kind = transformers.MixtralForCausalLM
    else:
        config = transformers.Qwen3MoeConfig(**sizes, **heads, num_experts=4, moe_intermediate_size=32)
        kind = transformers.Qwen3MoeForCausalLM
    config._experts_implementation = "eager"
    ids = torch.randint(64, (4, 32))
    return kind(config), {"input_ids": ids, "labels": ids}


class DropPath(nn.Module):
    """Skips its input at random, by a branch in Python."""

    def forward(self, x):
        return torch.zeros_like(x) if self.training and random.random() < 0.3 else x


def skips():
    blocks = (nn.Sequential(nn.LayerNorm(16), feed_forward(), DropPath()) for _ in range(4))
    return Residuals(blocks), {"x": torch.randn(64, 16)}


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.rnn = nn.Embedding(50, 16), nn.LSTM(16, 8, batch_first=True, bidirectional=True)
        self.heads = nn.ModuleList(feed_forward() for _ in range(3))

    def forward(self, ids, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(self.embed(ids), lengths, batch_first=True, enforce_sorted=False)
        x, _ = nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        for head in self.heads:
            x = x + head(x)
        return x.square().mean()


class Matcher(nn.Module):
    """Matches every target with one prediction, at the least cost."""

    @torch.no_grad()
    def forward(self, predictions, targets):
        from scipy.optimize import linear_sum_assignment

        costs = torch.cdist(predictions, targets).numpy()
        return [torch.as_tensor(linear_sum_assignment(cost)[0]) for cost in costs]


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.ModuleList(nn.Sequential(nn.LayerNorm(16), feed_forward()) for _ in range(3))
        self.boxes, self.matcher = nn.Linear(16, 4), Matcher()

    def forward(self, x, targets):
        for block in self.encoder:
            x = x + block(x)
        boxes = self.boxes(x).sigmoid()
        chosen = self.matcher(boxes, targets)
        matched = torch.stack([box[at] for box, at in zip(boxes, chosen)])
        return {"loss": F.l1_loss(matched, targets), "boxes": boxes}


class EarlyExit(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(feed_forward() for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
            if x.abs().mean() > 100:
                break
        return x.square().mean()


def sparse_embedding():
    return model_of(
        lambda self, ids: self.body(self.embed(ids)).square().mean(),
        embed=nn.Embedding(50, 16, sparse=True),
        body=nn.Sequential(feed_forward(), feed_forward()),
    ), {"ids": torch.randint(50, (8, 24))}


def scripted():
    script = torch.jit.script(nn.Sequential(nn.Linear(16, 16), nn.Tanh()))
    return nn.Sequential(feed_forward(), script, feed_forward(), Mean()), {"input": torch.randn(64, 16)}


def compiled():
    inner = torch.compile(nn.Sequential(nn.Linear(16, 16), nn.Tanh()), backend="aot_eager")
    return nn.Sequential(feed_forward(), inner, feed_forward(), Mean()), {"input": torch.randn(64, 16)}


MODELS = {
    "Mixtral": lambda: mixture("Mixtral"),
    "Qwen3-MoE": lambda: mixture("Qwen3-MoE"),
    "drop path": skips,
    "packed LSTM": lambda: (Tagger(), {"ids": torch.randint(50, (8, 24)), "lengths": torch.arange(8) * 2 + 8}),
    "matcher": lambda: (Detector(), {"x": torch.randn(8, 12, 16), "targets": torch.rand(8, 5, 4)}),
    "early exit": lambda: (EarlyExit(), {"x": torch.randn(64, 16)}),
    "sparse embedding": sparse_embedding,
    "scripted": scripted,
    "compiled": compiled,
}


def built(name: str):
    torch.manual_seed(0)
    random.seed(0)
    return MODELS[name]()


class Adds(nn.Module):
    """Three residual blocks, made by `block`, around a branch on values."""

    def __init__(self, block=lambda: nn.Sequential(nn.LayerNorm(16), feed_forward()), is_residual: bool = True):
        super().__init__()
        self.first, self.blocks = nn.Linear(16, 16), nn.ModuleList(block() for _ in range(3))
        self.is_residual = is_residual

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x) if self.is_residual else block(x)
        return x.square().mean() if x.sum().item() < 1e9 else x.sum()


def loss_of(outputs) -> torch.Tensor:
    return outputs if torch.is_tensor(outputs) else outputs["loss"]


def results(model, call, batch, number: int = 1) -> list:
    """Loss, gradients and buffers of a step, and the states of random numbers after it."""
    model.zero_grad()
    seed(number)
    loss = loss_of(call(**batch))
    loss.backward()
    gradients = [None if p.grad is None else p.grad.to_dense() for p in model.parameters()]
    return [loss.detach(), *gradients, *(buffer.clone() for buffer in model.buffers())]


def measured(model, call, batch, number: int = 1):
    seed(number)
    return measured_step(model, call, loss=loss_of, warmup=0, **batch)
