"""The count of the bytes that autograd saves."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ackpt
from ackpt.regions.saved_bytes import SavedBytes, counting_a_region, has_room


def test_every_storage_counts_once_while_it_is_allocated():
    x, weight = torch.randn(8, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    counter = SavedBytes([x, weight])
    with counter.counting():
        y = x @ weight  # saves resident tensors only
        assert counter.bytes == 0
        z = y.sin() * y.cos()  # saves y for both, and the two factors
        assert counter.bytes == counter.most_bytes == 3 * 8 * 4 * 4
    z.sum().backward()
    del y, z
    assert counter.bytes == 0 and counter.most_bytes == 3 * 8 * 4 * 4


def test_the_bound():
    sizes = []
    counter = SavedBytes(bound=300, exceeded=sizes.append)
    with counter.counting():
        x = torch.ones(64, requires_grad=True) * 1
        y = x.sin()
        assert sizes == [] and has_room(40) and not has_room(50)
        z = y.sin()
        z = z.sin()
    assert sizes == [512] and z is not None and has_room(10**9)


def test_a_region_counts_what_its_recomputation_saves():
    layers = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8))
    x = torch.randn(16, 8)

    def region(x):
        with counting_a_region():
            return layers(x)

    counter = SavedBytes([x, *layers.parameters()])
    with counter.counting():
        y = ackpt.checkpoint(region, x)
    assert counter.bytes == 0 and counter.most_bytes == 16 * 64 * 4
    y.sum().backward()
    gradients = [parameter.grad.clone() for parameter in layers.parameters()]
    layers.zero_grad()
    layers(x).sum().backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(layers.parameters(), gradients))


def test_a_change_in_place_is_noticed_as_without_the_count():
    x = torch.ones(4, requires_grad=True) * 1
    with SavedBytes().counting():
        y = x.sin()
    with torch.no_grad():
        x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
