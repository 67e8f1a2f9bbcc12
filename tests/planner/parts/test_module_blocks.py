"""What blocks of planned regions may do, and which are saved instead of checkpointed; all bit-equal to eager."""

import copy
import random
import warnings

import numpy as np
import pytest
import torch
from branching_models import Adds, DropPath, feed_forward, results
from conftest import assert_equal, model_of, raises
from torch import nn

import ackpt
from ackpt.planner.parts.module_blocks import blocks_of


def trains_equally(make, budgets=("1GiB", 0.8), steps: int = 3, reset=lambda model: None):
    """Steps of a model equal the model's own, gradients and buffers, at every budget; the last step's plan."""
    for budget in budgets:
        torch.manual_seed(0)
        model, x = make(), torch.randn(64, 16)
        own = copy.deepcopy(model)
        step = ackpt.compile(model, x, budget=budget, on_exceed="warn")
        for number in range(steps):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found, expected = [], []
                for call, each, into in ((step, model, found), (own, own, expected)):
                    reset(each)
                    into += results(each, call, {"x": x}, number)
            assert_equal(found, expected, f"{budget}, step {number}")
    return step.plan


def test_a_block_that_changes_its_input_is_saved():
    def in_place():
        return model_of(lambda self, x: self.layer(x.mul_(2)), layer=feed_forward())

    class Model(Adds):
        def forward(self, x):
            return super().forward(x * 1)

    plan = trains_equally(lambda: Model(in_place, is_residual=False))
    assert set(plan.fates.values()) == {"saved"} and set(plan.reasons) == {"blocks.0", "blocks.1", "blocks.2"}
    assert "in place" in plan.reasons["blocks.1"] and "in place" in plan.table()


def test_a_block_that_changes_an_argument_without_gradient_is_saved():
    def counts():
        def forward(self, x, seen):
            seen.add_(1)
            return self.layer(x) * seen.clone()

        return model_of(forward, layer=feed_forward())

    class Model(Adds):
        def __init__(self):
            super().__init__(counts)

        def forward(self, x):
            seen = torch.zeros(())
            for block in self.blocks:
                x = x + block(x, seen)
            return x.square().mean() if seen.item() == 3 else None

    plan = trains_equally(Model)
    assert list(plan.reasons) == ["blocks.0", "blocks.1", "blocks.2"]


def test_a_block_that_keeps_its_state_in_an_attribute_is_saved():
    def neuron():
        def forward(self, x):
            self.state = self.state * 0.5 + self.layer(x)
            spikes = torch.sigmoid(4 * (self.state - 1))
            self.state = self.state * (1 - spikes.detach())
            return spikes

        return model_of(forward, layer=nn.Linear(16, 16), state=0.0)

    class Spiking(Adds):
        def forward(self, x):
            return sum(super(Spiking, self).forward(x) for _ in range(3))

    def reset(model):
        for block in model.blocks:
            block.state = 0.0

    plan = trains_equally(lambda: Spiking(neuron), (1.0, 0.9), reset=reset)
    assert set(plan.reasons) == {"blocks.0", "blocks.1", "blocks.2"}


def test_a_block_that_writes_into_an_object_is_saved():
    class Data:
        pass

    def passes():
        def forward(self, data):
            data.seen = [*getattr(data, "seen", []), len(data.x)]
            data.x = torch.relu(self.layer(data.x))
            return data

        return model_of(forward, layer=nn.Sequential(nn.Linear(16, 16)))

    class Model(Adds):
        def __init__(self):
            super().__init__(passes)

        def forward(self, x):
            data = Data()
            data.x = self.first(x)
            for block in self.blocks:
                data = block(data)
            assert data.seen == [len(x)] * 3
            return data.x.square().mean() if data.x.sum().item() < 1e9 else None

    plan = trains_equally(Model)
    assert set(plan.reasons) == {"blocks.0", "blocks.1", "blocks.2"}


def test_an_error_of_a_block_is_raised_unchanged():
    def forward(self, x):
        if x.abs().max().item() > 1e5:
            raise KeyError("the block's own error")
        return self.layer(x)

    model, x = Adds(lambda: model_of(forward, layer=feed_forward())), torch.randn(64, 16)
    step = ackpt.compile(model, x, budget="1GiB")
    raises(KeyError, "the block's own error", lambda: step(x * 1e7))
    results(model, step, {"x": x})
    assert not step.plan.reasons


