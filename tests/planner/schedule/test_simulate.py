"""The simulator against timelines counted by hand, in tensors of four floats, and everything that it refuses."""

import dataclasses

import pytest
import torch
from conftest import model_of, raises
from torch import nn

import ackpt
from ackpt.graph import Profile, ScheduleError, lower, simulate
from ackpt.planner.schedule.schedule import COMPUTE, FREE, Step, everything
from ackpt.planner.schedule.simulator import peak_of, rng_state_bytes

B = 16  # bytes of a tensor
STATE = torch.get_rng_state().numel()


def traced(function):
    return ackpt.trace(
        model_of(lambda self, x: self.function(x * self.w), w=nn.Parameter(torch.randn(4)), function=function),
        torch.randn(4),
    )


def exp_and_sin():
    """Nodes: w, x, mul, exp, a view of exp, sin | the tangent, cos, mul_1, another view, mul_2, mul_3."""
    return traced(lambda h: h.exp().sin())


W, X, MUL, EXP, VIEW, SIN, TANGENT, COS, MUL_1, VIEW_1, MUL_2, MUL_3 = range(12)


def costs(graph, workspace=None, flops=1, seconds=None):
    """Every operation costs the same; `workspace` is ``{node: bytes}``."""
    count = len(graph.nodes)
    taken = tuple((workspace or {}).get(place, 0) for place in range(count))
    times = None if seconds is None else (seconds,) * count
    return Profile("cpu", (flops,) * count, (0,) * count, (0,) * count, taken, times)


def simulated(graph, schedule, **options):
    profile = costs(graph, **options)
    found = simulate(graph, profile, schedule)
    assert peak_of(graph, schedule, profile.workspace_bytes) == found.peak_bytes
    return found


