"""Helpers of the tests: one training step, plain and checkpointed, compared to the last bit."""

import contextlib
import copy
import dataclasses
import functools
import gc
import inspect
import os
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import ackpt
import experiments  # noqa: F401  its models are among those that the planner knows by name
from ackpt.metering.meter import Measurement
from ackpt.planner.capture.joint_graph import JointGraph
from ackpt.planner.capture.patches import kernels
from ackpt.planner.schedule.listing import boxed
from ackpt.planner.workloads import planned_shapes

# The committed rates of a CPU, for subprocesses too: plans do not depend on the machine that runs the tests.
os.environ["ACKPT_CALIBRATION"] = str(Path(__file__).parents[1] / "results" / "cpu_calibration.json")

# The same examples in every run: a commit fails for what it changes. `--hypothesis-profile=default` draws others.
settings.register_profile("fixed", derandomize=True)
settings.load_profile("fixed")

# Between tests, everything is collected: the many collections on the way, of objects that live, would take a twentieth
# of the time.
gc.set_threshold(100_000, 50, 50)


@dataclasses.dataclass
class Case:
    """What a region is called with; made afresh for each run, so that two runs share nothing.

    `also`: modules, tensors or containers of them whose gradients and values count besides those of the arguments.
    """

    function: Callable
    args: tuple = ()
    kwargs: dict = dataclasses.field(default_factory=dict)
    also: object = ()


def tensors_in(obj, tensors=None, seen=None) -> list[torch.Tensor]:
    """Tensors in nested containers, dataclasses, modules (parameters and buffers) and plain objects."""
    tensors, seen = ([] if tensors is None else tensors), (set() if seen is None else seen)
    if id(obj) in seen:
        return tensors
    seen.add(id(obj))
    if isinstance(obj, torch.Tensor):
        tensors.append(obj)
    elif isinstance(obj, nn.Module):
        tensors += [*obj.parameters(), *obj.buffers()]
    elif isinstance(obj, dict):
        for item in obj.values():
            tensors_in(item, tensors, seen)
    elif isinstance(obj, (list, tuple)):
        for item in obj:
            tensors_in(item, tensors, seen)
    elif dataclasses.is_dataclass(obj) and not isinstance(obj, type):
        for field in dataclasses.fields(obj):
            tensors_in(getattr(obj, field.name), tensors, seen)
    elif hasattr(obj, "__dict__") and not isinstance(obj, type) and not callable(obj):
        tensors_in(vars(obj), tensors, seen)
    return tensors


def seed(value: int = 0) -> None:
    torch.manual_seed(value)
    random.seed(value)
    np.random.seed(value)  # noqa: NPY002


def streams() -> tuple:
    """The states of the global random number streams, comparable by ``==``."""
    name, keys, *rest = np.random.get_state()  # noqa: NPY002
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), (name, keys.tobytes(), *rest)


def total(outputs) -> torch.Tensor:
    """A scalar that gives every element of every output that needs a gradient a different one."""
    loss = torch.zeros(())
    for index, tensor in enumerate(tensors_in(outputs)):
        if tensor.requires_grad:
            real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
            weights = torch.linspace(0.5, 1.5, real.numel()).reshape(real.shape)
            loss = loss + (index + 1) * (real.float() * weights).sum()
    return loss


def measured_step(model, call: Callable, *args, loss=None, autocast=False, warmup=1, **kwargs) -> Measurement:
    """A measured step that begins without gradients and calls the model so; `loss`: a function of the outputs."""

    def step():
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext():
            value = loss(call(*args, **kwargs)) if loss else call(*args, **kwargs)
        value.backward()

    return ackpt.measure(step, "cpu", resident=(model, *tensors_in([args, kwargs])), warmup=warmup, repeats=0)


def left_by(model: nn.Module, call: Callable, *args, loss=None, autocast=False, **kwargs) -> list:
    """What a step that calls the model so leaves: outputs, gradients, buffers, and the state of random numbers."""
    model.zero_grad()
    torch.manual_seed(1)
    with torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext():
        outputs = call(*args, **kwargs)
    is_loss = isinstance(outputs, torch.Tensor) and outputs.dim() == 0
    (loss(outputs) if loss else outputs if is_loss else total(outputs)).backward()
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    kept = [*tensors_in(outputs), *model.buffers()]
    return [*(tensor.detach().clone() for tensor in kept), *gradients, torch.get_rng_state()]


