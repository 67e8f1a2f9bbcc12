"""`ackpt.audit`: one model per kind of finding, each found and named."""

import collections
import copy
import functools
import random

import pytest
import torch
from audited_models import WIDTH, Block, Custom, Net, batch, by_reentrant, by_torch, kinds, llama, only, plain, tokens
from conftest import model_of
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrappers
from torch.utils.checkpoint import checkpoint

import ackpt


def test_finds_dropout_drawn_again():  # OLMo-core 828
    run = functools.partial(by_torch, preserve_rng_state=False)
    found = only(Net(run, make=lambda: Block(nn.GELU(), nn.Dropout(0.5))), batch())
    assert (found.kind, found.module) == ("random", "blocks.0") and "preserve_rng_state" in found.fix


@pytest.mark.parametrize("run", [by_torch, by_reentrant])
def test_finds_random_numbers_of_python(run):
    found = only(Net(run, make=lambda: Block(nn.GELU(), model_of(lambda self, x: x * random.random()))), batch())
    assert found.kind == "random" and "Python's random" in found.message


def generated():
    return model_of(lambda self, x: x * torch.rand(x.shape, generator=self.generator), generator=torch.Generator())


def test_finds_random_numbers_of_a_generator():
    assert "a torch.Generator" in only(Net(by_torch, make=lambda: Block(generated())), batch()).message
    assert kinds(Net(ackpt.checkpoint, make=lambda: Block(generated())), batch()) == []
    without = functools.partial(ackpt.checkpoint, preserve_rng_state=False)
    assert kinds(Net(without, make=lambda: Block(generated())), batch()) == ["random"]


@pytest.mark.parametrize("run", [by_torch, by_reentrant])
def test_finds_running_statistics_updated_twice(run):
    found = only(Net(run, make=lambda: Block(nn.BatchNorm1d(4 * WIDTH), nn.GELU())), batch())
    assert (found.kind, found.module[:7]) == ("statistics", "blocks.") and "middle.0.running" in found.message


def test_finds_a_closure_changed_before_backward():  # pytorch's documentation
    class Closure(Net):
        def forward(self, x):
            x = self.stem(x)
            for scale, block in enumerate(self.blocks, 1):
                x = checkpoint(lambda y: block(y) * scale, x, use_reentrant=False)  # noqa: B023
            return self.head(x).square().mean()

    found = only(Closure(plain), batch())
    assert found.kind == "changed" and "'block'" in found.message and found.module == "blocks.0"


def test_finds_an_attribute_changed_before_backward():  # peft 2826
    class Switch(nn.Module):
        scale = 1.0

        def forward(self, x):
            return x * self.scale

    class Adapters(Net):
        def forward(self, x):
            for block in self.blocks:
                block.middle[0].scale = 2.0
            loss = super().forward(x)
            for block in self.blocks:
                block.middle[0].scale = 1.0
            return loss

    found = only(Adapters(by_torch, make=lambda: Block(Switch())), batch())
    assert found.kind == "changed" and "'blocks.0.middle.0'" in found.message and "scale" in found.message


COUNTS = {  # what the first call of a block finds in its attribute `calls`, and what each call does to it
    "int": (lambda: 0, lambda block: setattr(block, "calls", block.calls + 1)),
    "added": (None, lambda block: setattr(block, "calls", getattr(block, "calls", 0) + 1)),
    "list": (list, lambda block: block.calls.append(torch.ones(2))),
    "nested": (lambda: {"steps": [0]}, lambda block: block.calls["steps"].append(1)),
    "long": (lambda: [0] * 10_000, lambda block: block.calls.append(1)),
    "counter": (collections.Counter, lambda block: block.calls.update("a")),
    "deque": (lambda: collections.deque(maxlen=3), lambda block: block.calls.append(len(block.calls))),
    "set": (set, lambda block: block.calls.add(len(block.calls))),
}


@pytest.mark.parametrize("rows", [1, 512])
@pytest.mark.parametrize("kind", COUNTS)
def test_finds_what_changes_twice(kind, rows):  # pytorch 196956
    make, count = COUNTS[kind]

    class Counting(Block):
        def __init__(self):
            super().__init__()
            if make is not None:
                self.calls = make()

        def forward(self, x):
            count(self)
            return super().forward(x)

    net = Net(by_torch, make=Counting)
    before = [copy.deepcopy(getattr(block, "calls", None)) for block in net.blocks]
    found = only(net, batch(rows))
    assert found.kind == "twice" and "calls" in found.message
    assert [getattr(block, "calls", None) for block in net.blocks] == before
    assert kinds(Net(plain, make=Counting), batch(rows)) == []


def test_finds_reentrant_regions_without_inputs_that_require_grad():  # peft 1142, trl 3089
    class Frozen(Net):
        def enable_input_require_grads(self):
            """As models of transformers have it."""

    net = Frozen(by_reentrant)
    net.stem.requires_grad_(False)
    audit = ackpt.audit(net, batch())
    (found,) = audit.findings
    assert (found.kind, found.module) == ("no_gradients", "blocks.0")
    assert "enable_input_require_grads" in found.fix and audit.differences["gradient blocks.0.up.weight"] is None


