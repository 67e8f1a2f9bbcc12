"""No step with gradients that Inductor compiles runs without its plan, whatever makes Dynamo give up."""

import copy
import threading

import pytest
import torch
from conftest import raises
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode

import ackpt

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "no_inductor")
LIMIT = 3
limited = torch._dynamo.config.patch(recompile_limit=LIMIT)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x):
        return self.last(torch.tanh(torch.relu(self.first(x)))).square().mean()


def as_function(model, **options):
    return torch.compile(model, backend="ackpt", options={"compiler": "inductor", **options})


def in_place(model, **options):
    model.compile(backend="ackpt", options={"compiler": "inductor", **options})
    return model


both_ways = pytest.mark.parametrize("compiled", [as_function, in_place])


@both_ways
@pytest.mark.parametrize("lengths", [range(1, 13), [1, 2, 3, 1, 4, 2, 5]])
def test_the_first_step_without_a_plan_raises_and_so_do_the_later_ones(compiled, lengths):
    plans, planned, refused = [], set(), set()
    call = compiled(Net(), policy="full", on_plan=plans.append)
    with limited:
        for rows in lengths:
            try:
                loss = call(torch.ones(rows, 8))
            except ackpt.TraceError as error:
                assert "recompile_limit" in str(error) and "captured without Dynamo" in str(error)
                refused.add(rows)
            else:
                assert "Compiled" in loss.grad_fn.name()  # the plan's node; the model's own is MeanBackward0
                loss.backward()
                planned.add(rows)
    assert planned == {1, 2, 3} and refused == set(lengths) - planned
    assert len(plans) == LIMIT


@both_ways
def test_evaluation_does_not_raise_at_the_limit(compiled):
    plans, model = [], Net()
    call, eager = compiled(model, policy="full", on_plan=plans.append), copy.deepcopy(model)
    with limited:
        for gradients_off in (torch.no_grad, torch.inference_mode):
            for rows in range(1, 11):
                with gradients_off():
                    x = torch.randn(rows, 8)
                    assert torch.equal(call(x), eager.forward(x))
        assert plans == []
        with pytest.raises(ackpt.TraceError, match="recompile_limit"):
            for rows in (1, 2, 3):
                call(torch.ones(rows, 8)).backward()
        with torch.no_grad():
            call(torch.ones(5, 8))


def test_the_accumulated_limit_is_named():
    call = as_function(Net(), policy="full")
    with torch._dynamo.config.patch(accumulated_recompile_limit=2):
        for rows in (1, 2):
            call(torch.ones(rows, 8)).backward()
        raises(ackpt.TraceError, "accumulated_recompile_limit", lambda: call(torch.ones(3, 8)))


def test_other_backends_fall_back_as_before():
    graphs, model = [], Net()

    class SameCode(Net):
        pass

    class OtherCode(Net):
        def forward(self, x):
            return super().forward(x)

    def other(gm, example_inputs):
        graphs.append(gm)
        return gm.forward

    call, shared = (as_function(model, policy="full") for model in (OtherCode(), SameCode()))
    with limited, torch._dynamo.config.patch(automatic_dynamic_shapes=False):
        others = torch.compile(model, backend=other)
        for rows in range(1, 8):
            x = torch.ones(rows, 8)
            assert torch.equal(others(x), model(x))
        assert len(graphs) == LIMIT
        call(torch.ones(4, 8)).backward()
        with pytest.raises(ackpt.TraceError, match="without a plan"):  # Dynamo gave up the code that they share
            shared(torch.ones(4, 8))


def test_suppressed_errors_are_raised():
    with torch._dynamo.config.patch(suppress_errors=True):
        with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="cannot keep the budget"):
            as_function(Net(), policy="none", budget=0.1)(torch.ones(4, 8))


class Block(Net):
    def forward(self, x):
        return torch.tanh(self.first(x))


class BreaksInside(Net):
    """A break that Dynamo answers by skipping the whole frame, and by compiling what it calls."""

    def forward(self, x):
        with torch.autograd.set_detect_anomaly(False):
            for layer in (self.first, self.last):
                x = layer(x)
                torch._dynamo.graph_break()
        return x.mean()


