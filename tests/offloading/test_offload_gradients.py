"""Offloaded steps have the gradients of the baseline, in every mode and store, with and without regions."""

import pytest
import torch
from conftest import Case, assert_same, model_of, plain_call, run_step
from offload_helpers import MODES, SIDE, assert_empty, blocks, counts, fresh, matrix, offload
from torch import nn

import ackpt
from ackpt.models.transformer import Transformer, TransformerConfig

WAYS = ["checkpoint", "sequential", "applied", "saved_tensors"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tmp_path_factory.mktemp("offload"))


def through(way, chosen):
    """A call of an ``nn.Sequential`` whose saved tensors, or boundaries, are offloaded."""

    def call(model, x):
        if way == "checkpoint":
            for layer in model:
                x = ackpt.checkpoint(layer, x, offload=chosen)
            return x
        if way == "sequential":
            return ackpt.checkpoint_sequential(model, len(model), x, offload=chosen)
        if way == "applied":
            ackpt.apply_activation_checkpointing(model, offload=chosen)
            return model(x)
        with chosen:
            return model(x)

    return call


def chain():
    model = blocks()
    return Case(model, (matrix().requires_grad_(),))


@pytest.mark.parametrize("keep_last", [0, 1])
@pytest.mark.parametrize("store", ["host", "disk"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mode", MODES)
def test_gradients_are_those_of_the_plain_step(mode, way, store, keep_last, folder):
    options = {"folder": folder} if store == "disk" else {}
    chosen = fresh(mode, store, keep_last=keep_last, **options)
    assert_same(run_step(chain, plain_call), run_step(chain, through(way, chosen)))
    out, back = counts(chosen.engine, "copies_out", "copies_in").values()
    # Regions: the first input is the caller's own leaf, the last segment of a chain is no region.
    regions = {"checkpoint": 3, "applied": 3, "sequential": 2}.get(way)
    assert out == regions - keep_last if regions else out > 8
    assert back > 0
    assert_empty(chosen.engine)


def cells(cell):
    """Recurrent cells change parts of one storage in place, each part with a version of its own."""

    def forward(self, x):
        state = (x, x) if isinstance(self.cell, nn.LSTMCell) else x
        for _ in range(3):
            state = self.cell(x, state)
        return state

    return model_of(forward, cell=cell)


def packed():
    return model_of(
        lambda self, x: self.model(x, torch.tensor([0, 7, 20, SIDE], dtype=torch.int32), 13),
        model=Transformer(TransformerConfig(dim=SIDE, ff_dim=48, layers=2, head_dim=8)),
    )


MODELS = {
    "lstm cell": lambda: cells(nn.LSTMCell(SIDE, SIDE)),
    "gru cell": lambda: cells(nn.GRUCell(SIDE, SIDE)),
    "lstm": lambda: nn.LSTM(SIDE, SIDE, 2, dropout=0.1),
    "transformer": packed,
    "encoder": lambda: nn.TransformerEncoderLayer(SIDE, 2, 48),
    "convolutions": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 4, 4)), nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2)
    ),
    "in place": lambda: nn.Sequential(nn.Linear(SIDE, SIDE), nn.ReLU(True), nn.Linear(SIDE, SIDE), nn.SiLU(True)),
    "embedding": lambda: nn.Sequential(
        nn.Flatten(), model_of(lambda self, x: (4 + 4 * x).long()), nn.Embedding(9, SIDE), nn.LayerNorm(SIDE), nn.GELU()
    ),
}


@pytest.mark.parametrize("keep_last", [0, 2])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("mode", MODES)
def test_gradients_of_models(mode, name, keep_last):
    chosen = offload(mode, keep_last=keep_last)

    def build():
        return Case(MODELS[name](), (matrix(),))

    assert_same(run_step(build, plain_call), run_step(build, through("saved_tensors", chosen)))
    assert_empty(chosen.engine)


def test_chunks_that_count_their_versions_apart_are_never_taken_for_each_other():
    """``unsafe_chunk`` gives views whose in-place changes the others do not notice."""

    def function(x):
        first, second = torch.unsafe_chunk(x * 1, 2, dim=1)
        return first.sigmoid_() * second.tanh_()

    build = lambda: Case(function, (matrix().requires_grad_(),))  # noqa: E731
    assert_same(run_step(build, plain_call), run_step(build, plain_call, around=lambda: offload("sync")))
    assert_same(run_step(build, plain_call), run_step(build, plain_call, around=lambda: offload("async")))
