"""Tensors are taken out of nested containers and put back."""

import collections
import dataclasses
from typing import NamedTuple

import torch
from hypothesis import given
from hypothesis import strategies as st

from ackpt.checkpointing.tree import Slot, Tensors, fill, strip


class Pair(NamedTuple):
    left: object
    right: object = None


@dataclasses.dataclass(frozen=True)
class Box:
    value: object

    def __post_init__(self):
        assert not isinstance(self.value, Slot), "__post_init__ ran again"


ONE, TWO = torch.ones(1), torch.ones(2)
LEAVES = st.sampled_from([ONE, TWO, 1, None, "text", 2.5, torch.float32])
TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.sampled_from("abc"), inner)
        | st.dictionaries(st.sampled_from("abc"), inner).map(collections.OrderedDict)
        | st.builds(Pair, inner, inner)
        | st.builds(Box, inner)
    ),
    max_leaves=12,
)


def same(one, other) -> bool:
    """Equal structure, types and leaves."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, Box):
        return same(one.value, other.value)
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    return one == other


def leaves(obj) -> list:
    if isinstance(obj, dict):
        return [leaf for value in obj.values() for leaf in leaves(value)]
    if isinstance(obj, (list, tuple)):
        return [leaf for value in obj for leaf in leaves(value)]
    return leaves(obj.value) if isinstance(obj, Box) else [obj]


@given(TREES)
def test_fill_is_the_inverse_of_strip(tree):
    tensors = Tensors()
    stripped = strip(tree, tensors)
    assert same(fill(stripped, tensors), tree)
    assert not any(isinstance(leaf, torch.Tensor) for leaf in leaves(stripped))
    found = [leaf for leaf in leaves(tree) if isinstance(leaf, torch.Tensor)]
    assert [id(tensor) for tensor in tensors] == list(dict.fromkeys(id(tensor) for tensor in found))
    assert (stripped is tree) == (not found)


def test_a_container_without_tensors_is_returned_itself():
    numbers, tensors = [1, [2], {"a": 3}], Tensors()
    assert strip(numbers, tensors) is numbers and fill(numbers, tensors) is numbers
    mixed = [numbers, ONE]
    assert fill(strip(mixed, tensors), tensors)[0] is numbers and mixed[1] is ONE
