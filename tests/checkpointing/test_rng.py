"""Random number streams are replayed in the recomputation, and end in the same state as in the baseline."""

# ruff: noqa: NPY002

import concurrent.futures
import contextlib
import dataclasses
import functools
import random
import threading
import types

import numpy as np
import pytest
import torch
from conftest import Case, assert_equal, assert_same_step, batch, bit_equal, plain_call, raises, seed, streams, total
from torch import nn

import ackpt
from ackpt.checkpointing import rng

GLOBAL = {
    "dropout": lambda x: nn.functional.dropout(x, 0.5),
    "rand_like": lambda x: x * torch.rand_like(x),
    "permutation": lambda x: x[torch.randperm(3)] * torch.arange(12.0).view(3, 4),
    "python": lambda x: x * random.random() + random.gauss(0, 1),
    "python choice": lambda x: x * random.choice([1, 2, 3]) if random.random() < 0.5 else x.sin(),
    "numpy": lambda x: x * float(np.random.rand()),
    "numpy normal, one of a pair": lambda x: x * float(np.random.randn()),
    "all of them": lambda x: x * random.random() * float(np.random.randn()) * torch.rand(4) + random.gauss(0, 1),
    "seeds inside": lambda x: (torch.manual_seed(5), x * torch.rand(4))[1],
    "python seeded inside": lambda x: (random.seed(3), np.random.seed(3), x * random.random() * np.random.rand())[2],
    "a fork inside": lambda x: forked(x),
}


def forked(x):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        y = x * torch.rand(4)
    return y * torch.rand(4)


@pytest.mark.parametrize("function", GLOBAL.values(), ids=GLOBAL)
@pytest.mark.parametrize("drawn_before", [0, 1], ids=["fresh", "after a draw"])
def test_global_streams_are_replayed(function, drawn_before):
    def around():
        for _ in range(drawn_before):  # leaves the cached half of a Gaussian pair behind
            random.gauss(0, 1), np.random.randn(), torch.randn(1)
        return contextlib.nullcontext()

    assert_same_step(lambda: Case(function, (batch(),)), around=around)


@pytest.mark.parametrize("function", GLOBAL.values(), ids=GLOBAL)
def test_global_streams_are_replayed_in_nested_regions_and_chains(function):
    def run(call):
        seed()
        x = batch()
        y = call(lambda x: call(function, x) + call(function, x.sin()), x)
        y = call(function, y)
        draws = [streams()]
        total(y).backward()
        return [y.detach(), x.grad], [*draws, streams()]

    (first, draws), (second, others) = run(plain_call), run(ackpt.checkpoint)
    assert_equal(first, second, "value")
    assert draws == others


def generators(make):
    return types.SimpleNamespace(torch=make[0], numpy=make[1], legacy=make[2], python=make[3])


def fresh():
    return torch.Generator().manual_seed(1), np.random.default_rng(2), np.random.RandomState(3), random.Random(4)


def draw(x, sources):
    """A product with a number of every generator object found in `sources`, however they are nested."""
    for source in flat(sources):
        if isinstance(source, torch.Generator):
            x = x * torch.rand(4, generator=source) + torch.randn((), generator=source)
        elif isinstance(source, np.random.Generator):
            x = x * float(source.normal())
        elif isinstance(source, np.random.RandomState):
            x = x * float(source.randn())
        else:
            x = x * source.gauss(0, 1)
    return x


def flat(sources):
    if isinstance(sources, dict):
        return [item for value in sources.values() for item in flat(value)]
    if isinstance(sources, (list, tuple)):
        return [item for value in sources for item in flat(value)]
    if dataclasses.is_dataclass(sources) or isinstance(sources, types.SimpleNamespace):
        return flat(vars(sources))
    return [] if isinstance(sources, float) else [sources]


def states(sources) -> list[str]:
    out = []
    for source in flat(sources):
        if isinstance(source, torch.Generator):
            out.append(str(source.get_state().tolist()))
        elif isinstance(source, random.Random):
            out.append(str(source.getstate()))
        elif isinstance(source, np.random.Generator):
            out.append(str(source.bit_generator.state))
        else:
            out.append(str(source.get_state(legacy=False)))
    return out


