"""What planned steps refuse, that they are modules like the model, and that an interrupt leaves the model as it was."""

import copy
import gc
import pickle
import random
import sys

import pytest
import torch
from conftest import function_of, raises, raises_cleanly
from dynamic_steps import Words, check, ids
from torch import nn
from torch._functorch import config as functorch_config
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import ackpt
from ackpt.graph import TraceError


class Net(nn.Module):
    def __init__(self, after=None):
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.after = after
        self.register_buffer("table", torch.ones(4), persistent=False)

    def forward(self, x):
        y = self.b(self.norm(self.a(x)).tanh()) * self.table
        return y if self.after is None else self.after(y)


class Opaque:
    def __init__(self, value):
        self.value = value


def branch(y):
    return y * 2 if y.sum() > 0 else y


X = torch.linspace(-1, 1, 12).reshape(3, 4)
HERE = r"at .*test_compile_errors.py:\d+ "


def backward_within(y):
    loss = y.sum()
    loss.backward()
    return loss


REFUSED = {
    "branch": (branch, HERE + r"\(return y \* 2"),
    "item": (lambda y: y * y.sum().item(), HERE),
    "nonzero": (lambda y: y[y > 0], HERE),
    "numpy": (lambda y: y.detach().numpy(), HERE),
    "backward": (backward_within, rf"calls backward\(\) in its forward {HERE}.*: return the loss"),
    "unregistered object": (Opaque, "returns a Opaque, which a captured step cannot rebuild"),
    "no gradient": (torch.Tensor.detach, "no output of the model that requires grad"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_cannot_be_captured_is_refused(name):
    after, message = REFUSED[name]
    with raises_cleanly(TraceError, message):
        ackpt.compile(Net(after), X)


def test_a_model_without_trainable_parameters_is_refused():
    with raises_cleanly(TraceError, "no parameter of the model requires grad"):
        ackpt.compile(nn.ReLU(), X)


@pytest.mark.parametrize("model", [torch.sin, None, Net], ids=["function", "None", "class"])
def test_functions_and_other_objects_are_refused(model):
    raises(TypeError, "model must be a torch.nn.Module", lambda: ackpt.compile(model, X))


def in_place(model):
    model.compile()
    return model


def distributed(model):
    """What needs no process group: the refusal comes before anything runs."""
    wrapper = nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)
    nn.Module.__init__(wrapper)
    wrapper.module = model
    return wrapper


WRAPPERS = {
    "compiled": (torch.compile, "torch.compile has compiled it.*_orig_mod.*'compiler': 'inductor'"),
    "compiled in place": (in_place, r"its compile\(\) was called. Do not call it.*'compiler': 'inductor'"),
    "scripted": (torch.jit.script, "TorchScript cannot be captured"),
    "parallel": (nn.DataParallel, "it runs copies of a module. .*DistributedDataParallel"),
    "distributed": (distributed, "a planned step cannot contain it.*DistributedDataParallel"),
    "lazy": (lambda model: nn.LazyLinear(4), "its parameters have no shape yet. Call the model once"),
    "planned": (lambda model: ackpt.compile(model, X), "it is already planned"),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_module_with_its_own_call_is_refused_with_the_fix(name):
    wrap, message = WRAPPERS[name]
    model = wrap(nn.Linear(4, 4))
    for call in (ackpt.trace, ackpt.compile):
        with raises_cleanly(TypeError, rf"the model \(\w+\) cannot be planned: {message}"):
            call(model, X)
        options = {"regions": False} if call is ackpt.compile else {}  # otherwise it may stay outside the plan
        with raises_cleanly(TypeError, rf"module '1' \(\w+\) cannot be planned: {message}"):
            call(nn.Sequential(nn.Linear(4, 4), model), X, **options)


def test_arguments_that_do_not_fit_are_refused_at_the_call():
    step = ackpt.compile(Net(), X)
    for args, kwargs, error, message in [
        ((torch.ones(3, 5),), {}, RuntimeError, "same reduction dim"),
        ((), {}, TypeError, r"Net.forward\(\) missing a required argument: 'x'; its parameters are x"),
        ((X, X), {}, TypeError, "too many positional arguments"),
        ((), {"xs": X}, TypeError, r"unexpected keyword argument 'xs' \(did you mean 'x'\?\)"),
    ]:
        with raises_cleanly(error, message):
            step(*args, **kwargs)
        if error is TypeError:
            with raises_cleanly(error, message):
                ackpt.apply_budget(Net(), kwargs or args, budget="1MiB", regions=True)
    step(X).sum().backward()


def test_a_batch_as_one_argument_is_named():
    for call in (ackpt.trace, ackpt.compile):
        with raises_cleanly(TypeError, r"Net got its arguments as one dict, and .*ackpt.compile\(model, \*\*batch"):
            call(Net(), {"x": X})


def test_a_model_without_data_is_planned_and_runs_when_it_has_some():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    step = ackpt.compile(model, X)
    with raises_cleanly(TraceError, "on the meta device.*to_empty.*load its state"):
        step(X)
    step.to_empty(device="cpu")
    step.load_state_dict({name: torch.ones_like(value) for name, value in step.state_dict().items()})
    step(X).sum().backward()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_a_nested_tensor_is_refused():
    nested = torch.nested.nested_tensor([X, X[:1]], layout=torch.jagged)
    for call in (ackpt.trace, ackpt.compile):
        with raises_cleanly(TraceError, "a nested tensor cannot be planned: give a padded one"):
            call(nn.Linear(4, 4), nested)


def test_function_transforms_are_refused():
    step = ackpt.compile(Net(), X)
    for call in (torch.vmap(step, randomness="same"), lambda x: torch.func.vjp(step, x)):
        with raises_cleanly(RuntimeError, "a planned step takes plain tensors; in torch.func and torch.vmap"):
            call(X.expand(2, 3, 4))


def test_an_attribute_of_the_model_is_set_on_the_model():
    model = Net()
    step = ackpt.compile(model, X)
    with pytest.raises(AttributeError, match="'after' is an attribute of the model: set it there"):
        step.after = torch.sin
    step.note = "of the step"
    step.a = nn.Linear(4, 4, bias=False)
    assert model.a is step.a and step.note == "of the step" and not hasattr(model, "note")
    model.after = torch.sin
    assert torch.equal(step(X), model(X))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo looks at it
def test_a_planned_step_of_a_model_that_was_compiled_elsewhere_can_be_compiled():
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.ones(2, 4)
    torch.compile(model)
    planned = ackpt.compile(model, x, policy="full")
    assert torch.equal(torch.compile(planned, backend="eager")(x), model(x))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda model, x: model.b.weight.mul_(2), r"parameter 'b.weight' of shape \[4, 4\] was changed between"),
        (lambda model, x: model.table.mul_(2), "buffer 'table' of shape"),
        (lambda model, x: x.mul_(2), r"an argument of shape \[3, 4\] was changed"),
    ],
)
def test_values_read_by_backward_must_not_change(change, said):
    model, x = Net(), X.clone()
    planned = ackpt.compile(model, x)
    loss = planned(x).sum()
    with torch.no_grad():
        change(model, x)
    raises(ackpt.CheckpointError, f"{said}.*Run backward before the change", loss.backward)
    assert all(parameter.grad is None for parameter in model.parameters())
    planned(x).sum().backward()  # the next step is as ever


