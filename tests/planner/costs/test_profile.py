"""What a profile says of a graph without running it, also of operations that a compiler fuses."""

from types import SimpleNamespace

import pytest
import torch
from conftest import model_of, raises
from torch import nn
from torch.utils.flop_counter import flop_registry

import ackpt
from ackpt.graph import trace
from ackpt.metering.meter import MeterError
from ackpt.planner.costs import devices
from ackpt.planner.costs.profiles import default_rates, fused, profile


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(100, 16)
        self.qkv, self.conv, self.head = nn.Linear(16, 48), nn.Conv1d(16, 16, 3, padding=1), nn.Linear(16, 100)

    def forward(self, tokens):
        h = self.embedding(tokens)
        q, k, v = self.qkv(h).view(*h.shape[:2], 2, 24).transpose(1, 2).chunk(3, -1)
        h = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        h = self.conv(h.transpose(1, 2)).transpose(1, 2)
        return nn.functional.cross_entropy(self.head(h).flatten(0, 1), tokens.flatten())


TOKENS = torch.zeros(2, 8, dtype=torch.long)


@pytest.fixture(scope="module")
def graph():
    return trace(Attention(), TOKENS)


@pytest.fixture(scope="module")
def linear():
    return trace(nn.Linear(8, 2), torch.ones(4, 8))


def by_target(graph, profile):
    return {
        node.target: tuple(getattr(profile, name)[node.id] for name in ("flops", "bytes_in", "bytes_out"))
        for node in graph.nodes
    }


def test_flops_are_those_of_an_eager_step(graph):
    model = Attention()
    assert "aten._scaled_dot_product_flash_attention_for_cpu.default" in {node.target for node in graph.nodes}
    assert sum(profile(graph).flops) == ackpt.count_flops(lambda: model(TOKENS).backward()) > 0


def test_costs_counted_by_hand(linear):
    """Float32: addmm reads bias, x and weight; views nothing; the weight's gradient reads the output's and x."""
    found = by_target(linear, profile(linear))
    assert found["aten.addmm.default"] == (2 * 4 * 8 * 2, 4 * (2 + 32 + 16), 4 * 8)
    assert found["aten.mm.default"] == (2 * 4 * 8 * 2, 4 * (8 + 32), 4 * 16)
    assert found["aten.sum.dim_IntList"] == (0, 4 * 8, 4 * 2)
    assert found["aten.t.default"] == found["aten.view.default"] == (0, 0, 0)


def test_bytes_are_those_that_are_touched():
    def forward(self, ids):
        self.count += 1
        h = self.table[ids] * self.row.expand(3, 4)
        return nn.functional.nll_loss(h * h, ids)

    parts = {"table": nn.Parameter(torch.ones(100, 4)), "row": nn.Parameter(torch.ones(1, 4))}
    model = model_of(forward, **parts, count=nn.Buffer(torch.zeros(3)))
    graph = trace(model, torch.zeros(3, dtype=torch.long))
    found = by_target(graph, profile(graph))
    assert found["aten.index.Tensor"] == (0, 4 * 12 + 8 * 3, 4 * 12)  # not the whole table
    assert found["aten.nll_loss_forward.default"][1] == 4 * 3 + 8 * 3  # one of each row
    assert found["aten.nll_loss_backward.default"][1:] == (4 + 8 * 3 + 4, 4 * 12)  # the result's gradient, ids, weight
    assert found["aten.copy_.default"] == (0, 4 * 3, 4 * 3)
    multiplied = next(node for node in graph.nodes if node.target == "aten.mul.Tensor")
    assert profile(graph).bytes_in[multiplied.id] == 4 * 12 + 4 * 4  # what is expanded lies there once


def test_seconds_are_the_maximum_of_compute_and_memory_time(linear):
    slow = devices.Device("slow", 1, {"float32": 1.0}, 1e9, 4.0, "made up")
    narrow = devices.Device("narrow", 1, {"float32": 1e9}, 1.0, 4.0, "made up")
    bare = profile(linear)
    assert bare.seconds is bare.swap_seconds is None
    for node in linear.nodes:
        moved = bare.bytes_in[node.id] + bare.bytes_out[node.id]
        assert profile(linear, slow).seconds[node.id] == max(bare.flops[node.id], moved / 1e9)
        assert profile(linear, narrow).seconds[node.id] == moved
    assert profile(linear, slow).swap_seconds == tuple(storage.bytes / 4 for storage in linear.storages)
    assert profile(linear, slow).device == "slow"


def test_views_cost_nothing_whatever_their_name():
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    graph = ackpt.trace(layer, torch.ones(2, 8, 16))
    views = [node.id for node in graph.nodes if "_unsafe_view" in node.target]
    found = profile(graph, "h200")
    assert found.seconds is not None and views
    assert {(found.seconds[i], found.bytes_in[i], found.bytes_out[i]) for i in views} == {(0, 0, 0)}
    assert ackpt.plan(graph, policy="none", profile=found).cost == 0


def test_the_dtype_decides_the_rate():
    rates = {"bfloat16": 1.0, "float32": 0.5}
    slow = devices.Device("slow", 1, rates, 1e9, 1.0, "made up")
    with torch.autocast("cpu", torch.bfloat16):
        graph = trace(nn.Linear(8, 2), torch.ones(4, 8))
    found = profile(graph, slow)
    products = [node.id for node in graph.nodes if found.flops[node.id]]
    assert [found.seconds[place] for place in products] == [found.flops[place] for place in products]
    with pytest.raises(ValueError, match="t4 has no rate for bfloat16; trace the model in one of float16, float32"):
        profile(graph, "t4")


