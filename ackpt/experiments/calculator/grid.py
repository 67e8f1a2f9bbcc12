"""The grid of the memory calculator: for every model and way of training, the formulas of its peaks, as plain data.

A step is captured at the three sizes of `POINTS`, with `CAPTURED` blocks if the model is a row of equal blocks. GPUs
whose compute capability leads to the same events share formulas.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Sequence
from typing import Any

import numpy as np

from ackpt.capture.joint_graph import FORWARD
from ackpt.capture.optimizer_state import eight_bit_bytes, optimizer_bytes
from ackpt.costs.devices import DEVICES, device
from ackpt.metering.gpus import CAPABILITIES, Gpu, gpu
from ackpt.metering.resident import rounded
from ackpt.planning.live_bytes import CATEGORIES
from ackpt.planning.schedule import recomputed
from ackpt.sharded.blocks import CAPTURED, deep
from ackpt.sharded.sharding import GroupBytes, Sharding, groups_of
from ackpt.sharded.step import CATEGORIES_OF_A_RANK, ROOT, ShardingError, Window
from ackpt.workloads.adapters import Lora
from ackpt.workloads.named_models import training_step
from ackpt.workloads.optimizers import EIGHT_BIT, OPTIMIZERS
from ackpt.workloads.planned_shapes import CUDA_BLOCK, PlanConfig
from ackpt.workloads.step_request import DTYPES, StepRequest

from .polynomials import (
    RANKS,
    TERMS,
    UNIT,
    Events,
    NotExact,
    Point,
    Points,
    Run,
    features,
    instants,
    terms,
    terms_like,
    upper,
)
from .presets import LORA_RANK, Preset
from .windows import CapturedStep

SCHEMA = {"schema": "ackpt.calculator", "version": 1}
HALF, MIXED, SINGLE, LORA = "half", "mixed", "single", "lora"
MODES = {
    HALF: "16-bit parameters, all trained",
    MIXED: "32-bit parameters, all trained, autocast to 16 bits",
    SINGLE: "32-bit parameters, all trained",
    LORA: f"LoRA adapters (r = {LORA_RANK}) of a 16-bit model",
}
NONE, FIRST_BLOCKS, PER_BLOCK = "none", "first blocks", "per block"
POLICIES = (NONE, FIRST_BLOCKS, PER_BLOCK)
# A GPU of each kind that chooses kernels in its own way; the first is the one whose steps are captured at all sizes.
KINDS = {"8.0": "a100-80g", "9.0": "h100-80g", "8.9": "l4", "7.5": "t4"}
# What the page offers to paste: a call, and how each optimizer is made.
CALL = """import ackpt, torch

