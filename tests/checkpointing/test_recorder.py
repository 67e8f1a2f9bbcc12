"""A recomputation that takes another path than its forward raises an error that names the operation."""

import collections
import concurrent.futures
import functools
import os
import types
from functools import lru_cache

import numpy as np
import pytest
import torch
from conftest import Case, assert_next_step_works, assert_same_step, batch, bit_equal, model_of, raises, raises_cleanly
from torch import nn

import ackpt
from ackpt.checkpointing import evidence, recorder, region


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


calls = [0]
entry = {"scale": 1.0}


def second() -> bool:
    """Whether this is the second call; a region cannot detect a changed list entry."""
    calls[0] += 1
    return calls[0] == 2


def scalar(x):
    entry["scale"] += 1
    return (x + entry["scale"]).exp()


def selection(x):
    mask = torch.tensor([True, True, second(), True, True])
    return x[mask].sum() * x


layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
frozen = nn.ModuleList(nn.Linear(4, 4).requires_grad_(False) for _ in range(2))


def add_made(x):
    """Adds a tensor that is made from another one, without gradients."""
    return x + frozen[0].weight.sum(0)


def after_a_region(x):
    return ackpt.checkpoint(add_made, x) * (3 if second() else 2)


def in_place(x):
    y = x * 1
    if second():
        y.mul_(2)
    return y.sin()


DIFFERENT = {
    "missing": (lambda x: x.sin().exp() if second() else x.sin().exp().sin(), "sin.*absent"),
    "extra": (lambda x: x.sin().exp().sin() if second() else x.sin().exp(), "absent.*sin"),
    "other operation": (lambda x: x.sin() if second() else x.cos(), "cos.*sin"),
    "scalar": (scalar, r"add\(\.\.\., 2\.0\).*add\(\.\.\., 3\.0\)"),
    "keyword": (lambda x: torch.add(x, x, alpha=3 if second() else 2).sin(), "alpha=2.*alpha=3"),
    "slice": (lambda x: x[:, : 2 if second() else 1].sum() * x, ":1.*:2"),
    "argument after a list": (lambda x: torch.cat([x, x], dim=1 if second() else 0).sum() * x, "dim=0.*dim=1"),
    "shape": (selection, r"\[4, 4\].*\[5, 4\]"),
    "environment": (lambda x: x.relu() if os.environ.get("ACKPT_TEST_FLAG") else x.tanh(), "tanh.*relu"),
    "autograd.Function": (lambda x: Double.apply(x) if second() else x * 2, "mul"),
    "one autograd.Function less": (
        lambda x: Double.apply(x).neg() if second() else Double.apply(Double.apply(x)).neg(),
        "Double",
    ),
    "in place": (in_place, "mul_"),
    "after a nested region": (after_a_region, r"mul\(\.\.\., 2\).*mul\(\.\.\., 3\)"),
    "parameter": (
        lambda x: layers[1 if second() else 0](x).tanh(),
        "parameter 'layers.0.weight'.*parameter 'layers.1.weight'",
    ),
}


@pytest.fixture(autouse=True)
def forget(monkeypatch):
    calls[0], entry["scale"] = 0, 1.0
    monkeypatch.delenv("ACKPT_TEST_FLAG", raising=False)


@pytest.mark.parametrize("offload", [None, "sync"])
@pytest.mark.parametrize(("function", "match"), DIFFERENT.values(), ids=DIFFERENT)
def test_another_path_is_an_error(function, match, offload, monkeypatch):
    x = batch(5)
    loss = ackpt.checkpoint(function, x, offload=offload).sum()
    monkeypatch.setenv("ACKPT_TEST_FLAG", "1")
    with raises_cleanly(ackpt.CheckpointError, f"(?s)path.*{match}"):
        loss.backward()
    assert x.grad is None
    assert_next_step_works()


def written_view(value):
    tensor = torch.zeros(4)
    tensor[:2].fill_(value)
    return tensor[1:]


def forked(value):
    with torch.random.fork_rng():
        torch.manual_seed(int(value))
        return torch.rand(4)


def unseeded(value):
    generator = torch.Generator()
    generator.seed()
    return torch.rand(4, generator=generator)


