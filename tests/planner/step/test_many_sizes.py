"""`ManySizes` computes what the simulator and a profile compute at each of many sizes."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from dynamic_steps import Words, gpt2, ids

from ackpt.planner.capture.aot import CAPTURING, capture
from ackpt.planner.capture.call_facts import WatchedModel, call_of
from ackpt.planner.capture.dynamic_sizes import Dimension
from ackpt.planner.capture.optimizer_state import Loop
from ackpt.planner.costs.devices import device
from ackpt.planner.costs.profiles import profile, with_gpu_workspace
from ackpt.planner.policies import auto, full
from ackpt.planner.policies.search.frontier import frontier
from ackpt.planner.schedule.schedule import everything, recomputed
from ackpt.planner.schedule.simulator import simulate
from ackpt.planner.step.many_sizes import ManySizes
from ackpt.planner.step.plans import CapturedStep
from ackpt.planner.workloads.planned_shapes import allocated_on, calls_as_on


def runnable(model, *args, loop=None, where=None, dtype="float32", **kwargs) -> CapturedStep:
    """The step, captured with all dimensions of its tensors dynamic."""
    with CAPTURING, calls_as_on(where, dtype):
        call = call_of(WatchedModel(model), args, kwargs)
        tensors = [(at, leaf) for at, leaf in enumerate(call.leaves) if isinstance(leaf, torch.Tensor)]
        dims = [Dimension(at, dim) for at, leaf in tensors for dim in range(leaf.dim())]
        with capture(model, args, kwargs, "loss", "drop", dims) as captured:
            return CapturedStep(captured, call, model, loop or Loop(None, False))


def test_peaks_on_a_cpu_equal_the_simulators_with_packed_masks_too():
    model = Words()
    step = runnable(model, ids(8, 30), loop=Loop(torch.optim.AdamW(model.parameters()), True))
    many = ManySizes(step, step.reference)
    points = frontier(many.graph, many.profile, auto.candidates)
    schedules = [everything(many.graph), full.schedule(many.graph, many.profile, None), *(p.schedule for p in points)]
    assert any(schedule.packed for schedule in schedules)
    sizes = [(8, 30), (2, 7), (5, 90), (16, 3)]
    for schedule in schedules:
        for values in sizes:
            graph, costs = step.described(values)
            simulated = simulate(graph, costs, replace(schedule, graph=graph.hash))
            assert many.peak(schedule, values) == simulated.peak_bytes + graph.resident_bytes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_peaks_and_costs_on_a_gpu_equal_those_of_each_size(dtype):
    with torch.device("meta"):
        model, tokens = gpt2(n_layer=1, attn_pdrop=0.0), torch.zeros(4, 32, dtype=torch.long)
    where = device("l4")
    step = runnable(model, input_ids=tokens, labels=tokens.clone(), where=where, dtype=dtype)
    many = ManySizes(step, allocated_on(where, step.reference), where)
    schedules = [everything(many.graph), full.schedule(many.graph, many.profile, None)]
    for batch, length in ((4, 32), (2, 64), (7, 13)):
        values = tuple({0: batch, 1: length}[each.dim] for each in step.dimensions)
        graph = allocated_on(where, step.graph(values))
        costs = with_gpu_workspace(graph, profile(graph, where))
        flops, seconds = many.costs(values)
        assert flops.tolist() == list(costs.flops) and np.allclose(seconds, costs.seconds, rtol=1e-12)
        assert many.workspace_bytes(values).tolist() == list(costs.workspace_bytes)
        for schedule in schedules:
            simulated = simulate(graph, costs, replace(schedule, graph=graph.hash))
            assert many.peak(schedule, values) == simulated.peak_bytes + graph.resident_bytes
            added = many.recompute_cost(schedule, values)
            assert added[0] == simulated.recompute_flops
            assert added[1] == pytest.approx(sum(costs.seconds[node] for node in recomputed(graph, schedule)))
