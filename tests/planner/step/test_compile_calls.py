"""Calls of planned steps: arguments, outputs, repeated and interleaved calls, new shapes and modes."""

import concurrent.futures
import contextlib
import copy
import threading

import pytest
import torch
from call_cases import CASES, Two, chain
from conftest import assert_as_eager, assert_equal, assert_same_step, model_of, raises, threads
from random_fates import planned
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import ackpt

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("policy", ["none", "full", "manual 2"])
@pytest.mark.parametrize("name", CASES)
def test_a_step_is_the_model_bit_for_bit(name, policy):
    def call(model, *args, **kwargs):
        return planned(model, policy, *args, differentiate="all", **kwargs)(*args, **kwargs)

    assert_same_step(CASES[name], call=call)


def x(seed=0, rows=3):
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(seed))


def no_grad(call, model):
    with torch.no_grad():
        return [call(x())]


def inference_mode(call, model):
    with torch.inference_mode():
        return [call(x())]


def after_inference(call, model):
    inference_mode(call, model)
    call(x()).sum().backward()


def retained(call, model):
    loss = call(x()).sin().sum()
    loss.backward(retain_graph=True)
    loss.backward()


def two_live_reversed(call, model):
    first, second = call(x(1)).sin().sum(), call(x(2)).sin().sum()
    second.backward()
    first.backward()


def two_in_one_backward(call, model):
    (call(x(1)).sum() * call(x(2)).sin().sum()).backward()


def gradients_zeroed(call, model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for seed in range(3):
        optimizer.zero_grad(set_to_none=False)
        call(x(seed)).sin().sum().backward()
        optimizer.step()


def optimizer_in_backward(call, model):
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()}

    def update(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    handles = [parameter.register_post_accumulate_grad_hook(update) for parameter in model.parameters()]
    for seed in range(2):
        call(x(seed)).sin().sum().backward()
    for handle in handles:
        handle.remove()


def gradients_asked_for(call, model):
    return torch.autograd.grad(call(x()).sin().sum(), [model.a.weight, model.b.bias])


def new_shapes(call, model):
    outputs = [call(x(rows=rows)) for rows in (3, 5, 2, 3)]
    sum(output.sin().sum() for output in outputs).backward()
    return outputs


def new_dtype(call, model):
    call(x()).sum().backward()
    model.zero_grad()
    model.double()
    output = call(x().double())
    output.sum().backward()
    return [output]


def new_modes(call, model):
    outputs = []
    for mode in (True, False, True):
        model.train(mode)
        outputs.append(call(x()))
        outputs[-1].sin().sum().backward()
    return outputs


def autocast(call, model):
    with torch.autocast("cpu", torch.bfloat16):
        low = call(x())
    full = call(x())
    (low.float() * full).sum().backward()
    return [low, full]


def frozen_later(call, model):
    call(x()).sum().backward()
    model.zero_grad()
    model.a.requires_grad_(False)
    call(x()).sin().sum().backward()


def module_replaced(call, model):
    call(x()).sum().backward()
    model.b = nn.Linear(4, 2)
    call(x()).sin().sum().backward()


def attribute_changed(call, model):
    first = call(x())
    model.dropout.p = 0.9
    return [first, call(x())]


def state_loaded(call, model):
    call(x()).sum().backward()
    model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})
    output = call(x())
    output.sin().sum().backward()
    return [output]


LIVES = [no_grad, inference_mode, after_inference, retained, two_live_reversed, two_in_one_backward]
LIVES += [gradients_zeroed, optimizer_in_backward, gradients_asked_for, new_shapes, new_dtype, new_modes]
LIVES += [autocast, frozen_later, module_replaced, attribute_changed, state_loaded]


@pytest.mark.parametrize("life", LIVES)
def test_a_step_follows_changes_of_its_model_over_many_calls(life):
    torch.manual_seed(0)
    eager, found = Two(chain), []
    model = copy.deepcopy(eager)
    step = ackpt.compile(model, x(), policy="full")
    for own, call in ((eager, eager), (model, step)):
        torch.manual_seed(1)
        outputs = life(call, own) or []
        gradients = [parameter.grad for parameter in own.parameters()]
        found.append([*outputs, *gradients, *own.state_dict().values(), torch.get_rng_state()])
    assert_equal(*found, life.__name__)


class Residual(nn.Linear):
    def forward(self, x):
        return x + super().forward(x).tanh().sin()


def layers():
    torch.manual_seed(0)
    return nn.Sequential(*(Residual(4, 4) for _ in range(6)))


