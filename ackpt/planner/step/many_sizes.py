"""`ManySizes`: peaks, allocations and costs of schedules of one capture, at thousands of sizes.

At every step of a schedule, the live bytes are a sum of storages, whose bytes are a few expressions in the sizes. So
the peaks at many sizes are one product of two matrices: how many storages of every kind are live at every step, and
the bytes of every kind at every size. `tests/planner/step/test_dynamic.py` compares them with the simulator.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from ackpt.metering.gpus import BLOCK
from ackpt.metering.kernel_memory import cuda_temporaries
from ackpt.metering.resident import rounded
from ackpt.planner.capture.joint_graph import JointGraph
from ackpt.planner.capture.mask_bits import packed_bytes
from ackpt.planner.choose import default_profile
from ackpt.planner.costs.devices import Device
from ackpt.planner.costs.operation_costs import allocates, flops, traffic
from ackpt.planner.costs.profiles import Profile, default_rates, profile, seconds_of, with_gpu_workspace
from ackpt.planner.costs.workspace import TensorLayout, evaluated, key_of, layout_of, numbers_of, tensor_of, value_of
from ackpt.planner.policies.search.frontier import packing_cost
from ackpt.planner.schedule.schedule import (
    COMPUTE,
    FREE,
    KINDS,
    PACK,
    PREFETCH,
    UNPACK,
    Schedule,
    StepArrays,
    recomputed,
)
from ackpt.planner.schedule.simulator import rng_state_bytes

from .plans import CapturedStep

Values = tuple[int, ...]  # the sizes of the dynamic dimensions of a capture
_AT_ONCE = 256  # sizes in one product, which bounds its memory


class ManySizes:
    """The step of one capture at all sizes that it serves.

    ``graph``: at the captured sizes, as a GPU allocates it if `gpu` is its rates; ``profile``: its costs.
    """

    def __init__(self, step: CapturedStep, graph: JointGraph, gpu: Device | None = None):
        self.step, self.graph, self.gpu = step, graph, gpu
        sizes = [storage.bytes for storage in step.reference.storages]
        expressions = sizes if step.module is None else step.module.storage_sizes
        self._kinds = tuple(dict.fromkeys(expressions))
        number = {kind: at for at, kind in enumerate(self._kinds)}
        self._kind_of = np.array([number[each] for each in expressions])
        self._sizes: dict[Values, tuple[np.ndarray, np.ndarray]] = {}
        self._live: dict[tuple, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
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

    def peaks(self, schedule: Schedule, sizes: Sequence[Values]) -> np.ndarray:
        """The peak of `schedule` at each of these sizes, in bytes, resident ones included."""
        parts = [self._peaks(schedule, sizes[at : at + _AT_ONCE]) for at in range(0, len(sizes), _AT_ONCE)]
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)

    def _peaks(self, schedule: Schedule, sizes: Sequence[Values]) -> np.ndarray:
        kinds = np.array([self._at(values)[0] for values in sizes])
        masks = [packed_bytes(kinds[:, kind] // element) for kind, element in self._masks]  # pyright: ignore
        live, nodes, is_below = self._live_of(schedule)
        workspace = np.array([self.workspace_bytes(values) for values in sizes])[:, nodes] * (nodes >= 0)
        used = ~is_below | workspace.any(axis=0)
        dynamic = np.array([*kinds.T, *masks, np.ones(len(sizes))]).T @ live[:, used]  # exact below 2**53
        resident = kinds @ self._resident + self.graph.optimizer_bytes + self.graph.accumulated_bytes
        return resident + (dynamic.astype(np.int64) + workspace[:, used]).max(axis=1)

    def _live_of(self, schedule: Schedule) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """How many storages of each kind, packed masks, and other bytes are live at every step.

        With the node that each step computes, -1 for none, and whether another step has at least as many of all.
        """
        key = schedule.forward, schedule.backward
        if key not in self._live:
            size, bits, allocated, again = self._units
            replayed = [*schedule.replayed]
            state = rng_state_bytes(self.graph) if replayed else 0
            allocated = allocated.copy()
            allocated[-1, replayed] += state
            forward = _changes(schedule.forward_arrays, size, bits, allocated).cumsum(axis=1)
            changes = _changes(schedule.backward_arrays, size, bits, again)
            changes[:, 0] += forward[:, -1] + size[:, self._tangents].sum(axis=1)
            changes[-1, 0] += self.graph.analysis.incoming_bytes
            changes[-1, [place + 1 for place in schedule.last_replays]] -= state
            backward = changes.cumsum(axis=1)
            backward[-1, -1] += self.graph.optimizer_step_bytes - self.graph.scaled_loss_bytes
            live = np.hstack([forward, backward])
            nodes = np.concatenate([_computed(schedule.forward_arrays), _computed(schedule.backward_arrays)])
            live[-1, forward.shape[1] :][np.isin(nodes[forward.shape[1] :], replayed)] += state
            is_below = np.zeros(len(nodes), bool)
            is_below[:-1] = (live[:, :-1] <= live[:, 1:]).all(axis=0)
            is_below[1:] |= (live[:, 1:] <= live[:, :-1]).all(axis=0) & (live[:, 1:] < live[:, :-1]).any(axis=0)
            self._live[key] = live, nodes, is_below
        return self._live[key]

    @cached_property
    def _masks(self) -> list[tuple[int, int]]:
        """The kinds of storages that are masks, with the bytes of an element."""
        masks = self.graph.analysis.masks.items()
        return [*dict.fromkeys((int(self._kind_of[storage]), mask.dtype.itemsize) for storage, mask in masks)]

    @cached_property
    def _tangents(self) -> list[int]:
        return [s for node in self.graph.analysis.tangents for s in self.graph.nodes[node].storages]

    @cached_property
    def _units(self) -> tuple[np.ndarray, ...]:
        """Bytes by storage, packed and not, and by node, where only the storages of one kind or its masks have any."""
        masks = self.graph.analysis.masks.items()
        number = {each: len(self._kinds) + at for at, each in enumerate(self._masks)}
        rows = len(self._kinds) + len(number) + 1
        bits = np.zeros((rows, len(self._kind_of)))
        for storage, mask in masks:
            bits[number[int(self._kind_of[storage]), mask.dtype.itemsize], storage] = 1
        units = [self.graph.resized((self._kind_of == row).astype(int).tolist()).analysis for row in range(rows)]
        size = np.array([unit.bytes for unit in units], float)
        allocated = np.array([unit.allocated_bytes for unit in units], float)
        return size, bits, allocated, np.array([unit.recomputed_bytes for unit in units], float)

    @cached_property
    def _resident(self) -> np.ndarray:
        return np.bincount(self._kind_of[list(self.graph.analysis.resident)], minlength=len(self._kinds))

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
    def _calls(self) -> list[tuple]:
        """(nodes, one of them, leaves of its arguments and result, their pytree) of every distinct operation."""
        module = self.step.module
        calls: dict[Any, tuple] = {}
        for node in self.graph.nodes:
            fx = self.graph.analysis.fx[node.id] if module is None else module.fx[node.id]
            if allocates(fx):
                args, kwargs = torch.fx.map_arg((fx.args, fx.kwargs), self._value)
                leaves, spec = tree_flatten((args, kwargs, fx.meta.get("val")))
                layouts = list(map(layout_of, leaves))
                key = fx.target, spec, tuple(map(key_of, layouts))
                calls.setdefault(key, ([], fx, layouts, spec))[0].append(node.id)
        return list(calls.values())

    @cached_property
    def _with_temporaries(self) -> list[tuple]:
        """The calls that allocate temporaries at the captured sizes, and so at others."""
        own = self._called(self._calls, self.step.sizes)
        return [call for call, (_, fx, *both, _) in zip(self._calls, own) if cuda_temporaries(fx.target, *both)]

    def _called(self, calls: list[tuple], values: Values) -> Iterator[tuple]:
        """`calls` with tensors without data of these sizes: (nodes, one of them, args, kwargs, result)."""
        expressions = tuple(number for _, _, leaves, _ in calls for leaf in leaves for number in numbers_of(leaf))
        numbers = iter(self._evaluated(expressions, values))
        for nodes, fx, leaves, spec in calls:
            known = [evaluated(leaf, numbers) for leaf in leaves]
            tensors = [tensor_of(leaf) if isinstance(leaf, TensorLayout) else leaf for leaf in known]
            yield nodes, fx, *tree_unflatten(tensors, spec)

    def _value(self, node: torch.fx.Node) -> Any:
        if self.step.module is None:
            return value_of(self.graph, node)
        return node.meta["val"] if "val" in node.meta else getattr(self.step.module.module, str(node.target))

    def _evaluated(self, expressions: tuple[Any, ...], values: Values) -> Sequence[int]:
        symbols = self.step.captured.symbols
        return expressions if symbols is None else symbols.evaluated(expressions, values)


def _changes(steps: StepArrays, size: np.ndarray, bits: np.ndarray, allocated: np.ndarray) -> np.ndarray:
    """The bytes that every step allocates or frees, a row for each row of the bytes, and a last column for the end."""
    ids, places = steps.ids, dict(zip(KINDS, steps.places))
    changes = np.zeros((len(size), len(ids) + 1))
    changes[:, places[COMPUTE]] = allocated[:, ids[places[COMPUTE]]]
    changes[:, places[FREE]] = -size[:, ids[places[FREE]]]
    changes[:, places[PACK]] = bits[:, ids[places[PACK]]]
    for kind in (PREFETCH, UNPACK):
        changes[:, places[kind]] = size[:, ids[places[kind]]]
    for storage, place in dict(zip(ids[places[UNPACK]].tolist(), places[UNPACK].tolist())).items():
        changes[:, place + 1] -= bits[:, storage]
    return changes


def _computed(steps: StepArrays) -> np.ndarray:
    """The node that every step computes, -1 for none and for the end."""
    return np.append(np.where(steps.kinds == KINDS.index(COMPUTE), steps.ids, -1), -1)
