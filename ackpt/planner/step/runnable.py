"""A captured step: its graph at the sizes that it serves, and the schedules that run it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any

from ackpt.planner.capture.aot import Capture
from ackpt.planner.capture.call_facts import Call
from ackpt.planner.capture.chunked_head import chunked
from ackpt.planner.capture.dynamic_sizes import Dimension, DynamicModule, expression
from ackpt.planner.capture.joint_graph import JointGraph
from ackpt.planner.capture.optimizer_state import Loop
from ackpt.planner.capture.tracing import captured_graph, described_graph, prepared
from ackpt.planner.choose import default_profile
from ackpt.planner.costs.devices import Device
from ackpt.planner.costs.profiles import Profile
from ackpt.planner.costs.workspace import DynamicWorkspace, workspace_bytes
from ackpt.planner.schedule.schedule import Schedule

from .backward_checks import gradient_strides
from .compiled_schedule import Strides, compiled_schedule


class Runnable:
    """One capture, which serves all sizes for which its guards hold; without dynamic dimensions, its own sizes alone.

    ``module``: of a capture with dynamic dimensions. ``values``: the sizes of these dimensions in the captured call.
    ``reference``: the graph at these sizes; schedules of it run at all sizes.
    """

    def __init__(self, captured: Capture, call: Call, model, loop: Loop):
        self.captured = captured
        self.module: DynamicModule | None = None
        self.values: tuple[int, ...] = ()
        self.dimensions: tuple[Dimension, ...] = ()
        instance = None
        if captured.symbols is not None:
            prepared(captured.joint.graph_module)
            self.module = DynamicModule(captured.joint.graph_module, captured.symbols)
            self.module.require_known_sizes()
            self.dimensions, self.values = captured.symbols.dimensions, captured.symbols.values(call.leaves)
            instance = self.module.at(self.values)
        self.reference: JointGraph = captured_graph(captured, model, loop, instance)
        self._compiled: dict[tuple, Callable[[Any, Strides], list[Any]]] = {}
        self._strides = gradient_strides(self.reference.analysis, None if self.module is None else self.module.fx)

    def sized(self, values: tuple[int, ...]) -> JointGraph:
        """The reference with the storages' bytes at these sizes, for simulations; its operations are unchanged."""
        if self.module is None or self.reference.analysis.restrided:
            return self.graph(values)
        return self.reference.resized(self.module.storage_bytes(values))

    def graph(self, values: tuple[int, ...]) -> JointGraph:
        """The graph of a step with these sizes, with all its shapes."""
        if self.module is None or values == self.values:
            return self.reference
        like = self.reference
        names = ("on_cpu", "optimizer_bytes", "optimizer_step_bytes", "accumulated_bytes", "scaled_loss_bytes")
        fields = {name: getattr(like, name) for name in (*names, "has_data", "as_compiled", "keeps_outputs")}
        return replace(described_graph(self.module.at(values)), **fields)

    def in_chunks(self, count: int) -> JointGraph:
        """The reference with its head in `count` chunks."""
        return self.reference if count == 1 else chunked(self.reference, count)

    def workspace_bytes(self, values: tuple[int, ...]) -> tuple[int, ...]:
        """The workspace of every operation at these sizes; 0 where it is not measured."""
        if not (self.reference.on_cpu and self.reference.has_data):
            return (0,) * len(self.reference.nodes)
        if values == self.values or not self._workspace.is_exact:
            return workspace_bytes(self.graph(values))
        return self._workspace.at(values)

    def described(self, values: tuple[int, ...], device: Device | str | None = None) -> tuple[JointGraph, Profile]:
        """The graph at these sizes and its profile, at the rates of `device` or of the GPU that it runs on."""
        graph = self.graph(values)
        return graph, default_profile(graph, device, self.workspace_bytes(values) if self.dimensions else None)

    @property
    def dynamic(self) -> tuple[tuple[int, int], ...]:
        """The dynamic dimensions, as a `Plan` names them."""
        return tuple((self.captured.given.index(each.leaf), each.dim) for each in self.dimensions)

    @cached_property
    def _workspace(self) -> DynamicWorkspace:
        assert self.module is not None
        return DynamicWorkspace(self.module, self.reference)

    def run(self, schedule: Schedule, values: tuple[int, ...], head_chunks: int) -> Callable[[Any], list[Any]]:
        """A function of the step's inputs, of these sizes, that runs `schedule`, one of ``in_chunks(head_chunks)``."""
        key = schedule.forward, schedule.backward, head_chunks
        if key not in self._compiled:
            graph = self.in_chunks(head_chunks)
            self._compiled[key] = compiled_schedule(self.captured, graph, schedule, self.module)
        step, strides = self._compiled[key], self._strides_at(values)
        return lambda inputs: step(inputs, strides)

    def _strides_at(self, values: tuple[int, ...]) -> Strides:
        if self.module is None:
            return self._strides
        flat = tuple(expression(stride) for strides in self._strides.values() for stride in strides)
        numbers = iter(self.module.symbols.evaluated(flat, values))
        return {at: tuple(next(numbers) for _ in strides) for at, strides in self._strides.items()}
