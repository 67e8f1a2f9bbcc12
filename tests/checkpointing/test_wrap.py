"""``apply_activation_checkpointing`` changes nothing but the memory."""

import copy
import inspect
import io
import pickle

import pytest
import torch
from conftest import assert_equal, assert_same_training, raises, seed, total
from torch import nn

import ackpt

apply, remove = ackpt.apply_activation_checkpointing, ackpt.remove_activation_checkpointing


class Block(nn.Module):
    def __init__(self, dim=4, rate=0.3):
        super().__init__()
        self.norm = nn.BatchNorm1d(dim)
        self.layers = nn.Sequential(nn.Linear(dim, dim), nn.Dropout(rate), nn.Linear(dim, dim))
        self.calls = 0

    def forward(self, x, *, scale: float = 1.0, **options):
        """One block."""
        self.calls += 1
        return x + scale * self.layers(self.norm(x))


class Special(Block):
    """A subclass whose forward calls its parent's."""

    def forward(self, x, **options):
        return super().forward(x, **options).tanh()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.blocks = nn.ModuleList([Block(), Block(), Special()])
        self.head = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x, scale=0.5)
        return self.head(x)


def batch():
    return torch.randn(5, 4)


def modules_run_as_regions(model, *inputs) -> list[str]:
    """Names of modules that run again in the backward."""
    names = []
    handles = [
        module.register_forward_pre_hook(lambda *_, name=name: names.append(name) if ackpt.is_recomputing() else None)
        for name, module in model.named_modules()
    ]
    total(model(*inputs)).backward()
    for handle in handles:
        handle.remove()
    return names


CHOICES = {
    "default": (None, ["blocks.0", "blocks.1"]),
    "class": (Block, ["blocks.0", "blocks.1", "blocks.2"]),
    "classes": ((Special, nn.Tanh), ["blocks.2", "head.1"]),
    "list of classes": ([Special], ["blocks.2"]),
    "predicate": (lambda module: type(module) is nn.Tanh, ["head.1"]),
    "name": ("blocks.1", ["blocks.1"]),
    "names": (["head", "blocks.0"], ["blocks.0", "head"]),
    "set of names": ({"stem"}, ["stem"]),
    "the model itself": ("", [""]),
    "nested": (lambda module: isinstance(module, (Model, Block, nn.Linear)), None),
}


@pytest.mark.parametrize(("check_fn", "names"), CHOICES.values(), ids=CHOICES)
def test_chosen_modules_are_checkpointed_and_training_is_bit_equal(check_fn, names):
    seed()
    model = Model()
    chosen = apply(copy.deepcopy(model), check_fn)
    assert names is None or chosen == names
    assert_same_training(model, (batch(),), check_fn)


@pytest.mark.parametrize("check_fn", [None, Block, "", ["blocks.0", "blocks.0.layers"]])
def test_applying_is_idempotent_and_can_be_undone(check_fn):
    model = Model()
    classes = [type(module) for module in model.modules()]
    attributes = [set(vars(module)) for module in model.modules()]
    first = apply(model, check_fn)
    assert apply(model, check_fn) == first
    assert modules_run_as_regions(model, batch()) != []
    assert remove(model) == first
    assert remove(model) == []
    assert [type(module) for module in model.modules()] == classes
    assert [set(vars(module)) for module in model.modules()] == attributes
    assert modules_run_as_regions(model, batch()) == []


def test_a_second_choice_adds_to_the_first():
    model = Model()
    assert apply(model, "blocks.0") == ["blocks.0"]
    assert apply(model, "blocks.1") == ["blocks.1"]
    assert remove(model) == ["blocks.0", "blocks.1"]


def test_names_types_and_state_of_a_module_stay_the_same():
    model, plain = Model(), Model()
    apply(model, Block)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert [name for name, _ in model.named_buffers()] == [name for name, _ in plain.named_buffers()]
    assert [name for name, _ in model.named_modules()] == [name for name, _ in plain.named_modules()]
    assert repr(model) == repr(plain)
    block = model.blocks[2]
    assert isinstance(block, Special) and isinstance(block, Block) and not isinstance(model.blocks[0], Special)
    assert type(block).__name__ == "Special" and type(block).__qualname__ == Special.__qualname__
    assert type(block).__module__ == __name__ and type(block).__doc__ == Special.__doc__
    assert inspect.signature(model.blocks[0].forward) == inspect.signature(plain.blocks[0].forward)
    assert model.blocks[0].forward.__doc__ == "One block."
    assert type(model.blocks[0]) is type(model.blocks[1])
    model.load_state_dict(plain.state_dict())
    plain.load_state_dict(model.state_dict())