def _fused_step(model):
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    optimizer.step()
    optimizer.zero_grad()


def _from_vector(model):
    vector = nn.utils.parameters_to_vector(model.parameters()).detach()
    nn.utils.vector_to_parameters(vector * 0.9, model.parameters())


WITHOUT_VERSIONS = {
    "fused optimizer": _fused_step,
    "vector to parameters": _from_vector,
    "half and back": lambda model: model.half().float(),
    "data": lambda model: setattr(model.b.weight, "data", torch.zeros(4, 4)),
}


@pytest.mark.parametrize("change", WITHOUT_VERSIONS.values(), ids=WITHOUT_VERSIONS)
def test_changes_without_a_version_counter_are_refused(change):
    model = Net()
    loss = ackpt.compile(model, X)(X).sum()
    change(model)
    with pytest.raises(ackpt.CheckpointError, match="of shape .* was changed between the forward of this planned step"):
        loss.backward()


def test_optimizer_steps_of_other_parameters_are_allowed():
    model, other = Net(), nn.Parameter(torch.ones(4))
    other.grad = torch.ones(4)
    loss = ackpt.compile(model, X)(X).sum()
    torch.optim.AdamW([other, *model.parameters()], lr=0.1, fused=True).step()  # the model's have no gradients
    loss.backward()
    assert model.b.weight.grad is not None


