"""What a captured step takes, what it refuses, and that nothing of the capture stays in the model."""

import concurrent.futures
import copy
import random
import re

import numpy as np
import pytest
import torch
from conftest import assert_as_eager, assert_equal, left_by, model_of, raises
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

import ackpt
from ackpt.graph import TraceError, trace

GLOBAL = torch.linspace(0, 1, 4)


class Model(nn.Module):
    """Two layers, a buffer, and a forward that the test gives."""

    def __init__(self, function, **attributes):
        super().__init__()
        self.function = function
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("buffer", torch.zeros(4))
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, *args):
        return self.function(self, *args)


def held(value):
    """Every tensor that a model's modules hold in any attribute, one level of lists deep."""
    for module in value.modules():
        for attribute in vars(module).values():
            for item in attribute if isinstance(attribute, list) else [attribute]:
                if isinstance(item, torch.Tensor):
                    yield item
        yield from (*module._parameters.values(), *module._buffers.values())


def same_as_eager(model, *args, runs=2):
    other = copy.deepcopy(model)
    planned = ackpt.compile(other, *args, policy="full")
    for _ in range(runs):
        assert_equal(left_by(model, model, *args), left_by(other, planned, *args), "step")


@pytest.mark.parametrize(
    "function",
    [
        lambda self, x: self.first(x) * self.mask,
        lambda self, x: self.first(x) * GLOBAL,
        lambda self, x: torch.cat([self.first(x), self.masks[1].expand(3, 4)]),
        lambda self, x: self.first(x) @ self.weights[0],
    ],
    ids=["attribute", "global", "list", "list of the model's own parameters"],
)
def test_tensors_of_the_models_code_are_inputs(function):
    model = Model(function, mask=torch.rand(4), masks=[torch.rand(4), torch.rand(4)])
    model.weights = [model.second.weight]
    same_as_eager(model, torch.randn(3, 4))


def test_a_tensor_attribute_may_change_or_be_replaced():
    model = Model(lambda self, x: self.first(x) * self.count, count=torch.ones(4))
    planned = ackpt.compile(model, torch.ones(3, 4), policy="none")
    before = planned(torch.ones(3, 4))
    model.count.mul_(2)
    assert torch.equal(planned(torch.ones(3, 4)), before * 2)
    model.count = torch.zeros(4)  # another tensor in its place
    assert torch.equal(planned(torch.ones(3, 4)), torch.zeros(3, 4))


def counting(self, x):
    self.count += 1
    self.buffer += 1
    return self.first(x) * self.count * self.buffer


def test_changes_in_place_are_part_of_the_step():
    model = Model(counting, count=torch.ones(4))
    same_as_eager(model, torch.randn(3, 4))


def test_one_tensor_can_be_two_arguments():
    x = torch.randn(3, 4)
    model = Model(lambda self, x, y: self.first(x.mul_(2)) * self.second(y))
    other = copy.deepcopy(model)
    planned = ackpt.compile(other, x, x, policy="none")
    one, two = x.clone(), x.clone()
    assert torch.equal(model(one, one), planned(two, two)) and torch.equal(one, two)


def assigns(self, x):
    self.buffer = self.buffer + 1
    return self.first(x) * self.buffer


def keeps(self, x):
    self.kept = self.first(x)
    return self.kept.sum()


def counts(self, x):
    self.calls += 1
    return self.first(x).sum()


