"""Changes between forward and backward are detected or undone, and changes that a region must not make are errors."""

from __future__ import annotations

import copy

import pytest
import torch
from conftest import assert_equal, batch, plain_call, raises_cleanly, seed, total, with_layer
from torch import nn

import ackpt

Error = ackpt.CheckpointError


def model_and_loss():
    seed()
    model = with_layer(nn.Tanh())
    model.register_buffer("offset", torch.zeros(4))
    other = copy.deepcopy(model.state_dict())
    x, mask = batch(6), torch.ones(4)
    loss = ackpt.checkpoint(lambda x: model(x) * mask + model.offset, x).sum()
    return model, x, mask, other, loss


def optimizer_step(model, x, mask, other):
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD(model.parameters(), lr=0.1).step()


@torch.no_grad()
def foreach(model, x, mask, other):
    torch._foreach_add_(list(model.parameters()), 1)


def swap_data_twice(model, *_):
    for _ in range(2):  # the second may get the memory of the one that the forward saw
        model[0].bias.data = model[0].bias.data + 1


CHANGES = {
    "optimizer": (optimizer_step, "parameter 'model."),
    "foreach": (foreach, "parameter 'model."),
    "add": (lambda model, *_: model[2].bias.detach().add_(1), "parameter 'model.2.bias'"),
    "copy": (lambda model, *_: model[0].bias.detach().copy_(torch.ones(4)), "parameter 'model.0.bias'"),
    "load": (lambda model, x, mask, other: model.load_state_dict(other), "parameter 'model."),
    "data": (lambda model, *_: setattr(model[0].weight, "data", torch.zeros(4, 4)), "parameter 'model.0.weight'"),
    "data twice": (swap_data_twice, "parameter 'model.0.bias'"),
    "init": (lambda model, *_: nn.init.zeros_(model[0].weight), "parameter 'model.0.weight'"),
    "frozen": (lambda model, *_: model.requires_grad_(False), "parameter 'model.*, was frozen"),
    "buffer": (lambda model, *_: model.offset.add_(1), "buffer or closed-over tensor 'model.offset'"),
    "buffer data": (lambda model, *_: setattr(model.offset, "data", torch.ones(4)), "'model.offset'"),
    "input": (lambda model, x, *_: x.detach().add_(1), "input tensor number 0, shape \\[6, 4\\] float32 on cpu,"),
    "closed over": (lambda model, x, mask, other: mask.zero_(), "buffer or closed-over tensor 'mask'"),
    "part": (lambda model, *_: model[0].weight.detach()[0].zero_(), "parameter 'model.0.weight'"),
}


@pytest.mark.parametrize(("change", "what"), CHANGES.values(), ids=CHANGES)
def test_a_change_between_forward_and_backward_is_named(change, what):
    model, x, mask, other, loss = model_and_loss()
    change(model, x, mask, other)
    with raises_cleanly(Error, what + ".* between the forward .* Run backward before the change"):
        loss.backward()
    assert x.grad is None


UNSEEN = {
    "nothing": lambda model: None,
    "gradients": lambda model: model.zero_grad(),
    "a module to eval": lambda model: model.eval(),
    "another parameter in the place": lambda model: setattr(model[0], "weight", nn.Parameter(torch.zeros(4, 4))),
    "another buffer in the place": lambda model: setattr(model, "offset", torch.ones(4)),
    "loaded by assignment": lambda model: model.load_state_dict(
        {key: value + 1 for key, value in model.state_dict().items()}, assign=True
    ),
    "a parameter deleted": lambda model: delattr(model[0], "bias"),
    "unfrozen": lambda model: model[2].bias.requires_grad_(),
}


@pytest.mark.parametrize("change", UNSEEN.values(), ids=UNSEEN)
def test_names_that_mean_something_else_by_the_backward(change):
    def run(call):
        seed()
        model = with_layer(nn.Dropout(0.5))
        model[2].bias.requires_grad_(False)
        model.register_buffer("offset", torch.zeros(4))
        parameters, x = list(model.parameters()), batch(6)
        loss = total(call(lambda x: model(x) * (model.offset + 1), x))
        change(model)
        now = [name for name, _ in model.named_parameters()], list(model.state_dict()), model.training
        loss.backward()
        assert now == ([name for name, _ in model.named_parameters()], list(model.state_dict()), model.training)
        return [x.grad, *(p.grad for p in parameters), *(p.detach() for p in model.parameters()), model.offset]

    assert_equal(run(plain_call), run(ackpt.checkpoint), "gradient")


def test_a_change_after_the_last_backward_is_nobodys_business():
    model, x, mask, other, loss = model_and_loss()
    loss.backward(retain_graph=True)
    loss.backward()
    optimizer_step(model, x, mask, other)
    ackpt.checkpoint(model, x).sum().backward()
    assert x.grad is not None


IN_REGION = {
    "input": (lambda x, w: x.mul_(2), "its input tensor|a tensor that requires grad"),
    "input without grad": (lambda x, w: x.detach().mul_(2) * w, "its input tensor number 0"),
    "view of the input": (lambda x, w: x.detach()[0].zero_().sum() * w, "its input tensor number 0"),
    "relu first": (lambda x, w: nn.functional.relu(x, inplace=True) * w, "tensor that requires grad|its input tensor"),
    "parameter": (lambda x, w: x * w * w.detach().mul_(2), "changes the parameter 'w'"),
    "leaf": (lambda x, w: x * w.add_(1), "changes a tensor that requires grad"),
}


@pytest.mark.parametrize("history", [False, True])
@pytest.mark.parametrize(("function", "message"), IN_REGION.values(), ids=IN_REGION)
def test_a_region_that_changes_its_own_input_or_parameter(function, message, history):
    w, x = nn.Parameter(torch.ones(4)), batch(6)
    with raises_cleanly(Error, message + ".*(clone|before the region)"):
        ackpt.checkpoint(lambda x: function(x, w), x * 1 if history else x).sum().backward()


def test_an_embedding_that_renormalises_its_weight():
    layer = nn.Embedding(5, 4, max_norm=0.1)
    with raises_cleanly(Error, "changes the parameter 'weight'.*max_norm"):
        ackpt.checkpoint(layer, torch.tensor([1, 2]))


def test_guarantees_can_be_switched_off_and_come_back():
    model, x = with_layer(nn.Tanh()), batch(6)
    with ackpt.guarantees(unchanged=False):
        loss = ackpt.checkpoint(model, x).sum()
        with ackpt.guarantees():
            guarded = ackpt.checkpoint(model, x).sum()
    again = ackpt.checkpoint(model, x).sum()
    with torch.no_grad():
        model[0].weight.add_(1)
    loss.backward()
    assert x.grad is not None
    for each in (guarded, again):
        with pytest.raises(Error, match="'0.weight'"):
            each.backward()


def test_guarantees_are_restored_after_an_exception():
    with pytest.raises(KeyError), ackpt.guarantees(unchanged=False):
        raise KeyError
    model, x, mask, other, loss = model_and_loss()
    mask.add_(1)
    with pytest.raises(Error, match="'mask'"):
        loss.backward()