def saved_and_loaded(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "oldest pickle": lambda model: pickle.loads(pickle.dumps(model, protocol=2)),
    "torch.save": saved_and_loaded,
    "twice": lambda model: copy.deepcopy(pickle.loads(pickle.dumps(model))),
}


@pytest.mark.parametrize("check_fn", [Block, ""])
@pytest.mark.parametrize("duplicate", COPIES.values(), ids=COPIES)
def test_copies_stay_checkpointed(duplicate, check_fn):
    seed()
    model = Model()
    names = apply(model, check_fn)
    other = duplicate(model)
    assert_equal(list(model.state_dict().values()), list(other.state_dict().values()), "state")
    x = batch()
    assert torch.equal(model.eval()(x), other.eval()(x))
    assert {name.split(".")[0] for name in modules_run_as_regions(other.train(), x)} >= {"blocks"}
    assert remove(copy.deepcopy(other)) == names


def test_options_reach_the_region():
    seed()
    model = nn.Sequential(nn.Dropout(0.5))
    apply(model, nn.Dropout, preserve_rng_state=False)
    x = torch.ones(1000, requires_grad=True)
    y = model(x)
    y.sum().backward()
    assert not torch.equal(y.detach(), x.grad)
    apply(model, nn.Dropout)
    x.grad = None
    y = model(x)
    y.sum().backward()
    assert torch.equal(y.detach(), x.grad)
    raises(ValueError, "offload='x'", lambda: apply(model, nn.Dropout, offload="x"))


ERRORS = {
    "no block": (lambda: nn.Linear(2, 2), None, ValueError, "no block is repeated .* pass check_fn"),
    "no such class": (Model, nn.LSTM, ValueError, "no module is a LSTM; the model has BatchNorm1d, Block, .*Special"),
    "no such name": (Model, "blocks.7", ValueError, "no module named 'blocks.7'; names look like 'stem', 'blocks'"),
    "one wrong name": (Model, ["stem", "tail"], ValueError, "no module named 'tail'"),
    "no name": (Model, [], ValueError, "nothing to checkpoint"),
    "predicate": (Model, lambda module: False, ValueError, "the predicate is true for no module"),
    "a number": (Model, 3, TypeError, "check_fn must be a predicate, .* got 3"),
    "mixed": (Model, ["stem", Block], TypeError, "check_fn must be a predicate"),
    "no model": (lambda: torch.sin, None, TypeError, "model must be a torch.nn.Module, got builtin"),
}


@pytest.mark.parametrize(("make", "check_fn", "error", "message"), ERRORS.values(), ids=ERRORS)
def test_an_error_leaves_the_model_unchanged(make, check_fn, error, message):
    model = make()
    raises(error, message, lambda: apply(model, check_fn))
    if isinstance(model, nn.Module):
        assert remove(model) == []
    else:
        raises(TypeError, "must be a torch.nn.Module", lambda: remove(model))


def test_a_step_that_is_planned_is_refused_at_once():
    planned = ackpt.compile(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), batch(), policy="full")
    in_place = nn.Linear(4, 4)
    ackpt.apply_budget(in_place, batch(), budget="1MiB", loss=lambda outputs, batch: outputs.sum())
    for model, name in [
        (planned, "the model"),
        (nn.Sequential(nn.Linear(4, 4), planned), "module '1'"),
        (in_place, "the model"),
    ]:
        with pytest.raises(TypeError, match=f"{name} is a step planned by ackpt.compile.*either that or activation"):
            apply(model)
    planned(batch()).sum().backward()