def in_a_function(value):
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * value

        @staticmethod
        def backward(ctx, grad):
            return grad

    return Scaled.apply(torch.ones(4, requires_grad=True))


buffer = torch.zeros(4)
elsewhere = types.ModuleType("elsewhere")
exec("SCALE = 1.0\ndef scaled(x):\n    return use(x, SCALE)", vars(elsewhere))
items = [torch.full((4,), float(i)) for i in range(9)]
# Tensors without gradients, made from a number.
CONSTANTS = {
    "tensor": torch.tensor,
    "negative": lambda value: torch.tensor(-value),
    "list": lambda value: torch.tensor([[0.0, value, 1.0, 2.0]]),
    "computed": lambda value: torch.tensor(value).double().sqrt().float(),
    "array": lambda value: torch.from_numpy(np.full(4, value, "f")),
    "bytes": lambda value: torch.frombuffer(bytearray(np.float32(value).tobytes()), dtype=torch.float32),
    "old constructor": lambda value: torch.FloatTensor([value]),
    "range": lambda value: torch.arange(value, value + 4),
    "filled": lambda value: torch.empty(4).fill_(value),
    "written view": lambda value: written_view(value).sum(),
    "out=": lambda value: torch.mul(torch.ones(4), value, out=torch.empty(4)),
    "buffer": lambda value: buffer.fill_(value) * 1,
    "seed in fork_rng": forked,
    "unseeded generator": unseeded,
    "unseeded generator of NumPy": lambda value: torch.from_numpy(np.random.default_rng().random(4, "f")),
    "another thread": lambda value: concurrent.futures.ThreadPoolExecutor(1).submit(torch.tensor, value).result(),
    "autograd.Function": in_a_function,
}
ITERATORS = {
    "DataLoader": lambda: functools.partial(next, iter(torch.utils.data.DataLoader(items, batch_size=1))),
    "DataLoader of arrays": lambda: functools.partial(next, iter(torch.utils.data.DataLoader(np.eye(4, dtype="f")))),
    "DataLoader's workers": lambda: functools.partial(
        next, iter(torch.utils.data.DataLoader(items, num_workers=1, multiprocessing_context="fork"))
    ),
    "list": lambda: functools.partial(next, iter(items[1:])),
    "generator": lambda: functools.partial(next, (torch.tensor(float(i)) for i in range(1, 9))),
    "queue": lambda: collections.deque(each.clone() for each in items[1:]).popleft,
}
USES = {
    "argument": lambda x, scale: x * scale,
    "branch": lambda x, scale: x.sin() if scale == 1 else x.cos(),
    "tensor": lambda x, scale: x * torch.tensor([scale]),
}


@pytest.mark.parametrize("rows", [5, 40_000])
@pytest.mark.parametrize("name", CONSTANTS)
def test_another_number_that_becomes_a_tensor_is_another_path(name, rows):
    region = ackpt.checkpoint(lambda x: x.sin() * CONSTANTS[name](2.0 if second() else 1.0), batch(rows))
    raises(ackpt.CheckpointError, "(?s)took another path.*operation", region.sum().backward)


@pytest.mark.parametrize("rows", [5, 40_000])
@pytest.mark.parametrize("name", ITERATORS)
def test_another_item_of_an_iterator_is_another_path(name, rows):
    take = ITERATORS[name]()
    region = ackpt.checkpoint(lambda x: x.sin() * take(), batch(rows))
    raises(ackpt.CheckpointError, "(?s)took another path.*an iterator", region.sum().backward)


@pytest.mark.parametrize("runs", [0, evidence.RECORDED_RUNS])
@pytest.mark.parametrize("rows", [5, 40_000])
@pytest.mark.parametrize("name", USES)
def test_a_number_rebound_in_another_file_is_another_path(name, rows, runs, monkeypatch):
    monkeypatch.setattr(elsewhere, "use", USES[name], raising=False)
    for _ in range(runs):
        ackpt.checkpoint(elsewhere.scaled, batch(rows)).sum().backward()
    region = ackpt.checkpoint(lambda x: elsewhere.scaled(x), batch(rows))
    monkeypatch.setattr(elsewhere, "SCALE", 2.0)
    raises(ackpt.CheckpointError, "took another path", region.sum().backward)