@both_ways
def test_a_graph_break_in_a_frame_that_is_skipped(compiled):
    raises(ackpt.TraceError, "one graph", lambda: compiled(BreaksInside(), policy="none")(torch.ones(4, 8)))


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # Dynamo reads that of the second graph's input
@pytest.mark.parametrize("blocks", [0, 2])
def test_modules_of_torch_compiled_in_place(blocks):
    """Before torch 2.14, Dynamo captures the children of an nn.Sequential that is compiled in place, one by one."""

    def model():
        return nn.Sequential(*(Block() for _ in range(blocks)) if blocks else (nn.Linear(8, 8), nn.Tanh()))

    x, plans, graphs = torch.ones(4, 8), [], CompileCounter()
    counted = model()
    counted.compile(backend=graphs)
    counted(x)
    for _ in range(2):
        call = in_place(model(), policy="full", on_plan=plans.append)
        if graphs.frame_count == 1:
            call(x).sum().backward()
        else:
            with pytest.raises(ackpt.TraceError, match="several graphs" if blocks else "without a plan.*nn.Sequential"):
                call(x)
    assert len(plans) == graphs.frame_count  # the second model finds the graphs of the first
    as_function(model(), policy="full")(x).sum().backward()


class SomeMode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_under_a_dispatch_mode_dynamo_skips_every_frame():
    call = as_function(Net(), policy="full")
    with SomeMode(), pytest.raises(ackpt.TraceError, match="without a plan"):
        call(torch.ones(4, 8))


def test_an_error_of_the_model_is_not_replaced():
    class Fails(Net):
        def forward(self, x):
            return super().forward(x[:, :3])

    with pytest.raises(Exception) as raised:
        as_function(Fails(), policy="full")(torch.ones(4, 8))
    assert "without a plan" not in str(raised.value)


def test_a_copy_of_a_compiled_model_and_another_thread():
    plans = []
    call = copy.deepcopy(as_function(Net(), policy="full", on_plan=plans.append))
    with limited:
        for rows in (1, 2, 3):
            thread = threading.Thread(target=lambda rows=rows: call(torch.ones(rows, 8)).backward())
            thread.start()
            thread.join()
        raises(ackpt.TraceError, "recompile_limit", lambda: call(torch.ones(4, 8)))


def test_the_backend_function_can_be_passed_itself():
    from ackpt.planner.backend.dynamo import backend

    options = {"compiler": "inductor"}
    torch.compile(Net(), backend=backend, options=options)(torch.ones(4, 8)).backward()
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="was not called through"):
        torch.compile(Net(), backend=lambda gm, inputs: backend(gm, inputs))(torch.ones(4, 8))


def test_a_frozen_model_needs_no_plan():
    model = Net().requires_grad_(False)
    assert torch.equal(as_function(model, policy="full")(torch.ones(4, 8)), model(torch.ones(4, 8)))


def as_a_function(model, **options):
    return torch.compile(lambda x: model(x), backend="ackpt", options={"compiler": "inductor", **options})


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # Dynamo reads that of the second graph's input
@pytest.mark.parametrize("compiled", [as_function, in_place, as_a_function])
@pytest.mark.parametrize("compiled_before", [False, True])
def test_inside_another_compiled_function(compiled, compiled_before):
    model, x, plans = Net(), torch.randn(4, 8), []
    model(x).backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    inner = compiled(model, on_plan=plans.append)
    outer = torch.compile(lambda x: inner(x * 1) * 1, backend=CompileCounter())
    if compiled_before:
        inner(x).backward()
    for _ in range(2):
        model.zero_grad()
        outer(x).backward()
        assert all(torch.equal(p.grad, gradient) for p, gradient in zip(model.parameters(), expected))
    assert len(plans) == 1
    with torch.no_grad():
        assert torch.equal(outer(x), inner(x))
    assert len(plans) == 1


@pytest.mark.parametrize("compiled", [as_function, in_place, as_a_function])
def test_inside_a_full_graph(compiled):
    inner = compiled(Net())
    outer = torch.compile(lambda x: inner(x), backend=CompileCounter(), fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        outer(torch.randn(4, 8))