@pytest.mark.parametrize("seeds", [torch.seed, random.seed, np.random.seed])
def test_a_block_that_seeds_in_every_call_is_saved(seeds):
    def forward(self, x):
        seeds()
        return self.layer(x) * (1 + torch.rand(16) + random.random() + float(np.random.rand()))  # noqa: NPY002

    class Model(Adds):
        def __init__(self):
            super().__init__()
            self.blocks[1] = model_of(forward, layer=feed_forward())

    model, x = Model(), torch.randn(64, 16)
    step = ackpt.compile(model, x, budget="1GiB")
    with pytest.raises(ackpt.CheckpointError, match=r"'blocks.1'.*saved from the next step on: .*random numbers"):
        step(x).backward()
    step(x).backward()
    assert step.plan.fates["blocks.1"] == "saved"
    assert "drew other random numbers" in step.plan.reasons["blocks.1"]


def test_a_block_refused_in_backward_is_named_and_saved_from_then_on():
    class Model(Adds):
        def __init__(self):
            super().__init__()
            self.blocks[1] = nn.Sequential(
                model_of(
                    lambda self, x: torch.sin(self.layer(x)) if next(self.calls) % 2 else torch.tanh(self.layer(x)),
                    layer=feed_forward(),
                    calls=iter(range(100)),
                ),
                nn.Linear(16, 16),
            )

    torch.manual_seed(0)
    model, x = Model(), torch.randn(64, 16)
    step = ackpt.compile(model, x, budget="1GiB")
    with pytest.raises(ackpt.CheckpointError, match=r"module 'blocks.1' \(Sequential\).*saved from the next step on"):
        results(model, step, {"x": x})
    assert step.plan.fates["blocks.1"] == "saved" and "blocks.1" in step.plan.reasons
    for _ in range(2):
        model.blocks[1][0].calls = iter(range(100))
        found = results(model, step, {"x": x})
        model.blocks[1][0].calls = iter(range(100))
        assert_equal(found, results(model, model, {"x": x}), "saved")