def test_the_error_names_line_and_module():
    class Gate(nn.Module):
        def forward(self, x):
            return x.sin() if second() else x.cos()

    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Tanh(), Gate()))
    loss = ackpt.checkpoint(model, batch(5)).sum()
    raises(ackpt.CheckpointError, r"test_recorder\.py:\d+, in module '1\.1' \(Gate\)", loss.backward)


def cached():
    """Builds its mask once, in a dict."""

    def forward(self, x):
        if len(x) not in self.masks:
            self.masks[len(x)] = torch.linspace(0, 1, len(x)).unsqueeze(1).sqrt()
        return x * self.masks[len(x)]

    return model_of(forward, masks={})


@lru_cache
def positions(length):
    return torch.arange(length).float().unsqueeze(1).cos()


def logged(x):
    y = x.exp()
    if not ackpt.is_recomputing():
        calls.append(y.mean())
    calls.append(float(y.detach().std()))
    return y


def watched(x):
    y = x.exp()
    if not second():
        calls.append(y.detach().square().mean())
        (y * 3).sum()
    return y.sin()


SAME = {
    "mask in a dict": lambda: cached(),
    "lru_cache": lambda: lambda x: x * positions(len(x)),
    "nan": lambda: lambda x: (x * float("nan")).clamp(min=float("nan")),
    "logging": lambda: logged,
    "what no output depends on": lambda: watched,
    "several outputs": lambda: lambda x: sum(part.sum() for part in x.unbind(1)) + x,
    "LSTM": lambda: nn.LSTM(4, 4, batch_first=True),
    "attention": lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True),
    "attention in evaluation": lambda: nn.TransformerEncoderLayer(4, 2, 8).eval(),
    "item assignment": lambda: lambda x: torch.zeros(5, 4).index_add(0, torch.arange(5), x) + 0,
}


@pytest.mark.parametrize("make", SAME.values(), ids=SAME)
def test_allowed_differences_between_two_runs(make):
    """Differences in caches, logging and values that no output depends on are allowed."""

    def build():
        calls[0] = 0
        return Case(make(), (batch(5),))

    assert_same_step(build)
    del calls[1:]


def test_counting_flops_changes_no_path():
    """Under a dispatch mode the inputs of a recompute are views, which functions such as ``to`` may return."""

    def function(x):
        y = x.to(torch.float32)
        return y.pow(2) @ y.contiguous().t()

    x = batch(5)
    flops = ackpt.count_flops(lambda: ackpt.checkpoint(function, x).sum().backward())
    assert flops == 3 * 2 * 5 * 5 * 4  # backward does not read the product itself


def test_a_compiled_function_inside_stays_compiled():
    graphs = []

    def count(gm, inputs):
        graphs.append(gm)
        return gm.forward

    compiled = torch.compile(lambda x: (x.sin() * 2).cos(), backend=count)
    for _ in range(3):
        ackpt.checkpoint(compiled, batch(5)).sum().backward()
    assert len(graphs) == 1 and sum(node.op.startswith("call") for node in graphs[0].graph.nodes) == 3


def running(schema) -> list[str]:
    return [a.name for a in schema.arguments if a.name.startswith("running_")]


def test_every_operation_that_takes_running_statistics_is_watched():
    schemas = [s for s in torch._C._jit_get_all_schemas() if s.name.startswith("aten::") and running(s)]
    names = {schema.name.removeprefix("aten::") for schema in schemas}
    without = {name for name in names if "backward" in name or "functional" in name or "no_" in name}
    assert {name for name in names - without if getattr(torch.ops.aten, name) not in recorder._MAY_WRITE} == set()
    assert len(names - without) >= 10


SWAPPED = {
    "inputs": lambda x, y: (x, y),
    "results": lambda x, y: (x.sin(), y.sin()),
    "results of one call": lambda x, y: (x * y).chunk(2),
    "items of a list": lambda x, y: ([x.sin(), y.sin()], [y.sin(), x.sin()]),
}


@pytest.mark.parametrize("name", SWAPPED)
def test_swapped_arguments_are_another_path(name):
    runs = []

    def function(x, y):
        runs.append(1)
        one, other = SWAPPED[name](x, y)
        if isinstance(one, list):
            return torch.cat(one if len(runs) == 1 else other).sin()
        return one - other if len(runs) == 1 else other - one

    x, y = (torch.randn(4, 4, requires_grad=True) for _ in range(2))
    raises(ackpt.CheckpointError, "another path", lambda: ackpt.checkpoint(function, x, y).sum().backward())


