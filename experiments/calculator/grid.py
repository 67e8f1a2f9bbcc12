"""The grid of the memory calculator: the formulas of the peaks for every model and way of training, as plain data.

A step is captured at three sizes, with `CAPTURED` blocks if the model is a row of equal blocks, see `measured`. GPUs
whose compute capability leads to the same events share formulas.
"""

from __future__ import annotations

import gc
from typing import Any

from ackpt.metering.gpus import BLOCK, CAPABILITIES, gpu
from ackpt.metering.resident import rounded
from ackpt.planner.capture.optimizer_state import eight_bit_bytes, optimizer_bytes
from ackpt.planner.costs.devices import DEVICES, device
from ackpt.planner.sharding.planner import CAPTURED
from ackpt.planner.sharding.sharding import GroupBytes, Sharding, groups_of
from ackpt.planner.workloads.step_request import EIGHT_BIT, OPTIMIZERS

from .choices import HALF, KINDS, LORA, MIXED, MODES, SINGLE, kind_of, plan_config, shardings, whole_step
from .measured import Measured, points_of
from .polynomials import RANKS, TERMS, UNIT, NotExact
from .presets import PRESETS, Preset
from .windows import CapturedStep

SCHEMA = {"schema": "ackpt.calculator", "version": 1}
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
ALIKE = 2e-4  # of all bytes that a step allocates
LARGEST = {MIXED: 4 * 10**9, SINGLE: 4 * 10**8}  # parameters of models on one GPU; larger models fit no GPU in 32 bits
LARGEST_OLD = 2 * 10**9  # and on T4 and V100, whose kernels may need other memory
WIDEST = 192  # heads, for which all GPUs from compute capability 8.0 on use the same kernels


def entry_of(preset: Preset, known: dict[tuple[str, str], list[Measured]]) -> dict:
    """The data of one model; formulas that several ways of training or kinds of GPUs share are stored once.

    `known`: steps of other models by mode and kind of GPU; the function adds the steps of this model.
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
            is_whole = residents[name]["trained"] == residents[name]["count"]  # shards of state are those of parameters
            if first in sharded and is_whole:
                entry.setdefault("sharded", {})[name] = {
                    **sharded_resident(preset, mode, name, residents[name]),
                    "inputs": measured[first].inputs(),
                    "formulas": {kind: stored(sharded.get(kind, sharded[first])) for kind in kinds},
                }
        del measured
        gc.collect()
    return entry


def resident(preset: Preset, mode: str) -> dict:
    """Bytes of parameters and buffers, and of state and step of each optimizer; the number of parameters."""
    step = whole_step(preset, mode)
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
    """Bytes of an optimizer's state and step; each block adds the same bytes, so 2 and 3 blocks determine all."""
    groups, parameters = groups_of(model), dict(model.named_parameters())
    blocks = len(groups) - 1

    def of(some) -> list[int]:
        optimizer = kind([parameters[weight.name] for group in some for weight in group.weights])
        return [eight_bit_bytes(optimizer, False), 0] if name == EIGHT_BIT else [*optimizer_bytes(optimizer, False)]

    if not preset.repeats or blocks < CAPTURED or len({group.shapes() for group in groups[1:]}) > 1:
        return of(groups)
    return [two + (blocks - 2) * (three - two) for two, three in zip(of(groups[:3]), of(groups[:4]))]


def sharded_resident(preset: Preset, mode: str, name: str, unsharded: dict) -> dict:
    """The same bytes for one rank; `unsharded`: those of the unsharded model.

    ``parameters``: a list over the numbers of ranks in `RANKS`. ``optimizers``: state and step in multiples of the
    shards, and bytes of the state that each rank holds in addition, such as counts of steps.
    """
    groups = groups_of(whole_step(preset, mode).model)
    of_ranks = shardings(mode)[name]
    each = [Sharding(n, of_ranks.parameters, of_ranks.reduction, BLOCK) for n in RANKS]
    optimizers, whole = {}, unsharded["parameters"]
    for optimizer in SHARDED_OPTIMIZERS:
        state, step = unsharded["optimizers"][optimizer]
        optimizers[optimizer] = [state // whole, step // whole, state % whole]
        if step % whole:
            raise NotExact(f"{preset.name}: the step of {optimizer} does not take a multiple of the parameters")
    shards = [sum(GroupBytes(group, sharding).shards for group in groups) for sharding in each]
    return {"parameters": shards, "buffers": unsharded["buffers"], "optimizers": optimizers}


def header() -> dict:
    """The part of the grid that does not depend on the model."""
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
        "examples": {preset.name: preset.example for preset in PRESETS if preset.example},
        "multiples": {preset.name: preset.multiple for preset in PRESETS if preset.multiple > 1},
    }  # fmt: skip


def _two_blocks(preset: Preset, kind: str) -> list[int]:
    """All bytes that a step with two blocks allocates, without and with recomputation, on GPUs of this kind."""
    point = points_of(preset).second if preset.has_tokens else points_of(preset).first
    layers = 2 if preset.repeats else None
    captured = CapturedStep.of(
        plan_config(preset, HALF, KINDS[kind], point.batch, point.length * UNIT if preset.has_tokens else None, layers)
    )
    rows = [captured.windows(schedule) for schedule in (captured.none(), captured.per_block())]
    return [sum(max(0, size) for window in row for size, _ in window.events) for row in rows]


def _alike(preset: Preset, count: int) -> set[str]:
    """The kinds of GPUs on which a step allocates as on the first kind, except for a few blocks of 512 bytes.

    In rows of equal blocks, Hopper's kernels of attention allocate what Ampere's do, and Ada's, too, up to a width of
    heads of 192. Others may attend to a mask or to another number of tokens, so they are compared.
    """
    first, *others = KINDS
    is_wide = preset.fields.get("head_dim", 0) > WIDEST
    alike = {first}
    if preset.repeats:
        alike |= {"9.0"} if is_wide else {"9.0", "8.9"}
    compared = [kind for kind in others if kind not in alike and (kind != "7.5" or count < LARGEST_OLD)]
    one = _two_blocks(preset, first) if compared else []
    return alike | {
        kind for kind in compared if all(abs(a - b) <= ALIKE * a for a, b in zip(one, _two_blocks(preset, kind)))
    }


def _rounded(tensors) -> int:
    sizes = {id(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(rounded(size, BLOCK) for size in sizes.values())
