"""The decision chart of the ten-minute page: which method a step needs, by the thresholds that the chapters derive."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from matplotlib.patches import FancyBboxPatch

from . import plots


@dataclass(frozen=True)
class Question:
    """A question with its threshold, the threshold for one model, and the method that a yes asks for."""

    text: str
    threshold: str
    example: str
    method: str


def questions(fields: dict, batch: int, length: int, parameters: int) -> list[Question]:
    """The questions in order; examples for a decoder with these `fields`, trained in bf16 with AdamW."""
    d, layers, words = fields["hidden_size"], fields["num_hidden_layers"], fields["vocab_size"]
    tokens = batch * length
    gib = 2.0**30
    return [
        Question(
            "Do weights, gradients and\noptimizer state exceed the memory?",
            "8 bytes per parameter",
            f"here {8 * parameters / gib:.0f} GiB",
            "LoRA, 8-bit optimizer,\nFSDP2",
        ),
        Question(
            "Are the logits larger than\nthe inputs of all blocks?",
            r"$12\,V > 2\,L\,d$",
            f"here {12 * words * tokens / gib:.1f} > {2 * layers * d * tokens / gib:.1f} GiB",
            "chunk_head=True",
        ),
        Question(
            "Do activations exceed weights,\ngradients and optimizer state?",
            r"$T > T^* \approx \frac{8}{3} d$",
            f"here {tokens:,} > {8 * d / 3:,.0f} tokens",
            'apply_budget(..., "65GiB")',
        ),
        Question(
            "Does an error say that\nthe model cannot be planned?", "", "", "apply_activation_\ncheckpointing(model)"
        ),
        Question(
            "Do inputs of blocks still fill the\nmemory, and are copies free?",
            r"$S / \lambda \leq t_\mathrm{fwd}$",
            "",
            'offload="async"',
        ),
    ]


def chart(asked: list[Question], example: str) -> plots.Figure:
    """The questions from top to bottom; a yes leads to the right. `example`: the model that "here" stands for."""
    with plots.style.context("default"):
        figure, axes = plots._axes("", "", "")
        figure.set_size_inches(6.0, 1.05 * len(asked) + 0.35)
        axes.axis("off")
        axes.set_xlim(0, 100)
        axes.set_ylim(-100 * len(asked) - 30, 0)
        look: dict[str, Any] = {"ha": "center", "va": "center", "color": plots.TEXT, "fontsize": 8.5}
        arrow = {"arrowstyle": "->", "color": plots.TEXT}
        for place, question in enumerate(asked):
            top = -100 * place
            middle = top - 42
            _box(axes, 1, top - 76, 53, 68, plots.COLORS["parameters"])
            _box(axes, 68, top - 66, 31, 48, plots.COLORS["activations"])
            axes.text(27.5, middle + (11 if question.threshold else 0), question.text, **look)
            below = "    ".join(filter(None, (question.threshold, question.example)))
            axes.text(27.5, middle - 21, below, **look)
            axes.text(83.5, middle, question.method, **{**look, "fontweight": "bold", "fontsize": 8})
            axes.annotate("", (68, middle), (54, middle), arrowprops=arrow)
            axes.text(61, middle + 12, "yes", **look)
            if place + 1 < len(asked):
                axes.annotate("", (27.5, top - 108), (27.5, top - 76), arrowprops=arrow)
                axes.text(33, top - 91, "then", **look)
        axes.text(1, -100 * len(asked) - 12, f"Here: {example}", **{**look, "ha": "left", "fontsize": 8})
        return plots._finished(figure, [], [])


def _box(axes, left: float, bottom: float, width: float, height: float, color: str) -> None:
    axes.add_patch(
        FancyBboxPatch(
            (left, bottom), width, height, boxstyle="round,pad=0,rounding_size=2", facecolor="none", edgecolor=color,
            linewidth=1.4, mutation_aspect=6,
        )
    )  # fmt: skip
