"""The steps of `named_steps` without data: predictions for any size, on the CPU or as on a GPU."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import ackpt
from ackpt.core.errors import BudgetError
from ackpt.metering.prediction import predict
from ackpt.planner.capture.optimizer_state import loop_with, with_loop
from ackpt.planner.costs.devices import device as device_rates
from ackpt.planner.costs.profiles import with_gpu_workspace
from ackpt.planner.policies import function_of
from ackpt.planner.schedule.simulator import simulate
from ackpt.planner.workloads.planned_shapes import AS_ON, PlanConfig, captured, kernels_of_a_gpu
from ackpt.planner.workloads.step_request import training_step

from .named_steps import PER_BLOCK, UNBOUNDED, Method, NotRun, Setting, one_step, switch, tensors
from .settings import block_bytes, free_host_bytes, record_metrics
from .training import adamw, make_states, scaler_of

ROOM_SHARE = 0.8  # of free memory that a run may take; the rest is for what allocators add


class Shapes:
    """A step without data, whose peak is predicted."""

    def __init__(self, setting: Setting):
        self.setting = setting
        self._found: tuple | None = None
        self._known: dict[Method, dict] = {}

    def predicted(self, method: Method) -> dict:
        """Bytes and FLOPs of a step for its record; raises NotRun if the budget is infeasible."""
        if method not in self._known:
            self._known[method] = self._eager(method) if method.policy is None else self._planned(method)
        return self._known[method]

    def resolved(self, method: Method) -> Method:
        """The method with bytes as its budget, if the budget is the peak of per-block."""
        if method.budget != PER_BLOCK:
            return method
        return replace(method, budget=self.predicted(Method(PER_BLOCK))["peak_bytes"])

    def least_bytes(self, method: Method) -> int:
        """The smallest peak that the method can have at this size; an eager method has one peak only."""
        if method.policy is None or method.policy in UNBOUNDED:
            return self.predicted(method)["peak_bytes"]
        graph, profile = self._graph()
        simulated = simulate(graph, profile, function_of(method.policy)(graph, profile, 0))
        return simulated.peak_bytes + simulated.resident_bytes

    def _eager(self, method: Method) -> dict:
        with FakeTensorMode():
            made = training_step(self.setting.request(), "cpu")
            optimizer = adamw(made.model, self.setting.learning_rate) if self.setting.trains else None
            if optimizer is not None:
                make_states(optimizer)
        switch(made.model, method)
        cuda = self.setting.device == "cuda"

        def step():
            with kernels_of_a_gpu() if cuda else contextlib.nullcontext():
                one_step(made.model, made.inputs, self.setting, optimizer)

        resident = (made.model, *([optimizer] if optimizer else []), *tensors(made.inputs))
        device = self.setting.device
        found = predict(step, resident=resident, device=device, warmup=0, round_to=block_bytes(device))
        return record_metrics(found) | {"average_bytes": found.resident_bytes + _average(found.timeline)}

    def _planned(self, method: Method) -> dict:
        graph, profile = self._graph()
        try:
            plan = ackpt.plan(graph, method.budget, method.policy or "auto", profile=profile)
        except BudgetError as error:
            raise NotRun(str(error)) from error
        sizes = graph.bytes()
        resident = {"parameters": "parameter", "buffers": "buffer", "inputs": "input"}
        categories = {name: sizes[kind] for name, kind in resident.items()}
        return {
            "peak_bytes": plan.peak_bytes,
            "resident_bytes": plan.resident_bytes,
            "dynamic_peak_bytes": plan.dynamic_peak_bytes,
            "average_bytes": plan.resident_bytes + _average(plan.timeline),
            "categories": {
                **categories,
                "optimizer": graph.optimizer_bytes,
                **plan.timeline.at(plan.timeline.peak_index),
            },
            "flops": plan.flops,
            "cost": plan.cost,
        }

    def _graph(self):
        """Captured once, for all policies."""
        if self._found is None:
            cuda = self.setting.device == "cuda"
            where = device_rates(AS_ON) if cuda else None
            with FakeTensorMode():
                made = training_step(self.setting.request(), "cpu")
            wanted = PlanConfig(
                self.setting.request(), self.setting.dtype, optimizer="none", device=AS_ON if cuda else None
            )
            graph = captured(made, wanted, where)
            if self.setting.trains:
                scaler, optimizer = scaler_of("cpu", self.setting.dtype), adamw(made.model, self.setting.learning_rate)
                graph = with_loop(graph, made.model, loop_with(optimizer, False, scaler))
            profile = ackpt.profile(graph)
            self._found = graph, with_gpu_workspace(graph, profile) if cuda else profile
        return self._found


def free_bytes(device: str) -> int | None:
    """Memory of the device that is free now; None if the system does not say."""
    return torch.cuda.mem_get_info()[0] if device == "cuda" else free_host_bytes()


def does_not_fit(peak_bytes: int, device: str) -> str | None:
    """Why a step of that predicted peak is not run here, or None."""
    room = free_bytes(device)
    if room is None or peak_bytes <= ROOM_SHARE * room:
        return None
    return f"its peak of {peak_bytes >> 20} MiB is more than {ROOM_SHARE:.0%} of {room >> 20} MiB of free memory"


def _average(timeline) -> int:
    """The mean of the live bytes after every allocation and free; events have no durations."""
    return sum(timeline.live) // len(timeline.live)