REFUSED = {
    "assigns a buffer": (assigns, "replaces buffer 'buffer' of the model.*self.buffer.copy_.*regions=True"),
    "keeps a tensor": (keeps, "stores a tensor in attribute 'kept' of the model"),
    "appends a tensor": (
        lambda self, x: self.list.append(self.first(x)) or self.list[-1].sum(),
        "stores a tensor in attribute 'list' of the model",
    ),
    "counts": (counts, "changes attribute 'calls' of the model from 0 to 1"),
    "random": (lambda self, x: self.first(x) * random.random(), "random numbers from Python's module random"),
    "numpy": (lambda self, x: self.first(x) * np.random.rand(), "random numbers from numpy.random"),  # noqa: NPY002
    "unregistered": (lambda self, x: self.first(x) @ self.list[0], r"shape \(4, 4\) that requires grad is used at .*"),
    "numpy array": (
        lambda self, x: self.first(x) * torch.from_numpy(np.ones(4)),
        "every forward creates a tensor at .*test_capture.py",
    ),
    "own checkpoint": (lambda self, x: ackpt.checkpoint(self.first, x), "remove_activation_checkpointing"),
    "fails": (lambda self, x: self.first(x) + 1 // 0, "division.* by zero"),
}


class Lazy(nn.Module):
    """Sets an attribute in every forward, to the same value at its end, or creates a buffer in the first one."""

    def __init__(self, creates):
        super().__init__()
        self.linear, self.stride, self.creates = nn.Linear(4, 4), None, creates
        self.register_buffer("bias", None)

    def forward(self, x):
        if not self.creates:
            self.stride = 1
            self.stride *= 2
        elif self.bias is None:
            self.register_buffer("bias", torch.arange(4.0))
        return self.linear(x).sum() * (self.stride or 1) + (0 if self.bias is None else self.bias.sum())


@pytest.mark.parametrize("creates", [False, True], ids=["attribute", "buffer"])
def test_an_attribute_or_buffer_that_is_set_once_is_as_after_the_first_call(creates):
    model, x = Lazy(creates), torch.randn(3, 4)
    step = ackpt.compile(model, torch.randn(3, 4), policy="none")
    if creates:
        assert type(model.bias) is torch.Tensor and torch.equal(model.bias, torch.arange(4.0))
    assert model.stride == (None if creates else 2)
    assert torch.equal(step(x), model(x)) and len(step.history) == 1


@pytest.mark.parametrize("case", REFUSED)
def test_a_refused_capture_leaves_the_model_unchanged(case):
    function, message = REFUSED[case]
    model = Model(function, calls=0, list=[])
    if case == "unregistered":
        model.list = [nn.Parameter(torch.randn(4, 4))]
    before = {name: id(value) for name, value in vars(model).items()}
    buffer, length = model.buffer, len(model.list)
    states = random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state()  # noqa: NPY002
    raises(ZeroDivisionError if case == "fails" else TraceError, message, lambda: trace(model, torch.randn(3, 4)))
    assert {name: id(value) for name, value in vars(model).items()} == before
    assert model.buffer is buffer and len(model.list) == length and model.calls == 0
    assert not any(isinstance(tensor, (FakeTensor, FunctionalTensor)) for tensor in held(model))
    assert random.getstate() == states[0] and np.random.get_state()[1].tobytes() == states[1]  # noqa: NPY002


def test_a_refusal_raises_without_a_warning(recwarn):
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)))
    ackpt.apply_activation_checkpointing(blocks)
    raises(TraceError, "remove_activation_checkpointing", lambda: trace(blocks, torch.randn(3, 4)))
    assert [str(warning.message) for warning in recwarn] == []


def test_an_error_of_the_model_during_capture_is_shown_once():
    def refuses(self, x):
        raise ValueError(f"no columns in a {type(self.first(x)).__name__}")

    with pytest.raises(TraceError, match=r"like this at [^ ]*test_capture.py:\d+: no columns in a FunctionalTensor$"):
        trace(Model(refuses), torch.randn(3, 4))


def test_sparse_gradients_are_refused():
    model = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 4))
    with pytest.raises(TraceError, match="sparse tensor, which cannot be planned.*sparse=False"):
        trace(model, torch.tensor([0, 1]))


@pytest.mark.filterwarnings("ignore:This step was captured and planned 4 times because argument 1 changed")
def test_numeric_arguments_are_part_of_the_capture():
    model = Model(lambda self, x, t: self.first(x) * t)
    planned = ackpt.compile(model, torch.ones(3, 4), 0.0, policy="none")
    for number in (0.0, -0.0, 1, 1.0, True):
        expected, found = model(torch.ones(3, 4), number), planned(torch.ones(3, 4), number)
        assert torch.equal(expected, found) and torch.equal(expected.signbit(), found.signbit())
    raises(TypeError, "an argument of type set cannot be compared", lambda: planned(torch.ones(3, 4), {1}))


