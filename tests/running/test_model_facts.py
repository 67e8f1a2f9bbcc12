"""`WatchedModel` reads the facts of a model again when, and only when, something that they depend on changed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import ackpt
from ackpt.running.model_facts import ModelFacts, WatchedModel


class Holder(nn.Module):
    """A module with an attribute of every kind."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("offset", torch.zeros(4))
        self.scale, self.name, self.flags = 0.5, "holder", [True, {"depth": 2}]
        self.config, self.shape = SimpleNamespace(width=4), (1, (2, 3))
        self.act, self.constant, self.object = torch.relu, torch.ones(4), object()

    def forward(self, x):
        return self.act(self.first(x) * self.scale + self.offset) + self.second(x)


def _set(name, value):
    return lambda model: setattr(model, name, value)


def _renamed(model):
    del model.object
    model.other = 1


def _swapped_data(model):
    model.first.weight.data = model.first.weight.data.double()


def _untied(model):
    model.second.weight.data = model.second.weight.data.clone()


CHANGES = {
    "number": _set("scale", 0.25),
    "sign of zero": lambda model: [setattr(model, "scale", 0.0), setattr(model, "scale", -0.0)],
    "type of an equal number": _set("name", True),
    "text": _set("name", "other"),
    "item of a list": lambda model: model.flags.__setitem__(0, False),
    "item of a dict in a list": lambda model: model.flags[1].update(depth=3),
    "field of a namespace": lambda model: setattr(model.config, "width", 5),
    "tuple": _set("shape", (1, (2, 4))),
    "function": _set("act", torch.tanh),
    "tensor": lambda model: setattr(model, "constant", torch.ones(4)),
    "an object becomes a number": _set("object", 3),
    "new attribute": _set("added", 1),
    "removed attribute": lambda model: delattr(model, "name"),
    "renamed attribute": _renamed,
    "training": lambda model: model.first.eval(),
    "requires_grad": lambda model: model.first.weight.requires_grad_(False),
    "dtype": _swapped_data,
    "shape": lambda model: setattr(model, "offset", torch.zeros(1)),
    "strides": lambda model: setattr(model.first.weight, "data", model.first.weight.data.t()),
    "storages": _untied,
    "no bias": lambda model: setattr(model.first, "bias", None),
    "submodule": lambda model: setattr(model, "first", nn.Linear(4, 4, bias=False)),
    "added submodule": lambda model: model.add_module("third", nn.ReLU()),
    "hook": lambda model: model.first.register_forward_hook(lambda *_: None),
    "hook before the forward": lambda model: model.second.register_forward_pre_hook(lambda *_: None),
    "hook of backward": lambda model: model.second.register_full_backward_hook(lambda *_: None),
}


def _tied() -> Holder:
    model = Holder()
    model.second.weight.data = model.first.weight.data
    return model


@pytest.mark.parametrize("change", CHANGES.values(), ids=list(CHANGES))
def test_a_change_gives_the_facts_that_reading_the_model_gives(change):
    model = _tied()
    watched = WatchedModel(model)
    before = watched.facts()
    assert watched.facts() is before and watched.storages
    change(model)
    after = watched.facts()
    assert after != before
    assert after == ModelFacts(list(model.modules())) and hash(after) == hash(ModelFacts(list(model.modules())))
    assert list(watched.modules.values()) == list(model.modules())
    assert watched.facts() is after


@pytest.mark.parametrize("change", [_set("object", object()), lambda model: model.offset.add_(1), Holder.zero_grad])
def test_what_no_capture_depends_on_is_not_read_again(change):
    model = _tied()
    model(torch.ones(2, 4)).sum().backward()
    watched = WatchedModel(model)
    before = watched.facts()
    change(model)
    assert watched.facts() is before


def test_an_attribute_that_changes_and_changes_back_is_served_by_the_first_capture():
    model = Holder()
    del model.object
    x = torch.ones(2, 4)
    step = ackpt.compile(model, x, policy="none", differentiate="all")
    for scale in (0.5, 0.25, 0.5, 0.25):
        model.scale = scale
        assert torch.equal(step(x), model(x))
    assert [event.kind for event in step.history] == ["capture", "capture"]


def test_an_argument_that_shares_the_storage_of_a_parameter_is_another_call():
    model = Holder()
    step = ackpt.compile(model, torch.ones(4, 4), policy="none", differentiate="all")
    shared = model.first.weight.detach()
    assert torch.equal(step(shared), model(shared)) and len(step.history) == 2
    assert torch.equal(step(torch.ones(4, 4)), model(torch.ones(4, 4))) and len(step.history) == 2
