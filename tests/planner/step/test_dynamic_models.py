"""Models and loops whose sizes change: few captures, bit-equal to eager, with the simulated peak at every size."""

import math
import re

import pytest
import torch
from conftest import model_of
from dynamic_steps import check, ids, kinds
from torch import nn
from torch.nn import functional as F

import ackpt
from ackpt.models.transformer import LanguageModel, TransformerConfig

CAPTURES = "capture", "dynamic capture"


class UNet(nn.Module):
    def __init__(self, mode="nearest"):
        super().__init__()
        self.mode = mode
        self.down = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.middle, self.up = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(16, 2, 3, padding=1)

    def forward(self, images):
        wide = self.down(images)
        small = self.middle(F.max_pool2d(wide, 2)).relu()
        again = F.interpolate(small, size=wide.shape[2:], mode=self.mode)
        return self.up(torch.cat([again, wide], 1)).square().mean()


def recurrent():
    """One capture for all batch sizes; each length is another graph."""

    def forward(self, tokens):
        hidden, _ = self.layer(self.embed(tokens))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), tokens.flatten())

    return model_of(forward, embed=nn.Embedding(50, 32), layer=nn.GRU(32, 32, batch_first=True), head=nn.Linear(32, 50))


def pooled():
    def forward(self, x):
        hidden = F.max_pool1d(self.first(F.max_pool1d(x, 3, stride=1)).relu(), 2, padding=1)
        values, _ = F.max_pool1d(hidden, 2, dilation=2, return_indices=True)
        return self.last(values).square().mean()

    return model_of(forward, first=nn.Conv1d(8, 8, 3, padding=1), last=nn.Conv1d(8, 4, 1))