def test_threads_may_capture_at_the_same_time():
    def work(rows):
        ackpt.compile(nn.Linear(4, 4), torch.ones(rows, 4), policy="none")(torch.ones(rows, 4)).sum().backward()

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        list(pool.map(work, (2, 3)))  # raises what a thread raises


def test_an_output_that_overlaps_itself_is_refused():
    model = Model(lambda self, x: self.first(x).unfold(-1, 2, 1))
    with pytest.raises(TraceError, match=r"output 0 .* strides .* overlaps itself .*Return output.clone\(\)"):
        trace(model, torch.ones(3, 4))


def returned_with_its_base(self, x):
    hidden = self.first(x).sum(0)
    return hidden.unfold(-1, 2, 1), hidden


@pytest.mark.parametrize(
    "function",
    [
        lambda self, x: (self.first(x).unfold(-1, 2, 1).clone(),),
        lambda self, x: (self.first(x).unfold(-1, 2, 2),),
        lambda self, x: (self.first(x).sum().expand(2, 3),),
        lambda self, x: (self.second.bias.unfold(-1, 2, 1), self.first(x)),
        lambda self, x: (self.first(x).unfold(-1, 2, 1), self.second(x).sum()),  # only the loss has a gradient
        returned_with_its_base,
    ],
    ids=["cloned", "side by side", "expanded", "of a parameter", "beside the loss", "with its base"],
)
def test_other_views_are_returned_with_their_gradients(function):
    def total(outputs):
        outputs = outputs if outputs[-1].dim() else outputs[-1:]
        return sum((output * torch.linspace(1, 2, output.numel()).view(output.shape)).sum() for output in outputs)

    model = Model(function)
    step = ackpt.compile(model, torch.ones(3, 4), policy="full")
    assert_as_eager(model, step, torch.linspace(0, 1, 12).view(3, 4), loss=total)


@pytest.mark.filterwarnings("ignore:.*has a hook")
@pytest.mark.parametrize("remembers", [True, False])
def test_hooks_that_the_forward_adds_are_as_after_its_first_call_or_refused(remembers):
    def forward(self, x):
        if not self.is_ready:
            self.layer.register_forward_hook(lambda module, args, output: 2 * output)
            self.is_ready = self.remembers
        return self.layer(x).sum()

    model, x = model_of(forward, layer=nn.Linear(4, 4), remembers=remembers, is_ready=False), torch.ones(2, 4)
    if remembers:
        step = ackpt.compile(model, x, policy="none")
        assert len(model.layer._forward_hooks) == 1 and torch.equal(step(x), model(x))
        return
    raises(ackpt.TraceError, "adds or removes a hook of module 'layer'", lambda: ackpt.trace(model, x))
    assert not model.layer._forward_hooks and not model.is_ready


@pytest.mark.parametrize("make", [list, dict], ids=["list", "dict"])
def test_an_argument_that_the_forward_fills_is_refused(make):
    def collects(self, x, found):
        found.append(x.mean()) if isinstance(found, list) else found.update(loss=x.mean())
        return self.first(x)

    found = make()
    with pytest.raises(TraceError, match=f"changes a {make.__name__} that it received as an argument.*Return the"):
        trace(Model(collects), torch.randn(3, 4), found)
    assert not found


def test_an_argument_that_the_forward_reads_is_allowed():
    graph = trace(Model(lambda self, x, more: self.first(x) + more["list"][0]), torch.randn(3, 4), {"list": [1.0, [2]]})
    assert len(graph.nodes)


def test_a_tensor_kept_by_a_hook_is_refused_until_the_hook_is_removed():
    model, x, found = Model(lambda self, x: self.first(x).relu()), torch.randn(3, 4), []
    remove = model.first.register_forward_hook(lambda module, args, output: found.append(output)).remove
    with pytest.raises(TraceError, match="stores a tensor that it computes at .*capture.py:.*: in a hook.*remove"):
        trace(model, x)
    remove()
    assert trace(model, x).nodes