class Observes(nn.Module):
    """Divides by the largest value of its last input, as a model in 8 bits does, and counts its calls."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.register_buffer("amax", torch.ones(()))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        y = torch.tanh(self.layer(x / self.amax.clone()))
        with torch.no_grad():
            self.amax.copy_(x.abs().max())
            self.calls += 1
        return y


def test_buffers_that_a_block_updates():
    plan = trains_equally(lambda: Adds(lambda: nn.Sequential(Observes(), nn.BatchNorm1d(16), Observes())), (0.95, 0.7))
    assert not plan.reasons and set(plan.fates.values()) == {"saved", "checkpointed"}


@pytest.mark.parametrize("kind", ["dropout", "hooks that pack", "weight norm", "drop path"])
def test_blocks_of_every_kind(kind):
    def packs():
        def forward(self, x):
            hooks = (lambda t: t if isinstance(t, nn.Parameter) else t.bfloat16()), torch.Tensor.float
            with torch.autograd.graph.saved_tensors_hooks(*hooks):
                return self.layer(x)

        return model_of(forward, layer=feed_forward())

    block = {
        "dropout": lambda: nn.Sequential(feed_forward(), nn.Dropout(0.5)),
        "hooks that pack": packs,
        "weight norm": lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(16, 16)), nn.Tanh()),
        "drop path": lambda: nn.Sequential(feed_forward(), DropPath()),
    }[kind]
    plan = trains_equally(lambda: Adds(block))
    assert not plan.reasons and "checkpointed" in plan.fates.values()


def test_cached_parametrizations_over_blocks():
    class Model(Adds):
        def __init__(self):
            super().__init__(feed_forward)
            for block in self.blocks:
                nn.utils.parametrize.register_parametrization(block[2], "bias", nn.Tanh())

        def forward(self, x):
            with nn.utils.parametrize.cached():
                return super().forward(x) + super().forward(x)

    trains_equally(Model)


def test_transforms_inside_of_a_block_and_around_it():
    def derives():
        def forward(self, x):
            value, derivative = torch.func.jvp(self.layer, (x,), (torch.ones_like(x),))
            return value + derivative

        return model_of(forward, layer=feed_forward())

    inside = trains_equally(lambda: Adds(derives))
    assert not inside.reasons

    class Around(Adds):
        def body(self, x):
            for block in self.blocks:
                x = x + block(x)
            return x

        def forward(self, x):
            value, derivative = torch.func.jvp(self.body, (self.first(x),), (torch.ones_like(x),))
            return value.square().mean() + derivative.square().mean() if x.sum().item() < 1e9 else x.sum()

    around = trains_equally(Around)
    assert set(around.reasons) == {"blocks.0", "blocks.1", "blocks.2"} and "torch.func" in around.reasons["blocks.0"]


def test_checkpoints_of_the_user_are_kept():
    class Own(Adds):
        def forward(self, x):
            for block in self.blocks:
                x = x + torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
            return super().forward(x)

    plan = trains_equally(Own)
    assert "checkpoint of the model itself" in plan.reasons["blocks.0"]


def test_blocks_that_are_shared_or_called_several_times():
    class Shared(Adds):
        def __init__(self):
            super().__init__()
            self.blocks[2] = self.blocks[0]

        def forward(self, x):
            return super().forward(x) + super().forward(x.flip(0))

    plan = trains_equally(Shared, ("1GiB", 0.6))
    assert set(plan.fates) == {"blocks.0", "blocks.1"}


def test_fast_weights_get_their_gradients():
    model, x = Adds(), torch.randn(64, 16)

    def gradients(call):
        model.zero_grad()
        fast = {name: p - 0.1 * p.square() for name, p in model.named_parameters()}
        torch.func.functional_call(call, fast, (x,)).backward()
        return [parameter.grad for parameter in model.parameters()]

    expected = gradients(model)
    step = ackpt.compile(model, x, budget=0.9)
    assert all(parameter.grad is not None for parameter in model.parameters())  # of this test's step
    for _ in range(3):
        assert_equal(gradients(step), expected, "fast weights")


def test_hooks_of_blocks_run_as_in_eager():
    model, x = Adds(), torch.randn(64, 16)
    features, backward = [], []
    step = ackpt.compile(model, x, budget=0.8)
    for block in model.blocks:
        block.register_forward_hook(lambda module, args, output: features.append(output))
        block.register_full_backward_hook(lambda module, *_: backward.append(module))
    loss = step(x) + sum(feature.sum() for feature in features)
    loss.backward()
    assert len(features) == len(backward) == 3
    found = [parameter.grad for parameter in model.parameters()]
    features.clear()
    model.zero_grad()
    (model(x) + sum(feature.sum() for feature in features)).backward()
    assert_equal([parameter.grad for parameter in model.parameters()], found, "gradient")


def test_several_threads_can_train_one_model():
    import concurrent.futures

    torch.manual_seed(0)
    model = Adds()
    xs = [torch.randn(64, 16) for _ in range(4)]
    expected = []
    for x in xs:
        model.zero_grad()
        expected.append([*torch.autograd.grad(model(x), [*model.parameters()])])
    step = ackpt.compile(model, xs[0], budget="1GiB")
    results(model, step, {"x": xs[0]})
    model.zero_grad()

    def losses(x):
        for _ in range(5):
            loss = step(x)
            loss.backward()
        return loss.detach()

    with concurrent.futures.ThreadPoolExecutor(4) as executor:
        found = list(executor.map(losses, xs))
    assert_equal(found, [model(x).detach() for x in xs], "loss")
    for parameter, *gradients in zip(model.parameters(), *expected):
        torch.testing.assert_close(parameter.grad, 5 * sum(gradients), rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        assert torch.equal(step(xs[0]), found[0])


def test_a_model_that_calls_itself_is_bit_equal():
    class Twice(Adds):
        def forward(self, x, depth: int = 1):
            loss = super().forward(x)
            return loss + self(x.flip(0), depth=0) if depth else loss

    trains_equally(Twice)


def test_blocks_are_repeated_modules_wherever_their_container_is():
    def block():
        return nn.Sequential(nn.Linear(4, 4), nn.GELU())

    model = nn.Sequential(nn.Linear(4, 4), block(), nn.ModuleList([block(), block()]))
    assert [each.path for each in blocks_of(model)] == ["1", "2.0", "2.1"]
