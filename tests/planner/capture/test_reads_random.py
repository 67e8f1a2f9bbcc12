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


def forked(model):
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return torch.randn(4)


def restored(model):
    with torch.random.fork_rng():
        return torch.rand(4)


def seeded_own(model):
    model.own.seed(0)
    return model.own.random()


def seeded_python(model):
    random.seed(0)
    return random.random()


def seeded_numpy(model):
    np.random.seed(0)  # noqa: NPY002
    return float(np.random.rand())  # noqa: NPY002


# A forward that draws from a generator, or seeds one itself, so that every call leaves it in the same state.
DRAWS = {
    "own": lambda model: model.own.random(),
    "several": lambda model: model.several["numpy"].normal(),
    "GENERATOR": lambda model: GENERATOR.random(),
    "manual_seed": forked,
    "seeded own": seeded_own,
    "seeded random": seeded_python,
    "seeded numpy": seeded_numpy,
    "seeded generator": lambda model: torch.rand(4, generator=model.generator.manual_seed(0)),
    "set_rng_state": restored,
}


def drawing(factor):
    return model_of(
        lambda self, x: (self.linear(x) * self.factor(self)).sum(),
        linear=nn.Linear(4, 4),
        factor=factor,
        own=random.Random(3),  # noqa: S311
        several={"numpy": np.random.default_rng(0)},
        generator=torch.Generator().manual_seed(0),
    )


def states(model):
    """The states of all generators, comparable by ``==``."""
    of_torch = torch.get_rng_state().tolist(), model.generator.get_state().tolist()
    of_numpy = np.random.get_state()[1].tobytes(), model.several["numpy"].bit_generator.state  # noqa: NPY002
    return *of_torch, *of_numpy, random.getstate(), GENERATOR.getstate(), model.own.getstate()


@pytest.mark.parametrize("is_called", [False, True])
@pytest.mark.parametrize("how", DRAWS)
def test_a_forward_that_seeds_or_draws_itself_is_refused_and_generators_are_put_back(how, is_called):
    model, x = drawing(DRAWS[how]), torch.ones(2, 4)
    if is_called:
        model(x)
    before = states(model)
    raises(TraceError, f"{how.split()[-1]}.*regions=True", lambda: ackpt.compile(model, x, policy="full"))
    assert states(model) == before


def test_an_unused_generator_is_allowed():
    model = drawing(lambda model: 1.0)
    assert torch.equal(ackpt.compile(model, X)(X), model(X))


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
