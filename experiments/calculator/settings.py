"""One setting of the memory calculator: its peak by the grid's formulas, as on the page, and by a plan."""

from __future__ import annotations

from dataclasses import dataclass, replace

import ackpt
from ackpt.planner.schedule.plan import RECOMPUTED, SAVED, Plan
from ackpt.planner.sharding.sharded_model import ShardedModel
from ackpt.planner.workloads.planned_shapes import PlanConfig, at_peak, run_plan, with_training_loop

from .choices import FIRST_BLOCKS, HALF, MIXED, NONE, PER_BLOCK, plan_config, shardings
from .presets import PRESETS
from .windows import CapturedStep


@dataclass(frozen=True)
class Setting:
    """A reader's choices: the `name` of a preset, a GPU, a way of training, an optimizer, sizes, ranks and a policy.

    ``length``: 0 for images. ``blocks``: how many are checkpointed by the policy ``"first blocks"``.
    """

    preset: str
    gpu: str
    mode: str
    optimizer: str
    batch: int
    length: int
    ranks: int = 1
    policy: str = NONE
    blocks: int = 0

    @property
    def computed_as(self) -> str:
        """The mode in which blocks compute: ranks with 32-bit shards gather 16-bit parameters."""
        return HALF if self.ranks > 1 and self.mode == MIXED else self.mode

    def config(self) -> PlanConfig:
        """The request for ``ackpt plan``."""
        preset = next(preset for preset in PRESETS if preset.name == self.preset)
        sizes = self.batch, self.length or None
        return plan_config(preset, self.computed_as, self.gpu, *sizes, optimizer=self.optimizer)


def by_formula(data: dict, setting: Setting) -> dict:
    """Bytes at the peak by category, and FLOPs, as the page computes them from the grid."""
    preset = next(preset for preset in data["presets"] if preset["name"] == setting.preset)
    gpu = data["gpus"][setting.gpu]
    part = preset["modes" if setting.ranks == 1 else "sharded"][setting.mode]
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
        "inputs": value(part["inputs"]),
        "optimizer": state,
        **dynamic,
    }
    flops = value(formulas["flops"])
    again = {NONE: lambda: 0, PER_BLOCK: lambda: value(formulas["recomputed"])}
    again[FIRST_BLOCKS] = lambda: sum(times * value(part) for times, part in zip((1, m), formulas["recomputed_by_m"]))
    return _figures(categories, flops, again[setting.policy]())


def by_plan(setting: Setting) -> dict:
    """The same figures from a plan of the complete model, as ``ackpt plan`` makes it."""
    if setting.ranks > 1:
        sharding = replace(shardings(setting.computed_as)[setting.mode], ranks=setting.ranks)
        rank = ShardedModel(setting.config()).plan(sharding, policy={NONE: "none", PER_BLOCK: "full"}[setting.policy])
        return _figures(rank.at_peak(), rank.flops - rank.recompute_flops, rank.recompute_flops)
    if setting.policy == NONE:
        planned = run_plan(setting.config())
        return _figures(planned.at_peak(), planned.plan.flops, 0)
    graph, plan = _checkpointed(setting)
    return _figures(at_peak(graph, plan), plan.flops - plan.recompute_flops, plan.recompute_flops)


def _checkpointed(setting: Setting):
    """The graph, and a plan with the fates of checkpointed blocks: their inputs are saved, the rest is recomputed."""
    config = setting.config()
    step = CapturedStep.of(config)
    graph = with_training_loop(step.graph, step.step.model, config)
    saved = step.saved(len(step.groups) if setting.policy == PER_BLOCK else setting.blocks)
    read = ackpt.plan(graph, policy="none", profile=step.profile).schedule.saved
    names = {s: graph.nodes[graph.analysis.base_of[s]].name for s in {*saved, *read} & set(graph.analysis.savable)}
    fates = {name: SAVED if storage in saved else RECOMPUTED for storage, name in names.items()}
    plan: Plan = ackpt.plan(graph, policy="manual", profile=step.profile, fates=fates)
    return graph, plan


def _figures(categories: dict, flops: float, recompute_flops: float) -> dict:
    peak = sum(categories.values())
    return {"at_peak": categories, "peak_bytes": peak, "flops": flops, "recompute_flops": recompute_flops}