@pytest.mark.parametrize("name", devices.DEVICES)
def test_every_device_has_rates(name, linear):
    known = devices.device(name)
    assert known.name == name and known.source
    assert sum(profile(linear, name).seconds) == sum(profile(linear, known).seconds) > 0
    rates = known.flops_per_second
    assert rates["float16"] > rates["float32"] > known.memory_bytes_per_second > known.link_bytes_per_second


def test_rates_of_gpus():
    """Known ones by their names, others by what torch says of them: within a tenth of the data sheets."""
    figures = {  # multiprocessors, boost clock in kHz, memory clock in kHz, bus in bits
        "h100-80g": ((9, 0), 132, 1_830_000, 2_619_000, 5120),
        "a100-40g": ((8, 0), 108, 1_410_000, 1_215_000, 5120),
        "t4": ((7, 5), 40, 1_590_000, 5_001_000, 256),
        "rtx4090": ((8, 9), 128, 2_520_000, 10_501_000, 384),
        "rtx5090": ((12, 0), 170, 2_407_000, 14_001_000, 512),
    }
    for name, ((major, minor), processors, clock, memory_clock, bus) in figures.items():
        properties = SimpleNamespace(
            name="NVIDIA Unheard-of", major=major, minor=minor, multi_processor_count=processors, clock_rate=clock
        )
        properties.memory_clock_rate, properties.memory_bus_width, properties.total_memory = memory_clock, bus, 1
        derived, sheet = devices.rates_of(properties), devices.device(name)
        assert derived.flops_per_second["float16"] == pytest.approx(sheet.flops_per_second["float16"], rel=0.1)
        assert derived.flops_per_second["float32"] == pytest.approx(sheet.flops_per_second["float32"], rel=0.1)
        assert derived.memory_bytes_per_second == pytest.approx(sheet.memory_bytes_per_second, rel=0.1)
        assert ("bfloat16" in derived.flops_per_second) == ("bfloat16" in sheet.flops_per_second)
    assert devices.rates_of(SimpleNamespace(name="Tesla T4")) is devices.device("t4")
    assert devices.rates_of(SimpleNamespace(name="NVIDIA Unheard-of", major=99, minor=0)) is None


def test_a_step_on_a_gpu_is_planned_at_its_rates(linear, monkeypatch):
    assert default_rates(linear).name == "cpu"
    monkeypatch.setattr("ackpt.planner.costs.profiles.device_of", lambda graph: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(name="Tesla T4"))
    rates = default_rates(linear)
    assert rates.flops_per_second["bfloat16"] == rates.flops_per_second["float32"] == 8.1e12
    assert rates.flops_per_second["float16"] == 65e12
    assert profile(linear, rates).seconds == profile(linear, "t4").seconds


def test_invalid_arguments_are_refused(linear):
    with pytest.raises(ValueError, match="no rates are known for device 'tpu', only for h100-80g, h100-pcie"):
        profile(linear, "tpu")
    for name, close in [("h100", "h100-80g"), ("H200", "h200")]:
        with pytest.raises(ValueError, match=rf"device '{name}' \(did you mean '{close}'\?\)"):
            profile(linear, name)
    raises(ValueError, "the rates of 'cuda' are not known: name one of", lambda: profile(linear, "cuda"))
    raises(TypeError, "device must be a name or a Device, got int", lambda: profile(linear, 3))
    with pytest.raises(ValueError, match="workspace must be 'measured' or 'given', got True"):
        profile(linear, workspace=True)  # pyright: ignore


def test_a_formula_that_fails_is_an_error(linear, monkeypatch):
    def fails(*args, **kwargs):
        raise KeyError("shape")

    monkeypatch.setitem(flop_registry, torch.ops.aten.addmm, fails)
    with pytest.raises(MeterError, match=r"FLOP formula for aten.addmm.default fails on addmm: KeyError\('shape'\)"):
        profile(linear)


BYTES = 4 * 64 * 8  # of every tensor below
ROOF = devices.Device("memory only", 10**9, {"float32": 1e30}, 1.0, 1.0, "made up")  # a byte takes a second


def seconds(model, *args, device=ROOF):
    graph = trace(model, *args)
    costs = fused(graph, profile(graph, device), device)
    return {node.name: costs.seconds[node.id] for node in graph.nodes if node.phase == "forward"}


def test_a_chain_reads_once_and_writes_once():
    line = model_of(lambda self, x: torch.tanh(torch.sigmoid(x).view(-1).neg()).sum())
    taken = seconds(line, torch.ones(64, 8, requires_grad=True))
    # reads x; nothing; writes for the sum
    assert (taken["sigmoid"], taken["neg"], taken["tanh"]) == (BYTES, 0.0, BYTES)


def test_other_operations_keep_their_cost():
    layers = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    graph = trace(layers, torch.ones(64, 8))
    costs = profile(graph, ROOF)
    after = fused(graph, costs, ROOF)
    changed = {node.target for node in graph.nodes if after.seconds[node.id] != costs.seconds[node.id]}
    assert changed <= {"aten.gelu.default", "aten.gelu_backward.default", "aten.mul.Tensor"}


def test_fusion_saves_no_compute():
    slow = devices.Device("slow tanh", 10**9, {"float32": 1e30}, 1e30, 1.0, "made up", {"tanh": {"float32": 1.0}})
    taken = seconds(nn.Sequential(nn.Tanh(), nn.Sigmoid()), torch.ones(64, 8, requires_grad=True), device=slow)
    assert taken["tanh"] == pytest.approx(64 * 8)


def test_without_seconds_nothing_changes():
    graph = trace(nn.Tanh(), torch.ones(4, 8, requires_grad=True))
    costs = profile(graph)
    assert fused(graph, costs, ROOF) is costs
