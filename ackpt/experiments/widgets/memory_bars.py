"""The memory bars of the book: one step by model, size and policy, with the formula that its bytes follow, as data.

Steps are captured from shapes alone and planned as `ackpt.plan` plans them. The page shows what is here; every formula
comes with its numbers, and with the bytes that they give, which are those of the plan.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import ackpt
from ackpt.capture.joint_graph import JointGraph
from ackpt.metering.timeline import CATEGORIES
from ackpt.models import TransformerConfig
from ackpt.planning.plan import Plan
from ackpt.policies import auto
from ackpt.policies.search.frontier import frontier
from ackpt.workloads.named_models import training_step
from ackpt.workloads.planned_shapes import PlanConfig, at_peak, captured
from ackpt.workloads.step_request import StepRequest

SCHEMA = {"schema": "ackpt.memory-bars", "version": 1}
POLICIES = {  # name in short, what it does
    "none": ["none", "save all that backward reads"],
    "full": ["full", "save one tensor between two blocks"],
    "half": ["auto, half", "within half of the baseline's dynamic peak"],
    "least": ["auto, least", "the lowest peak that it can plan"],
}
OF_TRANSFORMERS = "4 T (L A + d + 1)", "4 T (L A + 2 d + 1) + 4 T V + 4"  # without, with a vocabulary


@dataclass(frozen=True)
class Bars:
    """A model of the page: `name` for `ackpt plan`, what it is to a reader, and the sizes to choose from.

    `option` is the size that varies: ``"seq_len"`` or ``"image_size"``.
    """

    name: str
    label: str
    option: str
    sizes: tuple[int, ...]
    batch_size: int
    fields: dict = field(default_factory=dict)

    def request(self, size: int) -> StepRequest:
        length, side = (size, None) if self.option == "seq_len" else (None, size)
        return StepRequest(self.name, self.batch_size, length, side, dict(self.fields))

    def batch(self, size: int) -> str:
        items = f"images of {size} × {size}" if self.option == "image_size" else f"sequences of {size:,} tokens"
        return f"{self.batch_size} {items}"


_BLOCKS = {"layers": 4, "dim": 256, "ff_dim": 1024, "head_dim": 64}
MODELS = (
    Bars("transformer", "the Transformer of this chapter", "seq_len", (1024, 4096), 4, _BLOCKS),
    Bars("lm", "the same blocks as a language model", "seq_len", (1024, 2048), 4, {**_BLOCKS, "vocab_size": 4096}),
    Bars("resnet18", "ResNet-18", "image_size", (128, 224), 16),
)


def memory_bars(models=MODELS) -> dict:
    """What the page needs, as plain JSON; all sizes in bytes.

    Returns:
        ``models``: each with ``steps``, one per size, whose ``always`` and ``kept`` are formulas, and whose ``plans``
        has for each of ``policies`` the bytes at the peak by category, None where the policy refuses its budget. A
        formula is its ``symbols``, the same with ``numbers``, and the ``bytes`` that these give.
    """
    shown = [
        {"label": one.label, "option": one.option, "steps": [_step(one, size) for size in one.sizes]} for one in models
    ]
    peaks = [plan["at_peak"] for model in shown for step in model["steps"] for plan in step["plans"].values() if plan]
    names = [name for name in CATEGORIES if any(peak.get(name) for peak in peaks)]
    return {**SCHEMA, "policies": POLICIES, "categories": names, "models": shown}


def _step(model: Bars, size: int) -> dict:
    config = PlanConfig(model.request(size))
    step = training_step(config.step)
    graph = captured(step, config, None)
    profile = ackpt.profile(graph)
    plain = ackpt.plan(graph, policy="none", profile=profile)
    least = frontier(graph, profile, auto.candidates)[-1].peak_bytes
    full = ackpt.plan(graph, policy="full", profile=profile)
    plans: dict[str, Plan | None] = {"none": plain, "full": full}
    for name, budget in {"half": 0.5, "least": least + plain.resident_bytes}.items():
        try:
            plans[name] = ackpt.plan(graph, budget, profile=profile)
        except ackpt.BudgetError:
            plans[name] = None
    return {
        "size": size,
        "title": f"{step.parameters:,} parameters, {model.batch(size)}",
        "always": _always(graph, step),
        "kept": _kept(graph, model, size, step, plain),
        "least_bytes": least,
        "plans": {name: None if plan is None else _shown(graph, plan, plain) for name, plan in plans.items()},
    }


def _shown(graph: JointGraph, plan: Plan, plain: Plan) -> dict:
    saved, every = set(plan.schedule.saved), set(plain.schedule.saved)
    return {
        "peak_bytes": plan.peak_bytes,
        "at_peak": at_peak(graph, plan),
        "kept": {
            "all": plain.saved_bytes,
            "dropped": _bytes(graph, every - saved),
            "instead": _bytes(graph, saved - every),
            "bytes": plan.saved_bytes,
        },
        "recompute_flops": plan.recompute_flops,
        "flops": plain.flops,
        "where": plan.peak_node,
    }


def _bytes(graph: JointGraph, storages) -> int:
    return sum(graph.storages[storage].bytes for storage in storages)


def _always(graph: JointGraph, step) -> dict:
    """Parameters and AdamW's state in fp32: two averages of each parameter, and a count of steps for each tensor."""
    sizes = graph.bytes()
    tensors = len(list(step.model.parameters()))
    rest = sizes["buffer"] + sizes["input"]
    return _formula(
        "4 P + 8 P + 4 n + buffers and inputs",
        f"4 × {step.parameters:,} + 8 × {step.parameters:,} + 4 × {tensors} + {rest:,}",
        sizes["parameter"] + graph.optimizer_bytes + rest,
    )


