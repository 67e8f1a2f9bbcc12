"""The smallest model with a finding: parts are removed and options set to their defaults as long as it persists."""

import dataclasses
from collections.abc import Callable, Iterator

from .compare import FINDING, Outcome, check
from .model import Node, Spec


def reduced(spec: Spec, outcome: Outcome) -> Spec:
    """A spec whose variant still is a finding of the same sort as `outcome`, and from which nothing can be removed."""
    return smallest(spec, lambda smaller: _persists(smaller, outcome))


def smallest(spec: Spec, persists: Callable[[Spec], bool]) -> Spec:
    """`spec` with as much removed as `persists` allows; most findings need one part alone, which is tried first."""
    nodes = [node for block in spec.blocks for node in _every_node(block)]
    for node in sorted(set(nodes), key=lambda node: len(node.names())):
        for options in ({}, vars(spec)):
            alone = Spec(**{**options, "seed": spec.seed, "kind": spec.kind, "blocks": ((node,), ())})
            if len(spec.names()) > len(node.names()) and persists(alone):
                return smallest(alone, persists)
    while True:
        for smaller in _smaller(spec):
            if persists(smaller):
                spec = smaller
                break
        else:
            return spec


def _every_node(nodes: tuple[Node, ...]) -> Iterator[Node]:
    for node in nodes:
        yield node
        yield from _every_node(node.inner)


def _sort(outcome: Outcome) -> str:
    """What of a text stays the same in a smaller model: the class and place of an error, or what differs."""
    first = outcome.text.split(": ")
    return first[1].split(" ")[0] if first[0].startswith("step") else first[0]


def _persists(spec: Spec, outcome: Outcome) -> bool:
    outcomes = check(spec, only=outcome.variant)
    return bool(outcomes) and outcomes[0].kind == FINDING and _sort(outcomes[0]) == _sort(outcome)


def _smaller(spec: Spec) -> Iterator[Spec]:
    for index in range(len(spec.blocks)):
        if len(spec.blocks) > 1:
            yield dataclasses.replace(spec, blocks=spec.blocks[:index] + spec.blocks[index + 1 :])
        for nodes in _smaller_lists(spec.blocks[index]):
            yield dataclasses.replace(spec, blocks=(*spec.blocks[:index], nodes, *spec.blocks[index + 1 :]))
    for field in dataclasses.fields(spec):
        if field.default is not dataclasses.MISSING and getattr(spec, field.name) != field.default:
            yield dataclasses.replace(spec, **{field.name: field.default})


def _smaller_lists(nodes: tuple[Node, ...]) -> Iterator[tuple[Node, ...]]:
    """The list without one part, with a container replaced by what it holds, and with less in a container."""
    for index, node in enumerate(nodes):
        before, after = nodes[:index], nodes[index + 1 :]
        yield before + after
        if node.inner:
            yield before + node.inner + after
        for inner in _smaller_lists(node.inner):
            yield (*before, dataclasses.replace(node, inner=inner), *after)