def test_another_path_of_a_region_inside_of_another_one_is_an_error():
    """In the recomputation of the outer region, both runs of the inner region take the second path."""
    seen = []

    def inner(x):
        seen.append(1)
        return x.sin().exp().sin() if len(seen) == 1 else x.sin().exp()

    x = torch.randn(4, 4, requires_grad=True)
    with pytest.raises(ackpt.CheckpointError, match=r"operation 3 was torch.Tensor.sin.* and is absent now"):
        ackpt.checkpoint(lambda x: ackpt.checkpoint(inner, x) * 2, x).sum().backward()


@pytest.mark.parametrize("depth", [2, 3])
def test_numbers_inside_of_nested_regions_are_compared(depth):
    seen = []

    def inner(x):
        seen.append(1)
        return x * (2.0 if len(seen) == 1 else 3.0)

    def nested(x, depth):
        return ackpt.checkpoint(inner if depth == 1 else lambda x: nested(x, depth - 1), x).sin()

    x = torch.randn(4, 4, requires_grad=True)
    with pytest.raises(ackpt.CheckpointError, match=r"mul\(..., 2.0\).* and is torch.Tensor.mul\(..., 3.0\)"):
        nested(x, depth).sum().backward()


@pytest.mark.parametrize("offload", [None, "sync"])
def test_a_parameter_created_by_the_region_is_trainable(offload):
    x = torch.ones(2, requires_grad=True)
    y = ackpt.checkpoint(lambda x: x * nn.Parameter(torch.full((2,), 3.0)), x.detach(), offload=offload)
    (x * y).sum().backward()
    assert y.requires_grad and torch.equal(x.grad, torch.full((2,), 3.0))


def test_other_parameters_that_only_an_iterator_has_are_another_path():
    parameters = iter([nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))])
    loss = ackpt.checkpoint(lambda x: x * next(parameters), torch.ones(1, 2)).sum()
    with raises_cleanly(ackpt.CheckpointError, "another path.*a parameter of shape \\[2\\].*a new parameter"):
        loss.backward()


TRANSFORMS = {
    "grad": lambda f, x: torch.func.grad(lambda x: f(x).square().mul_(2).sum())(x),
    "vmap": lambda f, x: torch.func.vmap(f)(x),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x).sum((0, 1)),
}


@pytest.mark.parametrize(("name", "rows"), [*((name, 2) for name in TRANSFORMS), ("grad", 20_000), ("vmap", 20_000)])
@bit_equal
def test_transforms_of_torch_func_inside_a_region(call, name, rows):
    layer, x = nn.Linear(4, 4), torch.randn(rows, 4)
    call(lambda x: TRANSFORMS[name](lambda x: layer(x).tanh(), x), x).sum().backward()
    return [each.grad for each in layer.parameters()]


def recorders(monkeypatch) -> list:
    """A list that grows with every run that is recorded call by call."""
    made = []

    class Counted(recorder.Recorder):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            made.append(self)

    monkeypatch.setattr(region, "Recorder", Counted)
    return made


def recorded(function, *args) -> None:
    """Run regions of a function as often as they are recorded."""
    for _ in range(evidence.RECORDED_RUNS):
        calls[0] = 10
        ackpt.checkpoint(function, *args).sum().backward()
    calls[0] = 0


def stops_gradient(x):
    return x.sin() + (x.detach() if second() else x).cos()


def order_of_inputs(x):
    one, other = x.sin(), x.cos()
    return other - one if second() else one - other


LATER = {
    **{name: function for name, (function, _) in DIFFERENT.items() if name not in ("scalar", "after a nested region")},
    "gradient": stops_gradient,
    "constant": lambda x: x + (torch.ones(5, 4) if second() else torch.zeros(5, 4)),
    "added number": lambda x: (x + (3.0 if second() else 2.0)).sin(),
    "order": order_of_inputs,
    "frozen parameter": lambda x: frozen[1 if second() else 0](x),
}