@pytest.mark.parametrize("held", [False, True])
def test_the_tensors_of_a_planned_model_can_be_swapped_after_a_step(held):
    model = Net()
    loss = ackpt.compile(model, X)(X).sum()
    loss.backward()
    if not held:
        del loss
    torch.utils.swap_tensors(model.b.weight, nn.Parameter(torch.zeros(4, 4)))
    assert not model.b.weight.any()


def test_values_not_read_by_backward_may_change():
    model = Net()
    loss = ackpt.compile(model, X)(X).sum()
    with torch.no_grad():
        model.b.bias.mul_(2)
    loss.backward()
    assert model.b.weight.grad is not None


def test_two_backwards_without_retain_graph_are_refused():
    loss = ackpt.compile(Net(), X)(X).sum()
    loss.backward()
    with raises_cleanly(RuntimeError, "backward through the graph a second time"):
        loss.backward()


def test_a_step_has_the_state_of_its_model():
    model = Net()
    step = ackpt.compile(model, X)
    assert list(step.state_dict()) == list(model.state_dict()) and "table" not in step.state_dict()
    assert [name for name, _ in step.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert all(one is other for one, other in zip(step.parameters(), model.parameters()))
    step.load_state_dict({name: value * 0 for name, value in model.state_dict().items()})
    assert not model.a.weight.any()
    assert step.eval() is step and not model.training and not model.norm.training
    model.train()
    assert step.training
    assert step.double() is step and model.a.weight.dtype == torch.float64
    assert step(X.double()).dtype == torch.float64


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda step: pickle.loads(pickle.dumps(step))])
def test_a_copy_is_planned_again_and_shares_nothing(copied):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    step = ackpt.compile(model, X, policy="full")
    other = copied(step)
    assert not {id(p) for p in other.parameters()} & {id(p) for p in step.parameters()}
    other(X).sum().backward()
    assert model[0].weight.grad is None and other.plan.policy == "full"
    step(X).sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(step.parameters(), other.parameters()))


class Fails(nn.Linear):
    def __init__(self, fail):
        super().__init__(4, 4)
        self.embedding, self.fail = nn.Embedding(5, 4), fail

    def forward(self, x):
        return self.fail(self, super().forward(x)).sum()


def _raise(error):
    raise error


RAISES = function_of(lambda ctx, x: x * 2, lambda ctx, gradient: _raise(LookupError("mine")))
OWN_ERRORS = {
    "raises": (lambda model, h: _raise(KeyError("mine")), KeyError, "mine"),
    "asserts": (lambda model, h: _raise(AssertionError("meta data of the storage")), AssertionError, "meta data"),
    "backward": (lambda model, h: RAISES.apply(h), LookupError, "mine"),
    "attribute": (lambda model, h: h * None.scale, AttributeError, "'NoneType' object has no attribute 'scale'"),
    "float ids": (lambda model, h: model.embedding(h), RuntimeError, "Long, Int; but got"),
    "loss": (lambda model, h: F.cross_entropy(h, torch.ones(9).long()), ValueError, "to match target batch_size"),
}


@pytest.mark.parametrize("options", [{"policy": "full"}, {"budget": "1MiB"}])
@pytest.mark.parametrize("name", OWN_ERRORS)
def test_an_error_of_the_model_is_raised_unchanged(name, options):
    fail, error, message = OWN_ERRORS[name]
    model = Fails(fail)
    with raises_cleanly(error, message):
        ackpt.apply_budget(model, X, **options)
    raises(ValueError, "has no budget", lambda: ackpt.remove_budget(model))


