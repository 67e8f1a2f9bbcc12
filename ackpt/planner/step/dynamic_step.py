"""A captured step with dynamic dimensions: its graph at any sizes, and the schedules that run it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from ackpt.planner.capture.aot import Capture
from ackpt.planner.capture.dynamic_sizes import DynamicModule, expression
from ackpt.planner.capture.joint_graph import JointGraph
from ackpt.planner.capture.optimizer_state import Loop
from ackpt.planner.capture.outputs import gradient_strides
from ackpt.planner.capture.tracing import captured_graph, described_graph, prepared
from ackpt.planner.costs.workspace import DynamicWorkspace, workspace_bytes
from ackpt.planner.schedule.schedule import Schedule

from .call_facts import Call
from .choices import Choose
from .compiled_schedule import Strides, compiled_schedule


class DynamicStep:
    """One capture that serves all sizes for which its guards hold.

    ``reference``: the graph at the sizes of the capture. Schedules of it run at all sizes. ``choose``: what runs at
    given sizes; set by whoever plans. ``search_at``: sizes that occurred or were declared; schedules are searched for
    at the largest of them.
    """

    choose: Choose | None = None
    search_at: Sequence[tuple[int, ...]] = ()

    def __init__(self, captured: Capture, call: Call, model, loop: Loop):
        assert captured.symbols is not None
        self.captured, self.symbols = captured, captured.symbols
        module = captured.joint.graph_module
        prepared(module)
        self.module = DynamicModule(module, self.symbols)
        self.module.require_known_sizes()
        values = self.symbols.values(call.leaves)
        self.reference: JointGraph = captured_graph(
            captured, model, call.args, call.kwargs, loop, self.module.at(values)
        )
        self._reference_values = values
        self._compiled: dict[tuple, Callable[[Any, Strides], list[Any]]] = {}
        self._strides = gradient_strides(self.reference.analysis, self.module.fx)

    def sized(self, values: tuple[int, ...]) -> JointGraph:
        """The reference with the storages' bytes at these sizes, for simulations; its operations are unchanged."""
        if self.reference.analysis.restrided:
            return self.graph(values)
        return self.reference.resized(self.module.storage_bytes(values))

    def graph(self, values: tuple[int, ...]) -> JointGraph:
        """The graph of a step with these sizes, with all its shapes."""
        if values == self._reference_values:
            return self.reference
        like = self.reference
        names = ("on_cpu", "optimizer_bytes", "optimizer_step_bytes", "accumulated_bytes", "scaled_loss_bytes")
        fields = {name: getattr(like, name) for name in (*names, "has_data", "as_compiled", "keeps_outputs")}
        return replace(described_graph(self.module.at(values)), **fields)

    @property
    def measures_workspace(self) -> bool:
        return self.reference.on_cpu and self.reference.has_data

    def workspace_bytes(self, values: tuple[int, ...]) -> tuple[int, ...]:
        """The workspace of every operation at these sizes; 0 where it is not measured."""
        if not self.measures_workspace:
            return (0,) * len(self.reference.nodes)
        if values == self._reference_values or not self._workspace.is_exact:
            return workspace_bytes(self.graph(values))
        return self._workspace.at(values)

    @cached_property
    def _workspace(self) -> DynamicWorkspace:
        return DynamicWorkspace(self.module, self.reference)

    def run(self, schedule: Schedule, values: tuple[int, ...]) -> Callable[[Any], list[Any]]:
        """A function of the step's inputs, of these sizes, that runs `schedule`."""
        key = schedule.forward, schedule.backward
        if key not in self._compiled:
            own = replace(schedule, graph=self.reference.hash)
            self._compiled[key] = compiled_schedule(self.captured, self.reference, own, self.module)
        step, strides = self._compiled[key], self._strides_at(values)
        return lambda inputs: step(inputs, strides)

    def _strides_at(self, values: tuple[int, ...]) -> Strides:
        flat = tuple(expression(stride) for strides in self._strides.values() for stride in strides)
        numbers = iter(self.symbols.evaluated(flat, values))
        return {at: tuple(next(numbers) for _ in strides) for at, strides in self._strides.items()}
