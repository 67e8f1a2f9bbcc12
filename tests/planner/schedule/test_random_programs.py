"""Random models under random schedules: the planned step is the eager one, and takes the bytes that were simulated."""

import dataclasses
import random
import types

import pytest
import torch
from conftest import assert_equal, peak_with_host_bytes, seed
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from programs import Program, program

import ackpt
from ackpt.graph import PlannedStep
from ackpt.planner.costs.profiles import profile
from ackpt.planner.request import Request
from ackpt.planner.schedule.offload_steps import offloadable, offloaded
from ackpt.planner.schedule.schedule import COMPUTE, lower, missing, scheduled
from ackpt.planner.schedule.simulator import peak_of, simulate

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*degrees of freedom:UserWarning"),
    pytest.mark.filterwarnings("ignore:Using a target size:UserWarning"),
]
SEEDS = st.integers(0, 2**32 - 1)
check = settings(max_examples=15, deadline=None, database=None, suppress_health_check=list(HealthCheck))


def must_be_saved(graph) -> set[int]:
    """Storages that cannot be computed again; running statistics are written once and read by nobody."""
    analysis = graph.analysis
    fixed = (place for place, why in analysis.not_recomputable.items() if "running statistic" not in why)
    return {storage for place in fixed for storage in graph.nodes[place].storages} & analysis.savable


def some_saved(graph, draw) -> set[int]:
    share = draw.choice((0, 0.5, 1))
    return must_be_saved(graph) | {s for s in sorted(graph.analysis.savable) if draw.random() < share}


def computed_once(graph, number: int):
    return lower(graph, some_saved(graph, random.Random(number)))


def computed_often(graph, number: int):
    """Between the operations of backward, values are dropped at random, and computed again where they are needed.

    A storage stays while backward still reads what it has itself made in it, and if the caller holds it.
    """
    analysis, draw = graph.analysis, random.Random(number)
    saved = some_saved(graph, draw) | {
        s for s in analysis.live_to_end if graph.nodes[graph.storages[s].producer].phase == "forward"
    }
    live = set(analysis.sources)
    for producer in {graph.storages[storage].producer for storage in saved}:
        live |= {analysis.base_of[storage] for storage in analysis.allocated[producer] if storage in analysis.base_of}
    order, backward = analysis.needed_backward, []
    for at, place in enumerate(order):
        for node in missing(analysis, place, live):
            backward.append(node)
            live.add(node)
        later = {source for node in order[at + 1 :] for source in graph.nodes[node].inputs} & {*order[: at + 1]}
        later = {storage for source in later for storage in graph.nodes[source].storages}
        kept = later | analysis.live_to_end | must_be_saved(graph) | analysis.resident
        for producer in sorted({graph.storages[s].producer for node in live for s in graph.nodes[node].storages}):
            if analysis.allocated[producer] & kept or graph.nodes[producer].phase == "backward" or draw.random() < 0.4:
                continue
            live = {
                node
                for node in live
                if graph.nodes[node].phase == "backward"
                or not analysis.allocated[producer].intersection(graph.nodes[node].storages)
            }
    return scheduled(graph, None, backward)


def offloaded_anywhere(graph, number: int):
    """Of what is saved some is offloaded; it leaves and comes back as random times and a random limit say."""
    draw = random.Random(number)
    schedule = draw.choice((computed_once, computed_often))(graph, number)
    seconds = tuple(draw.random() for _ in graph.nodes)
    copies = tuple(draw.choice((0.1, 1, 10)) * draw.random() for _ in graph.storages)
    times = dataclasses.replace(profile(graph), seconds=seconds, swap_seconds=copies)
    limit = int(draw.random() * peak_of(graph, schedule, times.workspace_bytes))
    chosen = [s for s in offloadable(graph, schedule) if draw.random() < 0.6]
    return offloaded(graph, schedule, chosen, times, limit)


def planned(model, lowering, number: int):
    def planner(graph):
        return types.SimpleNamespace(schedule=lowering(graph, number), limit_bytes=None)

    return PlannedStep(model, Request(planner=planner, differentiate="all", outputs="keep"))


def outputs_of(result) -> list[torch.Tensor]:
    return list(result) if isinstance(result, tuple) else [result]


def run(program: Program, prepare, steps: int = 2):
    """What `steps` steps leave behind: outputs, gradients of two backwards each, parameters, buffers, random state."""
    model, args = program.model(), program.arguments()
    step = prepare(model)
    leaves = [*model.parameters(), args[0]]
    outputs, gradients, values = [], [], []
    seed()
    for _ in range(steps):
        found = outputs_of(step(*args))
        outputs += [output.detach().clone() for output in found]
        values.append(torch.get_rng_state())
        trained = [output for output in found if output.requires_grad]
        incoming = [torch.linspace(-1, 2, output.numel()).view(output.shape) for output in trained]
        for retain in (True, False):
            for leaf in leaves:
                leaf.grad = None
            torch.autograd.backward(trained, incoming, retain_graph=retain)
            gradients.append([None if leaf.grad is None else leaf.grad.clone() for leaf in leaves])
        values += [tensor.detach().clone() for tensor in (*model.state_dict().values(), *args)]
        values.append(torch.get_rng_state())
        del found, trained
    return outputs, gradients, values


