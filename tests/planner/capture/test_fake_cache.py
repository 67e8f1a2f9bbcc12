"""Captures share fake results under equal settings, and only then."""

import pytest
import torch
from conftest import model_of
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

import ackpt
from ackpt.planner.capture.patches import kernels

pytestmark = pytest.mark.usefixtures("fresh_results")


def error():
    return model_of(lambda self, x: nn.functional.mse_loss(self.layer(x), x), layer=nn.Linear(8, 8))


def results() -> int:
    return sum(map(len, kernels._RESULTS.values()))


def test_an_equal_capture_reuses_all_results():
    graphs, found = [], []
    for rows in (4, 4, 5):
        before = FakeTensorMode.cache_misses
        graphs.append(ackpt.trace(error(), torch.ones(rows, 8)))
        found.append((FakeTensorMode.cache_misses - before, results()))
    (first, known), (second, still), (other, more) = found
    assert first > 0 and second == 0 and known == still < more and 0 < other <= first
    assert graphs[0].hash == graphs[1].hash and graphs[0].bytes() == graphs[1].bytes()


def attention():
    return model_of(
        lambda self, query: nn.functional.scaled_dot_product_attention(query, self.key, self.key).sum(),
        key=nn.Parameter(torch.ones(1, 2, 8, 4)),
    )


def test_the_kernel_of_attention_is_the_one_that_is_enabled_now():
    found = []
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH, SDPBackend.FLASH_ATTENTION):
        with sdpa_kernel(backend):
            graph = ackpt.trace(attention(), torch.ones(1, 2, 8, 4))
        found.append(any("flash_attention" in node.target for node in graph.nodes))
    assert found == [True, False, True]


def test_many_results_are_forgotten(monkeypatch):
    ackpt.trace(error(), torch.ones(4, 8))
    known = results()
    monkeypatch.setattr(kernels, "_MOST_RESULTS", known - 1)
    ackpt.trace(nn.Linear(2, 2), torch.ones(2, 2))
    assert 0 < results() < known