def test_a_budget_that_a_new_shape_cannot_keep_is_refused_at_the_call():
    model = layers()
    step = ackpt.compile(model, x(rows=4), budget="16KiB", policy="full")
    raises(ackpt.BudgetError, "cannot keep the budget '16KiB'", lambda: step(x(rows=4000)))
    step(x(rows=4)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_recomputation_whose_argument_has_changed_is_refused():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Tanh(), nn.Linear(4, 1))
    graph = ackpt.trace(model, x())
    fates = dict.fromkeys(("addmm", "tanh", "tanh_1"), "recomputed")
    step = ackpt.compile(model, x(), plan=ackpt.plan(graph, policy="manual", fates=fates))
    loss = step(x()).sum()
    with torch.no_grad():
        model[0].bias.add_(1)  # eager's backward does not need it, the recomputation does
    raises(RuntimeError, "parameter '0.bias' of shape .* was changed between", loss.backward)


@pytest.mark.filterwarnings("ignore:.*has a hook")
@pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook"])
def test_hooks_that_come_and_go_are_followed(kind):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    step = ackpt.compile(model, x(), policy="full")
    plain = step(x())

    def hook(module, *values):
        return values[-1] * 2 if kind == "register_forward_hook" else (values[0][0] * 2,)

    for module in (model[1], model):
        handle = getattr(module, kind)(hook)
        assert torch.equal(step(x()), model(x())) and not torch.equal(step(x()), plain)
        handle.remove()
        assert torch.equal(step(x()), plain)


@pytest.mark.filterwarnings("ignore:.*has a hook")
def test_backward_hooks_that_come_later_are_followed():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    step = ackpt.compile(model, x(), policy="full")
    step(x()).sum().backward()
    model[1].register_full_backward_hook(lambda module, inside, out: (inside[0] * 2,))
    assert_as_eager(model, step, x())


@pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"])
def test_a_hook_that_comes_later_is_warned_of(kind):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    step = ackpt.compile(model, x(), policy="full")
    getattr(model[1], kind)(lambda *_: None)
    with pytest.warns(UserWarning, match="module '1' has a hook, <lambda>.. at .*test_compile_calls.py:") as warned:
        step(x())
    assert len(warned) == 1
    step(x())  # and not again


def doubled(module, inputs, output):
    return output * 2 if isinstance(module, nn.Tanh) else None


@contextlib.contextmanager
def hook_of_all_modules():
    handle = torch.nn.modules.module.register_module_forward_hook(doubled)
    yield
    handle.remove()


SETTINGS = {
    "torch.backends.cuda.flash_sdp_enabled() changed": lambda: sdpa_kernel(SDPBackend.MATH),
    "a hook of all modules changed": hook_of_all_modules,
    "torch.get_num_threads() changed": lambda: threads(torch.get_num_threads() + 1),
}


@pytest.mark.parametrize("cause", SETTINGS)
def test_settings_of_torch_belong_to_a_capture(cause):
    def forward(self, x):
        query, key, value = self.act(self.project(x)).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return nn.functional.scaled_dot_product_attention(query, key, value)

    model, inputs = model_of(forward, project=nn.Linear(8, 24), act=nn.Tanh()), torch.randn(2, 16, 8)
    step = ackpt.compile(model, inputs, policy="full")
    for setting in (contextlib.nullcontext, SETTINGS[cause], contextlib.nullcontext):
        with setting():
            assert_as_eager(model, step, inputs, loss=lambda outputs: outputs.sin().sum())
    assert [event.cause for event in step.history] == ["first call", cause]


def test_counting_flops_causes_no_capture():
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    step = ackpt.compile(model, x)
    with FlopCounterMode(display=False):
        step(x)
    assert len(step.history) == 1


def scaled():
    return model_of(lambda self, x: self.layer(x) * self.scale, layer=nn.Linear(4, 4), scale=torch.full((4,), 2.0))


@pytest.mark.parametrize("data", [torch.full((1,), 3.0), torch.full((4,), 3.0, dtype=torch.float64)])
@pytest.mark.parametrize("rows", [(3,), (3, 5, 6)])
def test_a_held_tensor_of_another_shape_or_dtype_is_followed(data, rows):
    model = scaled()
    step = ackpt.compile(model, x(), policy="full")
    for each in rows:
        step(x(rows=each))
    model.scale.data = data
    assert_equal([model(x())], [step(x())], "outputs")
    assert step.history[-1].cause.startswith("a tensor that is neither a parameter nor a buffer changed")


