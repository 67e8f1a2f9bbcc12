"""Runs of one workload, all from the same start: their bytes and FLOPs, and the gradients and buffers they compute."""

from __future__ import annotations

import ctypes
import functools
import sys
from functools import partial
from typing import Literal

import torch
from torch._functorch import config as functorch_config

from ackpt.metering.meter import compare_seconds, count_flops, measure
from ackpt.metering.resident import Resident
from ackpt.planner.schedule.plan import Plan
from experiments.steps.captured_step import CapturedStep
from experiments.steps.workload import Workload, difference

from .peers import by_inductor, fresh_dynamo

Clock = Literal["wall", "processor"]
_LAST_BITS = 2.0**-22  # relative, of float32
_KEEP = ((-4, 0), (-1, -1))  # of glibc's malloc.h: M_MMAP_MAX, no block of its own; M_TRIM_THRESHOLD, never trim


class Runs:
    """Runs of one workload, each from the same start and compared with the first one.

    Where time is measured on a CPU, the process keeps freed memory if it can, so that page faults slow no step.
    """

    def __init__(self, work: Workload, seed: int, timed_rounds: int, clock: Clock = "wall"):
        self.work, self.seed, self.timed_rounds = work, seed, timed_rounds
        self.keeps_freed_memory = bool(timed_rounds) and work.device == "cpu" and keep_freed_memory()
        self.clock: Clock = clock
        self.start = [buffer.clone() for buffer in work.model.buffers()]
        self.flops = 0
        self.wanted: tuple[list, list] = ([], [])
        self.by_schedule: dict = {}

    @functools.cached_property
    def step(self) -> CapturedStep:
        """The step, captured once."""
        with self.work.autocast():
            return CapturedStep(self.work.model, *self.work.args)

    def first(self, planned: Plan) -> dict:
        """Run the step that all others are compared with; returns its peaks."""
        if self.work.device == "cuda":  # libraries allocate their workspaces at the first call, and never free them
            self._step(self.work.model)
        peaks = self._measured(self.step.planned(planned))
        self.flops = peaks.pop("flops")
        self._compared_with_this()
        return peaks

    def first_by_inductor(self) -> dict:
        """Run the step that all others are compared with, the model's own; returns the peaks of Inductor's version."""
        self._restart()
        self.flops = count_flops(partial(self._step, self.work.model))
        self._compared_with_this()
        resident_bytes = Resident((self.work.model, *self.work.args)).bytes(lambda tensor: True)
        with fresh_dynamo():
            peaks = self._peaks(partial(self._step, self._by_inductor()))
        return {"resident_bytes": sum(resident_bytes.values()), **peaks}

    def _compared_with_this(self) -> None:
        gradients, buffers = self._left()
        if self.work.device == "cuda":  # host memory counts in no peak
            gradients, buffers = [each.cpu() for each in gradients], [each.cpu() for each in buffers]
        self.wanted = gradients, buffers

    def planned(self, planned: Plan) -> dict:
        """The results `of` a plan; equal schedules run once."""
        if planned.schedule not in self.by_schedule:
            self.by_schedule[planned.schedule] = self.of(self.step.planned(planned))
        return self.by_schedule[planned.schedule]

    def of(self, call, compiles: bool = False) -> dict:
        """Peak, FLOPs of recomputation, differences of gradients and buffers, and the ratio of seconds if timed."""
        peaks = self._measured(call, compiles)
        again = peaks.pop("flops") - self.flops
        return peaks | {"recompute_flops": again, **self._differences(), **self._times(call, self.work.model)}

    def generated(self, call) -> dict:
        """As `of`, for a step that Inductor compiles at the first call: its FLOPs cannot be counted."""
        self._step(call)
        results = self._peaks(partial(self._step, call)) | self._differences()
        return results | self._times(call, self._by_inductor()) if self.timed_rounds else results

    def _by_inductor(self):
        """The model's own step, compiled by Inductor as it does by itself."""
        call = by_inductor(self.work.model)
        with functorch_config.patch(activation_memory_budget=1.0):
            self._step(call)
        return call

    def _times(self, call, reference) -> dict:
        if not self.timed_rounds:
            return {}
        steps = {"baseline": partial(self._step, reference), "this": partial(self._step, call)}
        times = compare_seconds(steps, self.timed_rounds, device=self.work.device, clock=self.clock).to_json()
        return {"seconds_ratio": times["seconds_ratio"]["this"], "seconds_step": times["seconds"]["this"]}

    def _step(self, call) -> None:
        self.work.step(call, self.seed)

    def _measured(self, call, compiles: bool = False) -> dict:
        """Peaks and FLOPs of a step; counted in one run, or in two if the first one compiles."""
        counted = []

        def step():
            counted.append(count_flops(partial(self._step, call)))

        if compiles:
            step()
        peaks = self._peaks(partial(self._step, call) if compiles else step)
        return peaks | {"flops": counted[0]}

    def _peaks(self, step) -> dict:
        """Peaks of one step; on a GPU also those of its allocator."""
        self._restart()
        resident = (self.work.model, *self.work.args)
        measured = measure(step, self.work.device, resident=resident, warmup=0, repeats=0)
        return {"measured_peak_bytes": measured.dynamic_peak_bytes, **measured.allocator}

    def rounding(self) -> dict:
        """The differences that rounding makes: those of a baseline step whose parameters differ in their last bits."""
        parameters = list(self.work.model.parameters())
        before = [parameter.detach().clone() for parameter in parameters]
        noise = torch.Generator().manual_seed(self.seed)
        self._restart()
        with torch.no_grad():
            for parameter in parameters:
                draws = torch.randn(parameter.shape, generator=noise)
                parameter.mul_(1 + _LAST_BITS * draws.to(parameter.device))
        self._step(self.work.model)
        with torch.no_grad():
            for parameter, value in zip(parameters, before, strict=True):
                parameter.copy_(value)
        return self._differences()

    def _differences(self) -> dict:
        gradients, buffers = (difference(mine, wanted) for mine, wanted in zip(self._left(), self.wanted, strict=True))
        return {"gradients_difference": gradients, "buffers_difference": buffers}

    def _restart(self) -> None:
        self.work.model.zero_grad(set_to_none=True)  # gradients of an earlier step are no part of this one
        with torch.no_grad():
            for buffer, value in zip(self.work.model.buffers(), self.start, strict=True):
                buffer.copy_(value)

    def _left(self) -> tuple[list, list]:
        """Gradients and buffers after a step."""
        gradients = [parameter.grad for parameter in self.work.model.parameters()]
        return gradients, [buffer.clone() for buffer in self.work.model.buffers()]


def promised(planned: Plan) -> dict:
    """What a plan predicts, for a point of the record."""
    return {
        "limit_bytes": planned.limit_bytes,
        "predicted_peak_bytes": planned.dynamic_peak_bytes,
        "predicted_recompute_flops": planned.recompute_flops,
        "cost": planned.cost,
        "lower_bound": planned.lower_bound,
    }


def keep_freed_memory() -> bool:
    """From now on, this process keeps freed memory for later allocations, as the allocator of a GPU does.

    By default, glibc returns large blocks to the operating system. The next step then asks for them again, and the page
    faults cost more the larger its peak is. Returns False where the C library has no such setting.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(mallopt(*setting) == 1 for setting in _KEEP)