def assert_as_eager(model: nn.Module, step: Callable, *args, **kwargs) -> None:
    """A step of the model leaves what the model itself leaves; `loss`: a function of the outputs."""
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    expected = left_by(model, model, *args, **kwargs)
    with torch.no_grad():
        for name, buffer in before.items():
            model.get_buffer(name).copy_(buffer)
    assert_equal(expected, left_by(model, step, *args, **kwargs), "step")


def left_by_steps(model: nn.Module, call: Callable, batches, optimizer=torch.optim.AdamW, **options) -> list:
    """What steps of an optimizer leave, each with a batch of arguments, and the state of the model at the end."""
    stepped, found = optimizer(model.parameters(), lr=0.01), []
    for batch in batches:
        found += left_by(model, call, *batch, **options)
        stepped.step()
    return [*found, *model.state_dict().values()]


@dataclasses.dataclass
class Step:
    outputs: list[torch.Tensor]
    requires_grad: list[bool]
    grads: list[torch.Tensor | None]
    values: list[torch.Tensor]
    after_forward: tuple
    after_backward: tuple


def run_step(build: Callable[[], Case], call: Callable, loss=total, around=contextlib.nullcontext) -> Step:
    """Build, call once, backward. `around` wraps the forward only."""
    seed()
    case = build()
    seed(1)
    with around():
        result = call(case.function, *case.args, **case.kwargs)
    after_forward = streams()
    value = loss(result)
    if value.requires_grad:
        value.backward()
    leaves = tensors_in([case.args, case.kwargs, case.also, case.function])
    outputs = tensors_in(result)
    return Step(
        outputs=[output.detach().clone() for output in outputs],
        requires_grad=[output.requires_grad for output in outputs],
        grads=[leaf.grad if leaf.is_leaf or leaf.retains_grad else None for leaf in leaves],
        values=[leaf.detach().clone() for leaf in leaves],
        after_forward=after_forward,
        after_backward=streams(),
    )


def assert_equal(first, second, label: str) -> None:
    assert len(first) == len(second), label
    for index, (one, other) in enumerate(zip(first, second)):
        assert (one is None) == (other is None), f"{label} {index}: {one} and {other}"
        if one is not None:
            assert one.dtype == other.dtype and one.shape == other.shape, f"{label} {index}"
            same = (
                torch.equal(one, other)
                or torch.equal(one.isnan(), other.isnan())
                and torch.equal(one.nan_to_num(), other.nan_to_num())
            )
            assert same, f"{label} {index}: {one} and {other}"


def assert_same(plain: Step, checkpointed: Step) -> None:
    assert_equal(plain.outputs, checkpointed.outputs, "output")
    assert plain.requires_grad == checkpointed.requires_grad
    assert_equal(plain.values, checkpointed.values, "value")
    assert_equal(plain.grads, checkpointed.grads, "gradient")
    assert plain.after_forward == checkpointed.after_forward, "random numbers after forward"
    assert plain.after_backward == checkpointed.after_backward, "random numbers after backward"


def plain_call(function, /, *args, **kwargs):
    return function(*args, **kwargs)


def bit_equal(scenario: Callable) -> Callable:
    """A test: the tensors of ``scenario(call, ...)`` are the same whether `call` makes a region or calls."""

    @functools.wraps(scenario)
    def test(**given):
        seed()
        plain = scenario(plain_call, **given)
        seed()
        assert_equal(plain, scenario(ackpt.checkpoint, **given), "gradient")

    signature = inspect.signature(scenario)
    given = [each for name, each in signature.parameters.items() if name != "call"]
    test.__signature__ = signature.replace(parameters=given)  # pyright: ignore[reportFunctionMemberAccess]
    return test


def assert_same_step(build: Callable[[], Case], loss=total, around=contextlib.nullcontext, call=ackpt.checkpoint):
    """The step of `build()` gives the same bits with `call` as without; returns the baseline."""
    plain = run_step(build, plain_call, loss, around)
    assert_same(plain, run_step(build, call, loss, around))
    return plain


def batch(rows: int = 3, width: int = 4, grad: bool = True) -> torch.Tensor:
    return torch.randn(rows, width, requires_grad=grad)


def model_of(forward: Callable, /, **parts) -> nn.Module:
    """A module with these parts; its class has this ``forward``, a function of the module and its inputs."""
    model = type("Model", (nn.Module,), {"forward": forward, "__module__": forward.__module__})()
    for name, part in parts.items():
        setattr(model, name, part)
    return model