def test_hooks_that_keep_nothing_and_reference_cycles_are_allowed():
    def cyclic(self, x):
        found = {"x": self.first(x)}
        found["self"] = found
        return found["x"].relu()

    sizes = []
    model = Model(cyclic)
    model.first.register_forward_hook(lambda module, args, output: sizes.append(output.numel()))
    assert trace(model, torch.randn(3, 4)).nodes and sizes


HIDDEN = {
    "list": lambda module: [module],
    "dict": lambda module: {"counter": module},
    "tuple": lambda module: (module,),
}


@pytest.mark.parametrize("hide", HIDDEN.values(), ids=HIDDEN)
def test_a_change_in_a_module_that_is_not_registered_is_refused(hide):
    def forward(self, x):
        self.calls[0] += 1
        return x * self.calls[0]

    def hides(self, x):
        for module in self.hidden.values() if isinstance(self.hidden, dict) else self.hidden:
            x = module(x)
        return self.first(x).sum()

    model = model_of(hides, first=nn.Linear(4, 4), hidden=hide(model_of(forward, calls=[0])))
    with pytest.raises(ackpt.TraceError, match=r"changes attribute 'calls' of module .hidden\["):
        ackpt.compile(model, torch.randn(3, 4))
    (counter,) = model.hidden.values() if isinstance(model.hidden, dict) else model.hidden
    assert counter.calls == [0]


# A captured step takes the ways that the plain model takes, also where a model asks whether it is compiled.


class Looks(nn.Linear):
    def forward(self, x):
        if not torch.compiler.is_compiling() and not bool((x == x).all()):
            raise ValueError("not a number")
        return super().forward(x).square().sum()


def test_a_model_that_asks_is_compiling_is_captured_as_in_eager():
    model, x = Model(lambda self, x: self.first(x) * (3 if torch.compiler.is_compiling() else 2)), torch.randn(3, 4)
    assert_as_eager(model, ackpt.compile(model, x, policy="full"), x)
    assert not torch.compiler.is_compiling()


LOOKS = "looks at the values of a tensor at .*test_capture.py"


@pytest.mark.parametrize(
    "how", [{"policy": "full"}, {"budget": "1MiB", "regions": False}, {"budget": 1.0, "regions": False}]
)
def test_with_data_a_model_that_reads_values_in_eager_is_refused(how):
    raises(ackpt.TraceError, LOOKS, lambda: ackpt.compile(Looks(4, 4), torch.randn(3, 4), **how))
    raises(ackpt.TraceError, LOOKS, lambda: ackpt.trace(Looks(4, 4), torch.randn(3, 4)))
    assert not torch.compiler.is_compiling()


def test_without_data_it_is_captured_as_compiled_with_one_note(tmp_path):
    model, x = Looks(4, 4).to("meta"), torch.empty(3, 4, device="meta")
    said = "captured as torch.compile runs it, because the model itself looks at .*own step may differ"
    with pytest.warns(UserWarning, match=said) as warned:
        plan = ackpt.plan(ackpt.trace(model, x))
        ackpt.trace(model, x)
    assert len(warned) == 1
    assert re.search(said, plan.note) and plan.note in plan.table()
    plan.save(tmp_path / "plan.json")
    assert ackpt.Plan.load(tmp_path / "plan.json").note == plan.note
    for make in (lambda: ackpt.compile(model, x, budget=0.5), lambda: ackpt.plan(ackpt.trace(model, x), "50%")):
        with pytest.raises(ackpt.BudgetError, match="torch.compile runs it.*Give bytes"):
            make()
    assert ackpt.compile(model, x, budget="1GiB").plan.peak_bytes <= 2**30


class Fails(nn.Linear):
    def forward(self, x):
        if torch.compiler.is_compiling():
            raise NotImplementedError("no compiled variant")
        return super().forward(x).sum() if x.sum() > 0 else super().forward(x).mean()


def test_a_model_refused_in_both_ways_names_both_reasons():
    model, x = Fails(4, 4), torch.ones(3, 4)
    error = raises(ackpt.TraceError, LOOKS, lambda: ackpt.trace(model, x))
    assert "no compiled variant" not in str(error.value)
    with pytest.raises(ackpt.TraceError, match="values of a tensor .*is_compiling.*no compiled variant"):
        ackpt.trace(model.to("meta"), x.to("meta"))