@dataclasses.dataclass
class Settings:
    generator: object
    rate: float = 0.5


class Noise(nn.Module):
    def __init__(self, sources):
        super().__init__()
        self.generator, self.numpy, self.legacy, self.python = sources

    def forward(self, x):
        return draw(x, [self.generator, self.numpy, self.legacy, self.python])


WAYS = {
    "arguments": lambda made: (lambda x, *sources: draw(x, sources), made, {}),
    "keywords": lambda made: (lambda x, **sources: draw(x, sources), (), dict(zip("abcd", made))),
    "dict": lambda made: (draw, ({"a": made[0], "b": {"c": made[1:]}},), {}),
    "list": lambda made: (draw, ([made[0], [list(made[1:])]],), {}),
    "dataclass": lambda made: (draw, (Settings([Settings(item) for item in made]),), {}),
    "plain object": lambda made: (draw, (generators(made),), {}),
    "closure": lambda made: (lambda x: draw(x, made), (), {}),
    "partial": lambda made: (functools.partial(draw, sources=made), (), {}),
    "default": lambda made: ((lambda x, sources=made: draw(x, sources)), (), {}),
    "module attribute": lambda made: (Noise(made), (), {}),
    "module below": lambda made: (nn.Sequential(nn.Identity(), Noise(made)), (), {}),
    "bound method": lambda made: (Noise(made).forward, (), {}),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_generator_objects_are_replayed(way):
    def run(call):
        seed()
        made, x = fresh(), batch()
        function, args, kwargs = way(made)
        y = call(function, x, *args, **kwargs)
        drawn = states(made)
        total(y).backward()
        return [y.detach(), x.grad], [drawn, states(made)]

    (first, draws), (second, others) = run(plain_call), run(ackpt.checkpoint)
    assert_equal(first, second, "value")
    assert draws == others
    assert draws[0] != states(fresh()) and draws[0] == draws[1]


_GENERATOR = torch.Generator()


@bit_equal
def test_a_global_generator_is_replayed(call):
    _GENERATOR.manual_seed(0)
    x = torch.ones(4, requires_grad=True)
    y = call(lambda x: x * torch.rand(4, generator=_GENERATOR), x)
    y.sum().backward()
    return [y.detach(), x.grad]


@pytest.mark.parametrize("generator", [torch.default_generator, _GENERATOR])
def test_without_preserving_the_mask_may_differ_and_nothing_is_restored(generator):
    x = torch.ones(1000, requires_grad=True)
    y = ackpt.checkpoint(lambda x: x * torch.rand(x.shape, generator=generator), x, preserve_rng_state=False)
    before = generator.get_state()
    y.sum().backward()
    assert not torch.equal(y.detach(), x.grad) and not torch.equal(generator.get_state(), before)


def test_without_other_streams_torchs_own_are_replayed():
    x = torch.ones(1000, requires_grad=True)
    with ackpt.guarantees(other_rng=False, unchanged=False):  # the other number would be another path
        y = ackpt.checkpoint(lambda x: nn.functional.dropout(x) * random.random(), x)
    y.sum().backward()
    assert torch.equal(y.detach() == 0, x.grad == 0) and not torch.equal(y.detach(), x.grad)


def test_only_streams_that_were_drawn_from_are_kept():
    def drawn(function):
        before = rng.snapshot([rng.stream_of(source) for source in sources])
        function()
        return [type(stream).__name__ for stream, _ in rng.drawn_from(before)]

    sources = fresh()
    assert drawn(lambda: None) == []
    assert drawn(lambda: torch.rand(1)) == ["TorchStream"]
    assert drawn(random.random) == ["PythonStream"]
    assert drawn(np.random.rand) == ["NumpyGlobalStream"]
    assert drawn(sources[0].seed) == ["TorchStream"]
    assert drawn(sources[1].random) == ["NumpyStream"] == drawn(sources[2].rand)
    assert drawn(sources[3].random) == ["PythonStream"]


def test_sources_of_true_randomness_are_not_replayed():
    assert rng.stream_of(random.SystemRandom()) is None
    assert rng.stream_of(object()) is None


def test_numpys_global_generator_may_be_replaced():
    before = np.random.get_bit_generator()
    try:
        for bits in (np.random.PCG64(1), np.random.MT19937(2)):
            np.random.set_bit_generator(bits)
            x = torch.ones(1, requires_grad=True)
            y = ackpt.checkpoint(lambda x: x * float(np.random.rand()), x)
            y.backward()
            assert y.item() == x.grad.item()
    finally:
        np.random.set_bit_generator(before)


def seeded(seeds):
    def function(x):
        seeds()
        return x * torch.rand(4) * float(np.random.rand()) * torch.tensor(random.random())

    return function


counter = iter(range(100))
UNREPEATABLE = {
    "torch": ("torch", torch.seed),
    "torch's generator": ("torch", torch.default_generator.seed),
    "a counter": ("torch", lambda: torch.manual_seed(next(counter))),
    "python": (r"Python's random", random.seed),
    "numpy": (r"numpy\.random", np.random.seed),
    "a nested region": ("torch", lambda: ackpt.checkpoint(seeded(torch.seed), torch.ones(4, requires_grad=True))),
}


@pytest.mark.parametrize(("name", "seeds"), UNREPEATABLE.values(), ids=UNREPEATABLE)
def test_a_seed_that_differs_between_runs_is_refused(name, seeds):
    seed()
    x = torch.ones(4, requires_grad=True)
    y = ackpt.checkpoint(seeded(seeds), x)
    before = streams()
    raises(ackpt.CheckpointError, f"drew other random numbers from {name} than its forward", lambda: y.sum().backward())
    assert x.grad is None and streams() == before


FORKED = {
    "rand": lambda x: torch.rand(4),
    "dropout": lambda x: nn.functional.dropout(x, 0.3),
    "in place": lambda x: torch.empty(4).normal_(),
    "attention": lambda x: nn.functional.scaled_dot_product_attention(*[torch.eye(4)[None]] * 3, dropout_p=0.5)[0, 0],
    "gumbel": lambda x: nn.functional.gumbel_softmax(torch.ones(4)),
}


@pytest.mark.parametrize("rows", [5, 40_000])
@pytest.mark.parametrize("name", FORKED)
@bit_equal
def test_draws_in_fork_rng_are_replayed(call, name, rows):
    def function(x):
        with torch.random.fork_rng():
            return x * FORKED[name](x)

    x = batch(rows)
    for step in range(5):
        torch.manual_seed(step)
        y = call(function, x)
        torch.rand(3)
        y.sum().backward()
    return x.grad, torch.get_rng_state()


def test_random_numbers_drawn_by_the_forward_alone_are_allowed():
    x = torch.ones(4, requires_grad=True)
    ackpt.checkpoint(lambda x: (ackpt.is_recomputing() or random.random(), x.sin())[1], x).sum().backward()
    assert torch.equal(x.grad, torch.ones(4).cos())


@pytest.mark.parametrize(
    "draw", [random.random, np.random.rand, lambda: torch.rand(3)], ids=["random", "numpy", "torch"]
)
def test_another_thread_draws(draw):
    """While a region runs that draws nothing; the first draw below stands for that of the thread."""
    layer, gate, drawn, done = torch.nn.Linear(4, 4), threading.Event(), threading.Event(), threading.Event()

    def prefetch():
        while not done.is_set():
            if gate.wait(0.05):
                draw()
                gate.clear()
                drawn.set()

    def function(x):
        gate.set()
        assert drawn.wait(10)
        drawn.clear()
        return torch.tanh(layer(x))

    thread = threading.Thread(target=prefetch)
    thread.start()
    try:
        for rows in (4, 40_000):
            for _ in range(3):
                x, ways = torch.randn(rows, 4), iter((1, 2))
                loss = ackpt.checkpoint(lambda x, w=ways: [function(x) for _ in range(next(w))][-1], x).sum()  # noqa: B023
                loss.backward()
    finally:
        done.set()
        thread.join()


def test_regions_in_threads_of_a_region_are_refused():
    x = torch.randn(4, requires_grad=True)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        with pytest.raises(ackpt.CheckpointError, match="thread pool"):
            ackpt.checkpoint(lambda x: pool.submit(ackpt.checkpoint, torch.sin, x).result(), x)