LIMITATIONS = {
    "numpy": (lambda model, h: h * torch.from_numpy(h.detach().numpy()), "not supported for tensor subclasses"),
    "pointer": (lambda model, h: h * (h.data_ptr() > 0), "data pointer"),
    "values": (lambda model, h: h if h.sum() > 0 else -h, "looks at the values"),
    "class": (lambda model, h: h if type(h) is torch.Tensor else _raise(TypeError(str(type(h)))), "FunctionalTensor"),
    "caught": (lambda model, h: _caught(h), "looks at the values"),
}


def _caught(h):
    try:
        return h * h.sum().item()
    except Exception as error:
        raise RuntimeError("mine") from error


@pytest.mark.parametrize("name", LIMITATIONS)
def test_a_limitation_of_the_capture_is_a_trace_error_and_planned_in_parts(name):
    fail, message = LIMITATIONS[name]
    model = Fails(fail)
    with raises_cleanly(TraceError, message):
        ackpt.apply_budget(model, X, policy="full")
    ackpt.apply_budget(model, X, budget="1MiB")
    model(X).backward()
    assert model.weight.grad is not None


# (file, function) that a KeyboardInterrupt interrupts when it is called
POINTS = [
    ("planner/capture/aot.py", "_exported"),
    ("planner/capture/tracing.py", "prepared"),
    ("planner/capture/tracing.py", "described_graph"),
    ("planner/schedule/simulator.py", "peak_of"),
    ("planner/policies/chains/block_options.py", "options_of_blocks"),
    ("planner/policies/search/refinement.py", "with_fewer_runs"),
]


class Interrupt:
    """Raises a KeyboardInterrupt when a function of this thread is called for the `number`-th time."""

    def __init__(self, file: str, function: str, number: int = 1):
        self.file, self.function, self.left = file, function, number

    def __call__(self, frame, event, argument):
        code = frame.f_code
        if event == "call" and code.co_name == self.function and code.co_filename.endswith(self.file):
            self.left -= 1
            if self.left == 0:
                sys.setprofile(None)
                raise KeyboardInterrupt

    def __enter__(self):
        sys.setprofile(self)

    def __exit__(self, *_):
        sys.setprofile(None)


def state(model):
    tensors = [*model.parameters(), *model.buffers()]
    return [
        [(id(tensor), tensor._version, tensor.grad, tensor.detach().clone().numpy().tobytes()) for tensor in tensors],
        [(name, module.training, sorted(vars(module))) for name, module in model.named_modules()],
        [torch.get_rng_state().numpy().tobytes(), random.getstate()],
        [gc.isenabled(), torch.is_grad_enabled(), torch.compiler.is_compiling(), torch.is_inference_mode_enabled()],
        [_get_current_dispatch_mode_stack(), _get_current_function_mode_stack()],
        [functorch_config.backward_pass_autocast, functorch_config.donated_buffer],
        [torch.nn.functional.dropout, torch.nn.Module.__call__, torch.nn.Module.__setattr__, torch.Tensor.detach],
        [torch.ops.aten.native_dropout.default, FakeTensor.__torch_dispatch__, torch.utils._pytree.tree_flatten],
        sys.stderr,
    ]


@pytest.fixture(scope="module")
def plan():
    plan = ackpt.compile(Words(2), ids(4, 12), budget=0.7).plan
    assert plan.cost > 0
    return plan


@pytest.mark.parametrize(("file", "function"), POINTS)
def test_an_interrupted_first_call_leaves_the_model_unchanged(tmp_path, plan, file, function):
    model = Words(2)
    before = state(model)
    with pytest.raises(KeyboardInterrupt), Interrupt(file, function):
        ackpt.compile(model, ids(4, 12), budget=0.7, cache=tmp_path)
    assert state(model) == before
    step = ackpt.compile(model, ids(4, 12), budget=0.7, cache=tmp_path)
    assert step.plan == plan
    check(step, model, ids(4, 12))


@pytest.mark.parametrize(("make", "holds"), [(nn.ModuleList, "model.0"), (nn.ParameterList, "")])
def test_a_module_without_forward_is_refused_with_the_name_of_what_it_holds(make, holds):
    module = make([nn.Linear(4, 4)] if holds else [nn.Parameter(torch.ones(4))])
    said = f"has no forward of its own to plan. Give the module .*{holds}"
    raises(TypeError, said, lambda: ackpt.compile(module, torch.ones(2, 4)))
