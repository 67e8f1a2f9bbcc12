"""From a seed to a model: a `Spec` lists its parts and options, `build` makes it, `batch` makes what it is called with.

A model has a stem, a few blocks of parts in an ``nn.ModuleList``, and a head with a loss. The same spec gives the same
model, bit for bit, as often as it is built.
"""

from __future__ import annotations

import dataclasses
import random
import types
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from . import containers, draws, images, layers, lengths, norms, objects, scripts, settings, state
from .part import CATALOG, KINDS, WIDTH, Part

FILL_THE_CATALOG = containers, draws, images, layers, lengths, norms, objects, scripts, settings, state
WORDS, CLASSES = 20, 5
SHAPES = (6, 12), (4, 14), (5, 17)  # rows and length; a capture of the first two serves the third


@dataclasses.dataclass(frozen=True)
class Node:
    """A part in a spec: its name in the catalog, the seed of its options, and the parts that it takes."""

    name: str
    seed: int
    inner: tuple[Node, ...] = ()

    def names(self) -> list[str]:
        return [self.name, *(name for node in self.inner for name in node.names())]

    def __str__(self) -> str:
        inside = f"({', '.join(map(str, self.inner))})" if self.inner else ""
        return f"{self.name}:{self.seed}{inside}"


@dataclasses.dataclass(frozen=True)
class Spec:
    """A model and how it is trained; every field after `blocks` has the common case as its default.

    ``takes``: how the batch is given, ``gives``: what the model returns. ``accumulates``: two forwards before a
    backward. ``evaluates``: an evaluation between steps. ``reshapes``: every step has other shapes. ``input_grad``:
    the images need a gradient. ``autocast``: bfloat16 around the forward. ``freezes``: after the first step the first
    block is frozen. ``evaluation``: trained in evaluation mode. ``called``: once before, without gradients, so that
    caches are filled. ``penalty``: the loop adds a penalty of the parameters to the loss. ``hooks``: hooks on the
    gradient accumulators change gradients. ``delays``: two forwards, a fused optimizer step after the first backward.
    """

    seed: int
    kind: str
    blocks: tuple[tuple[Node, ...], ...]
    takes: str = "tensors"
    gives: str = "loss"
    accumulates: bool = False
    evaluates: bool = False
    reshapes: bool = False
    input_grad: bool = False
    autocast: bool = False
    freezes: bool = False
    evaluation: bool = False
    tied: bool = False
    called: bool = False
    penalty: bool = False
    hooks: bool = False
    delays: bool = False

    def names(self) -> list[str]:
        """The names of all parts, one for each time it is there."""
        return [name for block in self.blocks for node in block for name in node.names()]

    def __str__(self) -> str:
        blocks = "; ".join(", ".join(map(str, block)) for block in self.blocks)
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        changed = (name for name, value in vars(self).items() if defaults[name] not in (value, dataclasses.MISSING))
        options = [f"{name}={getattr(self, name)}" for name in changed]
        return f"{self.kind} [{blocks}]{' ' if options else ''}{' '.join(options)}"


def draw_spec(seed: int) -> Spec:
    """The model of a seed."""
    draw = random.Random(seed)
    kind, any_part = draw.choice(KINDS), draw.random() < 0.5
    counts = [draw.choice([1, 2, 2]) for _ in range(draw.choice([2, 2, 3]))]
    blocks = tuple(tuple(_draw_node(draw, kind, 2, any_part) for _ in range(count)) for count in counts)
    takes, gives = ["tensors", "tensors", "keywords", "dict", "tuple"], ["loss", "loss", "dict", "tuple", "tensor"]

    def rarely(chance=0.08):
        return draw.random() < chance

    return Spec(
        seed,
        kind,
        blocks,
        takes=draw.choice([*takes, "object"] if any_part else takes),
        gives=draw.choice([*gives, "dataclass"] if any_part else gives),
        accumulates=rarely(),
        evaluates=rarely(0.2),
        reshapes=rarely(0.2),
        input_grad=kind == "image" and rarely(0.15),
        autocast=rarely(0.05),
        freezes=rarely(0.05),
        evaluation=rarely(0.05),
        tied=kind == "sequence" and rarely(0.3),
        called=rarely(0.3),
        penalty=rarely(),
        hooks=rarely(),
        delays=rarely(0.05),
    )


