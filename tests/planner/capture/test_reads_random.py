"""A forward that seeds, draws from generators of its own or sets torch's defaults is planned as it runs, or refused."""

import random

import numpy as np
import pytest
import torch
from conftest import model_of, raises
from reading_models import X
from torch import nn

import ackpt
from ackpt.graph import TraceError

GENERATOR = random.Random(5)


class Draws(nn.Module):
    """Draws random numbers of its own, or seeds torch's."""

    def __init__(self, how: str):
        super().__init__()
        self.how, self.weight = how, nn.Parameter(torch.ones(4))
        self.own, self.several = random.Random(3), {"numpy": np.random.default_rng(0)}

    def forward(self, x):
        y = self.weight * x
        if self.how == "nothing":
            return y
        if self.how == "own":
            return y * self.own.random()
        if self.how == "several":
            return y * self.several["numpy"].normal()
        if self.how == "GENERATOR":
            return y * GENERATOR.random()
        with torch.random.fork_rng():
            torch.manual_seed(7)
            return y * torch.randn(4)


@pytest.mark.parametrize("how", ["own", "several", "GENERATOR", "manual_seed"])
def test_random_numbers_that_a_capture_would_repeat_are_refused_and_put_back(how):
    model, states = Draws(how), (torch.get_rng_state(), GENERATOR.getstate())
    own, numpy_state = model.own.getstate(), model.several["numpy"].bit_generator.state
    raises(TraceError, how, lambda: ackpt.compile(model, torch.ones(4)))
    assert torch.equal(states[0], torch.get_rng_state()) and states[1] == GENERATOR.getstate()
    assert own == model.own.getstate() and numpy_state == model.several["numpy"].bit_generator.state


def test_an_unused_generator_is_allowed():
    assert torch.equal(ackpt.compile(Draws("nothing"), torch.ones(4))(torch.ones(4)), torch.ones(4))


class Seeds(nn.Module):
    """Seeds a generator itself, so that every call leaves it in the same state."""

    def __init__(self, how):
        super().__init__()
        self.how, self.linear = how, nn.Linear(4, 4)
        self.own, self.generator = random.Random(0), torch.Generator().manual_seed(0)  # noqa: S311

    def forward(self, x):
        if self.how == "random":
            random.seed(0)
            factor = random.random()
        elif self.how == "numpy":
            np.random.seed(0)  # noqa: NPY002
            factor = float(np.random.rand())  # noqa: NPY002
        elif self.how == "own":
            self.own.seed(0)
            factor = self.own.random()
        elif self.how == "generator":
            factor = torch.rand(4, generator=self.generator.manual_seed(0))
        else:
            with torch.random.fork_rng():
                factor = torch.rand(4)
        return (self.linear(x) * factor).sum()


@pytest.mark.parametrize("how", ["random", "numpy", "own", "generator", "set_rng_state"])
def test_a_forward_that_seeds_itself_is_refused_also_right_after_a_call(how):
    model, x = Seeds(how), torch.ones(2, 4)
    model(x)
    states = random.getstate(), np.random.get_state()[1].tobytes(), model.own.getstate()  # noqa: NPY002
    of_torch = torch.get_rng_state(), model.generator.get_state()
    raises(TraceError, f"{how}.*regions=True", lambda: ackpt.compile(model, x, policy="full"))
    assert states == (random.getstate(), np.random.get_state()[1].tobytes(), model.own.getstate())  # noqa: NPY002
    assert all(map(torch.equal, of_torch, (torch.get_rng_state(), model.generator.get_state())))


def own_generator(is_new: bool):
    def forward(self, x):
        generator = torch.Generator().manual_seed(3) if self.is_new else self.generator
        return (self.linear(x) * torch.rand(4, generator=generator)).sum()

    return model_of(forward, linear=nn.Linear(4, 4), is_new=is_new, generator=torch.Generator())


def test_a_generator_that_the_forward_creates_is_refused():
    with pytest.raises(TraceError, match=r"torch\.Generator that it creates.*regions=True"):
        ackpt.compile(own_generator(is_new=True), X, policy="full")


def test_a_generator_of_the_model_continues_from_step_to_step():
    model, expected = own_generator(is_new=False), own_generator(is_new=False)
    expected.load_state_dict(model.state_dict())
    step = ackpt.compile(model, X, policy="full")
    assert all(torch.equal(step(X), expected(X)) for _ in range(3))


def leaves_default(kind: str):
    def forward(self, x):
        if self.kind == "dtype":
            torch.set_default_dtype(torch.float64)
        else:
            torch.set_default_device("meta")
        return self.layer(x).sum()

    return model_of(forward, layer=nn.Linear(4, 4), kind=kind)


@pytest.mark.parametrize("kind", ["dtype", "device"])
def test_a_default_that_the_forward_leaves_set_is_refused_without_a_trace(kind):
    before = torch.get_default_dtype(), torch.get_default_device()
    with pytest.raises(ackpt.TraceError, match=f"changes torch's default {kind} and does not restore it.*regions=True"):
        ackpt.compile(leaves_default(kind), X, policy="full")
    assert (torch.get_default_dtype(), torch.get_default_device()) == before


def test_another_default_dtype_gets_its_own_capture():
    class Ones(nn.Linear):
        def forward(self, x):
            return super().forward(x).sum() * torch.full((), 1 / 3).double().sum()

    model = Ones(4, 4)
    step = ackpt.compile(model, X, policy="none")
    assert torch.equal(step(X), model(X))
    try:
        torch.set_default_dtype(torch.float64)
        assert torch.equal(step(X), model(X)) and step.history[-1].cause == "torch.get_default_dtype() changed"
    finally:
        torch.set_default_dtype(torch.float32)
