"""One setting of the memory calculator: its peak by the formulas of the grid, as the page computes it, and by a plan."""

from __future__ import annotations

from dataclasses import dataclass

import ackpt
from ackpt.sharded.planner import ShardedModel
from ackpt.sharded.sharding import Sharding
from ackpt.workloads.planned_shapes import OPTIMIZERS, at_peak, captured, with_loop
from ackpt.capture.optimizer_state import Loop

from .grid import FIRST_BLOCKS, NONE, PER_BLOCK, plan_config, shardings
from .presets import PRESETS


@dataclass(frozen=True)
class Setting:
    """What a reader chooses; ``length``: 0 for images. ``blocks``: how many are checkpointed, by `policy`."""

    preset: str
    gpu: str
    mode: str
    optimizer: str
    batch: int
    length: int
    ranks: int = 1
    policy: str = NONE
    blocks: int = 0


def by_formula(data: dict, setting: Setting) -> dict:
    """Bytes at the peak by category, and FLOPs, as the page computes them from the grid."""
    preset = next(preset for preset in data["presets"] if preset["name"] == setting.preset)
    gpu = data["gpus"][setting.gpu]
    mode = preset["modes"][setting.mode]
    part = mode if setting.ranks == 1 else preset["sharded"][setting.mode]
    formulas = preset["formulas"][part["formulas"][gpu["kind"]]]
    place = None if setting.ranks == 1 else data["ranks"].index(setting.ranks)
    b, t, m = setting.batch, setting.length / data["unit"] if setting.length else 1, setting.blocks

    def value(coefficients) -> float:
        return sum(c * b**i * t**j for c, (i, j) in zip(coefficients, data["terms"]))

    def bytes_of(parts) -> float:
        sizes, by_m, of_ranks, of_ranks_by_m = [*parts, [], [], []][:4]
        total = value(sizes) + m * value(by_m)
        for numbers, times in ((of_ranks, 1), (of_ranks_by_m, m)):
            total += times * (numbers[place] if place is not None and place < len(numbers) else 0)
        return total

    if place is None:
        parameters, (state, step) = part["parameters"], part["optimizers"][setting.optimizer]
    else:
        parameters = part["parameters"][place]
        of_state, of_step, more = part["optimizers"][setting.optimizer]
        state, step = of_state * parameters + more, of_step * parameters
    live = [{c: bytes_of(parts) for c, parts in row.items()} for row in formulas["peaks"][setting.policy]]
    end = {c: bytes_of(parts) for c, parts in formulas["end"].items()}
    end["temporaries"] = end.get("temporaries", 0) + step
    dynamic = max([*live, end], key=lambda row: sum(row.values()))
    categories = {
        "parameters": parameters,
        "buffers": part["buffers"],
        "inputs": value(mode["inputs"]),
        "optimizer": state,
        **dynamic,
    }
    flops = value(formulas["flops"])
    again = {NONE: 0, PER_BLOCK: value(formulas["recomputed"])}
    if setting.policy == FIRST_BLOCKS:
        fixed, each = formulas["recomputed_by_m"]
        again[FIRST_BLOCKS] = value(fixed) + m * value(each)
    return {"at_peak": categories, "peak_bytes": sum(categories.values()), "flops": flops, "recompute_flops": again[setting.policy]}


def by_plan(setting: Setting) -> dict:
    """The same from ``ackpt plan``, which captures the whole model."""
    preset = next(preset for preset in PRESETS if preset.name == setting.preset)
    if setting.ranks > 1:
        sharding = shardings("half" if setting.mode == "mixed" else setting.mode)[setting.mode]
        mode = "half" if setting.mode == "mixed" else setting.mode
        config = plan_config(preset, mode, setting.gpu, setting.batch, setting.length or None, optimizer=setting.optimizer)
        sharded = ShardedModel(config).plan(
            Sharding(setting.ranks, sharding.parameters, sharding.reduction),
            policy={NONE: "none", PER_BLOCK: "full"}[setting.policy],
        )
        flops = sharded.flops - sharded.recompute_flops
        return {"at_peak": sharded.at_peak(), "peak_bytes": sharded.peak_bytes, "flops": flops, "recompute_flops": sharded.recompute_flops}
    from .windows import CapturedStep

    config = plan_config(preset, setting.mode, setting.gpu, setting.batch, setting.length or None, optimizer=setting.optimizer)
    step = CapturedStep.of(config)
    kind = OPTIMIZERS[setting.optimizer]
    graph = with_loop(step.graph, step.step.model, Loop(kind(step.step.model.parameters())))
    profile = ackpt.profile(graph, step.device)
    from ackpt.costs.profiles import with_gpu_workspace
    profile = with_gpu_workspace(graph, profile)
    if setting.policy == NONE:
        plan = ackpt.plan(graph, policy="none", profile=profile)
    else:
        count = setting.blocks if setting.policy == FIRST_BLOCKS else len(step.groups)
        saved = step.saved(count)
        a = graph.analysis
        names = {graph.nodes[a.base_of[s]].name: s for s in a.savable}
        base = ackpt.plan(graph, policy="none", profile=profile)
        fates = {n: "saved" if s in saved else "recomputed" for n, s in names.items() if (s in saved) or n in base.fates}
        plan = ackpt.plan(graph, policy="manual", profile=profile, fates=fates)
    return {"at_peak": at_peak(graph, plan), "peak_bytes": plan.peak_bytes, "flops": plan.flops - plan.recompute_flops, "recompute_flops": plan.recompute_flops}