# once, before training; batch: one batch on the model's device
optimizer = OPTIMIZER
ackpt.apply_budget(model, batch, budget="BUDGET", optimizer=optimizer)"""
MADE_BY = {
    "adamw": "torch.optim.AdamW(model.parameters())",
    "adamw-fused": "torch.optim.AdamW(model.parameters(), fused=True)",
    "adamw-for-loop": "torch.optim.AdamW(model.parameters(), foreach=False)",
    "adamw-8bit": "bitsandbytes.optim.AdamW8bit(model.parameters())",
    "adafactor": "torch.optim.Adafactor(model.parameters())",
    "sgd": "torch.optim.SGD(model.parameters())",
    "sgd-momentum": "torch.optim.SGD(model.parameters(), momentum=0.9)",
}
SHARDED_OPTIMIZERS = ("adamw", "adamw-fused", "sgd", "sgd-momentum")
# With these, all tensors of batch size times length elements fill multiples of the 512 bytes of an allocator's block.
TOKENS = Points(Point(4, 1), Point(12, 4), Point(2, 2))
IMAGES = Points(Point(256), Point(512), Point(1024))
ALIKE = 2e-4  # of what a step allocates in all
LARGEST = {MIXED: 4 * 10**9, SINGLE: 4 * 10**8}  # parameters of models on one GPU; above, 32 bits fit none
LARGEST_OLD = 2 * 10**9  # and on T4 and V100, whose kernels may need other memory
WIDEST = 192  # heads, which every GPU from compute capability 8.0 on takes alike
BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256, 512, 1024)
LENGTHS = (128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768)


def kind_of(on: Gpu) -> str:
    """The name in `KINDS` of the GPUs that choose kernels like this one."""
    if on.capability in ((9, 0), (10, 0)):
        return "9.0"
    return "7.5" if on.capability < (8, 0) else "8.9" if on.capability >= (8, 6) and on.capability[0] != 9 else "8.0"


def plan_config(
    preset: Preset, mode: str, on: str, batch: int, length: int | None, layers: int | None = None, **more
) -> PlanConfig:
    """What to ask ``ackpt plan`` for: the step of a model on the GPU called `on`."""
    half = "bfloat16" if "bfloat16" in device(on).flops_per_second else "float16"
    lora = Lora({"r": LORA_RANK, "target_modules": list(preset.lora)}) if mode == LORA else None
    fields = preset.fields if layers is None else {**preset.fields, preset.depth: layers}
    request = StepRequest(
        preset.model,
        batch,
        length if preset.has_tokens else None,
        fields=dict(fields),
        dtype=DTYPES[half if mode in (HALF, LORA) else "float32"],
        lora=lora,
    )
    return PlanConfig(request, autocast=half if mode == MIXED else "float32", device=on, **more)


def shardings(mode: str) -> dict[str, Sharding]:
    """Modes of sharded steps whose blocks compute as those of `mode`; the number of ranks is a stand-in."""
    if mode == HALF:
        return {HALF: Sharding(2), MIXED: Sharding(2, DTYPES["float32"], DTYPES["float32"])}
    return {SINGLE: Sharding(2)} if mode == SINGLE else {}


def entry_of(preset: Preset, known: dict[tuple[str, str], list[Measured]]) -> dict:
    """The data of one model; formulas that several ways of training or kinds of GPUs share are stored once.

    `known`: steps of other models by mode and kind of GPU, to which those of this one are added.
    """
    formulas: list[dict] = []

    def stored(data: dict) -> int:
        if data not in formulas:
            formulas.append(data)
        return formulas.index(data)

    def measure(mode: str, kind: str) -> Measured:
        family = known.setdefault((mode, kind), [])
        family.append(Measured.of(preset, mode, kind, family))
        return family[-1]

    residents = {mode: resident(preset, mode) for mode in (HALF, SINGLE, LORA) if mode != LORA or preset.lora}
    residents[MIXED] = residents[SINGLE]  # autocast changes neither parameters nor optimizer
    count = residents[HALF]["count"]
    modes = [mode for mode in MODES if mode in residents and count < LARGEST.get(mode, count + 1)]
    entry: dict[str, Any] = {
        "name": preset.name,
        "label": preset.label,
        "model": preset.model,
        "fields": preset.fields,
        "lora": list(preset.lora),
        "longest": preset.longest,
        "modes": {},
        "formulas": formulas,
    }
    first, *others = KINDS
    alike = _alike(preset, count)
    for mode in modes:
        measured = {first: measure(mode, first)}
        for kind in others:
            if kind not in alike and mode != SINGLE and (kind != "7.5" or count < LARGEST_OLD):
                measured[kind] = measure(mode, kind)
        kinds = [kind for kind in KINDS if kind in measured or kind in alike]
        fits = {kind: each.formulas() for kind, each in measured.items()}
        entry["modes"][mode] = {
            **residents[mode],
            "inputs": measured[first].inputs(),
            "formulas": {kind: stored(fits.get(kind, fits[first])[0]) for kind in kinds},
        }
        for name in shardings(mode):
            sharded = {kind: fit[1][name] for kind, fit in fits.items() if name in fit[1]}
            if first in sharded:
                entry.setdefault("sharded", {})[name] = {
                    **sharded_resident(preset, mode, name, residents[name]),
                    "inputs": measured[first].inputs(),
                    "formulas": {kind: stored(sharded.get(kind, sharded[first])) for kind in kinds},
                }
        del measured
        gc.collect()
    return entry


class At:
    """The windows of a step at one size, by what it does."""

    def __init__(self, captured: CapturedStep, point: Point, mode: str, ranks: Sequence[int]):
        self.point = point
        none, per_block, half = captured.none(), captured.per_block(), captured.per_block(CAPTURED // 2)
        schedules = {NONE: none, PER_BLOCK: per_block, FIRST_BLOCKS: half}
        self.rows = {name: captured.windows(schedule) for name, schedule in schedules.items()}
        self.flops, self.owners = captured.profile.flops, captured.owners
        self.recomputed, self.recomputed_by_ranks = recomputed(captured.graph, per_block), []
        self.inputs = captured.graph.bytes()["input"]
        self.sharded: dict[str, dict[int, list[list[Window]]]] = {}  # by mode and ranks: without and with recomputation
        for name, sharding in shardings(mode).items():
            try:
                self.sharded[name] = {
                    n: captured.sharded(Sharding(n, sharding.parameters, sharding.reduction)) for n in ranks
                }
            except ShardingError:
                continue
            self.recomputed_by_ranks = captured.recomputed_by_ranks()

    def shape(self) -> list:
        """Phases, groups and categories of all windows, which models with equal events share."""
        rows = [*self.rows.values(), *(row for by_ranks in self.sharded.values() for row in by_ranks[RANKS[0]])]
        windows = [(w.phase, w.group, [category for _, category in w.events]) for row in rows for w in row]
        return [windows, len(self.flops), self.recomputed]


class Measured:
    """The step of a preset at several sizes, on one kind of GPU; ``layers``: how many of its blocks are captured.

    ``like``: the same for a model with equal events but other widths, which has the exponents; then one size is enough.
    """

    def __init__(self, preset: Preset, mode: str, layers: int | None, points: Points, at: list[At], like=None):
        self.preset, self.layers, self.points, self.at, self.like = preset, layers, points, at, like
        self.blocks = len(groups_of(_whole(preset, mode).model)) - 1
        self.found: list[np.ndarray] = []  # coefficients in the order in which they are asked for

    @classmethod
    def of(cls, preset: Preset, mode: str, kind: str, known: Sequence[Measured] = ()) -> Measured:
        """The step at all sizes; with few blocks if the others' windows repeat. `known`: steps of similar models."""
        points = TOKENS if preset.has_tokens else IMAGES
        layers, first = None, None
        if preset.repeats:
            layers, first = CAPTURED, cls.captured(preset, mode, kind, CAPTURED, points.first, RANKS)
            try:
                for policy in (NONE, PER_BLOCK):
                    deep(first.rows[policy], CAPTURED + 1)
            except ShardingError:
                layers, first = None, None
        first = first or cls.captured(preset, mode, kind, None, points.first, RANKS)
        for like in known:
            if like.like is None and like.layers == layers and first.shape() == like.at[0].shape():
                with contextlib.suppress(NotExact):
                    alone = cls(preset, mode, layers, points, [first], like)
                    alone.formulas()
                    return alone
        others = points[1:] if mode in (HALF, SINGLE) and kind == "8.0" else points[1:2]
        rest = [cls.captured(preset, mode, kind, layers, point, RANKS[:1]) for point in others]
        return cls(preset, mode, layers, points, [first, *rest])

    def _terms(self, values: list) -> np.ndarray:
        """Coefficients of the values of each size, which are asked for in the order of `like`."""
        if self.like is None:
            found = terms(values, self.points)
        else:
            found = terms_like(values[0], self.like.found[len(self.found)], self.points.first)
        self.found.append(found)
        return found

    @staticmethod
    def captured(preset: Preset, mode: str, kind: str, layers, point: Point, ranks: Sequence[int] = ()) -> At:
        length = point.length * UNIT if preset.has_tokens else None
        config = plan_config(preset, mode, KINDS[kind], point.batch, length, layers)
        return At(CapturedStep.of(config), point, mode, ranks)

    def inputs(self) -> list[int]:
        return self._inputs

    def formulas(self) -> tuple[dict, dict[str, dict]]:
        """The formulas of the step, and of its sharded versions by mode."""
        self.found.clear()
        self._inputs = _trimmed(self._terms([[at.inputs] for at in self.at])[0])
        by_node = self._terms([at.flops for at in self.at])
        common = {"blocks": self.blocks, **self._flops(by_node, self.at[0].recomputed)}
        runs = {name: self._events([at.rows[name] for at in self.at]) for name in POLICIES}
        single = {**common, **self._policies(runs, CATEGORIES)}
        sharded = {}
        for name in self.at[0].sharded:
            runs = {}
            for number, policy in enumerate((NONE, PER_BLOCK)):
                same = [at.sharded[name][RANKS[0]][number] for at in self.at]
                runs[policy] = self._events(same, [self.at[0].sharded[name][n][number] for n in RANKS])
            flops = self._flops(by_node, self.at[0].recomputed_by_ranks)
            sharded[name] = {"blocks": self.blocks, **flops, **self._policies(runs, CATEGORIES_OF_A_RANK)}
        return single, sharded

    def _flops(self, by_node: np.ndarray, recomputed: Sequence[int]) -> dict:
        """FLOPs of the step, of per-block checkpointing, and by number of checkpointed blocks: of none and each."""
        first = self.at[0]
        count = 1 + (self.layers or self.blocks)
        flops, again = (np.zeros((count, len(TERMS)), dtype=np.int64) for _ in range(2))
        for node, owner in enumerate(first.owners):
            flops[owner] += by_node[node]
        for node in recomputed:
            again[first.owners[node]] += by_node[node]
        found: dict[str, Any] = {"flops": _trimmed(self._total(flops)), "recomputed": _trimmed(self._total(again))}
        if self.layers is not None:
            found["recomputed_by_m"] = [_trimmed(again[1] - again[2]), _trimmed(again[2])]
        return found

    def _total(self, by_group: np.ndarray) -> np.ndarray:
        if self.layers is None:
            return by_group.sum(axis=0)
        return by_group[ROOT] + by_group[1] + (self.blocks - 2) * by_group[2] + by_group[CAPTURED]

    def _events(self, rows: list[list[Window]], by_ranks: Sequence[list[Window]] = ()) -> list[tuple[str, int, Events]]:
        """Phase, group and events of each window; `rows`: one per point, `by_ranks`: one per number of ranks."""
        events = []
        for windows in zip(*rows, strict=True):
            first = windows[0]
            categories = [category for _, category in first.events]
            for other in windows:
                if (other.phase, other.group, [c for _, c in other.events]) != (first.phase, first.group, categories):
                    raise NotExact(f"{self.preset.name}: the events of {first.phase} of group {first.group} differ")
            sizes = self._terms([[size for size, _ in window.events] for window in windows])
            events.append((first.phase, first.group, Events(sizes, categories)))
        return self._with_ranks(events, by_ranks) if by_ranks else events

    def _with_ranks(self, events, by_ranks):
        """`events` with a column for each number of ranks, in which the events are that do not depend on sizes."""
        wide = []
        for (phase, group, one), windows in zip(events, zip(*by_ranks, strict=True)):
            columns = np.zeros((len(one.category), len(RANKS)), dtype=np.int64)
            sizes = one.sizes.copy()
            for event, of_ranks in enumerate(zip(*(window.events for window in windows), strict=True)):
                values = [size for size, _ in of_ranks]
                if {category for _, category in of_ranks} != {one.category[event]}:
                    raise NotExact(f"{self.preset.name}: the events of a rank depend on the number of ranks")
                if len(set(values)) > 1:
                    if sizes[event, 1:].any():
                        raise NotExact(f"{self.preset.name}: an event depends on sizes and on the number of ranks")
                    columns[event], sizes[event] = values, 0
            wide.append((phase, group, Events(np.concatenate([sizes, columns], axis=1), one.category)))
        return wide

    def _policies(self, runs: dict, categories: Sequence[str]) -> dict:
        is_sharded = runs[NONE][0][2].sizes.shape[1] > len(TERMS)
        m_values = sorted({2, self.blocks // 4, self.blocks // 2, 3 * self.blocks // 4, self.blocks - 2} - {0, 1})
        policies, end = {}, None
        for policy in runs:
            if policy == FIRST_BLOCKS and (self.layers is None or self.blocks < 2 * CAPTURED):
                continue
            row = [Run(events) for _, _, events in runs[policy]] if self.layers is None else self._deep(runs, policy)
            live, last = instants(row, len(categories), runs[NONE][0][2].sizes.shape[1])
            chosen = upper(live, self._places(is_sharded), m_values if policy == FIRST_BLOCKS else [0])
            policies[policy] = [_by_category(instant, categories) for instant in chosen]
            if end is not None and not np.array_equal(end, last):
                raise NotExact(f"{self.preset.name}: policies end with different bytes")
            end = last
        assert end is not None
        return {"peaks": policies, "end": _by_category(end, categories)}

    def _deep(self, runs: dict, policy: str) -> list[Run]:
        """The whole model's row of windows: repeated ones stand for the blocks between the first and the last.

        With m checkpointed blocks, the windows of blocks 1, m, m + 1 and the last are those of blocks 1 to 4 of a step
        with 2 checkpointed blocks; those between are as if all or no blocks were checkpointed.
        """
        row = []
        for place, (phase, group, events) in enumerate(runs[policy]):
            if policy != FIRST_BLOCKS:
                row += [Run(events, self.blocks - 2)] if group == 2 else [Run(events)] if group != 3 else []
                continue
            between = {
                2: Run(runs[PER_BLOCK][place][2], -2, 1),
                3: Run(runs[NONE][place][2], self.blocks - 2, -1),
            }
            around = [between[group]] if group in between else []
            before = group == 2 if phase == FORWARD else group == 3
            row += [*around, Run(events)] if before else [Run(events), *around]
        return row

    def _places(self, is_sharded: bool) -> np.ndarray:
        lengths = [length / UNIT for length in LENGTHS if length <= self.preset.longest] or [1]
        points = [(batch, length) for batch in BATCHES for length in lengths]
        return features(points, RANKS if is_sharded else ())


def resident(preset: Preset, mode: str) -> dict:
    """Bytes of parameters and buffers, and of state and step of each optimizer; the number of parameters."""
    step = _whole(preset, mode)
    parameters = list(step.model.parameters())
    found = {name: _optimizer(name, kind, step.model, preset) for name, kind in OPTIMIZERS.items() if kind is not None}
    return {
        "count": step.parameters,
        "trained": sum(p.numel() for p in parameters if p.requires_grad),
        "parameters": _rounded(parameters),
        "buffers": _rounded(step.model.buffers()),
        "optimizers": found,
    }


def _optimizer(name: str, kind, model, preset: Preset) -> list[int]:
    """Bytes of an optimizer's state and step; equal blocks add the same bytes each, so that 2 and 3 determine all."""
    groups, parameters = groups_of(model), dict(model.named_parameters())
    blocks = len(groups) - 1

    def of(some) -> list[int]:
        optimizer = kind([parameters[weight.name] for group in some for weight in group.weights])
        return [eight_bit_bytes(optimizer, False), 0] if name == EIGHT_BIT else [*optimizer_bytes(optimizer, False)]

    if not preset.repeats or blocks < CAPTURED or len({group.shapes() for group in groups[1:]}) > 1:
        return of(groups)
    return [two + (blocks - 2) * (three - two) for two, three in zip(of(groups[:3]), of(groups[:4]))]


def sharded_resident(preset: Preset, mode: str, name: str, unsharded: dict) -> dict:
    """The same of one rank; `unsharded`: of the whole model.

    ``parameters``: a list over the numbers of ranks in `RANKS`. ``optimizers``: state and step in multiples of the
    shards, and bytes of the state that each rank holds in addition, such as counts of steps.
    """
    groups = groups_of(_whole(preset, mode).model)
    of_ranks = shardings(mode)[name]
    each = [Sharding(n, of_ranks.parameters, of_ranks.reduction, CUDA_BLOCK) for n in RANKS]
    optimizers, whole = {}, unsharded["parameters"]
    for optimizer in SHARDED_OPTIMIZERS:
        state, step = unsharded["optimizers"][optimizer]
        optimizers[optimizer] = [state // whole, step // whole, state % whole]
        if step % whole:
            raise NotExact(f"{preset.name}: the step of {optimizer} does not take a multiple of the parameters")
    shards = [sum(GroupBytes(group, sharding).shards for group in groups) for sharding in each]
    return {"parameters": shards, "buffers": unsharded["buffers"], "optimizers": optimizers}


def header() -> dict:
    """What does not depend on models."""
    gpus = {
        name: {
            "memory": device(name).memory_bytes,
            "context": gpu(name).context_bytes,
            "workspace": gpu(name).cublas_workspace_bytes,
            "kind": kind_of(gpu(name)),
            "half": "bfloat16" if "bfloat16" in device(name).flops_per_second else "float16",
        }
        for name in CAPABILITIES
        if name in DEVICES
    }
    return {
        **SCHEMA, "unit": UNIT, "terms": TERMS, "ranks": RANKS, "modes": MODES, "gpus": gpus,
        "optimizers": [name for name, kind in OPTIMIZERS.items() if kind is not None],
        "sharded_optimizers": SHARDED_OPTIMIZERS, "call": CALL, "made_by": MADE_BY,
    }  # fmt: skip


def _two_blocks(preset: Preset, kind: str) -> list[int]:
    """Bytes that a step with two blocks allocates in all, without and with recomputation, on GPUs of this kind."""
    point = TOKENS.second if preset.has_tokens else IMAGES.first
    layers = 2 if preset.repeats else None
    captured = CapturedStep.of(
        plan_config(preset, HALF, KINDS[kind], point.batch, point.length * UNIT if preset.has_tokens else None, layers)
    )
    rows = [captured.windows(schedule) for schedule in (captured.none(), captured.per_block())]
    return [sum(max(0, size) for window in row for size, _ in window.events) for row in rows]


def _alike(preset: Preset, count: int) -> set[str]:
    """The kinds of GPUs on which a step allocates the same, but for a few blocks of 512 bytes, as on the first kind.

    Hopper's kernels of attention allocate what Ampere's do, and Ada's, too, up to a width of heads of 192.
    """
    first, *others = KINDS
    is_wide = preset.fields.get("head_dim", 0) > WIDEST
    alike = {first, "9.0"} | ({"8.9"} if not is_wide else set())
    compared = [kind for kind in others if kind not in alike and (kind != "7.5" or count < LARGEST_OLD)]
    one = _two_blocks(preset, first) if compared else []
    return alike | {
        kind for kind in compared if all(abs(a - b) <= ALIKE * a for a, b in zip(one, _two_blocks(preset, kind)))
    }


def _whole(preset: Preset, mode: str):
    return training_step(plan_config(preset, mode, KINDS["8.0"], 1, UNIT).step)


def _rounded(tensors) -> int:
    sizes = {id(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(rounded(size, CUDA_BLOCK) for size in sizes.values())


def _trimmed(coefficients) -> list[int]:
    """Coefficients without the zeros at their end."""
    values = [int(value) for value in coefficients]
    while values and not values[-1]:
        values.pop()
    return values


def _by_category(instant: np.ndarray, categories: Sequence[str]) -> dict[str, list]:
    """Formulas (category, power of m, term) by category: coefficients, and those times m and of ranks if there are any.

    A formula is ``[sizes]``, ``[sizes, sizes per m]`` or ``[sizes, sizes per m, numbers by ranks, those per m]``.
    """
    found = {}
    for category, (fixed, per_m) in zip(categories, instant):
        parts = [_trimmed(part) for part in (fixed[: len(TERMS)], per_m[: len(TERMS)])]
        parts += [_trimmed(part) for part in (fixed[len(TERMS) :], per_m[len(TERMS) :])]
        while parts and not parts[-1]:
            parts.pop()
        if parts:
            found[category] = parts
    return found