def _kept(graph: JointGraph, model: Bars, size: int, step, plain: Plan) -> dict:
    """What the baseline's forward keeps: for Transformers the chapter's formula, else what each part keeps."""
    if not isinstance(config := step.model.config, TransformerConfig):
        return _formula(*_by_part(graph, plain), plain.saved_bytes)
    T, L, d, f, h = model.batch_size * size, config.layers, config.dim, config.ff_dim, config.heads
    A = 10 * d + 2 * f + 3 * h + 2
    without, with_vocabulary = OF_TRANSFORMERS
    if model.name == "transformer":
        return _formula(without, f"4 × {T:,} × ({L} × {A:,} + {d} + 1)", plain.saved_bytes)
    V = config.vocab_size
    numbers = f"4 × {T:,} × ({L} × {A:,} + 2 × {d} + 1) + 4 × {T:,} × {V:,} + 4"
    return _formula(with_vocabulary, numbers, plain.saved_bytes)


def _by_part(graph: JointGraph, plain: Plan) -> tuple[str, str]:
    """The sum over the parts of the model, in the order of the forward."""
    cover, parts = graph.analysis.base_of, {}
    for storage in sorted(plain.schedule.saved, key=lambda storage: cover[storage]):
        part = graph.nodes[cover[storage]].module.split(".")[0] or "loss"
        parts[part] = parts.get(part, 0) + graph.storages[storage].bytes
    return " + ".join(parts), " + ".join(f"{size:,}" for size in parts.values())


def _formula(symbols: str, numbers: str, size: int) -> dict:
    """Raises ValueError if the numbers do not give `size`: no formula may stand beside bytes that are not its own."""
    if value(numbers) != size:
        raise ValueError(f"{symbols} = {numbers} gives {value(numbers)} bytes, and the step has {size}")
    return {"symbols": symbols, "numbers": numbers, "bytes": size}


def value(numbers: str) -> int:
    """What the numbers of a formula give.

    >>> value("4 × 1,024 × (2 + 1)")
    12288
    """
    return eval(numbers.replace("×", "*").replace(",", ""), {"__builtins__": {}})