def test_finds_children_wrapped_instead_of_blocks():  # accelerate 3897
    net = Net(plain)
    wrappers.apply_activation_checkpointing(net.blocks, check_fn=lambda m: isinstance(m, (nn.Linear, nn.GELU)))
    found = only(net, batch())
    assert (found.kind, found.module) == ("children", "blocks.0")


def test_finds_a_vision_tower_without_regions():  # NeMo Automodel 2840
    class Both(Net):
        def __init__(self):
            super().__init__(by_torch)
            self.tower = nn.Sequential(*(Block() for _ in range(4)))

        def forward(self, x):
            return super().forward(self.tower(x))

    found = only(Both(), batch())
    assert found.kind == "not_covered" and found.module == "tower.0" and "4 x tower.*" in found.message


def switched(use_cache=False):
    """A model with a switch, as those of transformers and timm."""

    def forward(self, x):
        on = self.gradient_checkpointing and self.training and not self.config.use_cache
        self.net.run = by_torch if on else plain
        return self.net(x)

    return model_of(
        forward, net=Net(plain), gradient_checkpointing=True, config=type("Config", (), {"use_cache": use_cache})()
    )


def test_finds_a_cache_that_switches_checkpointing_off():
    assert kinds(switched(), batch()) == []
    found = only(switched(use_cache=True), batch())
    assert found.kind == "cache" and "use_cache = False" in found.fix


def test_finds_checkpointing_in_evaluation_mode():
    found = only(switched().eval(), batch())
    assert found.kind == "evaluation" and "train()" in found.fix


def test_finds_a_returned_cache():  # FSDP's wrapper around the layers of transformers
    model = llama()
    layer = type(model.model.layers[0])
    wrappers.apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, layer))
    assert kinds(model, tokens()) == ["cache"]


def test_finds_an_offload_around_backward_only():
    net, x = Net(plain), batch()

    def step():
        loss = net(x)
        with ackpt.offload_saved_tensors(min_bytes=0):
            loss.backward()

    found = only(step, resident=[net])
    assert found.kind == "offload" and "around the forward" in found.fix


class OffloadActivations(saved_tensors_hooks):
    """As TRL's and torchtune's, on any device."""

    def __init__(self, min_offload_size=1024):
        self.min_tensor_size_bytes, self.tracker = min_offload_size, {}

        def pack(tensor):
            number = len(self.tracker)
            is_large = tensor.numel() * tensor.element_size() >= self.min_tensor_size_bytes
            self.tracker[number] = tensor.clone() if is_large else tensor
            return number

        super().__init__(pack, lambda number: self.tracker.pop(number))


def with_offload(**options):
    net, x = Net(plain), batch()

    def step():
        with OffloadActivations(**options):
            loss = net(x)
        loss.backward()

    return step


def test_finds_an_offload_below_its_threshold():  # trl 5738
    assert kinds(with_offload()) == []
    found = only(with_offload(min_offload_size=1 << 20))
    assert found.kind == "offload" and "1.0 MiB" in found.message


def test_finds_an_offload_that_never_frees():  # axolotl 3638
    kept = []

    def pack(tensor):
        kept.append(tensor)
        return tensor.device, tensor.clone()

    net, x = Net(plain), batch()

    def step():
        with saved_tensors_hooks(pack, lambda packed: packed[1]):
            loss = net(x)
        loss.backward()

    found = only(step)
    assert found.kind == "offload" and "not freed" in found.message
    assert kept == []


def test_finds_regions_inside_regions_of_the_same_blocks():
    found = only(Net(lambda block, x: by_torch(lambda y: by_torch(block, y), x)), batch())
    assert (found.kind, found.module) == ("nested", "blocks.0")


def test_finds_one_region_around_everything():  # pytorch 147449
    found = only(Custom([nn.Sequential(*(Block() for _ in range(6)))]), batch(512))
    assert found.kind == "no_effect" and "at once" in found.message


@pytest.mark.parametrize("rows", [1, 4096])
def test_finds_regions_of_frozen_blocks(rows):
    net = Net(by_torch)
    net.stem.requires_grad_(False)
    net.blocks.requires_grad_(False)
    found = only(net, batch(rows))
    assert found.kind == "no_effect" and "frozen" in found.message


def test_finds_a_head_that_saves_most():
    class Model(Net):
        def __init__(self):
            super().__init__(by_torch)
            self.head = nn.Linear(WIDTH, 4096)

        def forward(self, x):
            x = self.stem(x)
            for block in self.blocks:
                x = self.run(block, x)
            return nn.functional.cross_entropy(self.head(x), torch.zeros(len(x), dtype=torch.long))

    found = only(Model(), batch(128))
    assert found.kind == "head" and "chunked_cross_entropy" in found.fix


def test_finds_a_recomputation_that_routes_other_tokens():  # pytorch 155171
    class Routed(Block):
        def forward(self, x):
            chosen = torch.rand(len(x)) < 0.5
            return x.index_put((chosen,), super().forward(x[chosen]))

    run = functools.partial(by_torch, preserve_rng_state=False)
    found = only(Net(run, make=Routed), batch())
    assert found.kind == "error" and "different metadata" in found.message and "random numbers" in found.message
