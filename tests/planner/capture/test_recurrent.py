"""Recurrent layers: captured as they run, with oneDNN's memory counted."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_as_eager, measured_step, model_of
from torch import nn

import ackpt

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning"),  # eager's, once per process
]
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
    """Of the last states, so that they need a gradient too."""
    return sum(part.square().mean() for part in (state if isinstance(state, tuple) else (state,)))


def raw(around=contextlib.nullcontext):
    """A layer whose input needs no gradient; under autocast if `around` says so."""

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
    assert_as_eager(model, ackpt.compile(model, args, policy="full"), args)


@pytest.mark.parametrize("name", ["lstm", "lstm, autocast", "gru"])
@pytest.mark.parametrize("policy", ["none", "full"])
def test_the_measured_peak_is_the_planned_one(name, policy):
    model, args = build(name)
    step = ackpt.compile(model, args, policy=policy)
    assert measured_step(model, step, args).dynamic_peak_bytes == step.plan.dynamic_peak_bytes


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
    with pytest.raises(ackpt.TraceError, match=r"runs under torch.no_grad\(\) at .*recurrent.py:\d+.*requires_grad_"):
        ackpt.trace(model, x)
    assert_as_eager(model, ackpt.compile(model, x, budget="1GiB"), x)


@pytest.mark.parametrize("policy", ["none", "full"])
def test_a_gru_that_autograd_does_not_record_runs_as_it_is(policy):
    model, x = untracked(nn.GRU, 2), torch.randn(4, 10, 32)
    assert_as_eager(model, ackpt.compile(model, x, policy=policy, regions=False), x)
