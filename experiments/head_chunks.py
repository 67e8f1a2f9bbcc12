"""The head of a language model in chunks of tokens: fixed chunks of other libraries, and those that a budget chooses.

The libraries' chunks follow the rules in their sources, which `FIXED` links; nothing of them runs here. What a budget
chooses is planned from shapes, with the modeled time of a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ackpt.core.errors import BudgetError
from ackpt.metering.meter import memory_format
from ackpt.planner.capture.chunked_head import chunked
from ackpt.planner.capture.joint_graph import JointGraph
from ackpt.planner.choose import plan_in_chunks
from ackpt.planner.costs.devices import device
from ackpt.planner.costs.profiles import Profile, profile, with_gpu_workspace
from ackpt.planner.request import Request
from ackpt.planner.schedule.allocations import allocations
from ackpt.planner.schedule.plan import Plan
from ackpt.planner.workloads.planned_shapes import PlanConfig, allocated_on, run_plan
from ackpt.planner.workloads.step_request import DTYPES, StepRequest

QWEN2_7B = {
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "use_cache": False,
}


class Fixed(NamedTuple):
    """A library's chunks: ``size(tokens, width, vocabulary)`` tokens each; ``products``: times that of the whole head.

    Forward, gradient of the hidden states and gradient of the weight are three products; a checkpointed chunk computes
    the first one twice.
    """

    name: str
    size: Callable[[int, int, int], int]
    products: float
    source: str


def liger_size(tokens: int, width: int, vocabulary: int) -> int:
    """The tokens of Liger's chunk, whose logits have about as many elements as all hidden states.

    Example:
        >>> liger_size(4096, 3584, 152064)
        128
    """
    least = math.ceil(tokens / math.ceil(vocabulary / width))
    return min(tokens, 1 << (least - 1).bit_length())


FIXED = (
    Fixed("whole head", lambda tokens, *_: tokens, 1.0, ""),
    Fixed(
        "TRL chunked_nll", lambda tokens, *_: min(256, tokens), 4 / 3, "https://github.com/huggingface/trl/pull/5575"
    ),
    Fixed(
        "Liger fused loss",
        liger_size,
        1.0,
        "https://github.com/linkedin/Liger-Kernel/blob/main/src/liger_kernel/ops/fused_linear_cross_entropy.py",
    ),
)


class HeadPlan(NamedTuple):
    """A plan within a budget: its chunks, its peak and the most bytes of its logits, and the time that it adds."""

    budget: str
    chunks: int
    dynamic_peak_bytes: int
    head_bytes: int
    cost: float

    @property
    def share(self) -> float:
        """The logits as a fraction of the dynamic peak."""
        return self.head_bytes / self.dynamic_peak_bytes


def plans(
    budgets: Sequence[str], fields: dict | None = None, layers: int = 2, tokens: int = 4096, on: str = "h200"
) -> list[HeadPlan | BudgetError]:
    """The baseline of a Qwen2 model in bfloat16, and its plan with the head in chunks for every budget."""
    fields = {**(fields or QWEN2_7B), "num_hidden_layers": layers}
    step = StepRequest("hf:Qwen2Config", 1, tokens, None, fields, DTYPES["bfloat16"])
    whole = run_plan(PlanConfig(step, optimizer="none", device=on))
    planned_device, vocabulary, width = device(on), fields["vocab_size"], fields["hidden_size"]

    def in_chunks(count: int) -> tuple[JointGraph, Profile]:
        one = allocated_on(planned_device, chunked(whole.graph, count))
        return one, with_gpu_workspace(one, profile(one, planned_device))

    def described(budget: str, plan: Plan, graph: JointGraph, costs: Profile) -> HeadPlan:
        most = head_bytes(graph, plan, costs, vocabulary, width)
        return HeadPlan(budget, plan.head_chunks, plan.dynamic_peak_bytes, most, plan.cost)

    head_plans: list[HeadPlan | BudgetError] = [described("", whole.plan, whole.graph, whole.profile)]
    for budget in budgets:
        try:
            made = plan_in_chunks(whole.graph, Request(budget, chunk_head=True), whole.profile, in_chunks)
            head_plans.append(described(budget, *made))
        except BudgetError as error:
            head_plans.append(error)
    return head_plans


def head_bytes(graph: JointGraph, plan: Plan, costs: Profile, vocabulary: int, width: int) -> int:
    """The most bytes of tensors with an element for each word that are live at once, but for weights' gradients."""
    changes: dict[int, int] = {}
    for block in allocations(graph, plan.schedule, costs.workspace_bytes):
        value = None if block.node is None else graph.analysis.fx[block.node].meta.get("val")
        shape = tuple(getattr(value, "shape", ()))
        if block.storage in graph.analysis.resident or vocabulary not in shape or width in shape:
            continue
        changes[block.begin] = changes.get(block.begin, 0) + block.bytes
        if block.end is not None:
            changes[block.end] = changes.get(block.end, 0) - block.bytes
    live = most = 0
    for at in sorted(changes):
        live += changes[at]
        most = max(most, live)
    return most


def table(head_plans: Sequence[HeadPlan | BudgetError], tokens: int = 4096, fields: dict | None = None) -> str:
    """The chunks of the libraries, and below them what each budget chooses."""
    width, vocabulary = (fields or QWEN2_7B)["hidden_size"], (fields or QWEN2_7B)["vocab_size"]
    lines = [f"{'':18}{'tokens':>8}{'chunks':>8}{'fp32 logits':>14}{'products':>10}"]
    for each in FIXED:
        size = each.size(tokens, width, vocabulary)
        logits = memory_format(4 * size * vocabulary)
        lines.append(f"{each.name:18}{size:>8}{-(-tokens // size):>8}{logits:>14}{each.products:>10.2f}")
    lines += ["", f"{'budget':18}{'tokens':>8}{'chunks':>8}{'head':>14}{'of peak':>10}{'added time':>12}"]
    for row in head_plans:
        if isinstance(row, BudgetError):
            lines.append(f"{row.budget!s:18}{'infeasible':>16}")
            continue
        size, most = -(-tokens // row.chunks), memory_format(row.head_bytes)
        name = row.budget or "none"
        lines.append(f"{name:18}{size:>8}{row.chunks:>8}{most:>14}{row.share:>10.1%}{row.cost:>12.1%}")
    return "\n".join(lines)
