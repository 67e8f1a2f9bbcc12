"""What a part is: a module that keeps the shape of its input, and takes other parts if it is a container.

A part of an image model takes and returns ``(N, WIDTH, H, W)``, one of a sequence model ``(N, T, WIDTH)``, one of both
kinds any such shape. `between` is what a training script changes between two steps; `restart` puts process-wide state,
such as globals and caches, back to where it was when the program started.
"""

import random
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

WIDTH = 8
KINDS = ("image", "sequence")


class Entry(NamedTuple):
    """A part in the catalog: its class, the kinds of models it is for, how many parts it takes, whether a planned step
    can have it."""

    cls: type
    kinds: tuple[str, ...]
    inner: tuple[int, int]
    planned: bool


CATALOG: dict[str, Entry] = {}
_RESTARTS: list[Callable[[], None]] = []


def part(*kinds: str, inner: tuple[int, int] = (0, 0), planned: bool = True):
    """Put a class into the catalog, for models of `kinds`; it takes between ``inner[0]`` and ``inner[1]`` parts.

    `planned`: False for a part that `ackpt.compile` refuses by design, so that half of the models go without it.
    """

    def register(cls):
        CATALOG[cls.__name__] = Entry(cls, kinds or KINDS, inner, planned)
        return cls

    return register


class Part(nn.Module):
    """Base of all parts, whose subclasses `part` puts into the catalog, with the options that they name.

    `draw` decides on options, `inner` are the parts that a container calls.
    """

    def __init_subclass__(cls, kind: str | None = None, **options):
        super().__init_subclass__()
        part(*[kind] if kind else [], **options)(cls)

    def __init__(self, draw: random.Random, inner=()):
        super().__init__()
        self.setup(draw, inner)

    def setup(self, draw: random.Random, inner) -> None:
        """Creates the submodules and draws the options."""

    def between(self, step: int) -> None:
        """What the training script changes after `step`."""


def at_restart(function):
    """Have `function` called before every run."""
    _RESTARTS.append(function)
    return function


def restart() -> None:
    """Put process-wide state back to where it was when the program started."""
    for function in _RESTARTS:
        function()


def channels_last(x: torch.Tensor) -> torch.Tensor:
    """An image or a sequence with its WIDTH channels in the last dimension."""
    return x.permute(0, 2, 3, 1) if x.dim() == 4 else x


def channels_first(x: torch.Tensor) -> torch.Tensor:
    """The inverse of `channels_last`."""
    return x.permute(0, 3, 1, 2) if x.dim() == 4 else x


def per_channel(x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """One value per channel, in a shape that broadcasts against `x`."""
    return values.view(1, -1, 1, 1) if x.dim() == 4 else values