def test_a_held_tensor_that_requires_grad_later_is_refused():
    model = scaled()
    step = ackpt.compile(model, x(), policy="full")
    model.scale.requires_grad_()
    raises(ackpt.TraceError, "that requires grad is used .* but is not a parameter", lambda: step(x()))
    model.scale.requires_grad_(False)
    assert_equal([model(x())], [step(x())], "outputs")


@pytest.mark.parametrize("view", [torch.conj, torch._neg_view])
def test_lazy_conjugates_and_negatives_are_captured_for_themselves(view):
    model = model_of(
        lambda self, x: (x @ self.weight).abs() + x.abs(), weight=nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))
    )
    inputs = torch.randn(3, 4, dtype=torch.complex64)
    step = ackpt.compile(model, inputs, policy="full")
    for each in (inputs, view(inputs), inputs):
        assert_equal([model(each)], [step(each)], "outputs")


class Methods(nn.Sequential):
    """Its methods return what they call the model for in all ways that Python has."""

    def generator(self, batches):
        for batch in batches:
            yield self(batch)

    def generator_in(self, batches):
        return (self(batch) for batch in batches)

    async def coroutine(self, batch):
        return self(batch)

    async def asynchronous_generator(self, batches):
        for batch in batches:
            yield self(batch)

    def stored(self):
        return self.numbers

    def waiting(self, batch, ready, go):
        ready.set()
        assert go.wait(60)
        return self(batch)


@pytest.mark.parametrize("name", ["generator", "generator_in", "coroutine", "asynchronous_generator"])
def test_a_method_that_runs_on_after_its_call_is_refused(name):
    step = ackpt.compile(Methods(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)), x(), policy="full")
    with pytest.raises(TypeError, match=f"{name} is a generator or a coroutine, which would call the model"):
        getattr(step, name)([x()])


def test_a_generator_that_a_method_returns_is_left_as_it_is():
    model = Methods(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    model.numbers = (number for number in range(3))
    raises(TypeError, "stored is a generator", lambda: ackpt.compile(model, x(), policy="full").stored())
    assert [*model.numbers] == [0, 1, 2]


def test_methods_in_two_threads_both_run_as_planned():
    model = Methods(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    step = ackpt.compile(model, x(), policy="full")
    planned_one = type(step(x()).grad_fn)
    ready, go = [threading.Event(), threading.Event()], [threading.Event(), threading.Event()]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        losses = [pool.submit(step.waiting, x(), *events) for events in zip(ready, go)]
        for event in ready:
            assert event.wait(60)
        for event, loss in zip(go, losses):
            event.set()
            assert type(loss.result().grad_fn) is planned_one
    assert type(model(x()).grad_fn) is not planned_one


def test_backward_inside_autocast_is_refused():
    """Eager mode casts the operations of a backward that runs in autocast; a planned step does not."""
    step = ackpt.compile(layers(), x(), policy="full")
    with torch.autocast("cpu", torch.bfloat16):
        loss = step(x()).float().sum()
        raises(ackpt.CheckpointError, "backward runs inside torch.autocast", lambda: loss.backward(retain_graph=True))
    loss.backward()


def test_new_sizes_in_several_threads_at_once():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    step = ackpt.compile(model, torch.randn(12, 4), policy="full")
    with concurrent.futures.ThreadPoolExecutor(3) as threads:
        for size in (5, 8, 9, 21):
            x = torch.randn(size, 4)
            assert all(torch.equal(found, model(x)) for found in threads.map(step, [x, x, x]))


class NotesLength(nn.Module):
    """Sets an attribute and a global to the length of long batches; short ones are scaled by the attribute."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.length = nn.Linear(4, 4), 1

    def forward(self, x):
        global LENGTH
        y = self.linear(x)
        if len(x) < 5:
            return (y * self.length).sum()
        self.length = LENGTH = len(x)
        return y.sum()


@pytest.mark.filterwarnings("ignore:This step was captured")
@pytest.mark.parametrize("dynamic", [None, False])
def test_a_value_that_a_forward_sets_at_some_sizes_only_is_as_in_the_model_at_all_others(dynamic):
    global LENGTH
    model, eager = NotesLength(), NotesLength()
    step = ackpt.compile(model, torch.ones(4, 4), policy="full", dynamic=dynamic)
    for length in [4, 6, 4, 7, 4, 6, 4]:
        LENGTH = 0
        output = step(torch.ones(length, 4))
        assert LENGTH == (length if length > 4 else 0)
        assert torch.equal(output, eager(torch.ones(length, 4)))
        assert model.length == eager.length
