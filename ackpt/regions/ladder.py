"""Order combinations of module options from the lowest cost to the lowest estimated peak.

Every module has options that save fewer bytes and cost recomputation, and submodules with options of their own. The
combinations with the least cost for their saved bytes form the lower convex hull, which is the merge of the submodules'
hulls by cost per byte. A region is recomputed all at once, so hulls with smaller regions follow. The combinations with
the lowest estimated peaks for their costs are tried in real steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ackpt.policies.search.frontier import evenly_spaced, undominated

SAVED, PLANNED, REGION = "saved", "planned", "region"
_ROUNDING = 1e-9
_MOST_SIZES = 8  # of regions that are the largest of a combination


class Option(NamedTuple):
    """One way to run a module.

    ``fate``: "planned" or "region". ``bytes``: the decrease in saved bytes. ``cost``:
    of the recomputation. ``share``: of a planned module, its budget as a fraction of its baseline's dynamic peak.
    """

    fate: str
    bytes: int
    cost: float
    share: float | None = None


@dataclass
class Choices:
    """A module's path, its options, and those of the modules that it calls.

    ``bytes``: what it saves as it is; ``argument_bytes``: of the tensors in its arguments.
    """

    path: str
    options: list[Option] = field(default_factory=list)
    children: Sequence[Choices] = ()
    bytes: int = 0
    argument_bytes: int = 0


class Combination(NamedTuple):
    """Options by the paths of modules, none inside another, with their sums of bytes and cost."""

    bytes: int
    cost: float
    options: dict[str, Option]


def ladder(choices: Choices) -> list[Combination]:
    """Combinations from the model as it is to the lowest estimated peak of saved bytes; each costs more than the last.

    Example:
        >>> def block(path):
        ...     inner = Choices(f"{path}.a", [Option("region", 60, 1.0)], bytes=70)
        ...     return Choices(path, [Option("region", 100, 3.0)], [inner], bytes=110)
        >>> model = Choices("", [], [block("0"), block("1")], bytes=220)
        >>> for combination in ladder(model):
        ...     print(peak_bytes(model, combination.options), combination.cost, list(combination.options))
        220 0.0 []
        160 1.0 ['0.a']
        120 2.0 ['0.a', '1.a']
        110 4.0 ['0', '1.a']
    """
    sizes = sorted({option.bytes for each in every(choices) for option in each.options if option.fate == REGION})
    found = [Combination(0, 0.0, {})]
    for largest in evenly_spaced(sizes[::-1], _MOST_SIZES):
        # A region of half the model saves little at the peak: smaller ones are better where the largest is too large.
        found += hull(choices, largest)
    found += hull(choices, 0)
    best = undominated(found, lambda each: (peak_bytes(choices, each.options), each.cost))
    return best[::-1]


def peak_bytes(choices: Choices, options: dict[str, Option]) -> int:
    """The estimated peak of saved bytes: at the end of the forward, or while a region is recomputed."""
    live = most = 0

    def visit(module: Choices) -> None:
        nonlocal live, most
        option = options.get(module.path)
        if option is not None:
            most = max(most, live + module.bytes if option.fate == REGION else 0)
            live += module.bytes - option.bytes
            return
        for child in module.children:
            visit(child)
        live += max(0, module.bytes - sum(child.bytes for child in module.children))

    visit(choices)
    return max(most, live)


def every(choices: Choices) -> Iterator[Choices]:
    """The module and all that it calls, directly and indirectly."""
    yield choices
    for child in choices.children:
        yield from every(child)


def hull(choices: Choices, largest: int) -> list[Combination]:
    """The combinations with the least cost for the bytes that they save, without regions that save more than `largest`.

    Example:
        >>> def block(path):
        ...     inner = Choices(f"{path}.a", [Option("region", 60, 1.0)])
        ...     return Choices(path, [Option("region", 100, 3.0)], [inner])
        >>> for combination in hull(Choices("", [], [block("0"), block("1")]), 100):
        ...     print(combination.bytes, combination.cost, list(combination.options))
        0 0.0 []
        60 1.0 ['0.a']
        120 2.0 ['0.a', '1.a']
        160 4.0 ['0', '1.a']
        200 6.0 ['0', '1']
    """
    combinations = _merged([hull(child, largest) for child in choices.children])
    options = [option for option in choices.options if option.fate != REGION or option.bytes <= largest]
    own = [Combination(option.bytes, option.cost, {choices.path: option}) for option in options]
    return _lower_hull([*combinations, *own])


def _merged(ladders: list[list[Combination]]) -> list[Combination]:
    """Merge ladders: combine one combination of each, in the order of increasing cost per byte."""
    steps = []
    for number, combinations in enumerate(ladders):
        for before, after in zip(combinations, combinations[1:]):
            steps.append(((after.cost - before.cost) / (after.bytes - before.bytes), number, before, after))
    steps.sort(key=lambda step: step[0])  # stable: of equal modules the first one is recomputed first
    current: dict[int, Combination] = {}
    merged = [Combination(0, 0.0, {})]
    for _, number, before, after in steps:
        current[number] = after
        options = {path: option for at in sorted(current) for path, option in current[at].options.items()}
        last = merged[-1]
        merged.append(
            Combination(last.bytes + after.bytes - before.bytes, last.cost + after.cost - before.cost, options)
        )
    return merged


def _lower_hull(combinations: list[Combination]) -> list[Combination]:
    """The combinations on the lower convex hull of cost over bytes; several on one line of it all remain."""
    hull: list[Combination] = []
    for point in sorted(combinations, key=lambda each: (each.bytes, each.cost)):
        if hull and point.bytes == hull[-1].bytes:
            continue
        while hull and point.cost <= hull[-1].cost and len(hull) > 1:
            hull.pop()
        while len(hull) > 1 and _is_above(hull[-2], hull[-1], point):
            hull.pop()
        hull.append(point)
    return hull


def _is_above(first: Combination, middle: Combination, last: Combination) -> bool:
    """Whether `middle` costs more than the line from `first` to `last`."""
    on_line = first.cost + (last.cost - first.cost) * (middle.bytes - first.bytes) / (last.bytes - first.bytes)
    return middle.cost > on_line * (1 + _ROUNDING) + _ROUNDING


def needed_bytes(choices: Choices, options: dict[str, Option]) -> list[tuple[Choices, int]]:
    """The bytes that each outermost module needs to run unchanged, if it could also run as a region.

    Such a module needs the bytes that it saves, those that all later modules save as regions, and those that the
    largest recomputation among these adds. A step that has less room left can still run this module as a region.

    Args:
        choices: of the model; ``options``: those of a combination.
    """
    needed = []
    later, largest = 0, 0
    for module, option in reversed([*_in_order(choices, options)]):
        if module.path not in options:
            needed.append((module, module.bytes + later + largest))
        later += module.bytes - option.bytes
        largest = max(largest, option.bytes)
    return needed


def _in_order(choices: Choices, options: dict[str, Option]) -> Iterator[tuple[Choices, Option]]:
    """The modules of a combination with their options, and the outermost other ones that can be regions."""
    region = next((option for option in choices.options if option.fate == REGION), None)
    if choices.path in options:
        yield choices, options[choices.path]
    elif region is not None and not any(path.startswith(f"{choices.path}.") for path in options):
        yield choices, region
    else:
        for child in choices.children:
            yield from _in_order(child, options)