@pytest.mark.parametrize("name", LATER)
def test_another_path_after_the_recorded_runs_is_an_error(name, monkeypatch):
    made, x = recorders(monkeypatch), batch(5)
    function = LATER[name]
    recorded(function, x)
    loss = ackpt.checkpoint(function, x).sum()
    assert len(made) == 2 * evidence.RECORDED_RUNS + (name == "one autograd.Function less")
    monkeypatch.setenv("ACKPT_TEST_FLAG", "1")
    x.grad = None
    with raises_cleanly(ackpt.CheckpointError, "another path"):
        loss.backward()
    assert x.grad is None
    assert_next_step_works()


def test_a_changed_number_without_effect_on_outputs_is_reported_in_recorded_runs_only():
    zero = nn.Parameter(torch.zeros(4))

    def function(x):
        return x.sin() + zero * (x + (3.0 if second() else 2.0))

    with pytest.raises(ackpt.CheckpointError, match=r"add\(..., 2.0\).*add\(..., 3.0\)"):
        ackpt.checkpoint(function, batch(5)).sum().backward()
    recorded(function, batch(5))
    ackpt.checkpoint(function, batch(5)).sum().backward()


def test_another_path_of_a_region_inside_after_the_recorded_runs():
    def outer(x):
        return ackpt.checkpoint(stops_gradient, x.exp()).tanh()

    x = batch(5)
    recorded(outer, x)
    raises(ackpt.CheckpointError, "another path", lambda: ackpt.checkpoint(outer, x).sum().backward())


ALWAYS_RECORDED = {
    "a custom function": (lambda x: Double.apply(x).sin(), {}),
    "outputs that are no plain tensors": (lambda x: nn.Parameter(x.detach()).sin().to_sparse(), {}),
    "other masks": (lambda x: nn.functional.dropout(x), {"preserve_rng_state": False}),
}


@pytest.mark.parametrize("name", ALWAYS_RECORDED)
def test_operations_outside_of_the_graph_are_recorded_in_all_runs(name, monkeypatch):
    made, (function, options) = recorders(monkeypatch), ALWAYS_RECORDED[name]
    for _ in range(evidence.RECORDED_RUNS + 2):
        torch.sum(ackpt.checkpoint(function, batch(5), **options)).backward()
    assert len(made) == 2 * evidence.RECORDED_RUNS + 4


SAME_EACH_TIME = {"a made tensor": add_made, "nan": lambda x: x * (float("nan") * frozen[0].in_features)}


@pytest.mark.parametrize("name", SAME_EACH_TIME)
def test_a_nested_region_that_is_recorded_later_than_its_outer_one(name):
    inner = SAME_EACH_TIME[name]
    which = [lambda x: x * frozen[0].in_features]

    def outer(x):
        return ackpt.checkpoint(which[-1], x)

    for _ in range(2):
        for _ in range(evidence.RECORDED_RUNS + 2):
            ackpt.checkpoint(outer, batch(5)).sum().backward()
        which.append(lambda x: inner(x))
    assert evidence.subject_of(outer).passed == evidence.subject_of(which[1]).passed == evidence.RECORDED_RUNS


def test_a_new_kind_of_operation_is_recorded_again(monkeypatch):
    made, x = recorders(monkeypatch), batch(5)

    def function(x, kind):
        return getattr(x, kind)()

    for kind in ["sin"] * 4 + ["cos"] * 4:
        ackpt.checkpoint(function, x, kind).sum().backward()
    assert len(made) == 2 * (evidence.RECORDED_RUNS + 3)


def test_large_tensors_are_recorded_in_all_runs(monkeypatch):
    made, x = recorders(monkeypatch), torch.ones(evidence.SMALL_BYTES // 4 + 1, requires_grad=True)
    for _ in range(evidence.RECORDED_RUNS + 1):
        ackpt.checkpoint(torch.sin, x).sum().backward()
    assert len(made) == 2 * evidence.RECORDED_RUNS + 2


def test_records_of_a_function_are_freed_with_it():
    def function(x):
        return x.sin()

    layer = nn.Linear(4, 4)
    for each in (function, layer):
        ackpt.checkpoint(each, batch(5)).sum().backward()
    places = {id(function.__code__), id(layer)}
    assert evidence._subjects.keys() >= places
    del layer, each
    assert id(function.__code__) in evidence._subjects and len(evidence._subjects.keys() & places) == 1