@pytest.mark.parametrize("is_before", [True, False])
def test_a_forward_replaced_on_the_instance_is_part_of_the_region(is_before):
    seed()
    model, x, calls = Model(), batch(), []
    plain = copy.deepcopy(model)
    if not is_before:
        apply(model, Block)
    for block in model.blocks:

        def forward(*args, own=block.forward, **kwargs):
            calls.append(ackpt.is_recomputing())
            return own(*args, **kwargs)

        block.forward = forward
    assert not is_before or apply(model, Block)
    for each in (model, plain):
        seed()
        total(each(x)).backward()
    assert calls == [False] * 3 + [True] * 3
    assert_equal([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()], "gradient")


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(self.norm(x)).tanh()


class FeedForward(Attention):
    pass


class ListsInAList(nn.Module):
    """Layers as lists of parts: the lists are never called."""

    def __init__(self, container=nn.ModuleList):
        super().__init__()
        parts = [[nn.ModuleList([nn.LayerNorm(4)]), Attention(), FeedForward()] for _ in range(3)]
        if container is nn.ModuleDict:
            parts = [dict(zip(("norms", "attention", "forward_part"), layer)) for layer in parts]
        self.layers = nn.ModuleList(map(container, parts))

    def forward(self, x):
        for layer in self.layers:
            norms, attention, feed_forward = layer.values() if isinstance(layer, nn.ModuleDict) else layer
            x = x + attention(norms[0](x))
            x = x + feed_forward(x)
        return x


@pytest.mark.parametrize("container", [nn.ModuleList, nn.ModuleDict])
def test_the_parts_of_lists_in_a_list_are_chosen(container):
    seed()
    model = ListsInAList(container)
    names = apply(copy.deepcopy(model))
    assert len(names) == 6 and all(isinstance(model.get_submodule(name), Attention) for name in names)
    assert_same_training(model, (batch(),))
    apply(model)
    assert {name.rpartition(".")[0] for name in modules_run_as_regions(model, batch())} == set(names)


class CallsInside(nn.Module):
    """Calls the members of its blocks, or uses their weights, and never the blocks."""

    def __init__(self, uses_weights=False, skips=()):
        super().__init__()
        self.uses_weights, self.skips = uses_weights, skips
        self.blocks = nn.ModuleList(nn.Sequential(Attention(), FeedForward()) for _ in range(3))
        self.head = nn.Linear(4, 4)

    def forward(self, x):
        for place, block in enumerate(self.blocks):
            if place in self.skips:
                continue
            if self.uses_weights:
                x = x + nn.functional.linear(x, block[0].linear.weight)
            elif self.skips:
                x = block(x)
            else:
                for part in block:
                    x = part(x)
        return {"x": (self.head(x),)}


@pytest.mark.parametrize("uses_weights", [False, True])
def test_a_chosen_module_that_is_not_called_is_an_error_at_the_first_step(uses_weights):
    model = CallsInside(uses_weights)
    apply(model)
    with torch.no_grad():
        model(batch())
    raises(ackpt.CheckpointError, r"3 of 3 .*blocks\.0, blocks\.1.*Attention.*FeedForward", lambda: model(batch()))
    remove(model)
    model(batch())


def test_a_chosen_module_may_be_skipped_by_a_forward():
    model = CallsInside(skips=(1,))
    assert len(apply(model)) == 3
    total(model(batch())).backward()
    assert model.blocks[1][0].linear.weight.grad is None


def test_the_check_of_the_first_forward_leaves_nothing_behind():
    model = Model()
    hooks = dict(model._forward_hooks)
    apply(model)
    apply(model)
    other = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    for each in (model, other):
        total(each(batch())).backward()
        assert dict(each._forward_hooks) == hooks
    assert dict(remove(model) and model._forward_hooks) == hooks


def test_scripted_modules_are_not_chosen_and_are_refused_by_name():
    def block():
        return nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    scripted = nn.ModuleList(torch.jit.script(block()) for _ in range(2))
    model = nn.ModuleDict({"blocks": nn.ModuleList([block(), block()]), "scripted": scripted})
    assert ackpt.apply_activation_checkpointing(model) == ["blocks.0", "blocks.1"]
    with pytest.raises(ValueError, match="module 'scripted.0' is scripted, so its forward cannot be replaced"):
        ackpt.apply_activation_checkpointing(model, ["scripted.0"])