def _draw_node(draw, kind: str, depth: int, any_part: bool) -> Node:
    fitting = [
        name
        for name, entry in CATALOG.items()
        if kind in entry.kinds and (depth or not entry.inner[1]) and (any_part or entry.planned)
    ]
    name = draw.choice(fitting)
    least, most = CATALOG[name].inner
    inner = tuple(_draw_node(draw, kind, depth - 1, any_part) for _ in range(draw.randint(least, most)))
    return Node(name, draw.randrange(1000), inner)


def _make(node: Node) -> nn.Module:
    return CATALOG[node.name].cls(random.Random(node.seed), tuple(map(_make, node.inner)))


def build(spec: Spec) -> Model:
    """The model of a spec; draws from torch's random numbers, which are put back."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)
        model = Model(spec)
    return model.train(not spec.evaluation)


class Block(nn.Module):
    def __init__(self, parts):
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x):
        for each in self.parts:
            x = each(x)
        return x


@dataclasses.dataclass
class Result:
    loss: torch.Tensor
    logits: torch.Tensor
    note: str = "result"


class Model(nn.Module):
    """Stem, blocks, head and loss. `call` is how blocks are called; a variant may put a checkpoint there."""

    def __init__(self, spec: Spec):
        super().__init__()
        self.kind, self.gives = spec.kind, spec.gives
        if spec.kind == "image":
            self.stem: nn.Module = nn.Conv2d(3, WIDTH, 3, padding=1)
            self.head = nn.Linear(WIDTH, CLASSES)
        else:
            self.stem = nn.Embedding(WORDS, WIDTH)
            self.head = nn.Linear(WIDTH, WORDS, bias=False)
            if spec.tied:
                self.head.weight = self.stem.weight
        self.blocks = nn.ModuleList([Block(map(_make, block)) for block in spec.blocks])

    def call(self, start: int, end: int, x):
        for block in self.blocks[start:end]:  # pyright: ignore[reportGeneralTypeIssues]
            x = block(x)
        return x

    def chain(self, x):
        return self.call(0, len(self.blocks), x)

    def forward(self, x, target=None, weight=None):
        if isinstance(x, dict):
            x, target = x["x"], x["target"]
        elif isinstance(x, tuple):
            x, target = x
        elif isinstance(x, types.SimpleNamespace):
            x, target = x.x, x.target
        x = self.chain(self.stem(x))
        if self.kind == "image":  # not the mean alone, which is constant after most norms
            x = (x * torch.linspace(-1, 2, 36).view(6, 6)).mean((2, 3))
        logits = self.head(x)
        loss = F.cross_entropy(logits.float().flatten(0, -2), target.flatten(), weight)
        for module in self.modules():
            side = getattr(module, "side_loss", None)
            if side is not None:
                loss = loss + side
        if self.gives == "loss":
            return loss
        if self.gives == "tensor":
            return logits
        if self.gives == "dict":
            return {"loss": loss, "logits": logits, "hidden": None}
        return (loss, logits) if self.gives == "tuple" else Result(loss, logits)

    def between(self, step: int) -> None:
        """What the training script changes after `step`."""
        for module in self.modules():
            if isinstance(module, Part):
                module.between(step)


def batch(spec: Spec, step: int, shape: int = 0) -> tuple[tuple, dict[str, Any], list[torch.Tensor]]:
    """Arguments, keywords and their tensors for `step`; `shape` selects the sizes if the spec reshapes."""
    generator = torch.Generator().manual_seed(1000 + step)
    rows, length = SHAPES[shape if spec.reshapes else 0]
    if spec.kind == "image":
        x = torch.randn(rows, 3, 6, 6, generator=generator).requires_grad_(spec.input_grad)
        target = torch.randint(CLASSES, (rows,), generator=generator)
    else:
        x = torch.randint(WORDS, (rows, length), generator=generator)
        target = torch.randint(WORDS, (rows, length), generator=generator)
    tensors = [x, target]
    if spec.takes == "tensors":
        return (x, target), {}, tensors
    if spec.takes == "keywords":
        return (), {"x": x, "target": target, "weight": None}, tensors
    if spec.takes == "dict":
        return ({"x": x, "target": target},), {}, tensors
    if spec.takes == "tuple":
        return ((x, target),), {}, tensors
    return (types.SimpleNamespace(x=x, target=target),), {}, tensors