def tensors(found):
    """Live bytes in tensors, where nothing else lives."""
    assert all(size % B == 0 for size in found.timeline.live)
    return [size // B for size in found.timeline.live]


def test_bytes_of_a_saved_value():
    graph = exp_and_sin()
    schedule = everything(graph)
    found = simulated(graph, schedule, seconds=0.5)
    forward = [0, 1, 2, 1, 2]  # mul, exp, mul is freed, sin
    # The tangent comes in; cos, mul_1, cos is freed, mul_2, mul_1 and exp are freed, the gradient, mul_2 is freed.
    assert tensors(found) == [*forward, 3, 4, 5, 4, 5, 4, 3, 4, 3]
    assert found.timeline.boundary == len(forward) - 1
    assert (found.peak_bytes, found.peak_node, found.saved_bytes) == (5 * B, MUL_1, B)
    assert found.resident_bytes == 2 * B  # w and x
    ran = [MUL, EXP, SIN, COS, MUL_1, VIEW, VIEW_1, MUL_2, MUL_3]
    assert [s.id for s in (*schedule.forward, *schedule.backward) if s.kind == COMPUTE] == ran
    assert (found.flops, found.recompute_flops) == (len(ran), 1)  # the view is made again
    assert found.seconds == 0.5 * len(ran)


def test_categories_add_up_to_the_peak():
    timeline = simulated(exp_and_sin(), everything(exp_and_sin())).timeline
    assert timeline.categories.keys() == {"gradients", "activations", "temporaries"}  # nothing is recomputed
    assert timeline.at(timeline.boundary) == {"gradients": 0, "activations": 2 * B, "temporaries": 0}
    assert timeline.at(len(timeline.live) - 1) == {"gradients": B, "activations": B, "temporaries": B}
    assert [sum(parts) for parts in zip(*timeline.categories.values())] == list(timeline.live)


def test_bytes_of_a_recomputed_value():
    graph = exp_and_sin()
    found = simulated(graph, lower(graph, ()))
    # mul, exp, mul is freed, sin, exp is freed | the tangent; mul and exp again, mul is freed, then as above.
    assert tensors(found) == [0, 1, 2, 1, 2, 1, 2, 3, 4, 3, 4, 5, 4, 5, 4, 3, 4, 3]
    assert (found.peak_bytes, found.peak_node, found.saved_bytes) == (5 * B, MUL_1, 0)
    assert found.recompute_flops == 3  # mul, exp, the view
    categories = found.timeline.at(found.timeline.peak_index)
    # Of mul and exp, which are recomputed, exp is live; the tangent and the results of backward are temporaries.
    assert categories == {"gradients": 0, "activations": B, "recomputed": B, "temporaries": 3 * B}


def test_workspace_counts_while_its_operation_runs():
    graph = exp_and_sin()
    plain = simulated(graph, everything(graph))
    found = simulated(graph, everything(graph), workspace={EXP: 10 * B})
    # Taken while exp runs, its argument still there, and given back at once.
    assert tensors(found)[:5] == [0, 1, 2, 12, 2] and tensors(found)[5:] == tensors(plain)[3:]
    assert (found.peak_bytes, found.peak_node) == (12 * B, EXP)


def test_a_recomputed_random_operation_keeps_its_state():
    graph = traced(lambda h: torch.native_dropout(h, 0.5, True)[0].sin())
    assert rng_state_bytes(graph) == STATE
    schedule = lower(graph, ())
    assert len(schedule.replayed) == 1
    found = simulated(graph, schedule)
    b, mask = B, 4
    forward = [b, b + STATE, 2 * b + STATE, 2 * b + mask + STATE, b + mask + STATE, b + STATE]  # mul, dropout, frees
    forward += [2 * b + STATE, b + STATE]  # sin, dropout's result is freed
    again = [2 * b, 3 * b]  # the tangent, mul; the state is kept until dropout has run, and the present one put aside
    again = [size + STATE for size in again] + [3 * b + 2 * STATE, 4 * b + 2 * STATE, 4 * b + mask + 2 * STATE]
    again += [4 * b + mask + STATE, 4 * b + mask, 3 * b + mask]  # both states are given back, mul is freed
    live = list(found.timeline.live)
    assert live[: 1 + len(forward) + len(again)] == [0, *forward, *again]
    assert found.peak_bytes == 4 * b + mask + 2 * STATE
    plain = simulated(graph, everything(graph))
    assert max(plain.timeline.live) < STATE  # saved, it needs no state


def test_the_optimizer_step_comes_last():
    graph = dataclasses.replace(exp_and_sin(), optimizer_step_bytes=7 * B, optimizer_bytes=2 * B)
    found = simulated(graph, everything(graph))
    assert tensors(found)[-3:] == [3, 10, 3]
    assert (found.peak_bytes, found.peak_node, found.resident_bytes) == (10 * B, None, 4 * B)


# What it refuses


def test_schedules_and_profiles_of_another_graph_are_refused():
    graph, other = exp_and_sin(), traced(torch.sin)
    with pytest.raises(ScheduleError, match="this schedule was made for another graph.*Make a new one"):
        simulate(graph, costs(graph), everything(other))
    strange = dataclasses.replace(costs(other), graph=other.hash)
    with pytest.raises(ScheduleError, match="this profile was made for another graph"):
        simulate(graph, strange, everything(graph))
    assert simulate(graph, dataclasses.replace(costs(graph), graph=graph.hash), everything(graph)).flops


CANNOT_RUN = {  # how the baseline's schedule is changed, and the error
    "frees what it saves": (
        lambda graph, steps: {"forward": (*steps.forward, Step(FREE, steps.saved[0]))},
        r"storages \[\d+\] are to be saved, but the forward has freed them",
    ),
    "reads what it did not save": (
        lambda graph, steps: {"saved": ()},
        r"cos \(.*\) of module 'the model itself' reads exp .*, which is not live",
    ),
    "reads what is not computed yet": (
        lambda graph, steps: {"forward": (Step(COMPUTE, EXP), *steps.forward)},
        r"exp \(aten.exp.default\).* reads mul .*freed it, never computed it",
    ),
    "computes a live value": (
        lambda graph, steps: {"forward": (Step(COMPUTE, MUL), *steps.forward)},
        r"mul \(.*\) of module .* is computed while its result is still live",
    ),
    "frees what is not live": (
        lambda graph, steps: {"forward": (*steps.forward, Step(FREE, graph.nodes[COS].storages[0]))},
        r"storage \d+ is freed, but it is not live",
    ),
}


@pytest.mark.parametrize("name", CANNOT_RUN)
def test_a_schedule_that_cannot_run_is_refused(name):
    change, message = CANNOT_RUN[name]
    graph = exp_and_sin()
    schedule = everything(graph)
    wrong = dataclasses.replace(schedule, **change(graph, schedule))
    raises(ScheduleError, message, lambda: simulate(graph, costs(graph), wrong))