class Experts(nn.Module):
    """A mixture whose experts have a capacity that follows from the number of tokens."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(16, 2)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(2))

    def forward(self, x):
        x = x.flatten(0, 1)
        weight, choice = self.gate(x).softmax(-1).max(-1)
        order, capacity = choice.argsort(stable=True), (len(x) + 1) // 2
        parts = [expert(x[order[at * capacity :][:capacity]]) for at, expert in enumerate(self.experts)]
        return (torch.cat(parts) * weight[order, None]).square().mean()


def make_pieces():
    def forward(self, x, lengths):
        pieces = [self.layer(piece, piece, piece, need_weights=False)[0] for piece in x.split(lengths)]
        return torch.cat(pieces).square().mean()

    return model_of(forward, layer=nn.MultiheadAttention(16, 2, 0.1))


def scaled():
    return model_of(
        lambda self, x, count: self.layers(x).square().sum() / count,
        layers=nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 16)),
    )


def make_table():
    return model_of(
        lambda self, x, table: (self.layers(x) @ table).square().mean(),
        layers=nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)),
    )


def images(*sizes):
    return [(torch.randn(size),) for size in sizes]


def packed(*batches):
    """Batches of sequences that are equally long, one after the other."""
    for sequences, length in batches:
        tokens, ends = torch.randint(0, 50, (sequences * length,)), torch.arange(sequences + 1, dtype=torch.int32)
        yield tokens, ends * length, length, tokens.roll(1)


class PackedLlama(nn.Module):
    """A model of transformers that finds the ends of its sequences in the positions."""

    def __init__(self):
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
        self.model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, vocab_size=50, use_cache=False, **sizes))

    def forward(self, tokens, positions):
        return self.model(input_ids=tokens, position_ids=positions, labels=tokens).loss


def in_one_row(*batches):
    """Tokens and positions of sequences of these lengths, one after the other."""
    return [(ids(1, sum(lengths)), torch.cat([*map(torch.arange, lengths)])[None]) for lengths in batches]


def rows(*sizes):
    return [torch.randn(size, 16) for size in sizes]


TABLE = torch.randn(16, 9)
MODELS = {
    "images": (UNet, images((2, 3, 16, 16), (2, 3, 24, 20), (2, 3, 17, 19), (2, 3, 9, 31)), 2),
    "images, bilinear": (lambda: UNet("bilinear"), images((2, 3, 16, 16), (2, 3, 24, 20), (2, 3, 17, 19)), 2),
    "pooling over time": (pooled, images((2, 8, 20), (2, 8, 31), (3, 8, 17), (2, 8, 40)), 3),
    "batches of a recurrent layer": (recurrent, [(ids(size, 5),) for size in (4, 6, 3, 8)], 2),
    "lengths of a recurrent layer": (recurrent, [(ids(4, size),) for size in (5, 4, 3)], 3),
    "experts": (Experts, images((4, 20, 16), (4, 31, 16), (3, 12, 16)), 3),
    "packed sequences": (
        lambda: LanguageModel(TransformerConfig(dim=16, ff_dim=64, layers=1, head_dim=8, vocab_size=50)),
        packed((3, 20), (3, 24), (3, 17), (3, 33)),
        2,
    ),
    "packed sequences of transformers": (PackedLlama, in_one_row((9, 11), (20, 4), (5, 5, 5), (13, 20)), 2),
    "lengths in a list": (
        make_pieces,
        [(torch.randn(sum(n), 16), list(n)) for n in ((20, 30), (24, 25), (9, 9), (40, 17), (1, 9), (5, 5, 5))],
        4,
    ),
    "a number": (scaled, list(zip(rows(64, 64, 40, 40, 40, 40), (5, 7, 9, 64, 1, -3))), 5),
    "a table": (make_table, [(x, TABLE) for x in rows(64, 40, 50)], 2),
}


@pytest.mark.parametrize("name", MODELS)
def test_one_capture_serves_all_sizes(name):
    make, batches, captures = MODELS[name]
    torch.manual_seed(0)
    model, step = make(), None
    for args in batches:
        step = step or ackpt.compile(model, *args)
        check(step, model, *args)
    assert sum(kind in CAPTURES for kind in kinds(step)) == captures


MODES = ["nearest", "nearest-exact", "linear", "bilinear", "bicubic", "trilinear", "area", "bicubic antialias"]


@pytest.mark.parametrize(
    ("mode", "resized"), [*((mode, "size") for mode in MODES), ("bilinear antialias", "scale_factor")]
)
def test_interpolated_sizes_are_served(mode, resized):
    mode, _, antialias = mode.partition(" ")
    dims = {"linear": 1, "trilinear": 3}.get(mode, 2)
    convolution = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]

    def forward(self, x):
        to = {"size": [n + 3 for n in x.shape[2:]]} if resized == "size" else {"scale_factor": 1.7}
        return F.interpolate(self.layer(x), mode=mode, antialias=bool(antialias), **to).square().mean()

    model = model_of(forward, layer=convolution(2, 3, 3, padding=1))
    step = ackpt.compile(model, torch.randn(2, 2, *[8, 6, 4][:dims]), dynamic={"x": dict.fromkeys(range(2, 2 + dims))})
    for sizes in ([5, 9, 7], [12, 12, 12]):
        check(step, model, torch.randn(2, 2, *sizes[:dims]))
    assert kinds(step) == ["dynamic capture", "plan", "plan"]


def test_a_number_that_the_model_fixes_is_named_with_its_line_and_the_fix():
    def forward(self, x, times):
        for _ in range(times):
            x = self.layer(x).tanh()
        return x.square().mean()

    model, x = model_of(forward, layer=nn.Linear(8, 8)), torch.randn(4, 8)
    step = ackpt.compile(model, x, 2)
    with pytest.warns(UserWarning, match=r"works for one size only of argument 1 at .*test_dynamic_models.py:\d+"):
        for times in (3, 4, 5, 6, 7, 8):
            check(step, model, x, times)
    assert "refused" in kinds(step)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("GRU", r"one size only of dimension 1 of argument 0 at .*test_dynamic_models.py:\d+ .*, in GRU$"),
        ("LSTM", r"module 'layer' runs an operation at .*test_dynamic_models.py:\d+ .*takes no dynamic sizes"),
    ],
)
def test_a_recurrent_layer_explains_its_capture_for_each_length(kind, reason):
    layer = getattr(nn, kind)(32, 32, batch_first=True)
    model = model_of(lambda self, x: self.layer(x)[0].square().mean(), layer=layer)
    step = ackpt.compile(model, torch.randn(2, 5, 32))
    step.prepare(torch.randn(2, 4, 32))
    assert step.history[1].kind == "refused" and re.search(reason, step.history[1].cause)


def test_changing_sizes_with_dynamic_false_are_warned_of():
    step = ackpt.compile(scaled(), torch.randn(4, 16), 3, dynamic=False)
    with pytest.warns(UserWarning, match="Leave dynamic at None, so that one capture serves several sizes"):
        for rows in (5, 6, 7, 8):
            step.prepare(torch.randn(rows, 16), 3)


def test_arithmetic_with_floats_on_a_length_is_served_by_one_capture():
    def forward(self, x):
        n = x.shape[1]
        x = self.first(x) * (1 / n**0.5) + (n * 0.1 + 0.2 + 0.3)
        kept = [x[:, : math.ceil(n * 0.1 * 3)], x[:, : math.floor((n * 0.3) // 0.1)], x[:, : round(n / 2)]]
        width = math.floor(n / 4)
        count = math.ceil(n / width)
        windows = F.pad(x, (0, 0, 0, count * width - n)).unflatten(1, (count, width)).mean(2)
        resized = F.interpolate(x.transpose(1, 2), scale_factor=1 / 3, mode="nearest-exact").transpose(1, 2)
        grid = (x * torch.arange(0, 1, 1 / n)[:n, None]) / x.var(1, keepdim=True)
        return self.last(torch.cat([*kept, windows, resized, grid], 1).tanh()).square().sum() / (n * 0.7)

    model, step = model_of(forward, first=nn.Linear(8, 8), last=nn.Linear(8, 8)), None
    for length in (11, 13, 17, 20, 23):
        x = torch.randn(2, length, 8)
        step = step or ackpt.compile(model, x, policy="full")
        check(step, model, x)
    assert kinds(step) == ["capture", "dynamic capture", "plan", "plan", "plan"]


def test_large_numbers_are_computed_and_compared_exactly():
    def counted(self, x, count):
        x = self.layer(x) * (2 if count == 2.0**53 else 3)
        return (x * 5 if count > 2.0**53 else x).square().mean() / (count / 3) * (count // 2.0)

    model, x = model_of(counted, layer=nn.Linear(8, 8)), torch.randn(2, 8)
    step = ackpt.compile(model, x, 2**53 - 1, policy="full")
    for count in (2**53, 2**53 + 1, 2**53 + 2, 2**61 + 1, 17):
        assert torch.equal(step(x, count), model(x, count))
    assert kinds(step) == ["capture", "dynamic capture", "dynamic capture", "plan", "plan", "dynamic capture"]


def test_the_largest_length_is_captured_for_itself_and_other_lengths_together():
    def forward(self, tokens, labels):
        length = tokens.shape[1]
        x = self.mask[:length, :length] @ self.embed(tokens)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())

    model = model_of(
        forward, embed=nn.Embedding(50, 8), head=nn.Linear(8, 50), mask=nn.Buffer(torch.ones(64, 64).tril())
    )
    step = None
    for length in (50, 64, 30, 20):
        tokens = ids(2, length)
        step = step or ackpt.compile(model, tokens, tokens, policy="full")
        check(step, model, tokens, tokens)
    assert kinds(step) == ["capture", "refused", "dynamic capture", "dynamic capture", "plan"]


def test_dimensions_that_need_a_capture_for_each_size_are_given_up():
    def forward(self, x, y):
        half = int(x.shape[1] * 0.5)
        return (self.layer(x)[:, :half] * y[:, :half]).square().mean()

    model, step = model_of(forward, layer=nn.Linear(8, 8)), None
    with pytest.warns(UserWarning, match=r"converts a number that it computes from a size at .*test_dynamic_models"):
        for length in range(8, 28, 2):
            x = torch.randn(2, length, 8)
            step = step or ackpt.compile(model, x, x, policy="full")  # one tensor twice
            step(x, x)
            assert torch.equal(step(x, x), model(x, x))
    assert kinds(step) == ["capture", *["dynamic capture"] * 3, *["capture"] * 6]