def run_eagerly(program: Program):
    """The eager step, if eager can run it, and leaves inputs and buffers without a history."""
    model, args = program.model(), program.arguments()
    try:
        model(*args)
    except (RuntimeError, IndexError):  # eager itself cannot run it
        assume(False)
    assume(all(tensor.is_leaf for tensor in (*args, *model.parameters(), *model.buffers())))
    assume(not any(tensor.requires_grad for tensor in (*args[1:], model.frozen, *model.buffers())))
    try:
        return run(program, lambda model: model)
    except RuntimeError:  # something that backward needs is changed in place
        assume(False)


def shares_memory(program: Program, trained: bool = False) -> bool:
    """Whether an output, or one that needs a gradient, shares memory with an input, a parameter or another such output.

    Autograd makes and sums the gradients of such outputs outside of the graph, which nobody simulates.
    """
    model, args = program.model(), program.arguments()
    outputs = [output for output in outputs_of(model(*args)) if output.requires_grad or not trained]
    places = [output.untyped_storage()._cdata for output in outputs]
    own = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers(), *args)}
    return len(set(places)) < len(places) or not own.isdisjoint(places)


def assert_same(one, other, sums_alike: bool = True):
    outputs, gradients, values = one
    others, other_gradients, other_values = other
    assert_equal(outputs, others, "output")
    assert_equal(values, other_values, "value")
    for found, expected in zip(gradients, other_gradients):
        if sums_alike:
            assert_equal(found, expected, "gradient")
            continue
        for gradient, known in zip(found, expected):
            assert (gradient is None) == (known is None)
            assert gradient is None or torch.allclose(gradient, known, rtol=1e-4, atol=1e-5)


@check
@given(SEEDS)
def test_a_planned_step_is_the_eager_step_to_the_last_bit(number):
    model = program(random.Random(number), leave_out=("inplace=True",))
    eager = run_eagerly(model)
    found = run(model, lambda module: planned(module, computed_once, number))
    # Views of inputs and of one another are made anew outside of the graph, so autograd adds their gradients last.
    assert_same(found, eager, sums_alike=not shares_memory(model))
    assert_equal(found[1][0], found[1][1], "gradient of the second backward")


@pytest.mark.parametrize("lowering", [computed_often, offloaded_anywhere])
@check
@given(number=SEEDS)
def test_computing_values_several_times_and_offloading_them_change_nothing(lowering, number):
    model = program(random.Random(number), leave_out=("inplace=True",))
    run_eagerly(model)
    once = run(model, lambda module: planned(module, computed_once, number))
    assert_same(run(model, lambda module: planned(module, lowering, number)), once)


def test_values_are_computed_several_times():
    """The lowering above does what it says."""
    model = Program("def forward(self, x, y, ids):\n    return (x @ self.weight).sigmoid().tanh().sin()\n", False)
    graph = ackpt.trace(model.model(), *model.arguments())
    again = [[s.id for s in computed_often(graph, n).backward if s.kind == COMPUTE] for n in range(20)]
    assert max(max(map(steps.count, steps)) for steps in again) > 1


@settings(check, max_examples=20)
@given(SEEDS)
def test_the_measured_peak_is_the_simulated_one_to_the_byte(number):
    model = program(random.Random(number))
    run_eagerly(model)
    assume(not shares_memory(model, trained=True))
    lowering = (computed_once, computed_often, offloaded_anywhere)[number % 3]
    module, args = model.model(), model.arguments()
    graphs = []

    def planner(graph):
        graphs.append(graph)
        return types.SimpleNamespace(schedule=lowering(graph, number), limit_bytes=None)

    keeps = bool(number % 2)
    step = PlannedStep(module, Request(planner=planner, differentiate="all", outputs="keep" if keeps else "drop"))
    step.prepare(*args)
    (graph,) = graphs
    schedule, costs = step.plan.schedule, profile(graph, workspace="measured")
    simulated = simulate(graph, costs, schedule)
    assert simulated.peak_bytes == peak_of(graph, schedule, costs.workspace_bytes)

    def once():
        for leaf in (*module.parameters(), args[0]):
            leaf.grad = None
        found = outputs_of(step(*args))
        trained = [output for output in found if output.requires_grad]
        if not keeps:
            del found
        torch.autograd.backward(trained, [torch.ones_like(output) for output in trained])

    measured = ackpt.measure(once, "cpu", resident=(module, *args), warmup=1, repeats=0)
    assert measured.dynamic_peak_bytes == peak_with_host_bytes(simulated)  # on the CPU both are one memory


def test_readers_of_a_changed_input_are_not_recomputed():
    model = Program(
        """def forward(self, x, y, ids):
        v0 = x.t()
        v1 = torch.sin(v0 * 2)
        v2 = v1 * self.bias[:, None]
        x.mul_(2)
        return v2.sin().t()\n""",
        False,
    )
    eager = run(model, lambda module: module)
    for number in range(4):
        assert_same(run(model, lambda module: planned(module, computed_once, number)), eager)  # noqa: B023
    graph = ackpt.trace(model.model(), *model.arguments())
    fixed = {graph.nodes[place].target for place in graph.analysis.not_recomputable}
    assert fixed == {"aten.t.default", "aten.mul.Tensor", "aten.copy_.default"}  # not the sine, which reads the product
