"""`ManySizes`: peaks, allocations and costs of schedules of one capture, at thousands of sizes."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from ackpt.metering.gpus import BLOCK
from ackpt.metering.kernel_memory import cuda_temporaries
from ackpt.metering.resident import rounded
from ackpt.planner.capture.call_facts import Sizes
from ackpt.planner.capture.joint_graph import JointGraph
from ackpt.planner.choose import default_profile
from ackpt.planner.costs.devices import Device
from ackpt.planner.costs.operation_costs import allocates, flops, traffic
from ackpt.planner.costs.profiles import Profile, default_rates, profile, seconds_of, with_gpu_workspace
from ackpt.planner.costs.workspace import calls_at, distinct_calls, with_tensors
from ackpt.planner.policies import auto, full
from ackpt.planner.policies.search.frontier import frontier, packing_cost
from ackpt.planner.schedule.schedule import Schedule, everything, recomputed
from ackpt.planner.schedule.simulator import peak_of, sizes_of

from .plans import CapturedStep

FULL, AUTO = "full", "auto"  # policies
Values = tuple[int, ...]  # the sizes of the dynamic dimensions of a capture


class ManySizes:
    """The step of one capture at all sizes that it serves.

    ``graph``: at the captured sizes, as a GPU allocates it if `gpu` is its rates; ``profile``: its costs. ``own``: the
    layouts of the captured call.
    """

    def __init__(self, step: CapturedStep, graph: JointGraph, gpu: Device | None = None, own: Sizes = ()):
        self.step, self.graph, self.gpu, self.own = step, graph, gpu, own
        sizes = [storage.bytes for storage in step.reference.storages]
        expressions = sizes if step.module is None else step.module.storage_sizes
        self._kinds = tuple(dict.fromkeys(expressions))
        number = {kind: at for at, kind in enumerate(self._kinds)}
        self._kind_of = np.array([number[each] for each in expressions])
        self._sizes: dict[Values, tuple[np.ndarray, np.ndarray]] = {}
        self._costs: dict[Values, tuple[np.ndarray, np.ndarray]] = {}

    @cached_property
    def profile(self) -> Profile:
        """Costs at the captured sizes, without times of copies to the host: plans do not offload."""
        if self.gpu is None:
            own = self.step.workspace_bytes(self.step.sizes) if self.step.dimensions else None
            return replace(default_profile(self.graph, None, own), swap_seconds=None)
        return replace(with_gpu_workspace(self.graph, profile(self.graph, self.gpu)), swap_seconds=None)

    def sized(self, values: Values) -> JointGraph:
        """The graph with the bytes of its storages at these sizes."""
        return self.graph.resized(self._at(values)[0][self._kind_of].tolist())

    def workspace_bytes(self, values: Values) -> np.ndarray:
        """The workspace of every operation at these sizes."""
        return self._at(values)[1]

    def peak(self, schedule: Schedule, values: Values) -> int:
        """The peak of `schedule` at these sizes, in bytes, resident ones included."""
        storages, workspace = self._at(values)[0][self._kind_of], self.workspace_bytes(values)
        dynamic = peak_of(self.graph, schedule, workspace, sizes_of(self.graph, storages))
        resident = int(storages[[*self.graph.analysis.resident]].sum())
        return dynamic + resident + self.graph.optimizer_bytes + self.graph.accumulated_bytes

    def values(self, sizes: Sizes) -> Values | None:
        """The sizes of the dynamic dimensions in a call with these layouts; None if the capture does not serve it."""
        if self.step.captured.symbols is None:
            return () if sizes == self.own else None
        return self.step.captured.symbols.values_in(sizes)

    def with_policy(self, policy: str, values: Values, budget: int | None) -> tuple[int, Schedule]:
        """The peak at these sizes and its schedule: for ``auto`` the cheapest within the budget, else the lowest."""
        schedule = self._full if policy == FULL else everything(self.graph)
        found = self.peak(schedule, values), schedule
        limit = float("inf") if policy != AUTO or budget is None else budget
        for schedule in self._frontier if found[0] > limit else ():
            found = min(found, (self.peak(schedule, values), schedule), key=lambda each: each[0])
            if found[0] <= limit:
                break
        return found

    @cached_property
    def _full(self) -> Schedule:
        return full.schedule(self.graph, self.profile, None)

    @cached_property
    def _frontier(self) -> list[Schedule]:
        return [point.schedule for point in frontier(self.graph, self.profile, auto.candidates)]

    def _at(self, values: Values) -> tuple[np.ndarray, np.ndarray]:
        """The bytes of every kind of storage, and the workspace of every operation."""
        if values not in self._sizes:
            kinds = self._evaluated(self._kinds, values)
            if self.gpu is None:
                workspace = np.array(self.step.workspace_bytes(values))
            else:
                kinds = [rounded(size, BLOCK) for size in kinds]
                workspace = np.zeros(len(self.graph.nodes), np.int64)
                for nodes, fx, args, kwargs, _ in self._called(self._with_temporaries, values):
                    workspace[nodes] = sum(rounded(size, BLOCK) for size in cuda_temporaries(fx.target, args, kwargs))
            self._sizes[values] = np.array(kinds, np.int64), workspace
        return self._sizes[values]

    def recompute_cost(self, schedule: Schedule, values: Values) -> tuple[int, float]:
        """FLOPs and seconds that `schedule` adds at these sizes; no seconds if the rates are unknown."""
        computed, seconds = self.costs(values)
        nodes = recomputed(self.graph, schedule)
        added = float(seconds[nodes].sum())
        if schedule.packed and self._rates is not None:
            here, own = (self._at(each)[0][self._kind_of[[*schedule.packed]]] for each in (values, self.step.sizes))
            added += packing_cost(self.graph, self.profile, schedule) * float(here.sum() / own.sum())
        return int(computed[nodes].sum()), added

    def costs(self, values: Values) -> tuple[np.ndarray, np.ndarray]:
        """FLOPs and seconds of every operation at these sizes."""
        if values not in self._costs:
            computed, seconds = np.zeros(len(self.graph.nodes), np.int64), np.zeros(len(self.graph.nodes))
            for nodes, fx, args, kwargs, result in self._called(self._calls, values):
                computed[nodes] = count = flops(fx, args, kwargs, result)
                if self._rates is not None:
                    moved = sum(traffic(fx, args, kwargs, result))
                    seconds[nodes] = seconds_of(self._rates, fx, args, kwargs, result, count, moved)
            self._costs[values] = computed, seconds
        return self._costs[values]

    @cached_property
    def _rates(self) -> Device | None:
        return default_rates(self.graph) if self.gpu is None else self.gpu

    @cached_property
    def _calls(self) -> list:
        """The distinct operations, with their results."""
        module = self.step.module
        nodes, root = (self.graph.analysis.fx, self.graph.module) if module is None else (module.fx, module.module)
        ids = (node.id for node in self.graph.nodes if allocates(nodes[node.id]))
        return distinct_calls(root, ((node_id, nodes[node_id]) for node_id in ids), results=True)

    @cached_property
    def _with_temporaries(self) -> list:
        """The calls that allocate temporaries at the captured sizes, and so at others."""
        own = self._called(self._calls, self.step.sizes)
        return [call for call, (_, fx, *both, _) in zip(self._calls, own) if cuda_temporaries(fx.target, *both)]

    def _called(self, calls: list, values: Values) -> Iterator[tuple]:
        """`calls` with tensors without data of these sizes: (nodes, one of them, args, kwargs, result)."""
        for nodes, fx, leaves, spec in calls_at(calls, self.step.captured.symbols, values):
            yield nodes, fx, *with_tensors(leaves, spec)

    def _evaluated(self, expressions: tuple[Any, ...], values: Values) -> Sequence[int]:
        symbols = self.step.captured.symbols
        return expressions if symbols is None else symbols.evaluated(expressions, values)