def function_of(forward: Callable, backward: Callable):
    """A function of autograd from ``forward(context, *inputs)`` and ``backward(context, *gradients)``."""
    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type("Function", (torch.autograd.Function,), methods)


class SomeMode(TorchDispatchMode):
    """Runs what it is given."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def with_layer(layer: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), layer, nn.Linear(4, 4))


def train(model: nn.Module, inputs, steps: int = 3, loss=total, lr: float = 0.1) -> list[torch.Tensor]:
    """A few SGD steps: losses, and the parameters and buffers at the end."""
    seed(1)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        value = loss(model(*inputs))
        value.backward()
        optimizer.step()
        losses.append(value.detach())
    return [*losses, *(tensor.detach().clone() for tensor in tensors_in(model))]


def assert_same_training(model: nn.Module, inputs, check_fn=None, steps: int = 3, loss=total) -> None:
    """Training `model` and a checkpointed copy of it gives the same losses, parameters and buffers."""
    other = copy.deepcopy(model)
    ackpt.apply_activation_checkpointing(other, check_fn)
    assert_equal(train(model, inputs, steps, loss), train(other, inputs, steps, loss), "training")


def surroundings() -> tuple:
    """What an error must leave as it was."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
        ackpt.is_recomputing(),
        torch._C._autograd._top_saved_tensors_default_hooks(False),
    )


def assert_next_step_works() -> None:
    """A step with everything in it gives the same bits with and without checkpoint."""

    def build():
        layer = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 4))
        return Case(lambda x: layer(x) * random.random(), (torch.randn(3, 4, requires_grad=True),), also=layer)

    assert_same_step(build)


def raises(error, match: str, call: Callable[[], object]) -> pytest.ExceptionInfo:
    """The error that the call raises, which has this text."""
    with pytest.raises(error, match=match) as raised:
        call()
    try:
        return raised
    finally:
        del raised  # this frame, which the error's traceback holds, would keep the error and what failed alive


@contextlib.contextmanager
def raises_cleanly(error, match: str):
    """The body raises; random numbers, modes and flags are as before; the next step works."""
    before = surroundings()
    with pytest.raises(error, match=match) as raised:
        yield raised
    assert surroundings() == before
    raised.value.__traceback__ = None
    assert_next_step_works()


@pytest.fixture
def no_gc():
    """Nothing may need the garbage collector to die."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(autouse=True)
def _little_to_collect():
    """What lives before a test is out of the collector's sight: measuring collects, often."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _leave_no_trace():
    torch.manual_seed(0)
    before = surroundings()
    yield
    assert surroundings() == before


@contextlib.contextmanager
def threads(count: int):
    """Torch computes on this many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.fixture(scope="module")
def one_thread():
    with threads(1):
        yield


@pytest.fixture
def seeded():
    torch.manual_seed(0)


@pytest.fixture
def no_gpu(monkeypatch):
    """Torch sees no GPU, whether or not there is one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def peak_with_host_bytes(simulated) -> int:
    """The peak of dynamic and host bytes together: on a CPU both are one memory."""
    return max(map(sum, zip(simulated.timeline.live, simulated.host_live)))


@pytest.fixture
def fresh_dynamo():
    """Dynamo has compiled nothing before, and forgets what the test compiled."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def no_inductor(monkeypatch):
    """Run the operations one by one: Inductor would compile for minutes."""
    monkeypatch.setattr("ackpt.planner.step.compiled_schedule.ByInductor", boxed)


@pytest.fixture
def fresh_results():
    """No result on tensors without data is known from an earlier capture."""
    kernels._RESULTS.clear()


_CAPTURED: dict[str, JointGraph] = {}


@pytest.fixture(scope="module")
def captured_once():
    """A step that is planned from shapes is captured once, whatever plans and optimizers it is asked for."""
    capture = planned_shapes.forward_and_backward

    def known(step, config, where):
        arguments = {name: getattr(value, "shape", value) for name, value in step.inputs.items()}
        parameters = [(name, tensor.shape, tensor.requires_grad) for name, tensor in step.model.named_parameters()]
        key = repr((config.step, config.autocast, config.device, config.scaling, step.model, arguments, parameters))
        if key not in _CAPTURED:
            _CAPTURED[key] = capture(step, config, where)
        return _CAPTURED[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planned_shapes, "forward_and_backward", known)
        yield
